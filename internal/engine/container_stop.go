package engine

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

const (
	defaultStopTimeout = 10 // seconds
	killTimeout        = 10 * time.Second
)

func notRunning(id string) error { return conflict("container %s is not running", id) }

func restarting(id string) error {
	return conflict("Container %s is restarting, wait until the container is running", id)
}

// ContainerStop sends the stop signal, waits, and kills what is left after timeout seconds: nil is the container's own
// timeout or 10, negative waits without end. It returns when the container has stopped; one that does not run is
// NotModified.
func (e *Engine) ContainerStop(ctx context.Context, ref, signal string, timeout *int) error {
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	c.mu.Lock()
	running := c.rec.State.Running
	c.mu.Unlock()
	if !running {
		return errf(cerrdefs.ErrNotModified, "container is already stopped")
	}
	if err := e.stop(context.WithoutCancel(ctx), c, signal, timeout); err != nil {
		if cerrdefs.IsInvalidArgument(err) {
			return err
		}
		return internal("cannot stop container: %s: %w", ref, err)
	}
	return nil
}

// stop is ContainerStop for a container that may have stopped already.
func (e *Engine) stop(ctx context.Context, c *ctr, signal string, timeout *int) error {
	rec := c.snapshot()
	if !rec.State.Running {
		return nil
	}
	name := signal
	if name == "" {
		name = rec.Config.StopSignal
	}
	sig := sigTerm
	if name != "" {
		var err error
		if sig, err = parseSignal(name); err != nil {
			return err
		}
	}
	seconds := defaultStopTimeout
	if rec.Config.StopTimeout != nil {
		seconds = *rec.Config.StopTimeout
	}
	if timeout != nil {
		seconds = *timeout
	}
	err := e.signal(ctx, c, sig, true)
	if err == nil || !isNotRunning(err) {
		wait := ctx
		if err != nil {
			seconds = 2 // it may be on its way out
		}
		if seconds >= 0 {
			var cancel context.CancelFunc
			wait, cancel = context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
			defer cancel()
		}
		if werr := c.waitStopped(wait); werr != nil {
			if ctx.Err() != nil {
				return err
			}
			e.log.Debug("killing a container that did not stop in time", "container", c.id, "seconds", seconds, "signal", sig)
			if err := e.kill(ctx, c); err != nil && !isNotRunning(err) {
				return err
			}
		}
	}
	e.containerEvent(c, events.ActionStop)
	return nil
}

type notRunningError struct{ error }

func (n notRunningError) Unwrap() error { return n.error }

func isNotRunning(err error) bool {
	var n notRunningError
	return errors.As(err, &n)
}

// signal sends a signal to the container's command. With stop it is meant to end the container: the restart policy does
// not start it again, and a paused one is resumed so that it can act on it.
func (e *Engine) signal(ctx context.Context, c *ctr, sig int, stop bool) error {
	c.op.Lock()
	defer c.op.Unlock()
	c.mu.Lock()
	if !c.rec.State.Running {
		c.mu.Unlock()
		return notRunningError{notRunning(c.id)}
	}
	manual := stop && !e.closing.Load() && !c.restart.byHand
	changed := manual && !c.rec.ManualStop
	if manual {
		c.rec.ManualStop = true
	}
	if stop && c.cancelRestart() {
		c.mu.Unlock()
		return e.save(c)
	}
	waiting := c.rec.State.Restarting
	paused, keep := c.rec.State.Paused, c.restart.byHand
	c.mu.Unlock()
	if changed {
		// Before the signal: a daemon that dies after it must not start the container again.
		if err := e.save(c); err != nil {
			return err
		}
	}
	if waiting { // between two runs there is nobody to take another signal
		return nil
	}
	f, err := e.agent.call(ctx, &wire.Signal{ID: c.id, Signal: sig, Keep: keep})
	if err := done(f, err); err != nil {
		if cerrdefs.IsNotFound(err) || cerrdefs.IsConflict(err) { // it has ended: its Exited is on the way
			return nil
		}
		return errf(cerrdefs.ErrInternal, "Cannot kill container %s: %w", c.id, err)
	}
	if stop && paused {
		if err := e.freeze(ctx, c, false); err != nil {
			e.log.Warn("resuming a paused container to stop it", "container", c.id, "error", err)
		}
	}
	e.containerEvent(c, events.ActionKill, "signal", strconv.Itoa(sig))
	return nil
}

// kill sends SIGKILL and waits for the end.
func (e *Engine) kill(ctx context.Context, c *ctr) error {
	if err := e.signal(ctx, c, sigKill, true); err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if c.waitStopped(wait) == nil {
		return nil
	}
	// The command is gone or cannot be; what it left in the cgroup may hold its output open.
	f, err := e.agent.call(ctx, &wire.Signal{ID: c.id, Signal: sigKill, All: true})
	if err := done(f, err); err != nil && !cerrdefs.IsNotFound(err) {
		return err
	}
	again, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if c.waitStopped(again) != nil {
		return internal("tried to kill container, but did not receive an exit event")
	}
	return nil
}

// ContainerKill sends a signal, SIGKILL if none is named, and for that waits for the end.
func (e *Engine) ContainerKill(ctx context.Context, ref, signal string) error {
	sig := sigKill
	if signal != "" {
		var err error
		if sig, err = parseSignal(signal); err != nil {
			return err
		}
		if sig < 1 || sig > 64 {
			return invalid("the linux daemon does not support signal %d", sig)
		}
	}
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	if sig == sigKill {
		err = e.kill(ctx, c)
	} else {
		err = e.signal(ctx, c, sig, stopsIt(c, sig))
	}
	if isNotRunning(err) {
		return conflict("cannot kill container: %s: %w", ref, err)
	}
	return err
}

// stopsIt tells whether sig is meant to end the container: the stop signal it names, or any if it names none.
func stopsIt(c *ctr, sig int) bool {
	rec := c.snapshot()
	if rec.Config.StopSignal == "" {
		return true
	}
	stop, err := parseSignal(rec.Config.StopSignal)
	return err != nil || stop == sig
}

// ContainerRestart stops the container, if it runs, and starts it.
func (e *Engine) ContainerRestart(ctx context.Context, ref, signal string, timeout *int) error {
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	setByHand := func(on bool) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.restart.byHand = on
	}
	setByHand(true) // an --rm container stays
	err = e.stop(ctx, c, signal, timeout)
	setByHand(false)
	if err == nil {
		err = e.start(ctx, c, true)
		if cerrdefs.IsNotModified(err) {
			err = nil
		}
	}
	if err != nil {
		return errf(classOf(err), "Cannot restart container %s: %w", ref, err)
	}
	e.containerEvent(c, events.ActionRestart)
	return nil
}

// classOf returns the sentinel that sorts err.
func classOf(err error) error {
	var f *failure
	if errors.As(err, &f) {
		return f.class
	}
	return cerrdefs.ErrInternal
}

// ContainerPause freezes all processes of the container.
func (e *Engine) ContainerPause(ctx context.Context, ref string) error {
	return e.pause(ctx, ref, true)
}

// ContainerUnpause lets them go on.
func (e *Engine) ContainerUnpause(ctx context.Context, ref string) error {
	return e.pause(ctx, ref, false)
}

func (e *Engine) pause(ctx context.Context, ref string, on bool) error {
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	c.op.Lock()
	defer c.op.Unlock()
	c.mu.Lock()
	s := c.rec.State
	c.mu.Unlock()
	switch {
	case on && !s.Running:
		return notRunning(c.id)
	case on && s.Paused:
		return conflict("container %s is already paused", c.id)
	case on && s.Restarting:
		return restarting(c.id)
	case !on && !s.Paused:
		return internal("Container %s is not paused", c.id)
	case !on && !s.Running:
		return notRunning(c.id)
	}
	verb := "pause"
	if !on {
		verb = "unpause"
	}
	if err := e.freeze(context.WithoutCancel(ctx), c, on); err != nil {
		return errf(classOf(err), "cannot %s container %s: %w", verb, c.id, err)
	}
	return nil
}

// freeze pauses or resumes; op is held.
func (e *Engine) freeze(ctx context.Context, c *ctr, on bool) error {
	f, err := e.agent.call(ctx, &wire.Freeze{ID: c.id, On: on})
	if err := done(f, err); err != nil {
		return err
	}
	c.mu.Lock()
	c.rec.State.Paused = on
	c.mu.Unlock()
	action := events.ActionPause
	if !on {
		action = events.ActionUnPause
	}
	e.pauseHealth(c, on)
	e.containerEvent(c, action)
	e.saveSoon(c)
	return nil
}

// ContainerRename gives the container another name.
func (e *Engine) ContainerRename(ctx context.Context, ref, name string) error {
	name = strings.TrimPrefix(strings.TrimSpace(name), "/")
	if strings.TrimPrefix(strings.TrimSpace(ref), "/") == "" || name == "" {
		return invalid("Neither old nor new names may be empty")
	}
	c, err := e.containers.get(strings.TrimSpace(ref))
	if err != nil {
		return err
	}
	c.op.Lock()
	defer c.op.Unlock()
	old := c.name()
	switch {
	case old == name:
		return invalid("Renaming a container with the same name as its current name")
	case !isName(name):
		return invalid("Error when allocating new name: Invalid container name (%s), only %s are allowed", name, nameChars)
	}
	if other := e.containers.reserve(name, c); other != nil {
		return conflict("Error when allocating new name: %w", nameConflict(name, other))
	}
	set := func(n string) bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.removing || c.removed {
			return false
		}
		c.rec.Name = n
		return true
	}
	if !set(name) {
		e.containers.release(name, c)
		return notFound("No such container: %s", ref)
	}
	if err := e.save(c); err != nil {
		set(old)
		e.containers.release(name, c)
		return err
	}
	e.containers.release(old, c)
	e.containerEvent(c, events.ActionRename, "oldName", "/"+old)
	return nil
}
