//go:build unix

package wire

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// pair makes two connected unix sockets.
func pair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	var conns [2]*net.UnixConn
	for i, fd := range fds {
		unix.CloseOnExec(fd)
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		conns[i] = c.(*net.UnixConn)
		t.Cleanup(func() { c.Close() })
	}
	return conns[0], conns[1]
}

// echo answers Signal with OK or an error, Logs with the descriptors it got, and records events.
type echo struct {
	mu     sync.Mutex
	events []Message
	got    chan struct{}
	block  chan struct{} // Stats waits for it
}

func (e *echo) Request(ctx context.Context, f *Frame) (*Frame, error) {
	switch m := f.Msg.(type) {
	case *Signal:
		if m.Signal == 0 {
			return nil, Errorf(Conflict, "container %s: %w", m.ID, unix.ESRCH)
		}
		return &Frame{Msg: &TopReply{PIDs: []int{m.Signal}}}, nil
	case *Logs:
		r := &Frame{Msg: &OK{}}
		for i := range f.Files {
			r.Files = append(r.Files, f.Take(i))
		}
		return r, nil
	case *Stats:
		select {
		case <-e.block:
		case <-ctx.Done():
		}
	}
	return &Frame{Msg: &OK{}}, nil
}

func (e *echo) Event(f *Frame) {
	f.Close()
	e.mu.Lock()
	e.events = append(e.events, f.Msg)
	e.mu.Unlock()
	if e.got != nil {
		e.got <- struct{}{}
	}
}

func ends(t testing.TB, h Handler) (near, far *Conn) {
	a, b := pair(t)
	near, far = NewConn(a, nil), NewConn(b, h)
	t.Cleanup(func() { near.Close(); far.Close() })
	return near, far
}

func TestCalls(t *testing.T) {
	near, _ := ends(t, &echo{})
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r, err := CallFor[*TopReply](context.Background(), near, &Signal{ID: "x", Signal: i + 1})
			if err != nil || r.PIDs[0] != i+1 {
				t.Errorf("call %d: %+v, %v", i, r, err)
			}
		}()
	}
	wg.Wait()
	_, err := near.Call(context.Background(), &Signal{ID: "x"})
	if ClassOf(err) != Conflict || !errors.Is(err, unix.ESRCH) {
		t.Errorf("an error came as %v", err)
	}
}

// TestSmallReads makes every read return one byte, so that frames arrive in all pieces there are.
func TestSmallReads(t *testing.T) {
	a, b := net.Pipe()
	near, far := NewConn(a, nil), NewConn(oneByte{b}, &echo{})
	defer near.Close()
	defer far.Close()
	for i := range 50 {
		r, err := CallFor[*TopReply](context.Background(), near, &Signal{ID: strings.Repeat("x", i), Signal: i + 1})
		if err != nil || r.PIDs[0] != i+1 {
			t.Fatalf("call %d: %+v, %v", i, r, err)
		}
	}
	if _, err := near.Call(context.Background(), &Logs{}, os.Stdin); ClassOf(err) != Unsupported {
		t.Errorf("a descriptor over a pipe: %v", err)
	}
}

type oneByte struct{ net.Conn }

func (o oneByte) Read(p []byte) (int, error) { return o.Conn.Read(p[:min(1, len(p))]) }

func openFiles(t testing.TB) int {
	t.Helper()
	d, err := os.Open("/proc/self/fd")
	if err != nil {
		t.Skip(err)
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// TestFiles sends descriptors there and back, and looks that none stays open.
func TestFiles(t *testing.T) {
	near, _ := ends(t, &echo{})
	before := openFiles(t)
	for n := range MaxFiles + 1 {
		var files []*os.File
		for i := range n {
			f, err := os.CreateTemp(t.TempDir(), "f")
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(f, "file %d", i)
			files = append(files, f)
		}
		r, err := near.Call(context.Background(), &Logs{ID: strings.Repeat("y", 20000)}, files...)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Files) != n {
			t.Fatalf("%d of %d descriptors came back", len(r.Files), n)
		}
		for i, f := range r.Files {
			b := make([]byte, 32)
			k, _ := f.ReadAt(b, 0)
			if string(b[:k]) != fmt.Sprintf("file %d", i) {
				t.Errorf("descriptor %d is %q", i, b[:k])
			}
			if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("descriptor %d is open across exec", i)
			}
		}
		r.Close()
		for _, f := range files {
			f.Close()
		}
	}
	if _, err := near.Call(context.Background(), &Logs{}, make([]*os.File, MaxFiles+1)...); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too many descriptors: %v", err)
	}
	waitFiles(t, before)
}

// waitFiles waits until no more files are open than before: the last ones are closed after the answer is out.
func waitFiles(t testing.TB, before int) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); openFiles(t) > before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d descriptors are open, %d were", openFiles(t), before)
		}
	}
}

// TestManyFrames sends frames with and without descriptors so close together that they are read at once.
func TestManyFrames(t *testing.T) {
	near, _ := ends(t, &echo{})
	before := openFiles(t)
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			r, w, err := os.Pipe()
			if err != nil {
				t.Error(err)
				return
			}
			defer r.Close()
			fmt.Fprint(w, i)
			w.Close()
			f, err := near.Call(context.Background(), &Logs{}, r)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			b, _ := io.ReadAll(f.Files[0])
			if string(b) != fmt.Sprint(i) {
				t.Errorf("call %d got the descriptor of call %s", i, b)
			}
		}()
		wg.Add(1)
		go func() {
			defer wg.Done()
			if _, err := near.Call(context.Background(), &Signal{Signal: 1}); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	waitFiles(t, before)
}

func TestNotifyKeepsOrder(t *testing.T) {
	h := &echo{got: make(chan struct{}, 1000)}
	near, _ := ends(t, h)
	for i := range 1000 {
		if err := near.Notify(&Ack{Run: uint64(i)}); err != nil {
			t.Fatal(err)
		}
	}
	for range 1000 {
		<-h.got
	}
	for i, m := range h.events {
		if m.(*Ack).Run != uint64(i) {
			t.Fatalf("event %d is %+v", i, m)
		}
	}
}

func TestCloseDuringCall(t *testing.T) {
	h := &echo{block: make(chan struct{})}
	near, far := ends(t, h)
	var wg sync.WaitGroup
	for range 20 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if _, err := near.Call(context.Background(), &Stats{}); !errors.Is(err, ErrClosed) {
				t.Errorf("a call that was cut off: %v", err)
			}
		}()
	}
	if _, err := near.Call(context.Background(), &Signal{Signal: 1}); err != nil { // the others are on their way or behind it
		t.Fatal(err)
	}
	far.Close()
	wg.Wait()
	<-near.Done()
	if !errors.Is(near.Err(), io.EOF) && !errors.Is(near.Err(), unix.ECONNRESET) {
		t.Errorf("the connection ended with %v", near.Err())
	}
	if _, err := near.Call(context.Background(), &Stats{}); !errors.Is(err, ErrClosed) {
		t.Errorf("a call on a closed connection: %v", err)
	}
}

func TestCallTimeout(t *testing.T) {
	h := &echo{block: make(chan struct{})}
	near, _ := ends(t, h)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
	defer cancel()
	if _, err := near.Call(ctx, &Stats{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	close(h.block) // the late answer is dropped, and the next call gets its own
	if r, err := CallFor[*TopReply](context.Background(), near, &Signal{Signal: 3}); err != nil || r.PIDs[0] != 3 {
		t.Errorf("the next call: %+v, %v", r, err)
	}
}

// TestBadFrames writes what no honest end would; the connection must end and say why.
func TestBadFrames(t *testing.T) {
	frame := func(size, seq uint32, kind uint16, files byte, payload ...byte) []byte {
		b := binary.LittleEndian.AppendUint32(nil, size)
		b = binary.LittleEndian.AppendUint32(b, seq)
		b = binary.LittleEndian.AppendUint16(b, kind)
		return append(append(b, files, 0), payload...)
	}
	for name, c := range map[string]struct {
		bytes []byte
		want  error
	}{
		"payload over the limit": {frame(MaxPayload+1, 1, uint16(KindTop), 0), ErrTooLarge},
		"too many descriptors":   {frame(0, 1, uint16(KindTop), MaxFiles+1), ErrTooLarge},
		"descriptors not there":  {frame(0, 1, uint16(KindLayers), 1), nil},
		"unknown kind":           {frame(0, 1, 0x7fff, 0), nil},
		"payload too short":      {frame(2, 1, uint16(KindTop), 0, 1, 0), io.ErrUnexpectedEOF},
		"half a header":          {[]byte{1, 2, 3}, io.ErrUnexpectedEOF},
		"half a payload":         {frame(100, 1, uint16(KindTop), 0, 1), io.ErrUnexpectedEOF},
		"clean end":              {nil, io.EOF},
	} {
		a, b := pair(t)
		w := NewConn(b, &echo{})
		a.Write(c.bytes)
		a.CloseWrite()
		<-w.Done()
		if w.Err() == nil || c.want != nil && !errors.Is(w.Err(), c.want) {
			t.Errorf("%s: %v", name, w.Err())
		}
		w.Close()
	}
}

// TestNoHandler is an end that answers nothing.
func TestNoHandler(t *testing.T) {
	a, b := pair(t)
	near, far := NewConn(a, nil), NewConn(b, nil)
	defer near.Close()
	defer far.Close()
	if _, err := near.Call(context.Background(), &Layers{}); ClassOf(err) != Unsupported {
		t.Errorf("got %v", err)
	}
}

func BenchmarkCall(b *testing.B) {
	near, _ := ends(b, &echo{})
	m := &Signal{ID: string(bytes.Repeat([]byte("a"), 64)), Signal: 9}
	for b.Loop() {
		if _, err := near.Call(context.Background(), m); err != nil {
			b.Fatal(err)
		}
	}
}
