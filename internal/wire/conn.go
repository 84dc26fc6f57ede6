package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
)

// A frame is a 12-byte header and a payload:
//
//	u32 payload length in bytes · u32 sequence · u16 kind · u8 descriptors that come with it · u8 zero
//
// A request has a sequence that is not 0; its reply carries the same sequence and the reply's kind or KindError.
// Sequence 0 is an unasked frame. Descriptors are SCM_RIGHTS of the very sendmsg that carried the header.
const headerSize = 12

// MaxFiles is the largest number of descriptors one frame may carry.
const MaxFiles = 16

// ErrClosed is the error of a call whose connection ended before the reply came.
var ErrClosed = &Error{Class: Unavailable, Text: "connection to the agent closed"}

// Frame is one message with the descriptors that came with it. Who receives a frame owns its Files.
type Frame struct {
	Msg   Message
	Files []*os.File
}

// Close closes the frame's descriptors that have not been taken (set to nil).
func (f *Frame) Close() {
	for i, file := range f.Files {
		if file != nil {
			file.Close()
			f.Files[i] = nil
		}
	}
}

// Take returns descriptor i and leaves nil in its place; the caller owns it. Nil if it is not there.
func (f *Frame) Take(i int) *os.File {
	if i >= len(f.Files) {
		return nil
	}
	file := f.Files[i]
	f.Files[i] = nil
	return file
}

// Handler answers a request or takes an unasked frame.
//
// Requests run in a goroutine of their own: the returned frame, or the error, is sent back. The request's
// descriptors are closed after the handler returns, unless it took them. Descriptors of the returned frame are
// closed once they are sent.
type Handler interface {
	// Request is called for a frame with a sequence; its result is the reply.
	Request(ctx context.Context, f *Frame) (*Frame, error)
	// Event is called in order, on the reading goroutine, for each unasked frame; it must not block.
	Event(f *Frame)
}

// Conn is one control connection. It is symmetric: either end may call and notify. All methods are safe for
// concurrent use; Close may be called more than once.
type Conn struct {
	c      net.Conn
	h      Handler
	ctx    context.Context
	cancel context.CancelCauseFunc
	wmu    sync.Mutex // guards writes: one frame at a time
	wbuf   []byte     // guarded by wmu
	mu     sync.Mutex // guards seq, calls
	seq    uint32
	calls  map[uint32]chan result

	// The reading goroutine's own: bytes rbuf[rpos:rend] are read and not yet used, pending are descriptors
	// received and not yet claimed by a header.
	rbuf       []byte
	rpos, rend int
	pending    []*os.File
}

type result struct {
	f   *Frame
	err error
}

// NewConn wraps c and starts reading. h may be nil if the other end never calls or notifies.
func NewConn(c net.Conn, h Handler) *Conn {
	w := &Conn{c: c, h: h, calls: map[uint32]chan result{}, rbuf: make([]byte, 8<<10)}
	w.ctx, w.cancel = context.WithCancelCause(context.Background())
	go w.read()
	return w
}

// Done is closed when the connection has ended.
func (w *Conn) Done() <-chan struct{} { return w.ctx.Done() }

// Err tells why the connection ended, nil while it lives. A clean end by the other side is io.EOF.
func (w *Conn) Err() error {
	if w.ctx.Err() == nil {
		return nil
	}
	return context.Cause(w.ctx)
}

// Close ends the connection; calls under way return ErrClosed.
func (w *Conn) Close() error {
	w.cancel(net.ErrClosed)
	return w.c.Close()
}

// Call sends m and waits for the reply. An error answered by the other end is an *Error. files are sent with the
// frame and stay the caller's. If ctx ends first the reply, when it comes, is dropped and its descriptors closed.
func (w *Conn) Call(ctx context.Context, m Message, files ...*os.File) (*Frame, error) {
	ch := make(chan result, 1)
	w.mu.Lock()
	w.seq++
	if w.seq == 0 {
		w.seq = 1
	}
	seq := w.seq
	w.calls[seq] = ch
	w.mu.Unlock()
	if err := w.write(seq, m, files); err != nil {
		w.forget(seq)
		return nil, err
	}
	select {
	case r := <-ch:
		return r.f, r.err
	case <-w.ctx.Done():
		w.forget(seq)
		return nil, fmt.Errorf("%T: %w", m, ErrClosed)
	case <-ctx.Done():
		w.forget(seq)
		select { // the reply may have come in the meantime
		case r := <-ch:
			return r.f, r.err
		default:
		}
		return nil, fmt.Errorf("%T: %w", m, context.Cause(ctx))
	}
}

// CallFor is Call for callers that want the reply's message and no descriptors.
func CallFor[R Message](ctx context.Context, w *Conn, m Message, files ...*os.File) (R, error) {
	var zero R
	f, err := w.Call(ctx, m, files...)
	if err != nil {
		return zero, err
	}
	f.Close()
	r, ok := f.Msg.(R)
	if !ok {
		return zero, fmt.Errorf("%T answered with %T", m, f.Msg)
	}
	return r, nil
}

// Notify sends m unasked. files stay the caller's.
func (w *Conn) Notify(m Message, files ...*os.File) error { return w.write(0, m, files) }

func (w *Conn) forget(seq uint32) {
	w.mu.Lock()
	delete(w.calls, seq)
	w.mu.Unlock()
}

func (w *Conn) write(seq uint32, m Message, files []*os.File) error {
	if len(files) > MaxFiles {
		return fmt.Errorf("sending %T with %d descriptors: %w", m, len(files), ErrTooLarge)
	}
	if len(files) > 0 && !carriesFiles(w.c) {
		return Errorf(Unsupported, "sending %T: this transport carries no descriptors", m)
	}
	w.wmu.Lock()
	defer w.wmu.Unlock()
	buf, err := AppendEncode(append(w.wbuf[:0], make([]byte, headerSize)...), m)
	if err != nil {
		return err
	}
	if cap(buf) <= 64<<10 {
		w.wbuf = buf
	}
	binary.LittleEndian.PutUint32(buf, uint32(len(buf)-headerSize))
	binary.LittleEndian.PutUint32(buf[4:], seq)
	binary.LittleEndian.PutUint16(buf[8:], uint16(m.Kind()))
	buf[10] = uint8(len(files))
	if len(files) > 0 {
		err = sendFiles(w.c, buf, files)
	} else {
		_, err = w.c.Write(buf)
	}
	if err != nil {
		return w.broken(m, err)
	}
	return nil
}

// broken ends the connection after a failed write: half a frame may be out, so nothing after it could be read.
func (w *Conn) broken(m Message, err error) error {
	w.cancel(err)
	w.c.Close()
	return fmt.Errorf("sending %T: %w: %w", m, err, ErrClosed)
}

func (w *Conn) read() {
	err := w.readFrames()
	w.cancel(err)
	w.c.Close()
	for _, f := range w.pending {
		f.Close()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for seq, ch := range w.calls {
		ch <- result{err: ErrClosed}
		delete(w.calls, seq)
	}
}

func (w *Conn) readFrames() error {
	var (
		head [headerSize]byte
		buf  []byte
	)
	for {
		if err := w.fill(head[:]); err != nil {
			return err
		}
		size := binary.LittleEndian.Uint32(head[:])
		seq := binary.LittleEndian.Uint32(head[4:])
		kind := Kind(binary.LittleEndian.Uint16(head[8:]))
		nfiles := int(head[10])
		if size > MaxPayload || nfiles > MaxFiles {
			return fmt.Errorf("frame of %d bytes with %d descriptors: %w", size, nfiles, ErrTooLarge)
		}
		if cap(buf) < int(size) || cap(buf) > 64<<10 {
			buf = make([]byte, max(int(size), 4<<10))
		}
		if err := w.fill(buf[:size]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		if nfiles > len(w.pending) {
			return fmt.Errorf("frame announces %d descriptors, %d came", nfiles, len(w.pending))
		}
		f := &Frame{}
		if nfiles > 0 {
			f.Files = append(f.Files, w.pending[:nfiles]...)
			w.pending = append(w.pending[:0], w.pending[nfiles:]...)
		}
		m, err := New(kind)
		if err == nil {
			err = Decode(buf[:size], m)
		}
		if err != nil {
			f.Close()
			return fmt.Errorf("frame of kind %d: %w", kind, err)
		}
		f.Msg = m
		w.dispatch(seq, f)
	}
}

func (w *Conn) dispatch(seq uint32, f *Frame) {
	if seq == 0 {
		if w.h != nil {
			w.h.Event(f)
		}
		return
	}
	if !isReply(f.Msg.Kind()) {
		if w.h == nil {
			f.Close()
			w.write(seq, Errorf(Unsupported, "%T: this end answers no requests", f.Msg), nil)
			return
		}
		go w.serve(seq, f)
		return
	}
	w.mu.Lock()
	ch := w.calls[seq]
	delete(w.calls, seq)
	w.mu.Unlock()
	if ch == nil {
		f.Close()
		return
	}
	if e, ok := f.Msg.(*Error); ok {
		ch <- result{err: e}
		return
	}
	ch <- result{f: f}
}

func (w *Conn) serve(seq uint32, f *Frame) {
	reply, err := w.h.Request(w.ctx, f)
	f.Close()
	if err != nil {
		w.write(seq, AsError(err), nil)
		return
	}
	w.write(seq, reply.Msg, reply.Files)
	reply.Close()
}

// fill reads len(p) bytes through the read buffer, collecting descriptors on the way. Descriptors arrive with the
// first byte of their frame or, when several frames are read at once, ahead of it; never behind it.
func (w *Conn) fill(p []byte) error {
	got := 0
	for got < len(p) {
		if w.rpos == w.rend {
			w.rpos, w.rend = 0, 0
			n, files, err := receive(w.c, w.rbuf)
			w.pending = append(w.pending, files...)
			if err != nil {
				if errors.Is(err, io.EOF) && got > 0 {
					err = io.ErrUnexpectedEOF
				}
				return err
			}
			w.rend = n
		}
		n := copy(p[got:], w.rbuf[w.rpos:w.rend])
		w.rpos += n
		got += n
	}
	return nil
}
