//go:build linux

package agent

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// stream is one client's connection to the stdio of a process. It came as a descriptor, so nobody only copies.
//
// Output is sent at once if the client's socket takes it, else queued; when the queue is over maxQueue the output
// waits. Input is moved by a task whenever the client has sent something or the process has read something.
//
// Either side can be closed on its own: a client that has said all it has to say (CloseWrite) still gets output, and
// the end of the output closes the connection.
type stream struct {
	loop   *loop
	want   [2]bool // stdout, stderr
	framed bool
	detach []byte    // keys that end the attach
	onGone func()    // called once, when the stream is over
	input  *stdinEnd // nil: what the client sends is ignored

	in  task // moves input
	out task // sends what is queued

	queued atomic.Bool   // something may be in queue, or is on its way there
	room   chan struct{} // holds one: a replay may go on
	hungUp atomic.Bool   // the client has gone; what it has sent is still to be read

	mu       sync.Mutex // guards all below
	fd       int        // -1 when it is over
	watch    *watch
	queue    []byte
	early    bool        // there is no process yet: input is left where it is
	held     bool        // a replay is being written to fd first: queue everything
	ended    bool        // no more output comes: close when the queue is empty
	pending  []byte      // input read and not yet written to the process
	matched  int         // of the detach keys, typed so far
	inEOF    bool        // the client will send no more
	waiting  *stdinWatch // where pending is to go, while it does not fit
	wokenOut func()      // called when the queue has become short again
}

// maxQueue is how much output is kept for a client that does not read, in bytes.
const maxQueue = 1 << 20

// newStream takes over f, the client's connection.
func newStream(l *loop, f *os.File, framed bool) (*stream, error) {
	fd, err := takeFD(f)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("making a stream non-blocking: %w", err)
	}
	s := &stream{loop: l, fd: fd, framed: framed, room: make(chan struct{}, 1)}
	s.in.fn, s.out.fn = s.moveInput, s.sendQueue
	return s, nil
}

// start begins to watch the client. From now on onGone may be called.
func (s *stream) start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return nil
	}
	w, err := s.loop.watch(s.fd, watchRead|watchWrite, func(events uint32) {
		if events&(unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			s.hungUp.Store(true)
		}
		if events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
			s.in.kick()
		}
		if events&unix.EPOLLOUT != 0 && s.queued.Load() {
			s.out.kick()
		}
	})
	s.watch = w
	return err
}

// send gives the client p, of stdout (0) or stderr (1). It returns false when the client is gone.
func (s *stream) send(i int, p []byte) bool {
	if !s.want[i] {
		return true
	}
	var parts [2][]byte
	n := 0
	if s.framed {
		parts[0] = s.header(i, len(p))
		n = 1
	}
	parts[n] = p
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return false
	}
	sent := 0
	s.queued.Store(true) // before the socket is tried: an edge in between must not be missed
	if len(s.queue) == 0 && !s.held {
		var err error
		sent, err = sendNow(s.fd, parts[:n+1])
		if err != nil && err != unix.EAGAIN {
			s.closeLocked()
			return false
		}
	}
	for _, part := range parts[:n+1] {
		skip := min(sent, len(part))
		sent -= skip
		s.queue = append(s.queue, part[skip:]...)
	}
	if len(s.queue) == 0 && !s.held {
		s.queued.Store(false)
	}
	return true
}

// header is Docker's multiplexing header for n bytes of stream i; nothing on a raw stream.
func (s *stream) header(i, n int) []byte {
	if !s.framed {
		return nil
	}
	return []byte{byte(i + 1), 0, 0, 0, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}
}

// begin lets input flow.
func (s *stream) begin() {
	s.mu.Lock()
	s.early = false
	s.mu.Unlock()
	s.in.kick()
}

// sendNow sends what fits without waiting, to a socket or anything else that can be written to.
func sendNow(fd int, parts [][]byte) (int, error) {
	for {
		n, err := unix.SendmsgBuffers(fd, parts, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if err == unix.ENOTSOCK {
			n, err = unix.Writev(fd, parts)
		}
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

func (s *stream) behind() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fd >= 0 && len(s.queue) > maxQueue
}

// sendQueue is the out task: the client's socket has room.
func (s *stream) sendQueue() {
	s.mu.Lock()
	if s.held || s.fd < 0 {
		s.mu.Unlock()
		s.wakeReplay()
		return
	}
	was := len(s.queue)
	done := 0
	for done < len(s.queue) {
		n, err := sendNow(s.fd, [][]byte{s.queue[done:]})
		done += n
		if err == unix.EAGAIN {
			break
		}
		if err != nil {
			s.closeLocked()
			s.mu.Unlock()
			return
		}
	}
	if done == len(s.queue) {
		s.queue = nil
		s.queued.Store(false)
		if s.ended {
			s.closeLocked()
		}
	} else if done > 0 {
		s.queue = s.queue[done:]
	}
	woken := s.wokenOut
	left := len(s.queue)
	s.mu.Unlock()
	if was > maxQueue && left <= maxQueue && woken != nil {
		woken()
	}
}

// hold keeps live output back while a replay is written to the client; release lets it go.
func (s *stream) hold() {
	s.mu.Lock()
	s.held = true
	s.queued.Store(true)
	s.mu.Unlock()
}

func (s *stream) wakeReplay() {
	select {
	case s.room <- struct{}{}:
	default:
	}
}

func (s *stream) release() {
	s.mu.Lock()
	s.held = false
	s.mu.Unlock()
	s.out.kick()
}

// finish is called when no more output comes: the stream closes once the client has it all.
func (s *stream) finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	if len(s.queue) == 0 && !s.held {
		s.closeLocked()
	}
}

// close ends the stream at once.
func (s *stream) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeLocked()
}

// letGo gives back a stream that was not started: the connection goes on, for whoever else holds it.
func (s *stream) letGo() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return
	}
	unix.Close(s.fd)
	s.fd, s.queue = -1, nil
}

func (s *stream) closeLocked() {
	if s.fd < 0 {
		return
	}
	s.watch.stop()
	unix.Shutdown(s.fd, unix.SHUT_RDWR)
	// Bytes that the client sent and nobody read would make its end of a unix socket report a reset instead of the end.
	var junk [4096]byte
	for n := 1; n > 0; {
		n, _ = unix.Read(s.fd, junk[:])
	}
	unix.Close(s.fd)
	s.fd, s.queue = -1, nil
	s.wakeReplay()
	s.waiting.stop()
	s.waiting = nil
	if s.onGone != nil {
		go s.onGone()
		s.onGone = nil
	}
}

// moveInput is the in task: reads what the client sends and writes it to the process. It stops when the client has
// nothing, or the process does not read, and is kicked when that changes.
func (s *stream) moveInput() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var buf [8 << 10]byte
	if s.early && s.hungUp.Load() {
		s.closeLocked()
	}
	for s.fd >= 0 && !s.early {
		if len(s.pending) > 0 {
			if !s.writeInput() {
				return
			}
			continue
		}
		if s.inEOF {
			if s.hungUp.Load() {
				s.closeLocked()
			}
			return
		}
		n, err := readFD(s.fd, buf[:])
		switch {
		case err == unix.EAGAIN:
			return
		case err != nil:
			s.closeLocked()
			return
		case n == 0:
			s.inEOF = true
			s.input.sourceEnded()
			if !s.want[0] && !s.want[1] {
				s.closeLocked()
			}
		}
		if s.input == nil {
			continue
		}
		p := buf[:n]
		if len(s.detach) > 0 {
			var left bool
			if p, left = s.scanKeys(p); left {
				s.pending = append(s.pending, p...)
				s.writeInput()
				s.closeLocked()
				return
			}
		}
		s.pending = append(s.pending[:0], p...)
	}
}

// writeInput writes pending to the process; false if not all of it could be written now.
func (s *stream) writeInput() bool {
	n, err := s.input.write(s.pending)
	s.pending = s.pending[n:]
	if len(s.pending) == 0 {
		s.pending = nil
		s.waiting.stop()
		s.waiting = nil
	}
	switch {
	case err == unix.EAGAIN:
		if s.waiting == nil {
			s.waiting = s.input.whenWritable(s.loop, s.in.kick)
			return s.waiting == nil // else it may have become writable since: the watch tells at once
		}
		return false
	case err != nil: // the process has closed its stdin: what else comes is thrown away
		s.input, s.pending = nil, nil
	}
	return true
}

// scanKeys looks for the detach keys in what was typed. It returns what is for the process: keys that have begun to
// match are held back until the next one tells, as Docker does. left tells that the sequence is complete.
func (s *stream) scanKeys(p []byte) (rest []byte, left bool) {
	out := make([]byte, 0, len(p)+s.matched)
	for _, c := range p {
		if c == s.detach[s.matched] {
			s.matched++
			if s.matched == len(s.detach) {
				s.matched = 0
				return out, true
			}
			continue
		}
		if s.matched > 0 {
			out = append(out, s.detach[:s.matched]...)
			s.matched = 0
			if c == s.detach[0] {
				s.matched = 1
				continue
			}
		}
		out = append(out, c)
	}
	return out, false
}

// replay writes to the client while live output is held: it may wait, and so has a goroutine.
func (s *stream) replay() io.Writer { return (*replayWriter)(s) }

type replayWriter stream

func (w *replayWriter) Write(p []byte) (int, error) {
	s := (*stream)(w)
	for done := 0; done < len(p); {
		s.mu.Lock()
		if s.fd < 0 {
			s.mu.Unlock()
			return done, errGone
		}
		n, err := sendNow(s.fd, [][]byte{p[done:]})
		s.mu.Unlock()
		done += n
		if err == unix.EAGAIN {
			<-s.room
			continue
		}
		if err != nil {
			return done, err
		}
	}
	return len(p), nil
}

// isHangup tells whether err is what writing to somebody who has gone away gives.
func isHangup(err error) bool {
	return errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) || errors.Is(err, os.ErrClosed)
}

// takeFD takes the descriptor out of f, which is closed.
func takeFD(f *os.File) (int, error) {
	defer f.Close()
	rc, err := f.SyscallConn()
	if err != nil {
		return -1, fmt.Errorf("taking descriptor %s: %w", f.Name(), err)
	}
	fd, derr := -1, error(nil)
	if err := rc.Control(func(p uintptr) { fd, derr = unix.FcntlInt(p, unix.F_DUPFD_CLOEXEC, 3) }); err != nil {
		return -1, fmt.Errorf("taking descriptor %s: %w", f.Name(), err)
	}
	if derr != nil {
		return -1, fmt.Errorf("taking descriptor %s: %w", f.Name(), derr)
	}
	return fd, nil
}

// dupFile gives a second descriptor of fd as a file of its own.
func dupFile(fd int, name string) (*os.File, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("duplicating descriptor of %s: %w", name, err)
	}
	return os.NewFile(uintptr(n), name), nil
}
