//go:build unix

package main

import (
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The signals that are sent on to a container: those that a terminal, a shell or a supervisor sends to a command. Real-time signals are
// not among them. Asking the Go runtime for one costs 25 microseconds and two thread switches; for all 64 it was a third of `kiri run`. So
// the usual ones are caught before the container starts, and the others once it has run for longer than a quick command takes.
var (
	proxiedFirst = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM}
	proxiedLater = []os.Signal{
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGCONT, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGWINCH,
	}
)

const proxyDelay = 30 * time.Millisecond

// proxySignals sends signals that reach this process on to the container. It returns at once; ready waits until the first are caught. They
// stay caught: what follows is the end of this process, and giving them back would cost as much as taking them.
func (c *cli) proxySignals(id string) (ready func()) {
	ch := make(chan os.Signal, 128)
	caught := make(chan struct{})
	go func() {
		signal.Notify(ch, proxiedFirst...)
		close(caught)
		time.AfterFunc(proxyDelay, func() { signal.Notify(ch, proxiedLater...) })
		for s := range ch {
			name := unix.SignalName(s.(syscall.Signal))
			// The container may not run yet or any more; the signal is lost then as it is with docker.
			_ = c.c.call("POST", idPath("/containers/", id, "/kill"), url.Values{"signal": {name}}, nil, nil)
		}
	}()
	return func() { <-caught }
}

// sizeChanges gives a channel that receives when the terminal's size may have changed.
func sizeChanges() (<-chan os.Signal, func()) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGWINCH)
	return ch, func() { signal.Stop(ch) }
}
