package engine

import (
	"context"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

// ContainerRemove removes a container that does not run, or with Force any.
func (e *Engine) ContainerRemove(ctx context.Context, ref string, opts RemoveOptions) error {
	if opts.Link {
		return NotBuilt("removing a link (legacy links)")
	}
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	return e.remove(context.WithoutCancel(ctx), c, ref, opts)
}

func (e *Engine) remove(ctx context.Context, c *ctr, ref string, opts RemoveOptions) error {
	c.mu.Lock()
	switch {
	case c.removed:
		c.mu.Unlock()
		return nil
	case c.removing:
		c.mu.Unlock()
		return conflict("removal of container %s is already in progress", ref)
	case c.rec.State.Running && !opts.Force:
		status := c.status()
		c.mu.Unlock()
		if status == container.StatePaused {
			return conflict("cannot remove container %q: container is paused and must be unpaused first", ref)
		}
		return conflict("cannot remove container %q: container is %s: stop the container before removing or force remove", ref, status)
	}
	c.removing = true
	c.mu.Unlock()
	err := e.removeLocked(ctx, c, opts)
	if err != nil {
		c.mu.Lock()
		c.removing = false
		c.mu.Unlock()
		return errf(classOf(err), "cannot remove container %q: %w", ref, err)
	}
	return nil
}

// removeLocked does it, with c.removing set.
func (e *Engine) removeLocked(ctx context.Context, c *ctr, opts RemoveOptions) error {
	if err := e.kill(ctx, c); err != nil && !isNotRunning(err) {
		return errf(classOf(err), "could not kill container: %w", err)
	}
	c.op.Lock()
	defer c.op.Unlock()
	c.mu.Lock()
	running := c.rec.State.Running
	used := c.rec.StartedBefore || !c.rec.State.StartedAt.IsZero() || c.rec.State.Error != ""
	c.mu.Unlock()
	if running { // a restart policy was quicker: it is on its way again
		return conflict("container is running: stop the container before removing or force remove")
	}
	e.endExecs(c)
	if used {
		// From here on a daemon that starts finishes the removal: half a container must not come back.
		c.mu.Lock()
		c.rec.Dead = true
		c.mu.Unlock()
		if err := e.save(c); err != nil {
			return err
		}
	}
	f, err := e.agent.call(ctx, &wire.Remove{ID: c.id})
	if err := done(f, err); err != nil && !cerrdefs.IsNotFound(err) {
		return err
	}
	return e.forgetContainer(c, opts.Volumes)
}

// forgetContainer takes a container that has stopped out of the records and the indexes and answers those who wait. op
// is held.
func (e *Engine) forgetContainer(c *ctr, volumes bool) error {
	c.saving.Lock() // no write of the record may follow its end
	if err := e.containerRecords.Delete(c.id); err != nil {
		c.saving.Unlock()
		return internal("deleting the record of container %s: %w", c.id, err)
	}
	c.mu.Lock()
	c.removed, c.removing = true, false
	rec, execs := c.rec, c.execs
	c.execs = nil
	c.rec.State.Error = "" // who waits for the removal is told of the exit alone, as by Docker
	c.mu.Unlock()
	c.saving.Unlock()
	e.containers.withdraw(c, rec.Name)
	e.images.unuse(c.id)
	for id := range execs {
		e.execs.remove(id)
	}
	if len(rec.Mounts) > 0 {
		e.releaseVolumes(&rec, volumes)
	}
	e.containerEventOf(&rec, events.ActionDestroy)
	c.mu.Lock()
	c.notify()
	c.mu.Unlock()
	return nil
}

// ContainersPrune removes all containers that do not run and pass the filters.
func (e *Engine) ContainersPrune(ctx context.Context, filters Filters) (*container.PruneReport, error) {
	if err := filters.validate("label", "label!", "until"); err != nil {
		return nil, err
	}
	until, err := filters.until()
	if err != nil {
		return nil, err
	}
	if !e.pruningContainers.CompareAndSwap(false, true) {
		return nil, conflict("a prune operation is already running")
	}
	defer e.pruningContainers.Store(false)
	report := &container.PruneReport{}
	for _, c := range e.containers.all() {
		if ctx.Err() != nil {
			break
		}
		rec := c.snapshot()
		if rec.State.Running || !until.IsZero() && rec.Created.After(until) || !filters.pruneLabels(rec.Config.Labels) {
			continue
		}
		size := e.sizeRw(ctx, &rec)
		if err := e.remove(context.WithoutCancel(ctx), c, c.id, RemoveOptions{}); err != nil {
			e.log.Warn("pruning a container", "container", c.id, "error", err)
			continue
		}
		report.ContainersDeleted = append(report.ContainersDeleted, c.id)
		report.SpaceReclaimed += uint64(size)
	}
	e.pruneEvent(events.ContainerEventType, report.SpaceReclaimed)
	return report, nil
}

// sizeRw is the size of the container's writable layer in bytes, 0 if it cannot be told.
func (e *Engine) sizeRw(ctx context.Context, rec *containerRecord) int64 {
	if rec.State.StartedAt.IsZero() {
		return 0
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	f, err := e.agent.call(ctx, &wire.Changes{ID: rec.ID, Size: true})
	r, err := reply[*wire.ChangesReply](f, err)
	if err != nil {
		return 0
	}
	return r.Size
}
