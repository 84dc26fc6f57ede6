//go:build linux

package agent

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// stdio is our side of a process's input and output.
type stdio struct {
	out   *output
	in    *stdinEnd
	tty   *os.File    // the terminal's master, for its size; nil without one
	child [3]*os.File // the process's side, until it has been started; with a terminal all three are the same
	nodes [3]uint64   // inodes of the pipes, for the next agent
}

// newStdio makes pipes, or a terminal from the devpts mount pts.
func newStdio(l *loop, warn func(error), pts *os.File, tty, stdin, once bool, height, width uint32) (s stdio, err error) {
	s.out = newOutput(l, warn)
	s.out.tty = tty
	defer func() {
		if err != nil {
			s.closeChild()
			s.close()
		}
	}()
	if tty {
		return s, s.openTerminal(pts, stdin, height, width)
	}
	if stdin {
		r, w, err := pipe()
		if err != nil {
			return s, err
		}
		s.in = &stdinEnd{fd: w, once: once}
		// Our end must not block, the process's must: O_NONBLOCK belongs to the open file, so it gets one of its own.
		if s.child[0], err = reopen(r, unix.O_RDONLY, "stdin"); err != nil {
			return s, err
		}
		s.nodes[0] = inode(s.child[0])
	}
	for i := range 2 {
		r, w, err := pipe()
		if err != nil {
			return s, err
		}
		s.out.src[i].fd = r
		// Open for reading too: while there is no agent the process waits when the pipe is full and gets no SIGPIPE.
		if s.child[i+1], err = reopen(w, unix.O_RDWR, "stdout"); err != nil {
			return s, err
		}
		s.nodes[i+1] = inode(s.child[i+1])
	}
	return s, nil
}

func pipe() (r, w int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return -1, -1, fmt.Errorf("making a pipe: %w", err)
	}
	return p[0], p[1], nil
}

// reopen makes a new open file of the pipe that fd is an end of, and closes fd.
func reopen(fd int, flags int, name string) (*os.File, error) {
	var buf [32]byte
	path := strconv.AppendInt(append(buf[:0], "/proc/self/fd/"...), int64(fd), 10)
	n, err := unix.Open(string(path), flags|unix.O_CLOEXEC, 0)
	unix.Close(fd)
	if err != nil {
		return nil, fmt.Errorf("opening the process's end of %s: %w", name, err)
	}
	return os.NewFile(uintptr(n), name), nil
}

func inode(f *os.File) uint64 {
	var st unix.Stat_t
	if unix.Fstat(fdOf(f), &st) != nil {
		return 0
	}
	return st.Ino
}

// fdOf is the descriptor of a file that is not in the runtime's poller. (Fd of one that is would make it blocking.)
func fdOf(f *os.File) int { return int(f.Fd()) }

// openTerminal opens a terminal in pts, gives it its size and takes both of its ends.
func (s *stdio) openTerminal(pts *os.File, stdin bool, height, width uint32) error {
	master, err := unix.Openat(fdOf(pts), "ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("opening a terminal: %w", err)
	}
	s.out.src[0].fd = master
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return fmt.Errorf("unlocking the terminal: %w", err)
	}
	// TIOCGPTPEER opens the other end through the master, whatever is at its path.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		return fmt.Errorf("opening the other end of the terminal: %w", errno)
	}
	slave := os.NewFile(peer, "terminal")
	s.child = [3]*os.File{slave, slave, slave}
	if s.tty, err = dupFile(master, "terminal"); err != nil {
		return err
	}
	if height != 0 || width != 0 {
		if err := s.resize(height, width); err != nil {
			return err
		}
	}
	if stdin {
		fd, err := unix.FcntlInt(uintptr(master), unix.F_DUPFD_CLOEXEC, 3)
		if err != nil {
			return fmt.Errorf("duplicating the terminal: %w", err)
		}
		s.in = &stdinEnd{fd: fd, tty: true}
	}
	return nil
}

// resize sets the terminal's size; the kernel tells the foreground processes if it has changed.
func (s *stdio) resize(height, width uint32) error {
	if s.tty == nil {
		return wire.Errorf(wire.Invalid, "process has no terminal")
	}
	ws := unix.Winsize{Row: uint16(min(height, 0xffff)), Col: uint16(min(width, 0xffff))}
	if err := unix.IoctlSetWinsize(fdOf(s.tty), unix.TIOCSWINSZ, &ws); err != nil {
		return fmt.Errorf("setting the size of the terminal: %w", err)
	}
	return nil
}

// begin begins to read the output.
func (s *stdio) begin() error { return s.out.begin() }

// closeChild closes the process's side.
func (s *stdio) closeChild() {
	for i, f := range s.child {
		if f != nil && (i == 0 || f != s.child[0]) {
			f.Close()
		}
	}
	s.child = [3]*os.File{}
}

// close closes all that finish of the output does not.
func (s *stdio) close() {
	s.in.close()
	if s.tty != nil {
		s.tty.Close()
		s.tty = nil
	}
	s.out.mu.Lock()
	s.out.ended = true
	s.out.abandon()
	s.out.mu.Unlock()
}

// forDaemon duplicates the descriptors that RunReply carries behind the pidfd.
func (s *stdio) forDaemon() (files []*os.File, err error) {
	add := func(fd int) {
		if err != nil {
			return
		}
		var f *os.File
		if f, err = dupFile(fd, "stdio"); err == nil {
			files = append(files, f)
		}
	}
	if s.tty != nil {
		add(fdOf(s.tty))
	} else {
		s.out.mu.Lock()
		add(s.out.src[0].fd)
		add(s.out.src[1].fd)
		s.out.mu.Unlock()
		// A stdin that ends with its first client must be ours alone, or it would not end.
		if s.in != nil && !s.in.once {
			s.in.mu.Lock()
			add(s.in.fd)
			s.in.mu.Unlock()
		}
	}
	if err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}
