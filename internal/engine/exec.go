package engine

import (
	"context"
	"strconv"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

// execKept is how long an exec that has ended can be inspected (Docker forgets it after five to ten minutes).
const execKept = 5 * time.Minute

// execution is one exec, created, running or ended. It lives in memory only, as Docker's do.
type execution struct {
	id        string
	container *ctr
	req       *container.ExecCreateRequest
	keys      []byte

	mu       sync.Mutex
	running  bool
	exitCode *int
	pid      int
	started  chan struct{} // closed when the agent has answered
	ended    chan struct{} // closed when it has ended
	resize   *[2]uint32    // asked for before it ran
	result   chan<- int    // of a health check: gets the exit code once
	probe    bool          // a health check's: forgotten as soon as it has ended
	forget   *time.Timer   // nil until it has ended
}

// execIndex finds execs by id.
type execIndex struct {
	mu sync.Mutex
	m  map[string]*execution
}

func (x *execIndex) get(id string) (*execution, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if ex := x.m[id]; ex != nil {
		return ex, nil
	}
	return nil, notFound("No such exec instance: %s", id)
}

func (x *execIndex) add(ex *execution) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.m[ex.id] = ex
}

func (x *execIndex) remove(id string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.m, id)
}

// ExecCreate prepares a command to be run in a container that runs.
func (e *Engine) ExecCreate(ctx context.Context, ref string, req *container.ExecCreateRequest) (string, error) {
	c, err := e.containers.get(ref)
	if err != nil {
		return "", err
	}
	if err := canExec(c); err != nil {
		return "", err
	}
	if len(req.Cmd) == 0 {
		return "", invalid("no exec command specified")
	}
	for _, env := range req.Env {
		if k, _, _ := strings.Cut(env, "="); k == "" {
			return "", invalid("invalid environment variable: %s", env)
		}
	}
	keys, err := detachKeys(req.DetachKeys)
	if err != nil {
		return "", invalid("Invalid escape keys (%s) provided", req.DetachKeys)
	}
	ex := newExecution(c, req, keys)
	e.execs.add(ex)
	c.mu.Lock()
	c.addExec(ex.id)
	c.mu.Unlock()
	e.execEvent(ex, events.ActionExecCreate)
	return ex.id, nil
}

func newExecution(c *ctr, req *container.ExecCreateRequest, keys []byte) *execution {
	return &execution{id: newID(), container: c, req: req, keys: keys, started: make(chan struct{}), ended: make(chan struct{})}
}

// addExec notes an exec that has not ended. mu is held.
func (c *ctr) addExec(id string) {
	if c.execs == nil {
		c.execs = map[string]bool{}
	}
	c.execs[id] = true
}

func canExec(c *ctr) error {
	s := c.snapshot().State
	switch {
	case !s.Running:
		return notRunning(c.id)
	case s.Paused:
		return conflict("Container %s is paused, unpause the container before exec", c.id)
	case s.Restarting:
		return restarting(c.id)
	}
	return nil
}

// execEvent publishes an event whose action carries the command, as Docker's do.
func (e *Engine) execEvent(ex *execution, action events.Action) {
	e.containerEvent(ex.container, action+": "+events.Action(ex.req.Cmd[0]+" "+strings.Join(ex.req.Cmd[1:], " ")), "execID", ex.id)
}

// ExecStart runs it. Attached it returns once the agent has the client's connection (for one that has to be relayed,
// once that has ended); detached, once the command runs.
func (e *Engine) ExecStart(ctx context.Context, id string, opts ExecStartOptions, open StreamOpener) error {
	ex, err := e.execs.get(id)
	if err != nil {
		return err
	}
	if err := canExec(ex.container); err != nil {
		return err
	}
	ex.mu.Lock()
	switch {
	case ex.exitCode != nil:
		err = conflict("exec command %s has already run", ex.id)
	case ex.running:
		err = conflict("exec command %s is already running", ex.id)
	}
	if err != nil {
		ex.mu.Unlock()
		return err
	}
	ex.running = true
	ex.mu.Unlock()
	e.execEvent(ex, events.ActionExecStart)

	var s *stream
	if !opts.Detach {
		if _, err := e.agent.get(ctx); err != nil {
			e.execFailed(ex, exitNotExecutable)
			return fromAgent(err)
		}
		if s, err = openStream(open, ex.req.Tty); err != nil {
			e.execFailed(ex, exitNotExecutable)
			return err
		}
	}
	err = e.execRun(context.WithoutCancel(ctx), ex, opts, s)
	if err != nil {
		if s != nil { // the header is out
			s.fail(ex.req.Tty, err.Error()+"\r\n")
			return nil
		}
		return err
	}
	if s != nil {
		s.wait()
	}
	return nil
}

func (e *Engine) execRun(ctx context.Context, ex *execution, opts ExecStartOptions, s *stream) error {
	m := &wire.Exec{
		ID: ex.container.id, Exec: ex.id, Args: ex.req.Cmd, Env: ex.req.Env, Cwd: ex.req.WorkingDir, User: ex.req.User,
		TTY: ex.req.Tty, Privileged: ex.req.Privileged, Stdin: ex.req.AttachStdin, Stdout: ex.req.AttachStdout,
		Stderr: ex.req.AttachStderr, Framed: !ex.req.Tty && !ex.probe, Detach: opts.Detach, DetachKeys: ex.keys,
	}
	if ex.req.Tty && !slicesHaveTerm(ex.req.Env) && !ex.container.snapshot().Config.Tty {
		m.Env = append([]string{"TERM=xterm"}, m.Env...)
	}
	size := opts.ConsoleSize
	if size == nil {
		size = ex.req.ConsoleSize
	}
	if size != nil {
		m.Height, m.Width = uint32(size[0]), uint32(size[1])
	}
	ex.mu.Lock()
	if ex.resize != nil {
		m.Height, m.Width = ex.resize[0], ex.resize[1]
	}
	ex.mu.Unlock()
	var f *wire.Frame
	var err error
	if s != nil {
		m.Buffered = s.buffered
		f, err = s.hand(ctx, e.agent, m)
	} else {
		f, err = e.agent.call(ctx, m)
	}
	r, err := reply[*wire.ExecReply](f, err)
	if err != nil {
		e.execFailed(ex, startExitCode(err))
		return errf(classOf(err), "OCI runtime exec failed: exec failed: unable to start container process: %w", err)
	}
	ex.mu.Lock()
	late := ex.resize // one that came while the agent was starting it
	ex.pid = r.PID
	close(ex.started)
	ex.mu.Unlock()
	if late != nil && (late[0] != m.Height || late[1] != m.Width) {
		f, err := e.agent.call(ctx, &wire.Resize{ID: ex.container.id, Exec: ex.id, Height: late[0], Width: late[1]})
		if err := done(f, err); err != nil {
			e.log.Debug("resizing an exec that has just started", "exec", ex.id, "error", err)
		}
	}
	return nil
}

func slicesHaveTerm(env []string) bool {
	for _, v := range env {
		if strings.HasPrefix(v, "TERM=") {
			return true
		}
	}
	return false
}

// execFailed ends an exec that did not start.
func (e *Engine) execFailed(ex *execution, code int) {
	ex.mu.Lock()
	select {
	case <-ex.started:
	default:
		close(ex.started)
	}
	ex.mu.Unlock()
	e.endExec(ex, code)
}

// endExec records the end and forgets the exec after a while.
func (e *Engine) endExec(ex *execution, code int) bool {
	c := ex.container
	c.mu.Lock()
	delete(c.execs, ex.id) // first: an exec that is seen to have ended is not listed by its container
	c.mu.Unlock()
	ex.mu.Lock()
	if ex.exitCode != nil {
		ex.mu.Unlock()
		return false
	}
	ex.exitCode, ex.running = &code, false
	if ex.probe {
		e.execs.remove(ex.id)
	} else {
		ex.forget = time.AfterFunc(execKept, func() { e.execs.remove(ex.id) })
	}
	result := ex.result
	close(ex.ended)
	ex.mu.Unlock()
	if result != nil {
		result <- code
	}
	return true
}

// execExited handles the end of an exec's command. Its start's answer was on the wire before, but may not have been
// seen yet.
func (e *Engine) execExited(m *wire.Exited) {
	defer e.ack(&wire.Ack{ID: m.ID, Run: m.Run, Exec: m.Exec})
	ex, err := e.execs.get(m.Exec)
	if err != nil {
		return // of an earlier daemon, or its container is gone
	}
	<-ex.started
	if e.endExec(ex, m.Code) {
		e.containerEvent(ex.container, events.ActionExecDie, "execID", ex.id, "exitCode", strconv.Itoa(m.Code))
	}
}

// endExecs ends what is left of a container's execs once its command has ended: they were killed with it.
func (e *Engine) endExecs(c *ctr) {
	c.mu.Lock()
	ids := make([]string, 0, len(c.execs))
	for id := range c.execs {
		ids = append(ids, id)
	}
	c.mu.Unlock()
	for _, id := range ids {
		ex, err := e.execs.get(id)
		if err != nil {
			continue
		}
		ex.mu.Lock()
		running := ex.running
		ex.mu.Unlock()
		if !running { // never started: it cannot be any more
			e.execs.remove(id)
			c.mu.Lock()
			delete(c.execs, id)
			c.mu.Unlock()
		}
		// One that runs gets its own Exited.
	}
}

// ExecInspect tells about an exec, until some minutes after its end.
func (e *Engine) ExecInspect(ctx context.Context, id string) (*container.ExecInspectResponse, error) {
	ex, err := e.execs.get(id)
	if err != nil {
		return nil, err
	}
	if e.containers.byFullID(ex.container.id) == nil {
		return nil, notFound("No such exec instance: %s", id)
	}
	e.settleExec(ctx, ex)
	ex.mu.Lock()
	defer ex.mu.Unlock()
	privileged := ex.req.Privileged
	r := &container.ExecInspectResponse{
		ID: ex.id, Running: ex.running, ExitCode: ex.exitCode,
		ProcessConfig: &container.ExecProcessConfig{
			Tty: ex.req.Tty, Entrypoint: ex.req.Cmd[0], Arguments: ex.req.Cmd[1:], Privileged: &privileged, User: ex.req.User,
		},
		OpenStdin: ex.req.AttachStdin, OpenStderr: ex.req.AttachStderr, OpenStdout: ex.req.AttachStdout,
		ContainerID: ex.container.id, DetachKeys: ex.keys, Pid: ex.pid,
	}
	if r.ProcessConfig.User == "" {
		r.ProcessConfig.User = ex.container.snapshot().Config.User
	}
	return r, nil
}

// settleExec makes sure that an end which the client can know of is known here. The agent tells an end before it ends
// the client's stream, but on another connection: a client that inspects as soon as its stream has ended could be
// quicker. An agent that can no longer signal the process has told its end already, so it is on its way.
func (e *Engine) settleExec(ctx context.Context, ex *execution) {
	ex.mu.Lock()
	running := ex.running
	ex.mu.Unlock()
	if !running {
		return
	}
	if _, err := e.agent.call(ctx, &wire.Signal{ID: ex.container.id, Exec: ex.id}); err == nil { // signal 0 only asks
		return
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second) // the agent may also have died
	defer cancel()
	select {
	case <-ex.ended:
	case <-ctx.Done():
	}
}

// ExecResize sets the size of an exec's terminal, in characters. One that comes before the command runs is kept for it.
func (e *Engine) ExecResize(ctx context.Context, id string, height, width uint32) error {
	ex, err := e.execs.get(id)
	if err != nil {
		return err
	}
	if err := canExec(ex.container); err != nil {
		return err
	}
	ex.mu.Lock()
	ended := ex.exitCode != nil
	started := false
	select {
	case <-ex.started:
		started = true
	default:
		ex.resize = &[2]uint32{height, width}
	}
	ex.mu.Unlock()
	switch {
	case ended:
		return errf(cerrdefs.ErrInvalidArgument, "exec process is not started")
	case !started:
		return nil
	}
	f, err := e.agent.call(ctx, &wire.Resize{ID: ex.container.id, Exec: ex.id, Height: height, Width: width})
	return done(f, err)
}
