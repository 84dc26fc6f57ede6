package engine

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"

	"runkiri.com/kiri/internal/wire"
)

// Exit codes of a container whose command did not start, as shells have them.
const (
	exitNotExecutable = 126
	exitNoCommand     = 127
	exitUnknown       = 128
)

// ContainerStart starts a container; one that runs already is NotModified.
func (e *Engine) ContainerStart(ctx context.Context, ref string) error {
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	// A client that goes away does not end the start half-way.
	return e.start(context.WithoutCancel(ctx), c, true)
}

// start runs the container's command. byHand resets what the restart policy has counted.
func (e *Engine) start(ctx context.Context, c *ctr, byHand bool) error {
	c.op.Lock()
	remove, err := e.startLocked(ctx, c, byHand)
	c.op.Unlock()
	if remove { // needs op itself
		e.autoRemove(c)
	}
	return err
}

// startLocked is start with op held. After a failure of an --rm container remove is true.
func (e *Engine) startLocked(ctx context.Context, c *ctr, byHand bool) (remove bool, err error) {
	c.mu.Lock()
	s := &c.rec.State
	switch {
	case s.Paused:
		err = conflict("cannot start a paused container, try unpause instead")
	case s.Running && (byHand || !s.Restarting):
		err = errf(cerrdefs.ErrNotModified, "container is already running")
	case c.removing || c.removed || c.rec.Dead:
		err = conflict("container is marked for removal and cannot be started")
	case e.closing.Load():
		err = errf(cerrdefs.ErrUnavailable, "the engine is shutting down")
	}
	if err != nil {
		c.mu.Unlock()
		return false, err
	}
	c.rec.Run++
	if byHand {
		c.rec.ManualStop, c.rec.RestartCount = false, 0
		c.restart.reset()
	}
	rec := c.rec
	c.mu.Unlock()

	spec, err := e.runSpec(&rec)
	if err != nil {
		return e.startFailed(c, &rec, err), err
	}
	for i := range rec.Mounts {
		e.mountEvent(&rec, &rec.Mounts[i], events.ActionMount)
	}
	e.networkEvent(&rec, events.ActionConnect)
	f, err := e.run(ctx, c, spec)
	if err != nil {
		e.networkEvent(&rec, events.ActionDisconnect)
		err = startError(err)
		return e.startFailed(c, &rec, err), err
	}
	r := f.Msg.(*wire.RunReply)
	files := f.Files

	c.mu.Lock()
	c.hold(files)
	s.Running, s.Paused, s.Restarting, s.OOMKilled, s.Error, s.ExitCode = true, false, false, false, "", 0
	c.rec.StartedBefore = true
	c.rec.Run = spec.Run
	c.running(r)
	c.mu.Unlock()
	e.containerEvent(c, events.ActionStart)
	e.saveSoon(c)
	e.startHealth(c)
	return false, nil
}

// run sends the frame. If the agent dies under it, the next one tells whether the command had been started; if not,
// nothing of it is left and it is sent again under another number.
func (e *Engine) run(ctx context.Context, c *ctr, spec *wire.Run) (*wire.Frame, error) {
	for try := 0; ; try++ {
		f, err := e.agent.call(ctx, spec)
		if err == nil {
			if _, ok := f.Msg.(*wire.RunReply); !ok {
				f.Close()
				return nil, internal("the agent answered Run with %T", f.Msg)
			}
			return f, nil
		}
		if !errors.Is(err, wire.ErrClosed) || try == 2 {
			return nil, err
		}
		if _, err := e.agent.get(ctx); err != nil {
			return nil, err
		}
		for _, r := range e.agent.greeting().Containers {
			if r.ID == c.id && r.Run == spec.Run && r.Exited == nil {
				return &wire.Frame{Msg: &r.Reply}, nil
			}
		}
		spec.Run++
	}
}

// running fills the state from the agent's answer. mu is held.
func (c *ctr) running(r *wire.RunReply) {
	s := &c.rec.State
	s.Pid, s.StartedAt, s.CgroupPath, s.Endpoint = r.PID, time.Unix(0, r.StartedAt).UTC(), r.Cgroup, r.Endpoint
	s.SandboxID, s.EndpointID = newID(), ""
	id, name := networkOf(&c.rec)
	old := c.rec.Networks[name]
	if old == nil {
		return
	}
	s.EndpointID = newID()
	ep := *old
	ep.NetworkID, ep.EndpointID = id, s.EndpointID
	if r.Endpoint.Address != "" {
		ep.IPAddress, _ = netip.ParseAddr(r.Endpoint.Address)
		ep.Gateway, _ = netip.ParseAddr(r.Endpoint.Gateway)
		ep.IPPrefixLen = r.Endpoint.PrefixLen
		ep.MacAddress = nil
		ep.MacAddress.UnmarshalText([]byte(r.Endpoint.MAC))
	}
	c.rec.Networks = map[string]*network.EndpointSettings{name: &ep}
}

// stopped clears what only a running container has. mu is held.
func (c *ctr) stopped() {
	s := &c.rec.State
	s.Running, s.Paused, s.Restarting, s.Pid = false, false, false, 0
	c.disconnected()
}

func (c *ctr) disconnected() {
	s := &c.rec.State
	s.Endpoint, s.EndpointID, s.SandboxID, s.CgroupPath = wire.Endpoint{}, "", "", ""
	c.hold(nil)
	for name, old := range c.rec.Networks {
		if old.EndpointID == "" {
			continue
		}
		ep := network.EndpointSettings{
			IPAMConfig: old.IPAMConfig, Links: old.Links, Aliases: old.Aliases, DriverOpts: old.DriverOpts,
			GwPriority: old.GwPriority, NetworkID: old.NetworkID,
		}
		c.rec.Networks = map[string]*network.EndpointSettings{name: &ep}
	}
}

// hold replaces the descriptors kept for the next agent. mu is held.
func (c *ctr) hold(files []*os.File) {
	for _, f := range c.held {
		if f != nil {
			f.Close()
		}
	}
	c.held = files
}

// startFailed records why a start failed and tells whether the container must be removed now.
func (e *Engine) startFailed(c *ctr, rec *containerRecord, err error) (remove bool) {
	c.mu.Lock()
	s := &c.rec.State
	s.Error = err.Error()
	s.ExitCode = startExitCode(err)
	if s.Restarting { // the policy's attempt: it is over
		c.stopped()
		s.FinishedAt = time.Now().UTC()
		c.notify()
	}
	c.mu.Unlock()
	e.log.Debug("a container did not start", "container", rec.ID, "error", err)
	e.saveSoon(c)
	return rec.Host.AutoRemove
}

// startError words an error of the agent as Docker's clients expect it: the CLI finds its exit code in the text.
func startError(err error) error {
	sorted := fromAgent(err)
	text := "failed to create task for container: " + sorted.Error()
	var class error = cerrdefs.ErrUnknown
	switch wire.ClassOf(err) {
	case wire.NoCommand, wire.NotExecutable, wire.Invalid:
		class = cerrdefs.ErrInvalidArgument
	case wire.Unsupported:
		class = cerrdefs.ErrNotImplemented
	case wire.Unavailable:
		class = cerrdefs.ErrUnavailable
	case wire.Conflict:
		class = cerrdefs.ErrConflict
	}
	switch {
	case errors.Is(err, syscall.EISDIR) && !strings.Contains(text, syscall.EACCES.Error()):
		text += ": " + syscall.EACCES.Error()
	case errors.Is(err, syscall.ENOTDIR) && !strings.Contains(text, "Are you trying to mount"):
		text += ": Are you trying to mount a directory onto a file (or vice-versa)? Check if the specified host path exists and is the expected type"
	}
	return &failure{class: class, text: text, cause: err}
}

func startExitCode(err error) int {
	text := err.Error()
	switch wire.ClassOf(err) {
	case wire.NoCommand:
		return exitNoCommand
	case wire.NotExecutable:
		return exitNotExecutable
	}
	switch {
	case errors.Is(err, syscall.EACCES) || strings.Contains(text, syscall.EACCES.Error()):
		return exitNotExecutable
	case errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ENOTDIR) || strings.Contains(text, syscall.ENOENT.Error()):
		return exitNoCommand
	}
	return exitUnknown
}

// networkEvent tells that a container joined or left the bridge.
func (e *Engine) networkEvent(rec *containerRecord, action events.Action) {
	id, name := networkOf(rec)
	if id == "" {
		return
	}
	driver := name
	if name == network.NetworkNone {
		driver = "null"
	}
	e.events.publish(events.NetworkEventType, action, id, map[string]string{"container": rec.ID, "name": name, "type": driver})
}

// networkOf returns the id and the name of the predefined network that the container is in, "" if it shares another's.
func networkOf(rec *containerRecord) (id, name string) {
	if rec.Host.NetworkMode.IsContainer() {
		return "", ""
	}
	name = rec.Host.NetworkMode.NetworkName()
	if rec.Config.NetworkDisabled {
		name = network.NetworkNone
	}
	if name == network.NetworkNone {
		return noneNetworkID, name
	}
	if name == network.NetworkHost {
		return hostNetworkID, name
	}
	return bridgeNetworkID, network.NetworkBridge
}

func (e *Engine) mountEvent(rec *containerRecord, m *mountPoint, action events.Action) {
	if m.Type != mount.TypeVolume {
		return
	}
	attributes := map[string]string{"container": rec.ID, "driver": m.Driver}
	if action == events.ActionMount {
		attributes["destination"] = m.Destination
		attributes["read/write"] = strconv.FormatBool(m.RW)
		attributes["propagation"] = string(m.Propagation)
	}
	e.events.publish(events.VolumeEventType, action, m.Name, attributes)
}
