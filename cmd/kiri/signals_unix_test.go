//go:build unix

package main

import (
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"testing"
)

func TestSignals(t *testing.T) {
	f := newFake(t)
	f.answer("POST /containers/create", 201, `{"Id":"c1"}`)
	killed, started := make(chan string, 1), make(chan struct{})
	f.hijack("POST /containers/c1/attach", func(net.Conn, io.Reader) {
		<-started
		// What a user's kill does to the command goes to the container.
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Error(err)
			return
		}
		if got := <-killed; got != "SIGHUP" {
			t.Errorf("the container got %q", got)
		}
	})
	f.mux.HandleFunc("POST /containers/c1/kill", func(w http.ResponseWriter, r *http.Request) {
		killed <- r.FormValue("signal")
		w.WriteHeader(204)
	})
	f.answer("POST /containers/c1/wait", 200, `{"StatusCode":129}`)
	f.mux.HandleFunc("POST /containers/c1/start", func(w http.ResponseWriter, _ *http.Request) {
		close(started)
		w.WriteHeader(204)
	})
	want(t, f.run("run", "alpine"), 129, "", "")
}
