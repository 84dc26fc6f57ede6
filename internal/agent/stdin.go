//go:build linux

package agent

import (
	"sync"

	"golang.org/x/sys/unix"
)

// stdinEnd is where input of a process goes: the write end of its pipe, or its terminal's master.
type stdinEnd struct {
	tty  bool
	once bool // the end of the first client's input is the end of the process's

	mu sync.Mutex // guards fd
	fd int        // non-blocking; -1 when closed
}

// write writes what fits. EAGAIN if not all did; EPIPE when the process does not read any more.
func (e *stdinEnd) write(p []byte) (n int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for n < len(p) {
		if e.fd < 0 {
			return n, unix.EPIPE
		}
		m, err := unix.Write(e.fd, p[n:])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return n, err
		}
		n += m
	}
	return n, nil
}

// sourceEnded is called when a client has no more input.
func (e *stdinEnd) sourceEnded() {
	if e != nil && e.once && !e.tty {
		e.close()
	}
}

// close ends the process's input.
func (e *stdinEnd) close() {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.fd >= 0 {
		unix.Close(e.fd)
		e.fd = -1
	}
}

// stdinWatch tells when a full stdin can be written again. It watches a descriptor of its own, so that clients do not
// get in each other's way.
type stdinWatch struct {
	w  *watch
	fd int
}

// whenWritable calls fn whenever there is room again; nil if the input has been closed.
func (e *stdinEnd) whenWritable(l *loop, fn func()) *stdinWatch {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.fd < 0 {
		return nil
	}
	fd, err := unix.FcntlInt(uintptr(e.fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil
	}
	w, err := l.watch(fd, watchWrite, func(uint32) { fn() })
	if err != nil {
		unix.Close(fd)
		return nil
	}
	return &stdinWatch{w: w, fd: fd}
}

func (w *stdinWatch) stop() {
	if w == nil {
		return
	}
	w.w.stop()
	unix.Close(w.fd)
}
