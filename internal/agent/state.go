//go:build linux

package agent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// The state file, EXEC-ROOT/containers/CELL/state, is all that the next agent needs to know of a container. It is
// written whole before the container's process is made, so that no process exists that nobody can find again; a cell
// that waits for its container has an empty one. After that only words of its head change, each by one write of a few bytes within a page, which the kernel does whole or not at
// all as far as a kill is concerned. The exec root does not outlive a reboot, so nothing is ever synced.
//
//	head, stateHead bytes: the words below, little endian
//	u32 length · u32 CRC-32 of the payload · the payload: savedContainer
const (
	stateMagic = 0x3154536972696b // "kiriST1"
	stateHead  = 256

	offMagic   = 0
	offPID     = 8  // main process; 0 until it runs
	offPIDNode = 16 // inode of its pidfd, which no other process of this boot has; 0 where the kernel has none
	offBegun   = 24 // its start time in clock ticks (/proc/PID/stat), where there is no inode
	offStarted = 32 // Unix ns
	offExit    = 40 // flags, code, Unix ns: the exit, once it is known
	offLog     = 64 // logPosition
	offStdio   = 96 // inodes of the pipes: stdin, stdout, stderr; 0 none
	offPaused  = 120
)

const (
	exitKnown = 1 << iota
	exitOOM
	exitLost
)

// savedContainer is the part of a state file that never changes.
type savedContainer struct {
	Run        wire.Run
	Endpoint   wire.Endpoint
	Cgroup     string // as Load of package cgroup takes it
	CgroupPath string // as RunReply tells it
	UID, GID   uint32
	Groups     []uint32
}

func (*savedContainer) Kind() wire.Kind { return 0 }

// Fields implements wire.Message.
func (s *savedContainer) Fields(c *wire.Coder) {
	s.Run.Fields(c)
	reply := wire.RunReply{Endpoint: s.Endpoint, Cgroup: s.CgroupPath}
	reply.Fields(c)
	s.Endpoint, s.CgroupPath = reply.Endpoint, reply.Cgroup
	c.Str(&s.Cgroup)
	c.U32(&s.UID)
	c.U32(&s.GID)
	wire.List(c, &s.Groups, (*wire.Coder).U32)
}

// state is an open state file.
type state struct{ fd int }

func statePath(dir string) string { return filepath.Join(dir, "state") }

// newState makes a state file that is still empty.
func newState(dir string) (*state, error) {
	name := statePath(dir)
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("making state %s: %w", name, err)
	}
	return &state{fd: fd}, nil
}

// begin writes what is known of a container that is about to be started.
func (st *state) begin(s *savedContainer) error {
	buf, err := wire.AppendEncode(make([]byte, stateHead+8, stateHead+8+2048), s)
	if err != nil {
		return fmt.Errorf("encoding state: %w", err)
	}
	payload := buf[stateHead+8:]
	le := binary.LittleEndian
	le.PutUint64(buf[offMagic:], stateMagic)
	le.PutUint32(buf[stateHead:], uint32(len(payload)))
	le.PutUint32(buf[stateHead+4:], crc32.ChecksumIEEE(payload))
	return st.put(0, buf)
}

func (s *state) put(off int64, p []byte) error {
	for len(p) > 0 {
		n, err := unix.Pwrite(s.fd, p, off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("writing state: %w", err)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (s *state) putWords(off int64, words ...uint64) error {
	var buf [64]byte
	for i, w := range words {
		binary.LittleEndian.PutUint64(buf[8*i:], w)
	}
	return s.put(off, buf[:8*len(words)])
}

// putLog is the commit of logFile.
func (s *state) putLog(p logPosition) error {
	return s.putWords(offLog, p.ino, uint64(p.size), uint64(p.done[0]), uint64(p.done[1]))
}

func (s *state) putExit(e *wire.Exited) error {
	flags := uint64(exitKnown)
	if e.OOMKilled {
		flags |= exitOOM
	}
	if e.CodeLost {
		flags |= exitLost
	}
	return s.putWords(offExit, flags, uint64(e.Code), uint64(e.At))
}

func (s *state) close() {
	if s != nil {
		unix.Close(s.fd)
	}
}

// found is a state file read back.
type found struct {
	savedContainer
	state   *state
	pid     int
	pidNode uint64
	begun   uint64
	started int64
	paused  bool
	exit    *wire.Exited // nil: no exit was recorded
	log     logPosition
	stdio   [3]uint64
}

// errTorn is a state file that is empty or was being written when its agent died: its container was never started.
var errTorn = errors.New("state file is not whole")

// readState reads the state file of the container in dir.
func readState(dir string) (*found, error) {
	name := statePath(dir)
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("opening state %s: %w", name, err)
	}
	f := &found{state: &state{fd: fd}}
	if err := f.read(fd); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("reading state %s: %w", name, err)
	}
	return f, nil
}

func (f *found) read(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Size < stateHead+8 || st.Size > stateHead+8+wire.MaxPayload {
		return errTorn
	}
	buf := make([]byte, st.Size)
	if n, err := unix.Pread(fd, buf, 0); err != nil || n < len(buf) {
		return errors.Join(err, errTorn)
	}
	le := binary.LittleEndian
	payload := buf[stateHead+8:]
	if le.Uint64(buf[offMagic:]) != stateMagic || int(le.Uint32(buf[stateHead:])) != len(payload) ||
		le.Uint32(buf[stateHead+4:]) != crc32.ChecksumIEEE(payload) {
		return errTorn
	}
	if err := wire.Decode(payload, &f.savedContainer); err != nil {
		return err
	}
	word := func(off int) uint64 { return le.Uint64(buf[off:]) }
	f.pid, f.pidNode, f.begun, f.started = int(word(offPID)), word(offPIDNode), word(offBegun), int64(word(offStarted))
	if flags := word(offExit); flags&exitKnown != 0 {
		f.exit = &wire.Exited{ID: f.Run.ID, Run: f.Run.Run, Code: int(word(offExit + 8)), At: int64(word(offExit + 16)),
			OOMKilled: flags&exitOOM != 0, CodeLost: flags&exitLost != 0}
	}
	f.log = logPosition{ino: word(offLog), size: int64(word(offLog + 8)), done: [2]int64{int64(word(offLog + 16)), int64(word(offLog + 24))}}
	f.paused = word(offPaused) != 0
	for i := range f.stdio {
		f.stdio[i] = word(offStdio + 8*i)
	}
	return nil
}

// removeDir deletes a container's directory in the exec root. It holds files only.
func removeDir(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("removing state directory: %w", err)
	}
	return nil
}
