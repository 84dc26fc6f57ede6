//go:build linux && (amd64 || arm64)

package launch

import (
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// Thread is a parked OS thread whose children inherit what it has joined: v1 cgroups, a network namespace. Nothing
// else ever runs on it, and it ends with Close, so what it joined leaks to no other goroutine. Its methods are safe
// for concurrent use; calls run one after another.
type Thread struct {
	tid  int
	bare bool // EmptyRoot has been called; only the thread itself uses it
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

// EmptyRoot moves the thread to a mount namespace that has nothing but an empty read-only directory, for plans with
// Spec.EmptyRoot. A clone then has one mount to copy instead of all of the host's, and no old root to detach: both
// together are a tenth of a start. The thread sees none of the host's files from then on, only descriptors.
func (t *Thread) EmptyRoot() error {
	ns, err := bareNamespace()
	if err != nil {
		return err
	}
	return t.Do(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare root and working directory: %w", err)
		}
		if err := unix.Setns(fdOf(ns), unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("join the empty mount namespace: %w", err)
		}
		t.bare = true
		return nil
	})
}

// bareNamespace is the mount namespace of EmptyRoot, made once. All threads share it, and their children get copies.
var bareNamespace = sync.OnceValues(func() (ns *os.File, err error) {
	t, err := NewThread(func() error {
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
	t.Close()
	return ns, nil
})

// Start makes the plan's process and returns when its execve has succeeded. Whatever the outcome the plan is used up.
// After an error nothing is left: no process, no mount; a failed step is an error as "mount proc on /proc: no such
// device" with the errno in its chain, and of class wire.NoCommand or wire.NotExecutable where the command itself
// cannot be executed.
func (t *Thread) Start(p *Plan) (Proc, error) {
	var proc Proc
	err := t.Do(func() (err error) {
		if p.emptyRoot && !t.bare {
			// It would leave the host's files under the container's root.
			p.Close()
			return wire.Errorf(wire.Internal, "start plan: it is for a thread with an empty root")
		}
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
