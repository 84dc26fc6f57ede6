package engine

import (
	"context"
	"strconv"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

// Event takes an unasked frame of the agent. It must not block: what has to wait gets a goroutine.
func (e *Engine) Event(f *wire.Frame) {
	switch m := f.Msg.(type) {
	case *wire.Exited:
		if m.Exec != "" {
			go e.execExited(m)
		} else {
			go e.exited(m)
		}
	case *wire.OOM:
		go e.oom(m.ID)
	}
	f.Close()
}

// Request refuses: the agent asks nothing of the daemon.
func (e *Engine) Request(_ context.Context, f *wire.Frame) (*wire.Frame, error) {
	return nil, wire.Errorf(wire.Unsupported, "%T: the daemon answers no requests", f.Msg)
}

func (e *Engine) ack(a *wire.Ack) { e.agent.notify(a) }

// oom tells that a process of the container was killed for memory.
func (e *Engine) oom(id string) {
	c, err := e.containers.get(id)
	if err != nil {
		return
	}
	c.mu.Lock()
	first := c.rec.State.Running && !c.rec.State.OOMKilled
	if first {
		c.rec.State.OOMKilled = true
	}
	c.mu.Unlock()
	if first {
		e.saveSoon(c)
		e.containerEvent(c, events.ActionOOM)
	}
}

// exited handles the end of a container's command: state, events, restart policy, --rm.
//
// The container's op lock makes it come after the start that it ends, whose answer was on the wire before.
func (e *Engine) exited(m *wire.Exited) {
	if !e.isOpen() {
		return
	}
	ack := &wire.Ack{ID: m.ID, Run: m.Run}
	c := e.containers.byFullID(m.ID)
	if c == nil { // a container that is removed: what the agent still has of it goes too
		e.clean(m.ID, ack)
		return
	}
	c.op.Lock()
	c.mu.Lock()
	s := &c.rec.State
	if m.Run != c.rec.Run || !s.Running || s.Restarting {
		c.mu.Unlock()
		c.op.Unlock()
		e.saveSoon(c, ack) // told before: what it said is on disk first
		return
	}
	oomNow := m.OOMKilled && !s.OOMKilled
	s.OOMKilled = s.OOMKilled || m.OOMKilled
	if m.CodeLost {
		s.Error = "the exit code is lost: the container ended while neither the daemon nor its agent ran"
	}
	at := time.Unix(0, m.At).UTC()
	ran := at.Sub(s.StartedAt)
	byHand := c.restart.byHand // `restart` has stopped it and starts it again itself
	again, wait := c.restart.next(c.rec.Host.RestartPolicy, m.Code, c.rec.RestartCount, c.rec.ManualStop || e.closing.Load(), ran)
	again = again && !byHand && !c.removing
	s.ExitCode, s.FinishedAt = m.Code, at
	c.stopped()
	if again {
		s.Running, s.Restarting = true, true
		c.rec.RestartCount++
	}
	removing := c.removing
	remove := c.rec.Host.AutoRemove && !again && !byHand && !removing
	if remove {
		c.removing = true
	}
	rec := c.rec
	if !remove {
		c.notify()
	}
	c.mu.Unlock()

	e.stopHealth(c)
	if oomNow {
		e.containerEventOf(&rec, events.ActionOOM)
	}
	e.containerEventOf(&rec, events.ActionDie, "exitCode", strconv.Itoa(m.Code), "execDuration", strconv.Itoa(int(ran.Seconds())))
	e.networkEvent(&rec, events.ActionDisconnect)
	for i := range rec.Mounts {
		e.mountEvent(&rec, &rec.Mounts[i], events.ActionUnmount)
	}
	e.endExecs(c)
	if remove {
		e.removeExited(c, ack)
		c.op.Unlock()
		return
	}
	c.op.Unlock()
	e.saveSoon(c, ack)
	if again {
		e.restartLater(c, wait)
	}
}

// removeExited removes an --rm container that has ended: the record is unlinked, the name is free, those who wait are
// answered. The agent deletes what it has by itself (Run.Remove), in the background, and remembers the exit until it is
// acknowledged, so that a daemon that dies in between hears of it again. op is held.
func (e *Engine) removeExited(c *ctr, ack *wire.Ack) {
	if err := e.forgetContainer(c, true); err != nil {
		e.log.Error("removing a container that has ended", "container", c.id, "error", err)
		c.mu.Lock()
		c.removing = false
		c.notify()
		c.mu.Unlock()
		e.saveSoon(c, ack)
		return
	}
	e.ack(ack)
}

// autoRemove removes an --rm container that did not start.
func (e *Engine) autoRemove(c *ctr) {
	if err := e.remove(context.Background(), c, c.id, RemoveOptions{Force: true, Volumes: true}); err != nil {
		e.log.Error("removing a container that did not start", "container", c.id, "error", err)
	}
}

// cleaners is how many containers' leftovers are deleted at once; more wait, which holds up whoever ends or removes
// containers faster than the disk can follow.
const cleaners = 32

// clean deletes what the agent has on disk of a container that is removed, in the background.
func (e *Engine) clean(id string, ack *wire.Ack) {
	e.cleaning <- struct{}{}
	e.background.start(func() {
		defer func() { <-e.cleaning }()
		f, err := e.agent.call(context.Background(), &wire.Remove{ID: id})
		if err := done(f, err); err != nil {
			e.log.Error("deleting what is left of a container", "container", id, "error", err)
		}
		if ack != nil {
			e.ack(ack)
		}
	})
}

// restarter is what a restart policy remembers of a container. Guarded by ctr.mu.
type restarter struct {
	wait   time.Duration // before the next restart
	timer  *time.Timer   // of the restart that is waited for
	byHand bool          // stopped in order to be started again by ContainerRestart
}

const (
	restartFirst  = 100 * time.Millisecond
	restartMost   = time.Minute
	restartSteady = 10 * time.Second // one that ran so long begins with the shortest wait again
)

func (r *restarter) reset() {
	r.wait = 0
	if r.timer != nil {
		r.timer.Stop()
		r.timer = nil
	}
}

// next decides whether the policy starts the container again, and after how long: 100 ms, doubled each time up to a
// minute. After a stop by hand no policy does; that `always` comes back at the next start of the daemon is another
// rule (startAgain).
func (r *restarter) next(p container.RestartPolicy, code, count int, stopped bool, ran time.Duration) (bool, time.Duration) {
	if p.IsNone() || stopped {
		return false, 0
	}
	if p.IsOnFailure() && (code == 0 || p.MaximumRetryCount > 0 && count >= p.MaximumRetryCount) {
		return false, 0
	}
	if ran >= restartSteady {
		r.wait = 0
	}
	r.wait = min(max(r.wait*2, restartFirst), restartMost)
	return true, r.wait
}

// restartLater starts the container after wait, unless it is stopped, removed or started by hand before.
func (e *Engine) restartLater(c *ctr, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.rec.State.Restarting {
		return
	}
	c.restart.timer = time.AfterFunc(wait, func() { e.restartNow(c) })
}

func (e *Engine) restartNow(c *ctr) {
	c.op.Lock()
	c.mu.Lock()
	due := c.rec.State.Restarting && !c.removing && !e.closing.Load()
	c.mu.Unlock()
	if !due {
		c.op.Unlock()
		return
	}
	_, err := e.startLocked(context.Background(), c, false)
	c.op.Unlock()
	if err != nil {
		e.log.Error("the restart policy could not start a container", "container", c.id, "error", err)
	}
}

// cancelRestart ends the wait for a restart: the container is then stopped, with the code and time of its last run.
// op and mu are held.
func (c *ctr) cancelRestart() bool {
	if !c.rec.State.Restarting {
		return false
	}
	c.restart.reset()
	c.stopped()
	c.notify()
	return true
}
