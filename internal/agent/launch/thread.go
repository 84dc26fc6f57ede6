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
//
// Its mount namespace has nothing but an empty read-only directory. A clone has one mount to copy then instead of all
// of the host's, and no old root to detach: both together are a tenth of a start.
type Thread struct {
	tid  int
	work chan func()
	once sync.Once     // guards closing quit
	quit chan struct{} // closed by Close
	done chan struct{} // closed when the thread takes no more work
}

// NewThread starts a thread and runs prepare on it, which may be nil; an error of prepare ends the thread and is
// returned. prepare must leave the goroutine locked to its thread. It is the last to see the host's files: afterwards
// the thread is in its empty mount namespace, where only descriptors lead out.
func NewThread(prepare func() error) (*Thread, error) {
	t := newThread()
	ready := make(chan error)
	go t.run(func() error {
		if prepare != nil {
			if err := prepare(); err != nil {
				return err
			}
		}
		return emptyRoot()
	}, ready)
	if err := <-ready; err != nil {
		return nil, err
	}
	return t, nil
}

func newThread() *Thread {
	return &Thread{work: make(chan func()), quit: make(chan struct{}), done: make(chan struct{})}
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
	if err := prepare(); err != nil {
		ready <- err
		return
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

// emptyRoot moves the calling thread to the empty mount namespace.
func emptyRoot() error {
	ns, err := bareNamespace()
	if err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare root and working directory: %w", err)
	}
	if err := unix.Setns(fdOf(ns), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("join the empty mount namespace: %w", err)
	}
	return nil
}

// bareNamespace is the empty mount namespace, made once. All threads share it, and their children get copies.
var bareNamespace = sync.OnceValues(func() (ns *os.File, err error) {
	err = onThread(func() error {
		// A thread with a file system context of its own has a mount namespace of its own.
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unshare mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("make mounts private: %w", err)
		}
		root, err := emptyMount()
		if err != nil {
			return err
		}
		defer root.Close()
		if err := unix.MoveMount(fdOf(root), "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("attach the empty root: %w", err)
		}
		if err := unix.Fchdir(fdOf(root)); err != nil {
			return fmt.Errorf("enter the empty root: %w", err)
		}
		proc, err := unix.Open("/proc/thread-self/ns/mnt", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open mount namespace: %w", err)
		}
		ns = os.NewFile(uintptr(proc), "empty mount namespace")
		if err := unix.PivotRoot(".", "."); err != nil {
			return fmt.Errorf("pivot to the empty root: %w", err)
		}
		if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
			return fmt.Errorf("detach the old root: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("make the empty mount namespace: %w", err)
	}
	return ns, nil
})

// onThread runs f on a thread that ends with it.
func onThread(f func() error) error {
	t := newThread()
	ready := make(chan error)
	go t.run(f, ready)
	err := <-ready
	t.Close()
	return err
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
