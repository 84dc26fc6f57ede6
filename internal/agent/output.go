//go:build linux

package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// The way of output, and why a kill of the agent at any instant neither loses nor doubles a line:
//
//	pipe --splice--> spool (exec root) --> log file (data root)
//
// splice(2) moves bytes from the pipe to the spool inside the kernel: what has left the pipe is in the spool, and the
// spool's size says how much that is, also when the process dies in the middle of the call. The log is then written
// from the spool, and one small write to the state file (state.go) says at the same time how far the log is good and
// up to where the spool is in it. A kill between the two leaves bytes in the log that the next agent cuts off before
// it writes the same lines again. Spool positions only grow; what is done is given back by punching holes.
//
// An unfinished line waits in the spool. A terminal's master cannot be spliced: its bytes pass through our memory on
// the way to the spool, so a kill may lose those of one read (at most 64 KiB) that were just being copied.

// output is what comes out of one process: up to two sources, a log or none, and the clients that watch.
//
// Lock order: output.mu, then stream.mu, then logFile.mu.
type output struct {
	loop *loop
	warn func(error)
	tty  bool

	task  task         // pumps in a goroutine of its own
	first atomic.Int32 // 1 + the source that became ready first since the last pump

	mu      sync.Mutex // guards all below
	src     [2]source
	sinks   []*stream
	logPath string // "" for no log
	policy  logPolicy
	dir     string // where spools go
	commit  func(logPosition) error
	log     *logFile      // opened when the first byte comes
	eof     chan struct{} // closed when all sources have ended; made by wait
	ended   bool          // finish has been called
}

// source is one pipe's read end, or a terminal's master.
type source struct {
	fd    int // -1: none, or ended
	watch *watch
	spool int   // -1: none yet
	end   int64 // bytes that have come into the spool
	sent  int64 // of them, given to clients
	holes int64 // of them, given back
}

const pumpSize = 64 << 10 // bytes moved at once: a pipe's capacity

var pumpBuffers = sync.Pool{New: func() any { return new([pumpSize + maxLine]byte) }}

func newOutput(l *loop, warn func(error)) *output {
	o := &output{loop: l, warn: warn}
	for i := range o.src {
		o.src[i].fd, o.src[i].spool = -1, -1
	}
	o.task.fn = o.pump
	return o
}

// setLog makes the output keep a log at path, with its spools in dir.
func (o *output) setLog(path, dir string, policy logPolicy, commit func(logPosition) error) {
	o.logPath, o.dir, o.policy, o.commit = path, dir, policy, commit
}

// add gives the output a source, and begins to read it; fd must be non-blocking and becomes the output's.
func (o *output) add(i, fd int) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.src[i].fd = fd
	return o.watch(i)
}

// begin begins to read the sources that are there.
func (o *output) begin() error {
	o.mu.Lock() // the first that has something may end both
	defer o.mu.Unlock()
	for i := range o.src {
		if o.src[i].fd >= 0 {
			if err := o.watch(i); err != nil {
				return err
			}
		}
	}
	return nil
}

func (o *output) watch(i int) error {
	fd := o.src[i].fd
	w, err := o.loop.watch(fd, watchRead, func(uint32) {
		o.first.CompareAndSwap(0, int32(i)+1)
		o.task.kick()
	})
	if err != nil {
		return err
	}
	o.src[i].watch = w
	return nil
}

func (o *output) pump() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pumpLocked()
}

// pumpLocked moves bytes until there are none, or a client is too far behind: then its next progress kicks the task.
func (o *output) pumpLocked() {
	buf := pumpBuffers.Get().(*[pumpSize + maxLine]byte)
	defer pumpBuffers.Put(buf)
	first := 0
	if o.first.Swap(0) == 2 {
		first = 1
	}
	for moved := true; moved; {
		moved = false
		for k := range o.src {
			i := k ^ first
			if o.src[i].fd < 0 {
				continue
			}
			if o.behind() {
				return
			}
			n, err := o.move(i, buf[:])
			switch {
			case n > 0:
				moved = true
			case err == unix.EAGAIN, err == unix.EIO && !o.ended: // EIO: nobody has the terminal open right now
			default:
				if err != nil && err != unix.EIO {
					o.warn(fmt.Errorf("reading a container's output: %w", err))
				}
				o.close(i, buf[:])
			}
		}
	}
}

// behind tells whether a client has more than its share waiting.
func (o *output) behind() bool {
	if o.ended {
		return false // what is left is a pipe full at most
	}
	for _, s := range o.sinks {
		if s.behind() {
			return true
		}
	}
	return false
}

// move takes what source i has, up to pumpSize bytes, to the spool, the clients and the log. 0, nil is the end.
func (o *output) move(i int, buf []byte) (int, error) {
	s := &o.src[i]
	if o.logPath == "" {
		n, err := readFD(s.fd, buf[:pumpSize])
		if n > 0 {
			o.deliver(i, buf[:n])
		}
		return n, err
	}
	if s.spool < 0 { // a container that says nothing has no files
		switch err := pending(s.fd); {
		case err == io.EOF && o.tty:
			return 0, unix.EIO
		case err == io.EOF:
			return 0, nil
		case err != nil:
			return 0, err
		}
		if err := o.openSpool(i); err != nil {
			o.warn(err)
			o.logPath = ""
			return o.move(i, buf)
		}
	}
	n, err := o.fill(s, buf)
	if n > 0 {
		fault("spooled")
		o.drain(i, buf, false)
	}
	return n, err
}

// pending tells what a read would find, without reading: nil data, io.EOF the end, EAGAIN nothing.
func pending(fd int) error {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		_, err := unix.Poll(p[:], 0)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return err
		case p[0].Revents&unix.POLLIN != 0:
			return nil
		case p[0].Revents != 0:
			return io.EOF
		}
		return unix.EAGAIN
	}
}

// fill brings bytes from the source to the end of the spool.
func (o *output) fill(s *source, buf []byte) (int, error) {
	if o.tty {
		n, err := readFD(s.fd, buf[:pumpSize])
		if n <= 0 {
			return n, err
		}
		if _, err := unix.Pwrite(s.spool, buf[:n], s.end); err != nil {
			return 0, fmt.Errorf("writing spool: %w", err)
		}
		s.end += int64(n)
		return n, nil
	}
	for {
		off := s.end
		n, err := unix.Splice(s.fd, nil, s.spool, &off, pumpSize, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if err == unix.EINTR {
			continue
		}
		if n > 0 {
			s.end += n
		}
		return int(max(n, 0)), err
	}
}

func readFD(fd int, p []byte) (int, error) {
	for {
		n, err := unix.Read(fd, p)
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

func spoolName(dir string, i int) string {
	return filepath.Join(dir, [2]string{"stdout", "stderr"}[i]+".spool")
}

// openSpool makes the spool of source i, and the log before it: from then on the log's position is committed.
func (o *output) openSpool(i int) error {
	if err := o.openLog(); err != nil {
		return err
	}
	name := spoolName(o.dir, i)
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("making spool %s: %w", name, err)
	}
	o.src[i].spool = fd
	return nil
}

// openLogNow opens the log although nothing may have come out yet, for a reader. Nil if there is none.
func (o *output) openLogNow() (*logFile, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.logPath == "" || o.ended && o.log == nil {
		return nil, nil
	}
	if err := o.openLog(); err != nil {
		return nil, err
	}
	return o.log, nil
}

func (o *output) openLog() (err error) {
	if o.log == nil {
		o.log, err = openLog(o.logPath, o.policy, o.commit, o.warn)
	}
	return err
}

// drain gives clients and the log what the spool has for them. With last an unfinished line is logged too.
func (o *output) drain(i int, buf []byte, last bool) {
	s := &o.src[i]
	for s.sent < s.end || last && o.log.done[i] < s.end {
		from := o.log.done[i]
		n, err := unix.Pread(s.spool, buf[:min(s.end-from, int64(len(buf)))], from)
		if err != nil || n <= 0 {
			if err != unix.EINTR {
				o.warn(fmt.Errorf("reading spool %s: %w", spoolName(o.dir, i), errors.Join(err, unix.EIO)))
				o.log.done[i], s.sent = s.end, s.end
			}
			continue
		}
		if skip := s.sent - from; skip < int64(n) {
			o.deliver(i, buf[skip:n])
			s.sent = from + int64(n)
		}
		o.record(i, buf[:n], last && from+int64(n) == s.end)
	}
	// Give back what is done, in pieces that make the call worth it.
	if page := o.log.done[i] &^ 4095; page-s.holes >= pumpSize || page > s.holes && o.log.done[i] == s.end {
		if unix.Fallocate(s.spool, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, s.holes, page-s.holes) == nil {
			s.holes = page
		}
	}
}

// record logs the whole lines of p, which begins at the log's position in the spool, and with last the rest too.
func (o *output) record(i int, p []byte, last bool) {
	done := o.log.done
	now := time.Now()
	for len(p) > 0 {
		n := lineLength(p)
		if n == 0 {
			if !last {
				break
			}
			n = len(p)
		}
		full := o.log.add(i, p[:n], now)
		done[i] += int64(n)
		p = p[n:]
		if full {
			o.log.flush(done)
		}
	}
	o.log.flush(done)
}

// lineLength is the length of the first record of p: a line with its newline, a piece of maxLine bytes of a longer
// one, or 0 if p has neither.
func lineLength(p []byte) int {
	if i := bytes.IndexByte(p[:min(len(p), maxLine)], '\n'); i >= 0 {
		return i + 1
	}
	if len(p) >= maxLine {
		return maxLine
	}
	return 0
}

// deliver gives p to the clients that want it. p is not kept.
func (o *output) deliver(i int, p []byte) {
	for k := 0; k < len(o.sinks); {
		if o.sinks[k].send(i, p) {
			k++
			continue
		}
		o.dropSink(k)
	}
}

func (o *output) dropSink(k int) {
	o.sinks[k] = o.sinks[len(o.sinks)-1]
	o.sinks[len(o.sinks)-1] = nil
	o.sinks = o.sinks[:len(o.sinks)-1]
}

// unfinished is what has come out of source i and is not in the log yet: the beginning of a line. Called with o.mu held.
func (o *output) unfinished(i int) []byte {
	s := &o.src[i]
	if s.spool < 0 || o.log == nil || s.end == o.log.done[i] {
		return nil
	}
	p := make([]byte, s.end-o.log.done[i])
	n, err := unix.Pread(s.spool, p, o.log.done[i])
	if err != nil {
		return nil
	}
	return p[:n]
}

// attach adds a client, which gets every byte from now on. If the output has ended, it ends too.
func (o *output) attach(s *stream) {
	o.mu.Lock()
	if !o.ended {
		o.sinks = append(o.sinks, s)
	}
	ended := o.ended
	o.mu.Unlock()
	if ended {
		s.finish()
	}
}

// detach takes a client off, if it is there, and goes on with output that it held up.
func (o *output) detach(s *stream) {
	o.mu.Lock()
	for k := range o.sinks {
		if o.sinks[k] == s {
			o.dropSink(k)
			break
		}
	}
	o.mu.Unlock()
	o.task.kick()
}

// close ends source i: its last line is logged.
func (o *output) close(i int, buf []byte) {
	s := &o.src[i]
	if s.spool >= 0 {
		o.drain(i, buf, true)
		unix.Close(s.spool)
		s.spool = -1
	}
	s.watch.stop()
	unix.Close(s.fd)
	s.fd = -1
	if o.eof != nil && o.src[0].fd < 0 && o.src[1].fd < 0 {
		close(o.eof)
		o.eof = nil
	}
}

// finish is called when the process has ended: it takes everything that is still in the pipes. If another process
// holds a pipe open, what it writes is waited for, but not longer than grace. Then the log is closed and the clients
// are told the end.
func (o *output) finish(grace time.Duration) {
	o.mu.Lock()
	o.ended = true
	o.pumpLocked()
	if o.src[0].fd >= 0 || o.src[1].fd >= 0 {
		eof := make(chan struct{})
		o.eof = eof
		o.mu.Unlock()
		t := time.NewTimer(grace)
		select {
		case <-eof:
		case <-t.C:
		}
		t.Stop()
		o.mu.Lock()
		o.pumpLocked()
		o.abandon()
	}
	if o.log != nil {
		o.log.close()
	}
	o.mu.Unlock()
}

// release ends the attached streams, after finish and after the exit has been told: a client that asks for the exit
// code once its stream has ended (`docker exec`) must find it.
func (o *output) release() {
	o.mu.Lock()
	sinks := o.sinks
	o.sinks = nil
	o.mu.Unlock()
	for _, s := range sinks {
		s.finish()
	}
}

// abandon closes sources that have not ended.
func (o *output) abandon() {
	o.eof = nil
	buf := pumpBuffers.Get().(*[pumpSize + maxLine]byte)
	defer pumpBuffers.Put(buf)
	for i := range o.src {
		if o.src[i].fd >= 0 {
			o.close(i, buf[:])
		}
	}
}

// adoptSpools goes on where an earlier agent was stopped: what its spools hold and the log does not is logged.
func (o *output) adoptSpools(at logPosition) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.logPath == "" || at.ino == 0 {
		return nil
	}
	var err error
	if o.log, err = recoverLog(o.logPath, o.policy, at, o.commit, o.warn); err != nil {
		return err
	}
	buf := pumpBuffers.Get().(*[pumpSize + maxLine]byte)
	defer pumpBuffers.Put(buf)
	for i := range o.src {
		s := &o.src[i]
		fd, err := unix.Open(spoolName(o.dir, i), unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err == unix.ENOENT {
			continue
		}
		var st unix.Stat_t
		if err == nil {
			err = unix.Fstat(fd, &st)
		}
		if err != nil {
			return fmt.Errorf("opening spool %s: %w", spoolName(o.dir, i), err)
		}
		s.spool, s.end = fd, st.Size
		s.sent = at.done[i]
		s.holes = at.done[i] &^ 4095
		o.drain(i, buf[:], false)
	}
	return nil
}
