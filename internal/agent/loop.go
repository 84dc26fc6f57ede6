//go:build linux

package agent

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// loop tells when descriptors become readable or writable. It is one epoll set, itself watched by the runtime's
// poller, so that any number of quiet containers cost one parked goroutine and no thread.
//
// Watches are edge triggered: who is told must read (or write) until EAGAIN. Callbacks run on the loop's goroutine,
// in the order in which the kernel saw the descriptors become ready, and must not block: they kick a task.
type loop struct {
	ep   int
	file *os.File // of ep, in the runtime's poller

	mu      sync.Mutex // guards next and watches
	next    uint64
	watches map[uint64]*watch
}

// watch is one descriptor's place in a loop.
type watch struct {
	l     *loop
	fd    int
	token uint64
	fn    func(events uint32)
}

// What a reader or a writer is interested in. Hang-up and error are always told.
const (
	watchRead  = unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET
	watchWrite = unix.EPOLLOUT | unix.EPOLLET
)

func newLoop() (*loop, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("making an epoll set: %w", err)
	}
	if err := unix.SetNonblock(ep, true); err != nil {
		unix.Close(ep)
		return nil, fmt.Errorf("making the epoll set non-blocking: %w", err)
	}
	l := &loop{ep: ep, file: os.NewFile(uintptr(ep), "epoll"), watches: map[uint64]*watch{}}
	rc, err := l.file.SyscallConn()
	if err != nil {
		l.file.Close()
		return nil, fmt.Errorf("watching the epoll set: %w", err)
	}
	go rc.Read(l.drain)
	return l, nil
}

// drain handles all that is ready and returns false, which makes the runtime wait for the next edge.
func (l *loop) drain(uintptr) bool {
	var events [32]unix.EpollEvent
	for {
		n, err := unix.EpollWait(l.ep, events[:], 0)
		if err == unix.EINTR {
			continue
		}
		if n <= 0 {
			return false
		}
		for _, e := range events[:n] {
			l.mu.Lock()
			w := l.watches[uint64(uint32(e.Fd))|uint64(uint32(e.Pad))<<32]
			l.mu.Unlock()
			if w != nil {
				w.fn(e.Events)
			}
		}
	}
}

// watch calls fn whenever fd has one of events, from now on (at once if it has it already).
func (l *loop) watch(fd int, events uint32, fn func(events uint32)) (*watch, error) {
	w := &watch{l: l, fd: fd, fn: fn}
	l.mu.Lock()
	l.next++
	w.token = l.next
	l.watches[w.token] = w
	l.mu.Unlock()
	e := unix.EpollEvent{Events: events, Fd: int32(uint32(w.token)), Pad: int32(uint32(w.token >> 32))}
	if err := unix.EpollCtl(l.ep, unix.EPOLL_CTL_ADD, fd, &e); err != nil {
		l.forget(w)
		return nil, fmt.Errorf("watching descriptor %d: %w", fd, err)
	}
	return w, nil
}

// stop ends the watch; fn may be running but is not called again. It must be called before fd is closed: others hold
// the same open file, and epoll would go on telling of it. A nil watch is fine.
func (w *watch) stop() {
	if w == nil {
		return
	}
	unix.EpollCtl(w.l.ep, unix.EPOLL_CTL_DEL, w.fd, nil)
	w.l.forget(w)
}

func (l *loop) forget(w *watch) {
	l.mu.Lock()
	delete(l.watches, w.token)
	l.mu.Unlock()
}

// close ends the loop. Watches that are left are never called again.
func (l *loop) close() { l.file.Close() }

// task runs fn in a goroutine of its own whenever it has been kicked: never twice at once, and once more if it was
// kicked while it ran. A task that has nothing to do has no goroutine.
type task struct {
	state atomic.Uint32
	fn    func()
}

const (
	taskIdle uint32 = iota
	taskRunning
	taskAgain
)

func (t *task) kick() {
	for {
		switch {
		case t.state.CompareAndSwap(taskIdle, taskRunning):
			go t.run()
			return
		case t.state.CompareAndSwap(taskRunning, taskAgain), t.state.Load() == taskAgain:
			return
		}
	}
}

func (t *task) run() {
	for {
		t.fn()
		if t.state.CompareAndSwap(taskRunning, taskIdle) {
			return
		}
		t.state.Store(taskRunning)
	}
}
