//go:build linux && (amd64 || arm64)

package launch

import (
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// Thread is a parked OS thread whose children inherit what it has joined: v1 cgroups, a network namespace. Nothing
// else ever runs on it, and it ends with Close, so what it joined leaks to no other goroutine. Its methods are safe
// for concurrent use; calls run one after another.
type Thread struct {
	tid  int
	work chan func()
	once sync.Once     // guards closing quit
	quit chan struct{} // closed by Close
	done chan struct{} // closed when the thread takes no more work
}

// NewThread starts a thread and runs prepare on it, which may be nil; an error of prepare ends the thread and is
// returned. prepare must leave the goroutine locked to its thread.
func NewThread(prepare func() error) (*Thread, error) {
	t := &Thread{work: make(chan func()), quit: make(chan struct{}), done: make(chan struct{})}
	ready := make(chan error)
	go t.run(prepare, ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	return t, nil
}

func (t *Thread) run(prepare func() error, ready chan<- error) {
	// Never unlocked: the runtime ends the thread when the goroutine returns.
	runtime.LockOSThread()
	t.tid = unix.Gettid()
	if t.tid == os.Getpid() {
		// The main thread cannot end; it would stay in the cgroups and namespaces for good. It is held here until
		// another one has been found.
		other := make(chan struct{})
		go func() {
			close(other)
			t.run(prepare, ready)
		}()
		<-other
		runtime.UnlockOSThread()
		return
	}
	defer close(t.done)
	if prepare != nil {
		if err := prepare(); err != nil {
			ready <- err
			return
		}
	}
	ready <- nil
	for {
		select {
		case f := <-t.work:
			f()
		case <-t.quit:
			return
		}
	}
}

// TID is the thread's id, for cgroup v1 `tasks` files.
func (t *Thread) TID() int { return t.tid }

// Do runs f on the thread and returns its error.
func (t *Thread) Do(f func() error) error {
	res := make(chan error, 1)
	select {
	case t.work <- func() { res <- f() }:
		return <-res
	case <-t.done:
		return fmt.Errorf("thread %d: %w", t.tid, os.ErrClosed)
	}
}

// Start makes the plan's process and returns when its execve has succeeded. Whatever the outcome the plan is used up.
// After an error nothing is left: no process, no mount; a failed step is an error as "mount proc on /proc: no such
// device" with the errno in its chain, and of class wire.NoCommand or wire.NotExecutable where the command itself
// cannot be executed.
func (t *Thread) Start(p *Plan) (Proc, error) {
	var proc Proc
	err := t.Do(func() (err error) {
		proc, err = p.direct()
		return err
	})
	return proc, err
}

// Close ends the thread and waits until it takes no more work; the kernel lets go of its cgroups and namespaces when
// it has exited, shortly after. It may be called more than once; a Start or Do that
// comes later fails.
func (t *Thread) Close() {
	t.once.Do(func() { close(t.quit) })
	<-t.done
}
