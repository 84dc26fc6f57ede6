//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/network"
	"runkiri.com/kiri/internal/wire"
)

func (a *Agent) signalRequest(m *wire.Signal) (*wire.Frame, error) {
	c, err := a.findRunning(m.ID)
	if err != nil {
		return nil, err
	}
	if m.Keep {
		c.mu.Lock()
		c.keep = true
		c.mu.Unlock()
	}
	if m.All {
		return okOr(c.signalAll(m.Signal))
	}
	p, err := c.process(m.Exec)
	if err != nil {
		return nil, err
	}
	return okOr(p.signal(m.Signal))
}

func (c *container) signalAll(sig int) error {
	if c.cgroup == nil {
		return wire.Errorf(wire.Conflict, "container %s is not running", short(c.id))
	}
	if sig == int(unix.SIGKILL) {
		return c.cgroup.Kill()
	}
	pids, err := c.cgroup.Procs()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		// A pid may be another process's by now; a pidfd that is opened and then found in the cgroup is not.
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue
		}
		now, err := c.cgroup.Procs()
		for _, p := range now {
			if p == pid {
				err = errors.Join(err, unix.PidfdSendSignal(fd, unix.Signal(sig), nil, 0))
			}
		}
		unix.Close(fd)
		if err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("sending signal %d to process %d of container %s: %w", sig, pid, short(c.id), err)
		}
	}
	return nil
}

func (a *Agent) freeze(m *wire.Freeze) (*wire.Frame, error) {
	c, err := a.findRunning(m.ID)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.paused == m.On {
		word := map[bool]string{true: "already", false: "not"}[m.On]
		return nil, wire.Errorf(wire.Conflict, "container %s is %s paused", short(c.id), word)
	}
	if err := c.cgroup.Freeze(m.On); err != nil {
		return nil, err
	}
	c.paused = m.On
	if err := c.state.putWords(offPaused, map[bool]uint64{true: 1}[m.On]); err != nil {
		a.logf("container %s: %v", short(c.id), err)
	}
	return okFrame(), nil
}

func (a *Agent) update(m *wire.Update) (*wire.Frame, error) {
	c, err := a.findRunning(m.ID)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.cgroup.Apply(&m.Resources); err != nil {
		return nil, err
	}
	if m.Resources.Memory != 0 {
		c.run.Resources.Memory = m.Resources.Memory
	}
	return okFrame(), nil
}

// resize sets a terminal's size, or keeps it for a process that is still to come.
func (a *Agent) resize(m *wire.Resize) (*wire.Frame, error) {
	id := m.ID
	if m.Exec != "" {
		id = m.Exec
	}
	if err := validID(id); err != nil {
		return nil, err
	}
	a.mu.Lock()
	c := a.containers[m.ID]
	keep := c == nil || c.phase.Load() >= phaseExiting
	if c != nil && m.Exec != "" {
		c.mu.Lock()
		keep = c.execs[m.Exec] == nil
		c.mu.Unlock()
	}
	if keep {
		e, err := a.earlyFor(id)
		if err == nil {
			e.height, e.width = m.Height, m.Width
		}
		a.mu.Unlock()
		return okOr(err)
	}
	a.mu.Unlock()
	<-c.decided
	p, err := c.process(m.Exec)
	if err != nil {
		return nil, err
	}
	if m.Exec != "" {
		<-p.decided
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done {
		return nil, wire.Errorf(wire.Conflict, "process of container %s is not running", short(c.id))
	}
	return okOr(p.stdio.resize(m.Height, m.Width))
}

func (a *Agent) stats(m *wire.Stats) (*wire.Frame, error) {
	c, err := a.findRunning(m.ID)
	if err != nil {
		return nil, err
	}
	var r wire.StatsReply
	if err := c.cgroup.Stats(&r); err != nil {
		return nil, err
	}
	if c.run.Net.Mode != "host" {
		if r.Interfaces, err = network.InterfaceStats(c.main.pid); err != nil {
			return nil, err
		}
	}
	return &wire.Frame{Msg: &r}, nil
}

func (a *Agent) top(m *wire.Top) (*wire.Frame, error) {
	c, err := a.findRunning(m.ID)
	if err != nil {
		return nil, err
	}
	pids, err := c.cgroup.Procs()
	if err != nil {
		return nil, err
	}
	return &wire.Frame{Msg: &wire.TopReply{PIDs: pids}}, nil
}

func (a *Agent) plan(m *wire.Plan) (*wire.Frame, error) {
	c, err := a.findRunning(m.ID)
	if err != nil {
		return nil, err
	}
	c.settlePlan()
	c.mu.Lock()
	text := c.planned
	c.mu.Unlock()
	if text == "" {
		return nil, wire.Errorf(wire.Unsupported, "container %s was started by an earlier agent, which took its plan with it", short(c.id))
	}
	return &wire.Frame{Msg: &wire.PlanReply{Text: text}}, nil
}

// settlePlan keeps the plan as text alone, which is a tenth of it.
func (c *container) settlePlan() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.plan != nil {
		c.planned, c.plan = c.plan.String(), nil
	}
}

func (a *Agent) settlePlans() {
	a.mu.Lock()
	var all []*container
	for _, c := range a.containers {
		all = append(all, c)
	}
	a.mu.Unlock()
	for _, c := range all {
		c.settlePlan()
	}
}

// remove deletes what is left of a container, after the cleaner has had it.
func (a *Agent) remove(m *wire.Remove) (*wire.Frame, error) {
	if err := validID(m.ID); err != nil {
		return nil, err
	}
	for {
		c, _ := a.find(m.ID)
		if c == nil {
			break
		}
		if c.phase.Load() < phaseExiting {
			return nil, wire.Errorf(wire.Conflict, "container %s is running", short(m.ID))
		}
		<-c.cleaned
		c.mu.Lock()
		c.acked = true // a daemon that removes it knows that it has ended
		c.mu.Unlock()
		c.forget()
	}
	early := a.takeEarly(m.ID)
	early.close()
	return okOr(a.store.RemoveContainer(m.ID))
}

func (a *Agent) unpack(ctx context.Context, m *wire.Unpack, f *wire.Frame) (*wire.Frame, error) {
	stream := f.Take(0)
	if stream == nil {
		return nil, wire.Errorf(wire.Invalid, "unpack without a stream")
	}
	defer stream.Close()
	defer a.active()
	r, err := a.store.Unpack(ctx, m, stream)
	if err != nil {
		return nil, err
	}
	return &wire.Frame{Msg: r}, nil
}

func (a *Agent) layers() (*wire.Frame, error) {
	l, err := a.store.Layers()
	if err != nil {
		return nil, err
	}
	return &wire.Frame{Msg: &wire.LayersReply{Layers: l}}, nil
}

func (a *Agent) volume(m *wire.Volume) (*wire.Frame, error) {
	path, err := a.store.Volume(m.Name)
	if err != nil {
		return nil, err
	}
	r := &wire.VolumeReply{Path: path, Size: -1}
	if m.Size {
		if r.Size, err = a.store.VolumeSize(m.Name); err != nil {
			return nil, err
		}
	}
	return &wire.Frame{Msg: r}, nil
}

// ack forgets an exit that the daemon knows.
func (a *Agent) ack(m *wire.Ack) (*wire.Frame, error) {
	c, err := a.find(m.ID)
	if err != nil || c.run.Run != m.Run {
		return okFrame(), nil
	}
	if m.Exec != "" {
		c.mu.Lock()
		if p := c.execs[m.Exec]; p != nil && p.isDone() {
			delete(c.execs, m.Exec)
		}
		c.mu.Unlock()
		return okFrame(), nil
	}
	c.mu.Lock()
	if c.exited != nil {
		c.acked = true
	}
	c.mu.Unlock()
	c.forget()
	return okFrame(), nil
}

// processIdentity finds what tells a process from any other of this boot: the inode of its pidfd, or before Linux 6.9
// its start time.
func processIdentity(p launch.Proc) (node, begun uint64) {
	if node = pidfdNode(fdOf(p.PIDFD)); node != 0 {
		return node, 0
	}
	return 0, startTime(p.PID)
}
