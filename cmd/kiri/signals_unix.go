//go:build unix

package main

import (
	"net/url"
	"os"
	"os/signal"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// proxySignals sends every signal that reaches this process on to the container, until the returned function is called. SIGCHLD and
// SIGPIPE concern this process, SIGURG is the Go runtime's own.
func (c *cli) proxySignals(id string) (stop func()) {
	ch := make(chan os.Signal, 128)
	signal.Notify(ch)
	go func() {
		for s := range ch {
			sig, ok := s.(syscall.Signal)
			if !ok || sig == syscall.SIGCHLD || sig == syscall.SIGPIPE || sig == syscall.SIGURG {
				continue
			}
			name := unix.SignalName(sig)
			if name == "" {
				name = strconv.Itoa(int(sig)) // a real-time signal
			}
			// The container may not run yet or any more; the signal is lost then as it is with docker.
			_ = c.c.call("POST", idPath("/containers/", id, "/kill"), url.Values{"signal": {name}}, nil, nil)
		}
	}()
	return func() {
		signal.Stop(ch)
		close(ch)
	}
}

// sizeChanges gives a channel that receives when the terminal's size may have changed.
func sizeChanges() (<-chan os.Signal, func()) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGWINCH)
	return ch, func() { signal.Stop(ch) }
}
