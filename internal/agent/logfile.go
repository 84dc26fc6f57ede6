//go:build linux

package agent

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// The drivers. `local` keeps Docker's promise (bounded, and only the engine reads it) in the same file format as
// json-file; its limits when none are given are Docker's for that driver. json-file without options grows without
// bound, as with Docker.
const (
	logNone     = "none"
	logJSONFile = "json-file"
	logLocal    = "local"
)

// logPolicy is a LogConfig, read.
type logPolicy struct {
	none    bool
	maxSize int64 // bytes after which a new file is begun; MaxInt64 for never
	maxFile int   // files kept, the current one among them
	attrs   []byte
}

// parseLogConfig reads c. Options that a driver does not know, and values that make no sense, are the daemon's to
// refuse when a container is created; here they are errors of class Invalid too.
func parseLogConfig(c *wire.LogConfig) (logPolicy, error) {
	p := logPolicy{maxSize: math.MaxInt64, maxFile: 1, attrs: encodeAttrs(c.Attrs)}
	switch c.Driver {
	case logNone:
		p.none = true
		return p, nil
	case logJSONFile, "":
	case logLocal:
		p.maxSize, p.maxFile = 20<<20, 5
	default:
		return p, wire.Errorf(wire.Invalid, "logger: no log driver named '%s' is registered", c.Driver)
	}
	if s := c.Options["max-size"]; s != "" && s != "-1" {
		n, err := parseSize(s)
		if err != nil || n <= 0 {
			return p, wire.Errorf(wire.Invalid, "invalid value for max-size: %s", s)
		}
		p.maxSize = n
	}
	if s := c.Options["max-file"]; s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 {
			return p, wire.Errorf(wire.Invalid, "invalid value for max-file: %s", s)
		}
		p.maxFile = n
	}
	return p, nil
}

// parseSize reads "10m" in binary units: k, m, g, t, each with an optional b or ib behind it, in either case.
func parseSize(s string) (int64, error) {
	num := strings.TrimRight(strings.ToLower(s), "bi")
	shift := 0
	if num != "" {
		if i := strings.IndexByte("kmgt", num[len(num)-1]); i >= 0 {
			shift = 10 * (i + 1)
			num = num[:len(num)-1]
		}
	}
	f, err := strconv.ParseFloat(strings.TrimSpace(num), 64)
	if err != nil {
		return 0, fmt.Errorf("reading size %q: %w", s, err)
	}
	if f *= float64(int64(1) << shift); f < 0 || f > math.MaxInt64/2 {
		return 0, fmt.Errorf("size %q is out of range", s)
	}
	return int64(f), nil
}

// logName is the log's path in the container's directory; rotated files have .1 (the newest), .2 ... behind it.
func logName(dir, id string) string { return filepath.Join(dir, id+"-json.log") }

func rotatedName(path string, i int) string { return path + "." + strconv.Itoa(i) }

// logFile writes the log of one run of a container. It is written by its output (under the output's lock) and read
// by followers, who learn from it how far they may read.
//
// Records are written at a known offset, and only then does the commit (state.go) say that they are there: a kill in
// between leaves bytes behind that offset, which the next agent cuts off and writes again from the spool.
type logFile struct {
	path   string
	policy logPolicy
	commit func(logPosition) error // makes a position durable against our own death
	warn   func(error)

	buf    []byte   // records not yet written
	done   [2]int64 // bytes of each spool that are in the log and committed
	broken bool     // the last write failed: say so once

	mu        sync.Mutex // guards what is below
	fd        int
	ino       uint64
	size      int64 // committed bytes of the current file
	followers map[*follower]struct{}
	closed    bool
}

// logPosition says what of the spools is in the log, and how far the log is good. All of it changes at once.
type logPosition struct {
	ino  uint64   // inode of the current file; 0: no log yet
	size int64    // bytes of it that are whole
	done [2]int64 // bytes of the stdout and stderr spools that are in the log
}

// openLog opens the log for appending, making it if it is not there.
func openLog(path string, policy logPolicy, commit func(logPosition) error, warn func(error)) (*logFile, error) {
	fd, st, err := openLogFile(path)
	if err != nil {
		return nil, err
	}
	l := &logFile{path: path, policy: policy, commit: commit, warn: warn, fd: fd, ino: st.Ino, size: st.Size}
	if err := commit(l.position()); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return l, nil
}

func (l *logFile) position() logPosition { return logPosition{ino: l.ino, size: l.size, done: l.done} }

func openLogFile(path string) (int, unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o640)
	if err != nil {
		return -1, st, fmt.Errorf("opening log %s: %w", path, err)
	}
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return -1, st, fmt.Errorf("stat of log %s: %w", path, err)
	}
	return fd, st, nil
}

// recoverLog opens the log where an earlier agent's last commit left it: what was written behind that is cut off, and
// a rotation under way is finished.
func recoverLog(path string, policy logPolicy, at logPosition, commit func(logPosition) error, warn func(error)) (*logFile, error) {
	fd, st, err := openLogFile(path)
	if err != nil {
		return nil, err
	}
	l := &logFile{path: path, policy: policy, commit: commit, warn: warn, fd: fd, ino: st.Ino, done: at.done}
	if st.Ino == at.ino {
		l.size = min(at.size, st.Size)
	} // else it is the new file of a rotation that was not committed
	if st.Size > l.size {
		err = unix.Ftruncate(fd, l.size)
	}
	if err == nil {
		err = commit(l.position())
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("cutting log %s to its committed %d bytes: %w", path, l.size, err)
	}
	return l, nil
}

// add puts a record into the buffer and tells whether flush should be called before the next one.
func (l *logFile) add(stream int, text []byte, at time.Time) (full bool) {
	l.buf = appendRecord(l.buf, stream, text, l.policy.attrs, at)
	return len(l.buf) >= 64<<10 || l.size+int64(len(l.buf)) >= l.policy.maxSize
}

// flush writes the buffer and commits it together with done, the positions in the spools that it reaches up to. If
// the file is full a new one is begun first. Bytes that cannot be written (a full disk) are dropped, as the container
// must not be held up for good; the agent's log says so once.
func (l *logFile) flush(done [2]int64) {
	if len(l.buf) == 0 {
		return
	}
	var err error
	if l.size >= l.policy.maxSize {
		err = l.rotate()
	}
	if err == nil {
		err = l.write()
	}
	fault("log-written")
	l.buf = l.buf[:0]
	if cap(l.buf) > 16<<10 {
		l.buf = nil
	}
	l.done = done
	if cerr := l.commit(l.position()); err == nil {
		err = cerr
	}
	fault("log-committed")
	if err != nil && !l.broken {
		l.warn(err)
	}
	l.broken = err != nil
}

func (l *logFile) write() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for n := 0; n < len(l.buf); {
		m, err := unix.Pwrite(l.fd, l.buf[n:], l.size+int64(n))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			// Half a batch may be there; leave no half record before the next one.
			unix.Ftruncate(l.fd, l.size)
			return fmt.Errorf("writing log %s: %w", l.path, err)
		}
		n += m
	}
	l.size += int64(len(l.buf))
	for f := range l.followers {
		f.wake()
	}
	return nil
}

// rotate moves path to path.1, .1 to .2 and so on, drops the oldest, and begins a new file. Followers get the new
// file handed to them, so that names that move under them do not matter.
func (l *logFile) rotate() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := l.policy.maxFile - 1; i >= 1; i-- {
		from := l.path
		if i > 1 {
			from = rotatedName(l.path, i-1)
		}
		if err := unix.Rename(from, rotatedName(l.path, i)); err != nil && err != unix.ENOENT {
			return fmt.Errorf("rotating log %s: %w", from, err)
		}
		fault("log-renamed")
	}
	if l.policy.maxFile == 1 {
		if err := unix.Unlink(l.path); err != nil && err != unix.ENOENT {
			return fmt.Errorf("rotating log %s: %w", l.path, err)
		}
	}
	fd, st, err := openLogFile(l.path)
	if err != nil {
		return err
	}
	fault("log-rotated")
	unix.Close(l.fd)
	l.fd, l.ino, l.size = fd, st.Ino, st.Size
	for f := range l.followers {
		f.next(fd, l.policy.maxFile)
	}
	return l.commit(l.position())
}

// close ends the log of this run: followers end when they have read all of it.
func (l *logFile) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.closed = true
	unix.Close(l.fd)
	for f := range l.followers {
		f.end()
	}
	l.followers = nil
}

// follow registers f, if this run's log still grows, and opens the files there are, oldest first; limit is how much of
// the last one is committed.
func (l *logFile) follow(f *follower) (files []*os.File, limit int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	files, err = openLogs(l.path)
	if err != nil {
		return nil, 0, err
	}
	if !l.closed && f != nil {
		f.log = l
		if l.followers == nil {
			l.followers = map[*follower]struct{}{}
		}
		l.followers[f] = struct{}{}
	}
	return files, l.size, nil
}

// openLogs opens the files of a log, oldest first. There may be none.
func openLogs(path string) ([]*os.File, error) {
	var files []*os.File
	for i := 0; ; i++ {
		name := path
		if i > 0 {
			name = rotatedName(path, i)
		}
		f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW, 0)
		if errors.Is(err, os.ErrNotExist) {
			if i == 0 {
				continue // a rotation that was cut short: the next file is still to be made
			}
			slices.Reverse(files)
			return files, nil
		}
		if err != nil {
			closeAll(files)
			return nil, fmt.Errorf("opening log: %w", err)
		}
		files = append(files, f)
	}
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			f.Close()
		}
	}
}

// follower is one reader that waits for a log to grow.
type follower struct {
	log   *logFile
	wakes chan struct{} // holds one: something has changed

	// Guarded by log.mu.
	files []*os.File // those begun since follow, oldest first, not yet taken
	ended bool
}

func (f *follower) wake() {
	select {
	case f.wakes <- struct{}{}:
	default:
	}
}

// next adds a new current file. A reader that lags more than the files that are kept loses what a reader of the
// files would lose.
func (f *follower) next(fd, keep int) {
	if file, err := dupFile(fd, "log"); err == nil {
		f.files = append(f.files, file)
	}
	if len(f.files) > keep {
		f.files[0].Close()
		f.files = f.files[1:]
	}
	f.wake()
}

func (f *follower) end() {
	f.ended = true
	f.wake()
}

// advance tells what there is behind the file being read: how far it is good (-1: to its end, as a newer one has been
// begun, which is returned), or that the log has ended.
func (f *follower) advance() (limit int64, next *os.File, ended bool) {
	f.log.mu.Lock()
	defer f.log.mu.Unlock()
	if len(f.files) > 0 {
		next = f.files[0]
		f.files = f.files[1:]
		return -1, next, false
	}
	return f.log.size, nil, f.ended
}

// close takes f off its log.
func (f *follower) close() {
	if f.log == nil {
		return
	}
	f.log.mu.Lock()
	defer f.log.mu.Unlock()
	delete(f.log.followers, f)
	closeAll(f.files)
	f.files = nil
}
