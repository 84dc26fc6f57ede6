//go:build linux

package agent

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// TestMain lets the test binary be the agent, its unpacking child and the init of containers.
func TestMain(m *testing.M) {
	switch {
	case os.Args[0] == launch.InitName:
		os.Exit(launch.InitMain(os.Args))
	case len(os.Args) > 1 && os.Args[1] == "agent":
		if p := os.Getenv("KIRI_TEST_INIT"); p != "" {
			initProgram = p
		}
		os.Exit(Main(os.Args[2:], "test"))
	case len(os.Args) > 1 && os.Args[1] == "unpack":
		os.Exit(rootfs.UnpackMain())
	}
	os.Exit(func() int {
		// Under the race detector this binary is dynamic, so the real one is the container's init.
		dir, err := os.MkdirTemp("", "kiri-init-")
		if err != nil {
			fmt.Println(err)
			return 1
		}
		defer os.RemoveAll(dir)
		c := exec.Command("go", "build", "-o", dir+"/", "../../cmd/kiri-init")
		c.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := c.CombinedOutput(); err != nil {
			fmt.Printf("building kiri-init: %v\n%s", err, out)
			return 1
		}
		os.Setenv("KIRI_TEST_INIT", dir+"/kiri-init")
		return m.Run()
	}())
}

// need skips the test where it cannot run, or fails with KIRI_MUST=1.
func need(t testing.TB, ok bool, what string) {
	t.Helper()
	if ok {
		return
	}
	if os.Getenv("KIRI_MUST") != "" {
		t.Fatalf("this machine lacks: %s", what)
	}
	t.Skipf("this machine lacks: %s", what)
}

// waitFor waits for cond, which somebody else makes true. It polls: what it waits for has no descriptor.
func waitFor(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited 20 s for %s", what)
		}
	}
}

// rig is an agent process and a daemon that is the test.
type rig struct {
	t      testing.TB
	dir    string
	bridge string
	env    []string
	layers []string
	args   []string

	cmd  *exec.Cmd
	gone chan struct{}
	log  *lockedBuffer

	conn  *wire.Conn
	hello *wire.HelloReply

	mu      sync.Mutex
	cond    *sync.Cond
	exits   map[string]*wire.Exited // by id, or exec
	ooms    map[string]int
	held    map[string][]*os.File
	runs    map[string]*wire.Run
	created []string
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

var rigs atomic.Uint32

func newRig(t testing.TB) *rig {
	t.Helper()
	need(t, os.Getuid() == 0, "root")
	_, err := os.Stat("/bin/busybox")
	need(t, err == nil, "/bin/busybox (static)")
	n := rigs.Add(1)
	r := &rig{
		t: t, dir: t.TempDir(), bridge: fmt.Sprintf("ka%x-%x", os.Getpid()&0xfffff, n), log: &lockedBuffer{},
		exits: map[string]*wire.Exited{}, ooms: map[string]int{}, held: map[string][]*os.File{}, runs: map[string]*wire.Run{},
	}
	r.args = []string{"--subnet", fmt.Sprintf("10.%d.%d.1/24", 128+os.Getpid()%120, n%250)}
	r.cond = sync.NewCond(&r.mu)
	before := snapshot(t)
	t.Cleanup(func() {
		r.cleanup()
		if !t.Failed() {
			before.compare(t, r)
		}
	})
	return r
}

func (r *rig) dataRoot() string { return filepath.Join(r.dir, "data") }
func (r *rig) execRoot() string { return filepath.Join(r.dir, "run") }

// start starts the agent and says Hello.
func (r *rig) start() {
	r.t.Helper()
	r.startAgent()
	r.connect()
}

func (r *rig) startAgent() {
	r.t.Helper()
	args := append([]string{"agent", "--data-root", r.dataRoot(), "--exec-root", r.execRoot(), "--bridge", r.bridge,
		"--nft-table", strings.ReplaceAll(r.bridge, "-", "_")}, r.args...)
	r.cmd = exec.Command("/proc/self/exe", args...)
	r.cmd.Env = append(os.Environ(), r.env...)
	r.cmd.Stdout, r.cmd.Stderr = r.log, r.log
	if tracing {
		r.cmd.Stderr = os.Stderr
	}
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	gone := make(chan struct{})
	r.gone = gone
	cmd := r.cmd
	go func() {
		cmd.Wait()
		close(gone)
	}()
}

func (r *rig) connect() {
	r.t.Helper()
	r.conn, r.hello = r.dial()
}

func (r *rig) dial() (*wire.Conn, *wire.HelloReply) {
	r.t.Helper()
	var c net.Conn
	waitFor(r.t, "the agent to listen\n"+r.log.String(), func() bool {
		select {
		case <-r.gone:
			r.t.Fatalf("the agent has ended:\n%s", r.log)
		default:
		}
		var err error
		c, err = net.Dial("unix", filepath.Join(r.execRoot(), SocketName))
		return err == nil
	})
	conn := wire.NewConn(c, r)
	hello, err := wire.CallFor[*wire.HelloReply](r.ctx(), conn, &wire.Hello{Version: wire.Version, Daemon: "test"})
	if err != nil {
		r.t.Fatalf("hello: %v\n%s", err, r.log)
	}
	return conn, hello
}

// dialRaw connects without saying Hello.
func dialRaw(r *rig) (*wire.Conn, error) {
	c, err := net.Dial("unix", filepath.Join(r.execRoot(), SocketName))
	if err != nil {
		return nil, err
	}
	return wire.NewConn(c, r), nil
}

func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	r.t.Cleanup(cancel)
	return ctx
}

// Request and Event implement wire.Handler.
func (r *rig) Request(context.Context, *wire.Frame) (*wire.Frame, error) {
	return nil, wire.Errorf(wire.Unsupported, "the test answers nothing")
}

func (r *rig) Event(f *wire.Frame) {
	f.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	switch m := f.Msg.(type) {
	case *wire.Exited:
		key := m.ID
		if m.Exec != "" {
			key = m.Exec
		}
		r.exits[key] = m
	case *wire.OOM:
		r.ooms[m.ID]++
	}
	r.cond.Broadcast()
}

// kill ends the agent as nobody expects it.
func (r *rig) kill() {
	r.cmd.Process.Kill()
	<-r.gone
	if r.conn != nil {
		r.conn.Close()
	}
}

func (r *rig) cleanup() {
	if r.cmd == nil {
		return
	}
	select {
	case <-r.gone:
		r.env = nil
		r.start()
	default:
		if r.conn == nil || r.conn.Err() != nil {
			r.connect()
		}
	}
	r.mu.Lock()
	created := r.created
	r.mu.Unlock()
	for _, id := range created {
		r.conn.Call(r.ctx(), &wire.Signal{ID: id, Signal: 9, All: true})
		waitFor(r.t, "container "+short(id)+" to go\n"+r.log.String(), func() bool {
			_, err := r.conn.Call(r.ctx(), &wire.Remove{ID: id})
			return err == nil
		})
	}
	if _, err := r.conn.Call(r.ctx(), &wire.Retire{}); err != nil {
		r.t.Errorf("retire: %v", err)
	}
	r.conn.Close()
	<-r.gone
	for _, files := range r.held {
		closeAll(files)
	}
	if r.t.Failed() {
		r.t.Logf("the agent's log:\n%s", r.log)
	}
	removeNetwork(r)
}

// image makes a layer of busybox with its links, some accounts, and files.
func (r *rig) image() {
	r.t.Helper()
	bb, err := os.ReadFile("/bin/busybox")
	if err != nil {
		r.t.Fatal(err)
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	add := func(h tar.Header, body []byte) {
		h.Size = int64(len(body))
		if err := w.WriteHeader(&h); err != nil {
			r.t.Fatal(err)
		}
		w.Write(body)
	}
	for _, d := range []string{"bin/", "etc/", "tmp/", "proc/", "sys/", "dev/", "root/", "data/"} {
		add(tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	}
	add(tar.Header{Name: "bin/busybox", Mode: 0o755, Typeflag: tar.TypeReg}, bb)
	for _, l := range []string{"sh", "true", "cat", "echo", "sleep", "id", "seq", "dd", "tr", "stty", "tty", "ls", "grep", "printf", "kill", "mount",
		"head", "yes", "sort", "cut", "usleep", "ps", "stat", "readlink", "hostname", "ip", "env", "wc", "touch", "mkdir", "mknod", "date", "sync", "od", "tail"} {
		add(tar.Header{Name: "bin/" + l, Typeflag: tar.TypeSymlink, Linkname: "busybox"}, nil)
	}
	add(tar.Header{Name: "etc/passwd", Mode: 0o644, Typeflag: tar.TypeReg}, []byte("root:x:0:0::/root:/bin/sh\nweb:x:1000:1000::/home/web:/bin/sh\n"))
	add(tar.Header{Name: "etc/group", Mode: 0o644, Typeflag: tar.TypeReg}, []byte("root:x:0:\nweb:x:1000:\nextra:x:1234:web\n"))
	add(tar.Header{Name: "data/file", Mode: 0o644, Typeflag: tar.TypeReg, Uid: 1000, Gid: 1000}, []byte("from the image\n"))
	add(tar.Header{Name: "etc/noexec", Mode: 0o644, Typeflag: tar.TypeReg}, []byte("no program\n"))
	if err := w.Close(); err != nil {
		r.t.Fatal(err)
	}
	sum := sha256.Sum256(buf.Bytes())
	diff := "sha256:" + hex.EncodeToString(sum[:])
	pr, pw, err := os.Pipe()
	if err != nil {
		r.t.Fatal(err)
	}
	go func() {
		pw.Write(buf.Bytes())
		pw.Close()
	}()
	if _, err := r.conn.Call(r.ctx(), &wire.Unpack{DiffID: diff}, pr); err != nil {
		r.t.Fatalf("unpack: %v\n%s", err, r.log)
	}
	pr.Close()
	r.layers = []string{diff}
}

var ids atomic.Uint32

func newID() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d-%d-%d", os.Getpid(), ids.Add(1), time.Now().UnixNano()))
	return hex.EncodeToString(sum[:])
}

// spec is a Run as the daemon would make it of `docker run IMAGE args...`.
func (r *rig) spec(args ...string) *wire.Run {
	return &wire.Run{
		ID: newID(), Name: "test", Run: 1, Layers: r.layers, Args: args,
		Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOSTNAME=box"}, Hostname: "box",
		Log: wire.LogConfig{Driver: "json-file"}, ShmSize: 64 << 20, Net: wire.NetConfig{Mode: "none"},
		Caps: launch.CapNames(launch.DefaultCaps()),
		MaskedPaths: []string{"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
			"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware"},
		ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
	}
}

// run starts a container and fails the test if that fails.
func (r *rig) run(m *wire.Run) *wire.RunReply {
	r.t.Helper()
	reply, err := r.tryRun(m)
	if err != nil {
		r.t.Fatalf("run %v: %v\n%s", m.Args, err, r.log)
	}
	return reply
}

func (r *rig) tryRun(m *wire.Run) (*wire.RunReply, error) {
	r.mu.Lock()
	r.created = append(r.created, m.ID)
	r.runs[m.ID] = m
	r.mu.Unlock()
	f, err := r.conn.Call(r.ctx(), m)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	closeAll(r.held[m.ID])
	r.held[m.ID] = f.Files
	r.mu.Unlock()
	return f.Msg.(*wire.RunReply), nil
}

// wait waits for the exit of a container or an exec.
func (r *rig) wait(id string) *wire.Exited {
	r.t.Helper()
	end := time.AfterFunc(20*time.Second, func() { r.cond.Broadcast() })
	defer end.Stop()
	limit := time.Now().Add(20 * time.Second)
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.exits[id] == nil {
		if time.Now().After(limit) {
			r.t.Fatalf("waited 20 s for the exit of %s\n%s", short(id), r.log)
		}
		r.cond.Wait()
	}
	return r.exits[id]
}

// output runs a command in a new container and returns what it wrote and its code.
func (r *rig) output(m *wire.Run) (stdout, stderr string, code int) {
	r.t.Helper()
	c := r.attach(m, &wire.Attach{Stdout: true, Stderr: true, Framed: !m.TTY, Stream: true})
	r.run(m)
	stdout, stderr = c.readAll(!m.TTY)
	return stdout, stderr, r.wait(m.ID).Code
}

// client is the test's end of a stream.
type client struct {
	t    testing.TB
	conn *net.UnixConn
}

// socketpair returns a client and the descriptor for the agent.
func socketpair(t testing.TB) (*client, *os.File) {
	t.Helper()
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	near := os.NewFile(uintptr(p[0]), "client")
	c, err := net.FileConn(near)
	near.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &client{t: t, conn: c.(*net.UnixConn)}, os.NewFile(uintptr(p[1]), "stream")
}

func (r *rig) attach(m *wire.Run, a *wire.Attach) *client {
	r.t.Helper()
	c, file := socketpair(r.t)
	a.ID = m.ID
	if _, err := r.conn.Call(r.ctx(), a, file); err != nil {
		r.t.Fatalf("attach: %v", err)
	}
	file.Close()
	return c
}

func (c *client) readAll(framed bool) (stdout, stderr string) {
	c.t.Helper()
	c.conn.SetReadDeadline(time.Now().Add(30 * time.Second))
	b, err := io.ReadAll(c.conn)
	if err != nil {
		c.t.Fatalf("reading the stream after %q: %v", tailOf(b), err)
	}
	if !framed {
		return string(b), ""
	}
	return demux(c.t, b)
}

func tailOf(b []byte) []byte { return b[max(0, len(b)-200):] }

// demux takes Docker's multiplexed stream apart, strictly.
func demux(t testing.TB, b []byte) (stdout, stderr string) {
	t.Helper()
	var out [3]bytes.Buffer
	for len(b) > 0 {
		if len(b) < 8 || b[0] < 1 || b[0] > 2 || b[1] != 0 || b[2] != 0 || b[3] != 0 {
			t.Fatalf("bad frame header %q", b[:min(8, len(b))])
		}
		n := int(binary.BigEndian.Uint32(b[4:]))
		if n > len(b)-8 {
			t.Fatalf("frame of %d bytes in %d", n, len(b)-8)
		}
		out[b[0]].Write(b[8 : 8+n])
		b = b[8+n:]
	}
	return out[1].String(), out[2].String()
}

// logs reads a container's log.
func (r *rig) logs(q *wire.Logs) (stdout, stderr string) {
	r.t.Helper()
	c := r.openLogs(q)
	return c.readAll(q.Framed)
}

func (r *rig) openLogs(q *wire.Logs) *client {
	r.t.Helper()
	c, file := socketpair(r.t)
	defer file.Close()
	if _, err := r.conn.Call(r.ctx(), q, file); err != nil {
		r.t.Fatalf("logs: %v", err)
	}
	return c
}

func allLogs(id string) *wire.Logs {
	return &wire.Logs{ID: id, Log: wire.LogConfig{Driver: "json-file"}, Stdout: true, Stderr: true, Framed: true, Tail: -1}
}

// things are what an agent could leave behind on the machine.
type things struct{ mounts, cgroups, links, procs map[string]bool }

func snapshot(t testing.TB) things {
	t.Helper()
	th := things{mounts: map[string]bool{}, cgroups: map[string]bool{}, links: map[string]bool{}, procs: map[string]bool{}}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		th.mounts[line] = true
	}
	roots, _ := filepath.Glob("/sys/fs/cgroup/*/kiri-*")
	more, _ := filepath.Glob("/sys/fs/cgroup/kiri-*")
	for _, root := range append(roots, more...) {
		filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				th.cgroups[p] = true
			}
			return nil
		})
	}
	ifs, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range ifs {
		th.links[i.Name] = true
	}
	return th
}

// compare fails the test if there is more now than there was, in so far as it belongs to r.
func (th things) compare(t testing.TB, r *rig) {
	t.Helper()
	parent := cgroupParent(r.execRoot())
	waitFor(t, "cgroups and links to go", func() bool {
		now := snapshot(t)
		for p := range now.cgroups {
			if strings.Contains(p, parent) {
				return false
			}
		}
		for l := range now.links {
			if !th.links[l] && strings.HasPrefix(l, r.bridge) {
				return false
			}
		}
		return true
	})
	for m := range snapshot(t).mounts {
		if !th.mounts[m] && strings.Contains(m, r.dir) {
			t.Errorf("mount left: %s", m)
		}
	}
	if left, _ := os.ReadDir(filepath.Join(r.execRoot(), "containers")); len(left) > 0 {
		t.Errorf("state left: %v", left)
	}
	if left, _ := os.ReadDir(filepath.Join(r.dataRoot(), "containers")); len(left) > 0 {
		t.Errorf("containers' files left: %v", left)
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/root")
	for _, p := range procs {
		pid, _ := strconv.Atoi(strings.Split(p, "/")[2])
		if env, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid)); err == nil && bytes.Contains(env, []byte(parent)) && alive(pid) {
			t.Errorf("process %d left in %s", pid, parent)
		}
	}
}

// alive tells whether a process is there and has not ended.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	i := bytes.LastIndexByte(b, ')')
	return i >= 0 && i+2 < len(b) && b[i+2] != 'Z'
}
