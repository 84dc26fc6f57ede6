package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// fakeDaemon answers on a socket with what a test says, and remembers what it was asked.
type fakeDaemon struct {
	t      *testing.T
	socket string
	mux    *http.ServeMux

	mu    sync.Mutex
	calls []string // "POST /containers/create?name=x", without the version
	body  map[string]string
}

func newFake(t *testing.T) *fakeDaemon {
	t.Helper()
	// t.TempDir can be longer than a socket's path may be.
	dir, err := os.MkdirTemp("", "kiri-cli-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := &fakeDaemon{t: t, socket: filepath.Join(dir, "s"), mux: http.NewServeMux(), body: map[string]string{}}
	l, err := net.Listen("unix", f.socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(f.serve)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		srv.Serve(l)
	}()
	t.Cleanup(func() {
		srv.Close()
		<-done
	})
	return f
}

func (f *fakeDaemon) serve(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/v"+apiVersion)
	if path == r.URL.Path && !strings.HasPrefix(path, "/kiri/") {
		f.t.Errorf("%s %s: no version in the path", r.Method, r.URL.Path)
	}
	call := r.Method + " " + strings.TrimPrefix(r.URL.EscapedPath(), "/v"+apiVersion)
	if r.URL.RawQuery != "" {
		call += "?" + r.URL.RawQuery
	}
	var b []byte
	if r.Header.Get("Upgrade") == "" || r.ContentLength > 0 {
		b, _ = io.ReadAll(r.Body)
	}
	f.mu.Lock()
	f.calls = append(f.calls, call)
	f.body[r.Method+" "+path] = string(b)
	f.mu.Unlock()
	r.URL.Path = path
	r.Body = io.NopCloser(bytes.NewReader(b))
	f.mux.ServeHTTP(w, r)
}

func (f *fakeDaemon) called() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.calls...)
}

func (f *fakeDaemon) bodyOf(call string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.body[call]
}

// answer makes a route give a status and a JSON body.
func (f *fakeDaemon) answer(route string, status int, body any) {
	f.mux.HandleFunc(route, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		if s, ok := body.(string); ok {
			io.WriteString(w, s)
			return
		}
		json.NewEncoder(w).Encode(body)
	})
}

func (f *fakeDaemon) fail(route string, status int, message string) {
	f.answer(route, status, map[string]string{"message": message})
}

// hijack makes a route upgrade and hands the connection to fn, which ends the stream by returning.
func (f *fakeDaemon) hijack(route string, fn func(conn net.Conn, r io.Reader)) {
	f.mux.HandleFunc(route, func(w http.ResponseWriter, _ *http.Request) {
		conn, buf, err := w.(http.Hijacker).Hijack()
		if err != nil {
			f.t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprint(conn, "HTTP/1.1 101 UPGRADED\r\nContent-Type: application/vnd.docker.multiplexed-stream\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
		fn(conn, buf)
	})
}

// frame is one frame of a multiplexed stream.
func frame(stream byte, payload string) string {
	h := [8]byte{stream}
	binary.BigEndian.PutUint32(h[4:], uint32(len(payload)))
	return string(h[:]) + payload
}

type result struct {
	code     int
	out, err string
}

// run runs a command line against the fake daemon, in this process.
func (f *fakeDaemon) run(args ...string) result { return f.runWith(nil, args...) }

func (f *fakeDaemon) runWith(in *os.File, args ...string) result {
	f.t.Helper()
	f.t.Setenv("KIRI_HOST", "unix://"+f.socket)
	f.t.Setenv("DOCKER_API_VERSION", "")
	if os.Getenv("DOCKER_CONFIG") == "" {
		f.t.Setenv("DOCKER_CONFIG", f.t.TempDir())
	}
	var out, errs bytes.Buffer
	c := &cli{in: in, out: &out, err: &errs, args: args}
	code := c.exit(c.dispatch(args))
	return result{code, out.String(), errs.String()}
}

// stdin gives a file that holds text and then ends.
func stdin(t *testing.T, text string) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	go func() {
		io.WriteString(w, text)
		w.Close()
	}()
	return r
}

func want(t *testing.T, got result, code int, out, err string) {
	t.Helper()
	if got.code != code || got.out != out || got.err != err {
		t.Errorf("code %d, out %q, err %q\nwant code %d, out %q, err %q", got.code, got.out, got.err, code, out, err)
	}
}
