//go:build linux

package agent

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"runkiri.com/kiri/internal/wire"
)

// logReader copies a log to a client, in the form the client asked for.
type logReader struct {
	q     *wire.Logs
	out   io.Writer
	files []*os.File // oldest first; all but the last are complete
	limit int64      // how much of the last file may be read; -1: all
	f     *follower  // nil: stop at the end of what there is
	gone  <-chan struct{}
	until <-chan time.Time // fires at q.Until

	from  [2]int64 // where each stream begins, counted over all files from the first
	mid   [2]bool  // the stream's last record did not end its line
	text  []byte   // buffer for one record's text
	frame []byte   // output not yet written
	base  int64    // size of all files before files[0]
}

// maxRecord bounds the bytes of one record: a piece of 16 KiB in which each byte is escaped, and its attributes.
const maxRecord = 1 << 20

// run reads it all. It ends with nil at the end of the log, at the time asked for, or when the reader of out has gone.
func (r *logReader) run() error {
	defer func() { closeAll(r.files) }()
	if r.q.Tail >= 0 {
		if err := r.tail(); err != nil {
			return err
		}
	}
	for len(r.files) > 0 {
		file := r.files[0]
		size, more, err := r.copyFile(file, len(r.files) == 1)
		if err != nil || !more {
			return ignoreGone(err)
		}
		file.Close()
		r.base += size
		r.files = r.files[1:]
	}
	return ignoreGone(r.flush())
}

// errUntil ends reading at a record later than Until; errGone when nobody reads any more.
var (
	errUntil = errors.New("behind the time asked for")
	errGone  = errors.New("reader is gone")
)

func ignoreGone(err error) error {
	if errors.Is(err, errUntil) || errors.Is(err, errEnd) || errors.Is(err, errGone) || isHangup(err) {
		return nil
	}
	return err
}

// copyFile copies one file, waiting at the end of the last one if there is a follower. more is false at the end of all.
func (r *logReader) copyFile(file *os.File, last bool) (size int64, more bool, err error) {
	s := lineScanner{file: file, limit: -1}
	if last {
		s.limit = r.limit
	}
	if from := min(r.from[0], r.from[1]) - r.base; from > 0 {
		st, err := file.Stat()
		if err != nil {
			return 0, false, fmt.Errorf("reading log: %w", err)
		}
		s.off = min(from, st.Size()) // the rest is in a later file
	}
	for {
		for {
			pos := s.off
			line, err := s.next()
			if err == io.EOF {
				break
			}
			if err == nil {
				err = r.record(r.base+pos, line)
			}
			if err != nil {
				return s.off, false, errors.Join(err, r.flush())
			}
		}
		if err := r.flush(); err != nil {
			return s.off, false, err
		}
		if s.limit < 0 || r.f == nil {
			return s.off, true, nil
		}
		limit, err := r.wait(s.limit)
		if err != nil {
			return s.off, false, err
		}
		s.limit = limit
	}
}

// errEnd is the end of a log that was followed.
var errEnd = errors.New("end of the log")

// wait waits until more than limit bytes of the last file can be read, or all of it (-1) as there is a newer one.
func (r *logReader) wait(limit int64) (int64, error) {
	for {
		fresh, next, ended := r.f.advance()
		switch {
		case next != nil:
			r.files = append(r.files, next)
			return -1, nil
		case fresh > limit:
			return fresh, nil
		case ended:
			return 0, errEnd
		}
		select {
		case <-r.f.wakes:
		case <-r.until:
			return 0, errUntil
		case <-r.gone:
			return 0, errGone
		}
	}
}

// record writes one record if it is wanted.
func (r *logReader) record(pos int64, line []byte) error {
	var rec record
	var ok bool
	if r.text, ok = parseRecord(line, r.text, &rec); !ok {
		return nil
	}
	if rec.stream == 0 && !r.q.Stdout || rec.stream == 1 && !r.q.Stderr || pos < r.from[rec.stream] {
		return nil
	}
	at := rec.at.UnixNano()
	if r.q.Until != 0 && at > r.q.Until {
		return errUntil
	}
	if r.q.Since != 0 && at < r.q.Since {
		return nil
	}
	start := len(r.frame)
	if r.q.Framed {
		r.frame = append(r.frame, byte(rec.stream+1), 0, 0, 0, 0, 0, 0, 0)
	}
	if !r.mid[rec.stream] {
		if r.q.Timestamps {
			r.frame = rec.at.UTC().AppendFormat(r.frame, "2006-01-02T15:04:05.000000000Z07:00 ")
		}
		if r.q.Details {
			r.frame = append(attrPairs(r.frame, rec.attrs), ' ')
		}
	}
	r.frame = append(r.frame, rec.text...)
	if r.q.Framed {
		binary.BigEndian.PutUint32(r.frame[start+4:], uint32(len(r.frame)-start-8))
	}
	r.mid[rec.stream] = !bytes.HasSuffix(rec.text, []byte{'\n'})
	if len(r.frame) >= 32<<10 {
		return r.flush()
	}
	return nil
}

func (r *logReader) flush() error {
	if len(r.frame) == 0 {
		return nil
	}
	_, err := r.out.Write(r.frame)
	r.frame = r.frame[:0]
	if err != nil {
		return fmt.Errorf("writing log to its reader: %w", err)
	}
	return nil
}

// lookBack is how far behind the last line wanted of one stream the beginning of a long line of the other is looked
// for, in bytes.
const lookBack = 1 << 20

// tail sets from so that the last q.Tail lines of the streams wanted are read. A line in several records is one line,
// and so is an unfinished last one of each stream.
func (r *logReader) tail() error {
	r.from = [2]int64{math.MaxInt64, math.MaxInt64}
	if r.q.Tail == 0 {
		return nil
	}
	var (
		count            int64
		seen, open, done [2]bool
		bases            = make([]int64, len(r.files)+1)
		ends             = make([]int64, len(r.files))
		stopAt           = int64(-1)
	)
	for i, f := range r.files {
		st, err := f.Stat()
		if err != nil {
			return fmt.Errorf("reading log: %w", err)
		}
		ends[i] = st.Size()
		if i == len(r.files)-1 && r.limit >= 0 {
			ends[i] = min(r.limit, ends[i])
		}
		bases[i+1] = bases[i] + ends[i]
	}
	var rec record
	for i := len(r.files) - 1; i >= 0; i-- {
		err := linesBackward(r.files[i], ends[i], func(off int64, line []byte) bool {
			var ok bool
			if r.text, ok = parseRecord(line, r.text, &rec); !ok {
				return true
			}
			s, pos := rec.stream, bases[i]+off
			if s == 0 && !r.q.Stdout || s == 1 && !r.q.Stderr || done[s] {
				return pos > stopAt
			}
			isEnd := !seen[s] || bytes.HasSuffix(rec.text, []byte{'\n'})
			seen[s] = true
			switch {
			case !isEnd && open[s]:
				r.from[s] = pos
			case isEnd && count < r.q.Tail:
				count++
				open[s] = true
				r.from[s] = pos
			case isEnd:
				done[s], open[s] = true, false
				if stopAt < 0 {
					stopAt = max(0, pos-lookBack)
				}
			}
			return count < r.q.Tail || (open[0] || open[1]) && pos > stopAt
		})
		if err == errStop {
			break
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// lineScanner reads a file's lines from off on, up to limit (-1: the end). off is where the next line begins.
type lineScanner struct {
	file  *os.File
	off   int64
	limit int64
	buf   []byte
	data  []byte // of buf: read and not yet given out
}

// next returns the next line, without its newline, good until the next call; io.EOF when no whole line is left.
func (s *lineScanner) next() ([]byte, error) {
	searched := 0
	for {
		if i := bytes.IndexByte(s.data[searched:], '\n'); i >= 0 {
			line := s.data[:searched+i]
			s.data = s.data[searched+i+1:]
			s.off += int64(len(line)) + 1
			return line, nil
		}
		searched = len(s.data)
		if searched >= maxRecord {
			return nil, fmt.Errorf("reading log %s: a line of more than %d bytes", s.file.Name(), maxRecord)
		}
		if s.buf == nil {
			s.buf = make([]byte, 32<<10)
		} else if searched == len(s.buf) {
			s.buf = append(s.buf, make([]byte, len(s.buf))...)
			s.data = s.buf[:searched]
		}
		copy(s.buf, s.data)
		room := s.buf[searched:]
		at := s.off + int64(searched)
		if s.limit >= 0 {
			room = room[:min(int64(len(room)), max(0, s.limit-at))]
		}
		n, err := 0, io.EOF
		if len(room) > 0 {
			n, err = s.file.ReadAt(room, at)
		}
		s.data = s.buf[:searched+n]
		if n == 0 {
			if err == nil || errors.Is(err, io.EOF) {
				return nil, io.EOF
			}
			return nil, fmt.Errorf("reading log: %w", err)
		}
	}
}

var errStop = errors.New("stop")

// linesBackward calls fn for each line of the first size bytes of file, last one first, with its offset and without
// its newline, until fn returns false (errStop). Bytes behind the last newline are no line.
func linesBackward(file *os.File, size int64, fn func(off int64, line []byte) bool) error {
	var buf []byte // bytes [pos, pos+len(buf)) of the file; ends behind a newline, once one has been found
	pos, found := size, false
	for {
		if i := bytes.LastIndexByte(buf, '\n'); !found && i >= 0 {
			buf, found = buf[:i+1], true
		}
		for found {
			i := bytes.LastIndexByte(buf[:max(0, len(buf)-1)], '\n')
			if i < 0 && (pos > 0 || len(buf) == 0) {
				break
			}
			if !fn(pos+int64(i)+1, buf[i+1:len(buf)-1]) {
				return errStop
			}
			buf = buf[:i+1]
		}
		if pos == 0 {
			return nil
		}
		if len(buf) > maxRecord {
			return fmt.Errorf("reading log %s: a line of more than %d bytes", file.Name(), maxRecord)
		}
		n := min(pos, 32<<10)
		grown := make([]byte, int(n)+len(buf))
		if _, err := file.ReadAt(grown[:n], pos-n); err != nil {
			return fmt.Errorf("reading log: %w", err)
		}
		copy(grown[n:], buf)
		buf, pos = grown, pos-n
	}
}
