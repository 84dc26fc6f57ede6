package engine

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

// What holds for a health check that does not say.
const (
	healthInterval      = 30 * time.Second
	healthTimeout       = 30 * time.Second
	healthStartInterval = 5 * time.Second
	healthRetries       = 3

	healthHistory = 5    // results that inspect shows
	healthOutput  = 4096 // bytes kept of the output of each
)

// healthMonitor runs the checks of one container, one at a time. Between checks it is a timer, not a goroutine.
type healthMonitor struct {
	ctx    context.Context
	cancel context.CancelFunc
	timer  *time.Timer // guarded by ctr.mu
}

// healthCommand returns the check's command, nil if there is none.
func healthCommand(c *container.Config) []string {
	h := c.Healthcheck
	if h == nil || len(h.Test) < 2 {
		return nil
	}
	switch h.Test[0] {
	case "CMD":
		return h.Test[1:]
	case "CMD-SHELL":
		shell := c.Shell
		if len(shell) == 0 {
			shell = []string{"/bin/sh", "-c"}
		}
		return slices.Concat(shell, h.Test[1:2])
	}
	return nil
}

// startHealth begins the checks of a container that has started. One that was adopted keeps what was known of it.
func (e *Engine) startHealth(c *ctr) { e.beginHealth(c, nil) }

func (e *Engine) beginHealth(c *ctr, known *container.Health) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.rec.State.Running || healthCommand(c.rec.Config) == nil {
		c.rec.State.Health = nil
		return
	}
	if known == nil {
		known = &container.Health{Status: container.Starting, Log: []*container.HealthcheckResult{}}
	}
	c.rec.State.Health = known
	if !c.rec.State.Paused {
		e.armHealth(c)
	}
}

// armHealth makes a monitor whose first check comes after the interval. mu is held.
func (e *Engine) armHealth(c *ctr) {
	if c.health != nil {
		return
	}
	m := &healthMonitor{}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	c.health = m
	m.timer = time.AfterFunc(healthWait(&c.rec, time.Now()), func() { e.check(c, m) })
}

// healthWait returns the time until the next check. While the container starts the checks come at the start interval,
// but the first one that counts comes within one ordinary interval of the start period's end, however long that is.
func healthWait(rec *containerRecord, now time.Time) time.Duration {
	h := rec.Config.Healthcheck
	interval := cmp.Or(h.Interval, healthInterval)
	left := h.StartPeriod - now.Sub(rec.State.StartedAt)
	if left <= 0 || rec.State.Health.Status != container.Starting {
		return interval
	}
	return min(cmp.Or(h.StartInterval, healthStartInterval), left+interval)
}

// stopHealth ends the checks, and one that is under way.
func (e *Engine) stopHealth(c *ctr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m := c.health; m != nil {
		m.cancel()
		m.timer.Stop()
		c.health = nil
	}
}

// pauseHealth stops the checks of a paused container and begins them again when it is resumed.
func (e *Engine) pauseHealth(c *ctr, on bool) {
	if on {
		e.stopHealth(c)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rec.State.Running && c.rec.State.Health != nil {
		e.armHealth(c)
	}
}

// check runs one check, records its result and arms the next.
func (e *Engine) check(c *ctr, m *healthMonitor) {
	rec := c.snapshot()
	start := time.Now()
	result := e.probe(m.ctx, c, &rec)
	if m.ctx.Err() != nil {
		return
	}
	result.Start = start
	if result.End.IsZero() {
		result.End = time.Now()
	}
	c.mu.Lock()
	if c.health != m || c.rec.State.Health == nil {
		c.mu.Unlock()
		return
	}
	before := c.rec.State.Health.Status
	c.rec.State.Health = judge(&c.rec, result)
	after := c.rec.State.Health.Status
	m.timer = time.AfterFunc(healthWait(&c.rec, time.Now()), func() { e.check(c, m) })
	c.mu.Unlock()
	if before != after {
		e.saveSoon(c)
		e.containerEvent(c, events.ActionHealthStatus+": "+events.Action(after))
	}
}

// judge returns the health after a result. Failures in the start period of a container that has not been healthy yet
// do not count.
func judge(rec *containerRecord, r *container.HealthcheckResult) *container.Health {
	old := rec.State.Health
	h := &container.Health{Status: old.Status, FailingStreak: old.FailingStreak}
	h.Log = append(slices.Clone(old.Log[max(0, len(old.Log)-healthHistory+1):]), r)
	switch {
	case r.ExitCode == 0:
		h.Status, h.FailingStreak = container.Healthy, 0
	case old.Status == container.Starting && r.Start.Sub(rec.State.StartedAt) < rec.Config.Healthcheck.StartPeriod:
	default:
		h.FailingStreak++
		if h.FailingStreak >= cmp.Or(rec.Config.Healthcheck.Retries, healthRetries) {
			h.Status = container.Unhealthy
		}
	}
	return h
}

// probe runs the check's command in the container. One that does not end in time is killed and has failed.
func (e *Engine) probe(ctx context.Context, c *ctr, rec *containerRecord) *container.HealthcheckResult {
	failed := func(format string, args ...any) *container.HealthcheckResult {
		return &container.HealthcheckResult{ExitCode: -1, Output: fmt.Sprintf(format, args...)}
	}
	command := healthCommand(rec.Config)
	ex := newExecution(c, &container.ExecCreateRequest{Cmd: command, AttachStdout: true, AttachStderr: true}, nil)
	ex.probe, ex.running = true, true
	ended := make(chan int, 1)
	ex.result = ended
	near, far := net.Pipe()
	defer near.Close()
	s := &stream{conn: far}
	e.execs.add(ex)
	e.execEvent(ex, events.ActionExecCreate)
	e.execEvent(ex, events.ActionExecStart)
	if err := e.execRun(ctx, ex, ExecStartOptions{}, s); err != nil {
		far.Close()
		return failed("%v", err)
	}
	output := make(chan []byte, 1)
	go func() {
		b, _ := io.ReadAll(io.LimitReader(near, healthOutput+1))
		output <- b
		io.Copy(io.Discard, near)
	}()
	limit := cmp.Or(rec.Config.Healthcheck.Timeout, healthTimeout)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	var code int
	timedOut := false
	select {
	case code = <-ended:
	case <-timer.C:
		timedOut = true
	case <-ctx.Done():
	}
	if timedOut || ctx.Err() != nil {
		// Not with ctx: it must be gone before the next check, or before the container is called stopped.
		f, err := e.agent.call(context.Background(), &wire.Signal{ID: c.id, Exec: ex.id, Signal: sigKill})
		if err := done(f, err); err == nil {
			<-ended
		}
		near.Close()
	}
	r := &container.HealthcheckResult{ExitCode: code, End: time.Now()}
	if !timedOut && ctx.Err() == nil {
		select { // what is left in the stream comes with its end
		case b := <-output:
			r.Output = cutOutput(b)
		case <-time.After(time.Second): // a child of the check holds it open
			near.Close()
			r.Output = cutOutput(<-output)
		}
		return r
	}
	r.ExitCode = -1
	r.Output = fmt.Sprintf("Health check exceeded timeout (%v)", limit)
	if b := <-output; len(b) > 0 {
		r.Output += ": " + cutOutput(b)
	}
	return r
}

func cutOutput(b []byte) string {
	if len(b) > healthOutput {
		return string(b[:healthOutput]) + "..."
	}
	return string(b)
}
