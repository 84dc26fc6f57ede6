//go:build unix

package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/jsonstream"
	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// fakeAgents is the far end of the wire: an agentHost whose agents do what the test says, so that what happens when is
// the test's. What an agent is asked is kept; `answer` may take a request over.
type fakeAgents struct {
	t       testing.TB
	version string

	mu      sync.Mutex
	running map[string]*wire.Running // as HelloReply tells it; kept over the agents' deaths
	asked   []wire.Message
	adopted map[string]int // descriptors that came with Adopt
	acked   []wire.Ack
	conn    *wire.Conn // of the agent that lives, nil for none
	pending net.Conn   // the daemon's end, until it dials
	starts  int
	layers  []wire.UnpackReply
	answer  func(f *wire.Frame) (*wire.Frame, error, bool)
	onAck   chan wire.Ack
}

func newFakeAgents(t testing.TB) *fakeAgents {
	return &fakeAgents{t: t, version: "test", running: map[string]*wire.Running{}, adopted: map[string]int{}, onAck: make(chan wire.Ack, 1000)}
}

func (a *fakeAgents) dial(context.Context) (net.Conn, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pending == nil {
		return nil, os.ErrNotExist
	}
	c := a.pending
	a.pending = nil
	return c, nil
}

func (a *fakeAgents) start() (<-chan struct{}, error) {
	near, far := socketPair(a.t)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.starts++
	a.pending = near
	a.conn = wire.NewConn(far, a)
	return make(chan struct{}), nil
}

// again lets the living agents be dialled once more, as by a new daemon.
func (a *fakeAgents) again() { a.start() }

// die ends the agent as kill -9 does.
func (a *fakeAgents) die() {
	a.mu.Lock()
	c := a.conn
	a.mu.Unlock()
	c.Close()
}

func socketPair(t testing.TB) (net.Conn, net.Conn) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]net.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		if ends[i], err = net.FileConn(f); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	return ends[0], ends[1]
}

func (a *fakeAgents) Event(f *wire.Frame) {
	if m, ok := f.Msg.(*wire.Ack); ok {
		a.mu.Lock()
		a.acked = append(a.acked, *m)
		if r := a.running[m.ID]; r != nil && r.Exited != nil && r.Run == m.Run && m.Exec == "" {
			delete(a.running, m.ID)
		}
		a.mu.Unlock()
		select {
		case a.onAck <- *m:
		default:
		}
	}
}

func (a *fakeAgents) Request(_ context.Context, f *wire.Frame) (*wire.Frame, error) {
	a.mu.Lock()
	a.asked = append(a.asked, f.Msg)
	answer := a.answer
	a.mu.Unlock()
	if answer != nil {
		if r, err, taken := answer(f); taken {
			return r, err
		}
	}
	ok := &wire.Frame{Msg: &wire.OK{}}
	switch m := f.Msg.(type) {
	case *wire.Hello:
		r := &wire.HelloReply{
			Version: wire.Version, Agent: a.version, Kernel: "6.18.0", Arch: "amd64", CgroupVersion: 2, NCPU: 2, MemTotal: 8 << 30,
			Features: []string{"memory", "swap", "cpu-shares", "cpu-quota", "cpuset", "pids", "blkio-throttle"},
			Bridge:   wire.Bridge{Name: "kiri0", Subnet: "172.17.0.0/16", Gateway: "172.17.0.1", MTU: 1500},
		}
		a.mu.Lock()
		for _, c := range a.running {
			r.Containers = append(r.Containers, *c)
		}
		a.mu.Unlock()
		return &wire.Frame{Msg: r}, nil
	case *wire.Run:
		return a.run(m), nil
	case *wire.Adopt:
		a.mu.Lock()
		a.adopted[m.ID] = len(f.Files)
		a.mu.Unlock()
		return ok, nil
	case *wire.Signal:
		if m.Signal == sigKill && m.Exec == "" {
			go a.exit(m.ID, 137)
		}
		return ok, nil
	case *wire.Exec:
		return &wire.Frame{Msg: &wire.ExecReply{PID: 99}}, nil
	case *wire.Volume:
		return &wire.Frame{Msg: &wire.VolumeReply{Path: "/volumes/" + m.Name + "/_data", Size: 5}}, nil
	case *wire.Changes:
		return &wire.Frame{Msg: &wire.ChangesReply{Size: 7}}, nil
	case *wire.Unpack:
		h := sha256.New()
		n, err := io.Copy(h, f.Files[0])
		if err != nil {
			return nil, err
		}
		l := wire.UnpackReply{DiffID: "sha256:" + hex.EncodeToString(h.Sum(nil)), Size: n}
		a.mu.Lock()
		a.layers = append(a.layers, l)
		a.mu.Unlock()
		return &wire.Frame{Msg: &l}, nil
	case *wire.Layers:
		a.mu.Lock()
		defer a.mu.Unlock()
		return &wire.Frame{Msg: &wire.LayersReply{Layers: a.layers}}, nil
	}
	return ok, nil
}

// run answers as for a command that runs, with three descriptors to hold.
func (a *fakeAgents) run(m *wire.Run) *wire.Frame {
	r := wire.RunReply{PID: 4242, StartedAt: time.Now().UnixNano()}
	if m.Net.Mode == "bridge" {
		r.Endpoint = wire.Endpoint{Address: "172.17.0.2", PrefixLen: 16, Gateway: "172.17.0.1", MAC: "02:42:ac:11:00:02", Ports: m.Net.Ports}
	}
	a.mu.Lock()
	a.running[m.ID] = &wire.Running{ID: m.ID, Run: m.Run, Reply: r}
	a.mu.Unlock()
	f := &wire.Frame{Msg: &r}
	for range 3 {
		file, err := os.Open(os.DevNull)
		if err != nil {
			a.t.Error(err)
		}
		f.Files = append(f.Files, file)
	}
	return f
}

// exit ends a container's command.
func (a *fakeAgents) exit(id string, code int) {
	a.mu.Lock()
	r := a.running[id]
	if r == nil || r.Exited != nil {
		a.mu.Unlock()
		return
	}
	e := &wire.Exited{ID: id, Run: r.Run, Code: code, At: time.Now().UnixNano()}
	r.Exited = e
	conn := a.conn
	a.mu.Unlock()
	if conn != nil {
		conn.Notify(e)
	}
}

// take sets what handles requests before the defaults do.
func (a *fakeAgents) take(f func(f *wire.Frame) (*wire.Frame, error, bool)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answer = f
}

// sent returns the messages of one type that were asked.
func sent[M wire.Message](a *fakeAgents) []M {
	a.mu.Lock()
	defer a.mu.Unlock()
	var l []M
	for _, m := range a.asked {
		if m, ok := m.(M); ok {
			l = append(l, m)
		}
	}
	return l
}

// harness is an engine over fake agents, with one image, bb.
type harness struct {
	*Engine
	t      testing.TB
	agents *fakeAgents
	cfg    Config
}

func newHarness(t *testing.T) *harness {
	var log *slog.Logger
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	return newHarnessFor(t, log)
}

func newHarnessFor(t testing.TB, log *slog.Logger) *harness {
	dir := t.TempDir()
	h := &harness{t: t, agents: newFakeAgents(t), cfg: Config{DataRoot: filepath.Join(dir, "data"), ExecRoot: filepath.Join(dir, "run"), Version: "test", Log: log}}
	h.open()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	w.WriteHeader(&tar.Header{Name: "hello", Mode: 0o755, Size: 2, Typeflag: tar.TypeReg})
	w.Write([]byte("hi"))
	w.Close()
	_, err := h.ImageImport(t.Context(), ImportOptions{Ref: "bb", Changes: []string{"CMD true", "ENV A=image", "LABEL from=image"}}, &b, func(jsonstream.Message) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
			if m, ok := f.Msg.(*wire.Signal); ok && m.Exec == "" {
				go h.agents.exit(m.ID, 143)
			}
			return nil, nil, false
		})
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		if err := h.Close(ctx); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return h
}

func (h *harness) open() {
	e, err := open(context.Background(), h.cfg, h.agents)
	if err != nil {
		h.t.Fatal(err)
	}
	h.Engine = e
}

// reopen replaces the daemon by a new one, leaving what runs.
func (h *harness) reopen(before func()) {
	h.Engine.cfg.LiveRestore = true
	if err := h.Close(context.Background()); err != nil {
		h.t.Fatal(err)
	}
	if before != nil {
		before()
	}
	h.agents.again()
	h.open()
}

func (h *harness) create(name string, change func(*container.Config, *container.HostConfig)) string {
	h.t.Helper()
	req := &container.CreateRequest{Config: &container.Config{Image: "bb"}, HostConfig: &container.HostConfig{}}
	if change != nil {
		change(req.Config, req.HostConfig)
	}
	r, err := h.ContainerCreate(context.Background(), name, req, "")
	if err != nil {
		h.t.Fatal(err)
	}
	return r.ID
}

func (h *harness) run(name string, change func(*container.Config, *container.HostConfig)) string {
	h.t.Helper()
	id := h.create(name, change)
	if err := h.ContainerStart(context.Background(), id); err != nil {
		h.t.Fatal(err)
	}
	return id
}

func (h *harness) state(ref string) *container.State {
	h.t.Helper()
	r, err := h.ContainerInspect(context.Background(), ref, false)
	if err != nil {
		h.t.Fatal(err)
	}
	return r.State
}

func (h *harness) wait(ref string, cond container.WaitCondition) <-chan container.WaitResponse {
	h.t.Helper()
	ch, err := h.ContainerWait(h.t.Context(), ref, cond)
	if err != nil {
		h.t.Fatal(err)
	}
	return ch
}

func receive[T any](t *testing.T, what string, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(10 * time.Second):
		t.Fatalf("nothing came: %s", what)
		panic("unreachable")
	}
}

// eventually waits for what has no channel to wait on.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(end) {
			t.Fatalf("it never came to be: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func wantError(t *testing.T, err error, is func(error) bool, text string) {
	t.Helper()
	if err == nil || !is(err) || err.Error() != text {
		t.Errorf("error %q (class ok: %v)\nwant  %q", err, err != nil && is(err), text)
	}
}
