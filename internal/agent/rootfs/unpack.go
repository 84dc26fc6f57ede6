package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// belowGrace is how long an unpack waits for a layer under it of which nothing is known yet. Layers of an image are
// unpacked side by side and their requests may arrive in any order; a layer that is being unpacked is waited for
// without limit.
const belowGrace = 10 * time.Second

// flight is a layer being unpacked.
type flight struct {
	done chan struct{} // closed when it is over, well or not
}

// Unpack makes a layer of stream, a tar that may be compressed (see wire.Unpack). The layer is durable when it
// returns. A layer that is there already is left alone; if it is being unpacked by another call, this one waits, and
// goes on with its own stream only if the other fails. In all cases the stream is read to its end, so that its
// writer need not know.
//
// Errors: wire.Invalid for a stream that is damaged, is no tar, tries to leave its root or has another DiffID;
// wire.NotFound for a layer below that is needed and not there; the context's error; else the kernel's. After an
// error nothing is left of the layer.
func (s *Store) Unpack(ctx context.Context, m *wire.Unpack, stream *os.File) (*wire.UnpackReply, error) {
	if m.DiffID == "" {
		return s.unpack(ctx, m, stream)
	}
	if err := checkDiffID(m.DiffID); err != nil {
		return nil, err
	}
	for {
		s.mu.Lock()
		if l, ok := s.layers[m.DiffID]; ok {
			s.mu.Unlock()
			if err := drain(ctx, stream); err != nil {
				return nil, fmt.Errorf("reading layer %s, which is here already: %w", m.DiffID, err)
			}
			return &wire.UnpackReply{DiffID: l.DiffID, Size: l.Size}, nil
		}
		f := s.flights[m.DiffID]
		if f == nil {
			f = &flight{done: make(chan struct{})}
			s.flights[m.DiffID] = f
			s.notify()
			s.mu.Unlock()
			reply, err := s.unpack(ctx, m, stream)
			s.mu.Lock()
			delete(s.flights, m.DiffID)
			s.notify()
			s.mu.Unlock()
			close(f.done)
			return reply, err
		}
		s.mu.Unlock()
		select {
		case <-f.done:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for layer %s: %w", m.DiffID, context.Cause(ctx))
		}
	}
}

// unpack runs the child and puts what it made in its place.
func (s *Store) unpack(ctx context.Context, m *wire.Unpack, stream *os.File) (reply *wire.UnpackReply, err error) {
	what := m.DiffID
	if what == "" {
		what = "of an import"
	}
	name := s.newName()
	tmp := filepath.Join(s.root, "layers", "+"+name)
	defer func() {
		if err != nil {
			err = fmt.Errorf("unpacking layer %s: %w", what, err)
		}
	}()
	if err := os.Mkdir(tmp, 0o700); err != nil {
		return nil, err
	}
	renamed := false
	defer func() {
		if !renamed {
			if rmErr := removeTree(fdOf(s.layerDir), "+"+name); rmErr != nil {
				s.swept("+"+name, rmErr)
			}
		}
	}()
	if err := os.Mkdir(filepath.Join(tmp, "fs"), 0o755); err != nil {
		return nil, err
	}
	info, err := s.runChild(ctx, m, stream, filepath.Join(tmp, "fs"))
	if err != nil {
		return nil, err
	}
	info.name = name
	if err := os.WriteFile(filepath.Join(tmp, "layer"), []byte(info.text()), 0o600); err != nil {
		return nil, err
	}
	if err := s.syncer.sync(); err != nil {
		return nil, fmt.Errorf("writing to disk: %w", err)
	}
	s.mu.Lock()
	if there, twice := s.layers[info.DiffID]; twice { // an import of what is here already, or two at once
		s.mu.Unlock()
		return &wire.UnpackReply{DiffID: there.DiffID, Size: there.Size}, nil
	}
	err = retry(func() error {
		return unix.Renameat2(fdOf(s.layerDir), "+"+name, fdOf(s.layerDir), name, unix.RENAME_NOREPLACE)
	})
	if err == nil {
		renamed = true
		s.layers[info.DiffID] = info
		s.notify()
	}
	s.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := s.layerDir.Sync(); err != nil {
		return nil, fmt.Errorf("writing to disk: %w", err)
	}
	return &wire.UnpackReply{DiffID: info.DiffID, Size: info.Size}, nil
}

// runChild starts the unpacking process, serves its questions and returns what it made.
//
// The goroutine keeps its thread: the child's PDEATHSIG is sent when the thread that made it ends. The exit status
// is not relied on, because the agent reaps all its children in one place; the child's last word on the control
// socket is what counts, and a child that dies has none.
func (s *Store) runChild(ctx context.Context, m *wire.Unpack, stream *os.File, dir string) (layerInfo, error) {
	var info layerInfo
	if err := ctx.Err(); err != nil {
		return info, context.Cause(ctx)
	}
	// The child gets the directory as the root of a mount of its own, so that nothing is above it. The mount goes
	// with tree unless the child has taken it; the lock, which tells a sweep that somebody still writes here, goes with
	// the last descriptor of root, of which the child has one.
	fd, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	tree, err := fileOf(fd, dir, err)
	if err != nil {
		return info, fmt.Errorf("taking %s as a mount: %w", dir, err)
	}
	defer tree.Close()
	fd, err = openat(fdOf(tree), ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	root, err := fileOf(fd, dir, err)
	if err != nil {
		return info, fmt.Errorf("opening %s: %w", dir, err)
	}
	defer root.Close()
	if err := retry(func() error { return unix.Flock(fdOf(root), unix.LOCK_EX|unix.LOCK_NB) }); err != nil {
		return info, fmt.Errorf("locking %s: %w", dir, err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return info, fmt.Errorf("making the control socket: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "control"), os.NewFile(uintptr(pair[1]), "control")
	defer ours.Close()

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mode := "layer"
	if m.Import {
		mode = "import"
	}
	p, err := os.StartProcess("/proc/self/exe", []string{"kiri-init", unpackArg, mode, m.DiffID}, &os.ProcAttr{
		Files: []*os.File{childStream: stream, childOut: os.Stderr, childErr: os.Stderr, childControl: theirs, childRoot: root},
		Env:   []string{},
		Sys:   &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL, Setsid: true},
	})
	theirs.Close()
	if err != nil {
		return info, fmt.Errorf("starting the unpack process: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { p.Kill() })
	info, answer := s.converse(ctx, ours, m.Below)
	if answer != nil {
		p.Kill() // it has nothing more to say; usually it is gone already
	}
	state, waitErr := p.Wait()
	stop()
	switch {
	case answer == nil:
		return info, nil
	case ctx.Err() != nil:
		return info, context.Cause(ctx)
	case errors.Is(answer, io.EOF) && waitErr == nil:
		return info, fmt.Errorf("the unpack process ended without an answer: %s", state)
	case errors.Is(answer, io.EOF):
		return info, errors.New("the unpack process ended without an answer")
	}
	return info, answer
}

// converse answers the child's questions until it has told its result. io.EOF: it died.
func (s *Store) converse(ctx context.Context, control *os.File, below []string) (layerInfo, error) {
	buf := make([]byte, maxPacket)
	for {
		n, err := recvPacket(fdOf(control), buf)
		if err != nil {
			return layerInfo{}, err
		}
		kind, body := buf[0], buf[1:n]
		switch kind {
		case packetBelow:
			if err := s.answerBelow(ctx, control, below); err != nil {
				return layerInfo{}, err
			}
		case packetDone:
			return parseInfo(string(body))
		case packetError:
			e := new(wire.Error)
			if err := wire.Decode(body, e); err != nil {
				return layerInfo{}, fmt.Errorf("reading the unpack process's error: %w", err)
			}
			return layerInfo{}, e
		default:
			return layerInfo{}, fmt.Errorf("the unpack process sent a packet of kind %q", kind)
		}
	}
}

// answerBelow sends the child a read-only view of the layers under the one it makes, or the reason why there is none.
func (s *Store) answerBelow(ctx context.Context, control *os.File, below []string) error {
	mnt, err := s.waitBelow(ctx, below)
	if err != nil {
		payload, encErr := wire.AppendEncode([]byte{packetError}, wire.AsError(err))
		if encErr != nil {
			return encErr
		}
		return sendPacket(fdOf(control), payload, -1)
	}
	if mnt == nil {
		return sendPacket(fdOf(control), []byte{packetBelow}, -1)
	}
	defer mnt.Close()
	return sendPacket(fdOf(control), []byte{packetBelow}, fdOf(mnt))
}

// waitBelow waits until all the layers are there and mounts them; nil if there are none.
func (s *Store) waitBelow(ctx context.Context, below []string) (*os.File, error) {
	if len(below) == 0 {
		return nil, nil
	}
	grace := time.NewTimer(belowGrace)
	defer grace.Stop()
	for {
		s.mu.Lock()
		changed := s.changed
		missing, unknown := "", ""
		for _, id := range below {
			if _, ok := s.layers[id]; ok {
				continue
			}
			missing = id
			if s.flights[id] == nil {
				unknown = id
			}
		}
		s.mu.Unlock()
		if missing == "" {
			return s.mountBelow(below)
		}
		var tooLate <-chan time.Time
		if unknown != "" {
			tooLate = grace.C
		}
		select {
		case <-changed:
		case <-tooLate:
			return nil, wire.Errorf(wire.NotFound, "layer %s below is not here", unknown)
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// drain reads stream to its end.
func drain(ctx context.Context, stream *os.File) error {
	r, err := newCancelReader(ctx, stream)
	if err != nil {
		return err
	}
	defer r.close()
	buf := make([]byte, 64<<10)
	for {
		if _, err := r.Read(buf); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// cancelReader reads a descriptor, of whatever kind, until a context ends.
type cancelReader struct {
	ctx   context.Context
	fd    int
	wake  int // eventfd
	stop  func() bool
	woken chan struct{}
}

func newCancelReader(ctx context.Context, f *os.File) (*cancelReader, error) {
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	r := &cancelReader{ctx: ctx, fd: fdOf(f), wake: wake, woken: make(chan struct{})}
	r.stop = context.AfterFunc(ctx, func() {
		defer close(r.woken)
		unix.Write(wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	})
	return r, nil
}

func (r *cancelReader) Read(p []byte) (int, error) {
	fds := []unix.PollFd{{Fd: int32(r.fd), Events: unix.POLLIN}, {Fd: int32(r.wake), Events: unix.POLLIN}}
	if err := retry(func() error { _, err := unix.Poll(fds, -1); return err }); err != nil {
		return 0, err
	}
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return fdReader(r.fd).Read(p)
}

func (r *cancelReader) close() {
	if !r.stop() {
		<-r.woken // the descriptor is closed after it
	}
	unix.Close(r.wake)
}
