//go:build unix

package engine

import (
	"bytes"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"

	"runkiri.com/kiri/internal/wire"
)

// opener is a client whose connection is handed over: near is the client's end.
func opener(t *testing.T) (StreamOpener, net.Conn) {
	near, far := socketPair(t)
	t.Cleanup(func() { near.Close() })
	return func(bool) (net.Conn, []byte, error) { return far, []byte("early"), nil }, near
}

func (a *fakeAgents) endExec(id, exec string, code int) {
	a.mu.Lock()
	conn := a.conn
	a.mu.Unlock()
	conn.Notify(&wire.Exited{ID: id, Run: 1, Exec: exec, Code: code, At: time.Now().UnixNano()})
}

func TestExec(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		m, ok := f.Msg.(*wire.Exec)
		if !ok {
			return nil, nil, false
		}
		if file := f.Take(0); file != nil { // the agent writes to the client's own connection
			file.Write([]byte("out of " + m.Args[0] + " after " + string(m.Buffered)))
			file.Close()
		}
		go h.agents.endExec(m.ID, m.Exec, 7)
		return &wire.Frame{Msg: &wire.ExecReply{PID: 99}}, nil, true
	})
	_, err := h.ExecCreate(t.Context(), id, &container.ExecCreateRequest{})
	wantError(t, err, cerrdefs.IsInvalidArgument, "no exec command specified")
	for range 100 {
		exec, err := h.ExecCreate(t.Context(), "cc", &container.ExecCreateRequest{Cmd: []string{"sh", "-c"}, AttachStdout: true, User: "u"})
		if err != nil {
			t.Fatal(err)
		}
		open, near := opener(t)
		if err := h.ExecStart(t.Context(), exec, ExecStartOptions{}, open); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(near); err != nil || string(b) != "out of sh after early" {
			t.Fatalf("%q, %v", b, err)
		}
		eventually(t, "the exec has ended", func() bool {
			r, err := h.ExecInspect(t.Context(), exec)
			return err == nil && !r.Running && r.ExitCode != nil && *r.ExitCode == 7 && r.Pid == 99
		})
		wantError(t, h.ExecStart(t.Context(), exec, ExecStartOptions{Detach: true}, nil), cerrdefs.IsConflict, "exec command "+exec+" has already run")
		if r, _ := h.ContainerInspect(t.Context(), id, false); len(r.ExecIDs) != 0 {
			t.Fatalf("exec ids %v", r.ExecIDs)
		}
	}
	_, err = h.ExecInspect(t.Context(), "nope")
	wantError(t, err, cerrdefs.IsNotFound, "No such exec instance: nope")
}

func TestExecResizeBeforeStart(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	exec, err := h.ExecCreate(t.Context(), id, &container.ExecCreateRequest{Cmd: []string{"sh"}, Tty: true, ConsoleSize: &[2]uint{24, 80}})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.ExecResize(t.Context(), exec, 40, 120); err != nil {
		t.Fatal(err)
	}
	if err := h.ExecStart(t.Context(), exec, ExecStartOptions{Detach: true, Tty: true}, nil); err != nil {
		t.Fatal(err)
	}
	if m := sent[*wire.Exec](h.agents)[0]; m.Height != 40 || m.Width != 120 {
		t.Errorf("size %dx%d, want 40x120", m.Height, m.Width)
	}
	if err := h.ExecResize(t.Context(), exec, 50, 200); err != nil {
		t.Fatal(err)
	}
	if l := sent[*wire.Resize](h.agents); len(l) != 1 || l[0].Height != 50 || l[0].Exec != exec {
		t.Errorf("resizes %+v", l)
	}
}

func TestExecThatDoesNotStart(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		_, ok := f.Msg.(*wire.Exec)
		return nil, wire.Errorf(wire.NoCommand, `exec: "nope": executable file not found in $PATH`), ok
	})
	exec, err := h.ExecCreate(t.Context(), id, &container.ExecCreateRequest{Cmd: []string{"nope"}})
	if err != nil {
		t.Fatal(err)
	}
	const text = `OCI runtime exec failed: exec failed: unable to start container process: exec: "nope": executable file not found in $PATH`
	open, near := opener(t)
	if err := h.ExecStart(t.Context(), exec, ExecStartOptions{}, open); err != nil {
		t.Errorf("after the header is out there is no error to answer: %v", err)
	}
	b, _ := io.ReadAll(near)
	if len(b) < 8 || b[0] != 1 || string(b[8:]) != text+"\r\n" {
		t.Errorf("the client was told %q", b)
	}
	if r, _ := h.ExecInspect(t.Context(), exec); r.ExitCode == nil || *r.ExitCode != 127 || r.Running {
		t.Errorf("inspect %+v", r)
	}
	exec, _ = h.ExecCreate(t.Context(), id, &container.ExecCreateRequest{Cmd: []string{"nope"}})
	wantError(t, h.ExecStart(t.Context(), exec, ExecStartOptions{Detach: true}, nil), cerrdefs.IsInvalidArgument, text)
}

// notUnix is a connection that cannot be handed over, such as TLS.
type notUnix struct{ net.Conn }

func (c notUnix) CloseWrite() error { return c.Conn.(*net.UnixConn).CloseWrite() }

func TestAttachRelayed(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", func(c *container.Config, _ *container.HostConfig) { c.OpenStdin = true })
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		if _, ok := f.Msg.(*wire.Attach); !ok {
			return nil, nil, false
		}
		file := f.Take(0)
		go func() { // cat: what it has written goes back once stdin has ended
			defer file.Close()
			b, err := io.ReadAll(file)
			if err != nil {
				t.Error(err)
			}
			file.Write(b)
		}()
		return &wire.Frame{Msg: &wire.OK{}}, nil, true
	})
	near, far := socketPair(t)
	open := func(tty bool) (net.Conn, []byte, error) { return notUnix{far}, nil, nil }
	ended := make(chan error, 1)
	go func() {
		ended <- h.ContainerAttach(t.Context(), id, AttachOptions{Stdin: true, Stdout: true, Stream: true}, open)
	}()
	sentBytes := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	go func() {
		near.Write(sentBytes)
		near.(*net.UnixConn).CloseWrite()
	}()
	got, err := io.ReadAll(near)
	if err != nil || !bytes.Equal(got, sentBytes) {
		t.Errorf("%d bytes came back of %d, %v", len(got), len(sentBytes), err)
	}
	if err := receive(t, "the attach has ended", ended); err != nil {
		t.Error(err)
	}
}

func TestAttachErrors(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	never := func(bool) (net.Conn, []byte, error) {
		t.Error("the connection was taken over for a request that fails")
		return nil, nil, io.EOF
	}
	wantError(t, h.ContainerAttach(t.Context(), "nope", AttachOptions{}, never), cerrdefs.IsNotFound, "No such container: nope")
	wantError(t, h.ContainerAttach(t.Context(), id, AttachOptions{DetachKeys: "ctrl-?"}, never), cerrdefs.IsInvalidArgument, "Invalid detach keys (ctrl-?) provided")
	h.ContainerPause(t.Context(), id)
	wantError(t, h.ContainerAttach(t.Context(), "cc", AttachOptions{}, never), cerrdefs.IsConflict, "container cc is paused, unpause the container before attach")
	_, _, err := h.ContainerLogs(t.Context(), id, LogsOptions{})
	wantError(t, err, cerrdefs.IsInvalidArgument, "You must choose at least one stream")
}

func TestDetachKeys(t *testing.T) {
	for _, tt := range []struct {
		in, want string
		ok       bool
	}{
		{"", "\x10\x11", true}, {"ctrl-p,ctrl-q", "\x10\x11", true}, {"a,b", "ab", true}, {"ctrl-@,ctrl-[", "\x00\x1b", true},
		{"DEL", "\x7f", true}, {"ctrl-_", "\x1f", true}, {"ctrl-A", "", false}, {"abc", "", false}, {"ctrl-", "", false},
	} {
		got, err := detachKeys(tt.in)
		if (err == nil) != tt.ok || tt.ok && string(got) != tt.want {
			t.Errorf("%q: %q, %v", tt.in, got, err)
		}
	}
}

// checks scripts the commands of health checks: code, output and how long each takes; negative is for ever.
func (h *harness) checks(f func(n int) (code int, output string, takes time.Duration)) {
	n := 0
	h.agents.take(func(fr *wire.Frame) (*wire.Frame, error, bool) {
		m, ok := fr.Msg.(*wire.Exec)
		if !ok {
			if s, ok := fr.Msg.(*wire.Signal); ok && s.Exec != "" {
				go h.agents.endExec(s.ID, s.Exec, 137)
			}
			return nil, nil, false
		}
		n++
		code, output, takes := f(n)
		file := fr.Take(0)
		go func() {
			defer file.Close()
			file.Write([]byte(output))
			if takes >= 0 {
				time.Sleep(takes)
				h.agents.endExec(m.ID, m.Exec, code)
			}
		}()
		return &wire.Frame{Msg: &wire.ExecReply{PID: 99}}, nil, true
	})
}

func TestHealth(t *testing.T) {
	h := newHarness(t)
	h.checks(func(n int) (int, string, time.Duration) {
		switch n {
		case 1:
			return 0, "fine", 0
		case 4:
			return 0, "", -1
		}
		return 1, strings.Repeat("x", 5000), 0
	})
	ch, err := h.Events(t.Context(), EventsOptions{Filters: Filters{"event": {"health_status": true}}})
	if err != nil {
		t.Fatal(err)
	}
	id := h.run("cc", func(c *container.Config, _ *container.HostConfig) {
		c.Healthcheck = &container.HealthConfig{Test: []string{"CMD-SHELL", "check me"}, Interval: 30 * time.Millisecond, Timeout: 200 * time.Millisecond, Retries: 3}
	})
	if s := h.state(id).Health; s == nil || s.Status != container.Starting {
		t.Errorf("before the first check: %+v", s)
	}
	if ev := receive(t, "event", ch); ev.Action != "health_status: healthy" {
		t.Errorf("event %v", ev.Action)
	}
	if ev := receive(t, "event", ch); ev.Action != "health_status: unhealthy" {
		t.Errorf("event %v", ev.Action)
	}
	s := h.state(id).Health
	if s.Status != container.Unhealthy || s.FailingStreak < 3 {
		t.Errorf("health %+v", s)
	}
	eventually(t, "five results are kept", func() bool { return len(h.state(id).Health.Log) == 5 })
	timedOut := false
	for _, r := range h.state(id).Health.Log {
		switch {
		case r.ExitCode == -1:
			timedOut = true
			if !strings.HasPrefix(r.Output, "Health check exceeded timeout (200ms)") {
				t.Errorf("output %q", r.Output)
			}
		case r.ExitCode == 1 && (len(r.Output) != 4096+3 || !strings.HasSuffix(r.Output, "...")):
			t.Errorf("output of %d bytes", len(r.Output))
		}
	}
	if !timedOut {
		t.Error("the check that hung is not among the results")
	}
	if sent[*wire.Exec](h.agents)[0].Framed {
		t.Error("a check's output is asked for in frames")
	}
	cmd := sent[*wire.Exec](h.agents)[0].Args
	if strings.Join(cmd, "|") != "/bin/sh|-c|check me" {
		t.Errorf("command %q", cmd)
	}
	if err := h.ContainerKill(t.Context(), id, "KILL"); err != nil {
		t.Fatal(err)
	}
	n := len(sent[*wire.Exec](h.agents))
	time.Sleep(100 * time.Millisecond) // three intervals
	if m := len(sent[*wire.Exec](h.agents)); m > n+1 {
		t.Errorf("%d checks after the container's end", m-n)
	}
}

func TestHealthTiming(t *testing.T) {
	const s = time.Second
	for _, tt := range []struct {
		what   string
		h      container.HealthConfig
		status container.HealthStatus
		ran    time.Duration
		want   time.Duration
	}{
		{"defaults", container.HealthConfig{}, container.Starting, 0, 30 * s},
		{"start interval longer than the start period", container.HealthConfig{StartPeriod: 2 * s, StartInterval: 30 * s, Interval: 2 * s}, container.Starting, 0, 4 * s},
		{"start interval", container.HealthConfig{StartPeriod: 30 * s, StartInterval: s / 2, Interval: 20 * s}, container.Starting, 10 * s, s / 2},
		{"default start interval", container.HealthConfig{StartPeriod: 30 * s, Interval: 20 * s}, container.Starting, 0, 5 * s},
		{"healthy in the start period", container.HealthConfig{StartPeriod: 30 * s, StartInterval: s / 2, Interval: 20 * s}, container.Healthy, 3 * s, 20 * s},
		{"after the start period", container.HealthConfig{StartPeriod: 2 * s, StartInterval: s / 2, Interval: 20 * s}, container.Starting, 3 * s, 20 * s},
	} {
		now := time.Now()
		rec := &containerRecord{Config: &container.Config{Healthcheck: &tt.h}}
		rec.State.StartedAt, rec.State.Health = now.Add(-tt.ran), &container.Health{Status: tt.status}
		if got := healthWait(rec, now); got != tt.want {
			t.Errorf("%s: next check after %v, want %v", tt.what, got, tt.want)
		}
	}
	// Failures in the start period do not count, the first one behind it does.
	now := time.Now()
	rec := &containerRecord{Config: &container.Config{Healthcheck: &container.HealthConfig{StartPeriod: 2 * s, Retries: 1}}}
	rec.State.StartedAt, rec.State.Health = now, &container.Health{Status: container.Starting}
	rec.State.Health = judge(rec, &container.HealthcheckResult{ExitCode: 1, Start: now.Add(s)})
	if rec.State.Health.Status != container.Starting || rec.State.Health.FailingStreak != 0 {
		t.Errorf("in the start period: %+v", rec.State.Health)
	}
	rec.State.Health = judge(rec, &container.HealthcheckResult{ExitCode: 1, Start: now.Add(3 * s)})
	if rec.State.Health.Status != container.Unhealthy {
		t.Errorf("behind it: %+v", rec.State.Health)
	}
	rec.State.Health = judge(rec, &container.HealthcheckResult{ExitCode: 0, Start: now.Add(4 * s)})
	if rec.State.Health.Status != container.Healthy || rec.State.Health.FailingStreak != 0 {
		t.Errorf("after a success: %+v", rec.State.Health)
	}
}
