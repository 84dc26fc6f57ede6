//go:build unix

package engine

import (
	"context"
	"strings"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"

	"runkiri.com/kiri/internal/wire"
)

func TestSecondDaemonRefused(t *testing.T) {
	h := newHarness(t)
	_, err := open(t.Context(), h.cfg, h.agents)
	if err == nil || !strings.Contains(err.Error(), "already uses this data root") || !strings.Contains(err.Error(), "process ") {
		t.Errorf("a second daemon on the data root: %v", err)
	}
}

func TestDaemonReplaced(t *testing.T) {
	h := newHarness(t)
	on := h.run("goes-on", nil)
	ends := h.run("ends", nil)
	rm := h.run("rm", func(_ *container.Config, hc *container.HostConfig) { hc.AutoRemove = true })
	gone := h.run("gone", nil)
	unseen := h.create("unseen", nil)
	at := time.Now().Add(-time.Minute)
	h.reopen(func() {
		h.agents.exit(ends, 42)
		h.agents.exit(rm, 7)
		h.agents.mu.Lock()
		h.agents.running[ends].Exited.At = at.UnixNano()
		delete(h.agents.running, gone) // the agent has died with it
		// Started, and the daemon died before it could write that down.
		h.agents.running[unseen] = &wire.Running{ID: unseen, Run: 1, Reply: wire.RunReply{PID: 77, StartedAt: time.Now().UnixNano()}}
		h.agents.mu.Unlock()
	})
	eventually(t, "what happened meanwhile is known", func() bool {
		return h.state(ends).Status == "exited" && h.state(gone).Status == "exited" && h.containers.byFullID(rm) == nil
	})
	if s := h.state(on); s.Status != "running" || s.Pid != 4242 {
		t.Errorf("one that goes on: %+v", s)
	}
	if s := h.state(ends); s.ExitCode != 42 || s.FinishedAt != at.UTC().Format(time.RFC3339Nano) {
		t.Errorf("one that has ended: %+v", s)
	}
	if s := h.state(gone); s.ExitCode != 255 || s.Error == "" {
		t.Errorf("one that is lost: %+v", s)
	}
	if s := h.state(unseen); s.Status != "running" || s.Pid != 77 {
		t.Errorf("one whose start was not written down: %+v", s)
	}
	if h.create("rm", nil) == "" {
		t.Error("the name of the removed one is not free")
	}
}

func TestUnknownContainerEnded(t *testing.T) {
	h := newHarness(t)
	stray := newID()
	h.reopen(func() {
		h.agents.mu.Lock()
		h.agents.running[stray] = &wire.Running{ID: stray, Run: 1}
		h.agents.mu.Unlock()
	})
	if a := receive(t, "acknowledgement", h.agents.onAck); a.ID != stray {
		t.Errorf("acknowledged %+v", a)
	}
	if l := sent[*wire.Remove](h.agents); len(l) != 1 || l[0].ID != stray {
		t.Errorf("removed %+v", l)
	}
}

func TestAgentReplaced(t *testing.T) {
	h := newHarness(t)
	on := h.run("on", nil)
	lost := h.run("lost", nil)
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		m, ok := f.Msg.(*wire.Adopt)
		return nil, wire.Errorf(wire.NotFound, "no state of it"), ok && m.ID == lost
	})
	h.agents.mu.Lock()
	clear(h.agents.running) // the next agent knows nothing by itself
	h.agents.mu.Unlock()
	h.agents.die()
	eventually(t, "what cannot be adopted has ended", func() bool { return h.state(lost).Status == "exited" })
	// A call in the meantime waits for the next agent.
	if err := h.ContainerPause(t.Context(), on); err != nil {
		t.Errorf("a call after the agent's death: %v", err)
	}
	h.agents.mu.Lock()
	defer h.agents.mu.Unlock()
	if h.agents.adopted[on] != 3 {
		t.Errorf("%d descriptors were handed over, want 3", h.agents.adopted[on])
	}
	if h.agents.starts != 2 {
		t.Errorf("%d agents were started, want 2", h.agents.starts)
	}
}

func TestAgentDiesUnderCalls(t *testing.T) {
	h := newHarness(t)
	id := h.create("cc", nil)
	deaths := 0
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		if _, ok := f.Msg.(*wire.Run); ok && deaths < 2 {
			deaths++
			h.agents.die()
			return nil, wire.ErrClosed, true
		}
		return nil, nil, false
	})
	if err := h.ContainerStart(t.Context(), id); err != nil {
		t.Fatalf("a start under which the agent died twice: %v", err)
	}
	runs := sent[*wire.Run](h.agents)
	if len(runs) != 3 || runs[2].Run != 3 {
		t.Errorf("runs %+v", runs)
	}
	h.agents.exit(id, 5)
	receive(t, "exit", h.wait(id, container.WaitConditionNotRunning))
	if s := h.state(id); s.ExitCode != 5 {
		t.Errorf("state %+v", s)
	}
	// A signal is not repeated: it may have arrived.
	id = h.run("dd", nil)
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		if _, ok := f.Msg.(*wire.Signal); ok {
			h.agents.die()
			return nil, wire.ErrClosed, true
		}
		return nil, nil, false
	})
	if err := h.ContainerKill(t.Context(), id, "HUP"); err == nil || !strings.Contains(err.Error(), "connection to the agent closed") {
		t.Errorf("a signal under which the agent died: %v", err)
	}
	h.agents.take(nil)
}

func TestAgentOfOtherVersionRetired(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	retired := false
	h.reopen(func() {
		h.agents.version = "older"
		h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
			if _, ok := f.Msg.(*wire.Retire); ok && !retired {
				retired = true
				h.agents.mu.Lock()
				h.agents.version = "test"
				conn := h.agents.conn
				h.agents.mu.Unlock()
				time.AfterFunc(10*time.Millisecond, func() { conn.Close() })
			}
			return nil, nil, false
		})
	})
	if !retired || h.agents.starts != 3 { // again() counts as one
		t.Errorf("retired %v, %d starts", retired, h.agents.starts)
	}
	if s := h.state(id); s.Status != "running" {
		t.Errorf("state %+v", s)
	}
}

func TestPoliciesOverDaemonRestart(t *testing.T) {
	h := newHarness(t)
	type want struct{ running, stopped, failed bool }
	policies := map[string]want{
		"no":             {true, false, false},
		"on-failure:2":   {true, false, true},
		"always":         {true, true, true},
		"unless-stopped": {true, false, true},
	}
	ids := map[string]string{}
	for p := range policies {
		name, most, _ := strings.Cut(p, ":")
		for _, how := range []string{"running", "stopped", "failed"} {
			ids[p+how] = h.run("", func(_ *container.Config, hc *container.HostConfig) {
				hc.RestartPolicy.Name = container.RestartPolicyMode(name)
				hc.RestartPolicy.MaximumRetryCount = len(most) * 2
			})
		}
	}
	zero := 0
	for p := range policies {
		if err := h.ContainerStop(t.Context(), ids[p+"stopped"], "", &zero); err != nil {
			t.Fatal(err)
		}
	}
	// The daemon is away while they fail, so that no policy acts at once.
	h.reopen(func() {
		for p := range policies {
			h.agents.exit(ids[p+"failed"], 1)
		}
	})
	for p, w := range policies {
		for how, run := range map[string]bool{"running": w.running, "stopped": w.stopped, "failed": w.failed} {
			id := ids[p+how]
			if run {
				eventually(t, p+" "+how+" comes back", func() bool { return h.state(id).Status == "running" })
			}
		}
	}
	for p, w := range policies {
		for how, run := range map[string]bool{"running": w.running, "stopped": w.stopped, "failed": w.failed} {
			if s := h.state(ids[p+how]); (s.Status == "running") != run {
				t.Errorf("%s, %s: %s, want running: %v", p, how, s.Status, run)
			}
		}
	}
}

func TestCloseStopsContainers(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", func(c *container.Config, hc *container.HostConfig) { hc.RestartPolicy.Name = "always" })
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		if m, ok := f.Msg.(*wire.Signal); ok && m.Signal == sigTerm {
			go h.agents.exit(m.ID, 143)
		}
		return nil, nil, false
	})
	if err := h.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := len(sent[*wire.Retire](h.agents)); n != 1 {
		t.Errorf("the agent was retired %d times", n)
	}
	h.agents.again()
	h.open()
	eventually(t, "always comes back", func() bool { return h.state(id).Status == "running" })
	if r, _ := h.ContainerInspect(t.Context(), id, false); r.State.FinishedAt == "0001-01-01T00:00:00Z" {
		t.Error("the shutdown's end of it was not recorded")
	}
}

func TestInterruptedRemovalIsFinished(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	h.agents.exit(id, 0)
	receive(t, "exit", h.wait(id, container.WaitConditionNotRunning))
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		_, ok := f.Msg.(*wire.Remove)
		return nil, wire.Errorf(wire.Internal, "disk on fire"), ok
	})
	err := h.ContainerRemove(t.Context(), "cc", RemoveOptions{})
	wantError(t, err, cerrdefs.IsInternal, `cannot remove container "cc": disk on fire`)
	if s := h.state(id); s.Status != "dead" {
		t.Errorf("state %+v", s)
	}
	h.agents.take(nil)
	h.reopen(nil)
	eventually(t, "the removal is finished", func() bool { return h.containers.byFullID(id) == nil })
	var none context.Context = t.Context()
	if l, _ := h.ContainerList(none, ListOptions{All: true}); len(l) != 0 {
		t.Errorf("left: %v", l)
	}
}
