package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/jsonstream"
	"golang.org/x/sys/unix"
)

// missing says why a test cannot run here: loudly, and as a failure where everything must run.
func missing(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("KIRI_MUST") != "" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// realEngine is an engine over a real kiri-init, in a network namespace of its own so that no bridge is left on the
// host, with busybox as the image bb.
func realEngine(t *testing.T) (_ *Engine, netns *os.File) {
	if os.Getuid() != 0 {
		missing(t, "needs root")
	}
	busybox, err := os.ReadFile("/bin/busybox")
	if err != nil {
		missing(t, "needs a static busybox: "+err.Error())
	}
	dir := t.TempDir()
	initPath := filepath.Join(dir, "kiri-init")
	build := exec.Command("go", "build", "-ldflags", "-X main.version=test", "-o", initPath, "../../cmd/kiri-init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building kiri-init: %v\n%s", err, out)
	}
	// The thread stays locked and so dies with the test. The agent is a child of it and gets its namespace.
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		missing(t, "needs a network namespace: "+err.Error())
	}
	if netns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { netns.Close() })
	cfg := Config{DataRoot: filepath.Join(dir, "data"), ExecRoot: filepath.Join(dir, "run"), InitPath: initPath, Version: "test", BIP: "10.213.7.1/24"}
	e, err := Open(t.Context(), cfg)
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(cfg.ExecRoot, "agent.log"))
		t.Fatalf("%v\n%s", err, log)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := e.Close(ctx); err != nil {
			t.Errorf("closing: %v", err)
		}
		if t.Failed() {
			log, _ := os.ReadFile(filepath.Join(cfg.ExecRoot, "agent.log"))
			t.Logf("agent.log:\n%s", log)
		}
	})
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	w.WriteHeader(&tar.Header{Name: "bin/busybox", Mode: 0o755, Size: int64(len(busybox)), Typeflag: tar.TypeReg})
	w.Write(busybox)
	for _, name := range []string{"sh", "cat", "echo", "true", "sleep", "id", "stty", "ls", "kill"} {
		w.WriteHeader(&tar.Header{Name: "bin/" + name, Linkname: "busybox", Typeflag: tar.TypeSymlink})
	}
	w.Close()
	if _, err := e.ImageImport(t.Context(), ImportOptions{Ref: "bb", Changes: []string{"CMD true"}}, &b, func(jsonstream.Message) {}); err != nil {
		t.Fatal(err)
	}
	return e, netns
}

// output runs a container as `docker run` does, attached before it starts, and returns what it wrote to stdout and its
// exit code. c gets the stdin given.
func output(t *testing.T, e *Engine, stdin string, change func(*container.Config, *container.HostConfig), cmd ...string) (string, int) {
	t.Helper()
	req := &container.CreateRequest{
		Config:     &container.Config{Image: "bb", Cmd: cmd, OpenStdin: stdin != "", StdinOnce: true},
		HostConfig: &container.HostConfig{AutoRemove: true},
	}
	if change != nil {
		change(req.Config, req.HostConfig)
	}
	ctx := t.Context()
	r, err := e.ContainerCreate(ctx, "", req, "")
	if err != nil {
		t.Fatal(err)
	}
	near, far := socketPair(t)
	defer near.Close()
	open := func(bool) (net.Conn, []byte, error) { return far, nil, nil }
	if err := e.ContainerAttach(ctx, r.ID, AttachOptions{Stdin: stdin != "", Stdout: true, Stream: true}, open); err != nil {
		t.Fatal(err)
	}
	wait, err := e.ContainerWait(ctx, r.ID, container.WaitConditionRemoved)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.ContainerStart(ctx, r.ID); err != nil {
		t.Fatal(err)
	}
	go func() {
		io.WriteString(near, stdin)
		near.(*net.UnixConn).CloseWrite()
	}()
	framed, err := io.ReadAll(near)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for len(framed) >= 8 {
		n := int(framed[4])<<24 | int(framed[5])<<16 | int(framed[6])<<8 | int(framed[7])
		out.Write(framed[8 : 8+n])
		framed = framed[8+n:]
	}
	return out.String(), int(receive(t, "removed", wait).StatusCode)
}

func TestReal(t *testing.T) {
	e, netns := realEngine(t)
	ctx := t.Context()
	start := func(name string, change func(*container.Config, *container.HostConfig), cmd ...string) string {
		t.Helper()
		req := &container.CreateRequest{Config: &container.Config{Image: "bb", Cmd: cmd}, HostConfig: &container.HostConfig{}}
		if change != nil {
			change(req.Config, req.HostConfig)
		}
		r, err := e.ContainerCreate(ctx, name, req, "")
		if err != nil {
			t.Fatal(err)
		}
		if err := e.ContainerStart(ctx, r.ID); err != nil {
			t.Fatal(err)
		}
		return r.ID
	}
	state := func(id string) *container.State {
		t.Helper()
		r, err := e.ContainerInspect(ctx, id, false)
		if err != nil {
			t.Fatal(err)
		}
		return r.State
	}
	logs := func(id string) string {
		t.Helper()
		r, _, err := e.ContainerLogs(ctx, id, LogsOptions{Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		b, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}

	t.Run("output and codes", func(t *testing.T) {
		for i := range 20 {
			if out, code := output(t, e, "", nil, "sh", "-c", fmt.Sprintf("echo hi; exit %d", i)); out != "hi\n" || code != i {
				t.Fatalf("%q, code %d, want %d", out, code, i)
			}
		}
		if out, code := output(t, e, "over and back", nil, "cat"); out != "over and back" || code != 0 {
			t.Errorf("%q, code %d", out, code)
		}
		yes := true // PID 1 of a namespace is not killed by its own signals, so it must be another's
		if _, code := output(t, e, "", func(_ *container.Config, h *container.HostConfig) { h.Init = &yes }, "sh", "-c", "kill -TERM $$"); code != 143 {
			t.Errorf("code %d, want 143", code)
		}
	})
	t.Run("stop waits from the signal on", func(t *testing.T) {
		id := start("", nil, "sh", "-c", "trap 'sleep 1; exit 5' TERM; echo ready; while :; do sleep 0.02; done")
		eventually(t, "it is ready", func() bool { return strings.Contains(logs(id), "ready") })
		if err := e.ContainerStop(ctx, id, "", nil); err != nil {
			t.Fatal(err)
		}
		if s := state(id); s.ExitCode != 5 || s.Running {
			t.Errorf("%+v", s)
		}
	})
	t.Run("restart of a removable container keeps its files", func(t *testing.T) {
		id := start("again", func(_ *container.Config, h *container.HostConfig) { h.AutoRemove = true }, "sh", "-c", "echo x >> /f; cat /f; sleep 1000")
		eventually(t, "first run", func() bool { return strings.Count(logs(id), "x") == 1 })
		zero := 0
		if err := e.ContainerRestart(ctx, id, "", &zero); err != nil {
			t.Fatal(err)
		}
		eventually(t, "second run, with the first one's file", func() bool { return strings.Count(logs(id), "x") == 3 })
		if err := e.ContainerKill(ctx, id, ""); err != nil {
			t.Fatal(err)
		}
		eventually(t, "then it goes", func() bool { return e.containers.byFullID(id) == nil })
	})
	t.Run("health", func(t *testing.T) {
		id := start("", func(c *container.Config, _ *container.HostConfig) {
			c.Healthcheck = &container.HealthConfig{Test: []string{"CMD-SHELL", "echo looked; ls /ok"}, Interval: 50 * time.Millisecond, Timeout: 5 * time.Second, Retries: 2}
		}, "sleep", "1000")
		health := func() *container.Health { return state(id).Health }
		eventually(t, "unhealthy", func() bool { return health().Status == container.Unhealthy })
		ex, err := e.ExecCreate(ctx, id, &container.ExecCreateRequest{Cmd: []string{"sh", "-c", "echo > /ok"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.ExecStart(ctx, ex, ExecStartOptions{Detach: true}, nil); err != nil {
			t.Fatal(err)
		}
		eventually(t, "healthy", func() bool { return health().Status == container.Healthy })
		if l := health().Log; !strings.HasPrefix(l[len(l)-1].Output, "looked\n") {
			t.Errorf("output %q", l[len(l)-1].Output)
		}
		if err := e.ContainerRemove(ctx, id, RemoveOptions{Force: true}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("terminal size from the first instruction", func(t *testing.T) {
		id := start("", nil, "sleep", "1000")
		ex, err := e.ExecCreate(ctx, id, &container.ExecCreateRequest{Cmd: []string{"stty", "size"}, Tty: true, AttachStdout: true})
		if err != nil {
			t.Fatal(err)
		}
		near, far := socketPair(t)
		open := func(tty bool) (net.Conn, []byte, error) { return far, nil, nil }
		if err := e.ExecStart(ctx, ex, ExecStartOptions{Tty: true, ConsoleSize: &[2]uint{40, 120}}, open); err != nil {
			t.Fatal(err)
		}
		if b, _ := io.ReadAll(near); strings.TrimSpace(string(b)) != "40 120" {
			t.Errorf("%q", b)
		}
		e.ContainerRemove(ctx, id, RemoveOptions{Force: true})
	})
	t.Run("a new daemon of another release", func(t *testing.T) {
		runtime.LockOSThread() // its agent, too, belongs into the test's network namespace
		if err := unix.Setns(int(netns.Fd()), unix.CLONE_NEWNET); err != nil {
			t.Fatal(err)
		}
		on := start("on", nil, "sleep", "1000")
		pid := state(on).Pid
		ends := start("ends", nil, "sh", "-c", "trap 'exit 23' TERM; echo ready; while :; do sleep 0.02; done")
		eventually(t, "it is ready", func() bool { return strings.Contains(logs(ends), "ready") })
		endPid := state(ends).Pid
		e.cfg.LiveRestore = true
		if err := e.Close(ctx); err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(endPid, unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		cfg := e.cfg
		cfg.LiveRestore, cfg.Version = false, "next"
		next, err := Open(ctx, cfg)
		if err != nil {
			t.Fatal(err)
		}
		*e = Engine{} // the cleanup closes what e is
		t.Cleanup(func() {
			if err := next.Close(context.Background()); err != nil {
				t.Error(err)
			}
		})
		inspect := func(id string) *container.State {
			r, err := next.ContainerInspect(ctx, id, false)
			if err != nil {
				t.Fatal(err)
			}
			return r.State
		}
		eventually(t, "the end of the other is told", func() bool { return inspect(ends).Status == "exited" })
		if s := inspect(ends); s.ExitCode != 23 {
			t.Errorf("%+v", s)
		}
		if s := inspect(on); s.Status != "running" || s.Pid != pid {
			t.Errorf("%+v", s)
		}
		zero := 0
		if err := next.ContainerStop(ctx, on, "", &zero); err != nil {
			t.Fatal(err)
		}
		for _, id := range []string{on, ends} {
			if err := next.ContainerRemove(ctx, id, RemoveOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		if l, _ := next.ContainerList(ctx, ListOptions{All: true}); len(l) != 1 { // the one of the stop test
			t.Errorf("%d containers are left, want 1", len(l))
		}
	})
}
