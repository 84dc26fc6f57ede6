//go:build linux

package agent

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Server listens for daemons.
type Server struct {
	a        *Agent
	listener *net.UnixListener
	done     chan struct{} // closed when the agent is to end
}

// SocketName is the agent's socket in the exec root.
const SocketName = "agent.sock"

// Listen makes the socket. Only one agent may hold the exec root; who calls has its lock (Lock).
func (a *Agent) Listen() (*Server, error) {
	path := filepath.Join(a.cfg.ExecRoot, SocketName)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("removing the socket of an earlier agent: %w", err)
	}
	// The mode must be right from the first instant: nobody else may connect in between.
	old := unix.Umask(0o177)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	unix.Umask(old)
	if err != nil {
		return nil, fmt.Errorf("listening on %s: %w", path, err)
	}
	return &Server{a: a, listener: l, done: make(chan struct{})}, nil
}

// Lock takes the exec root for this process, as long as the file is open. Another agent there is an error.
func Lock(execRoot string) (*os.File, error) {
	if err := os.MkdirAll(execRoot, 0o711); err != nil {
		return nil, fmt.Errorf("making the exec root: %w", err)
	}
	name := filepath.Join(execRoot, "agent.lock")
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening lock: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another agent holds %s: %w", execRoot, err)
	}
	return f, nil
}

// Serve accepts connections until stop is closed or a daemon sends Retire.
func (s *Server) Serve(stop <-chan struct{}) error {
	s.a.retired = s.done
	fail := make(chan error, 1)
	go func() {
		for {
			c, err := s.listener.AcceptUnix()
			if err != nil {
				fail <- err
				return
			}
			h := &session{a: s.a, ready: make(chan struct{})}
			h.conn = wire.NewConn(c, h)
			close(h.ready)
		}
	}()
	var err error
	select {
	case <-stop:
	case <-s.done:
	case err = <-fail:
	}
	s.listener.Close()
	s.a.shutdown()
	if err != nil {
		return fmt.Errorf("accepting daemons: %w", err)
	}
	return nil
}

// replaceWait is how long a new daemon waits for the connection of an old one to be seen to have ended.
const replaceWait = time.Second

// hello makes the connection the daemon's, unless another daemon lives, and tells what runs.
//
// From then on exits are told by Exited too; such a frame may overtake the answer.
func (a *Agent) hello(s *session, m *wire.Hello) (*wire.Frame, error) {
	if m.Version != wire.Version {
		return nil, wire.Errorf(wire.Unsupported, "daemon speaks version %d of the protocol, this agent %d", m.Version, wire.Version)
	}
	end := time.After(replaceWait)
	for {
		a.mu.Lock()
		d := a.daemon
		if d == nil || d == s.conn || d.Err() != nil {
			a.daemon = s.conn
			a.mu.Unlock()
			break
		}
		a.mu.Unlock()
		select {
		case <-d.Done():
		case <-s.conn.Done():
			return nil, wire.ErrClosed
		case <-end:
			return nil, wire.Errorf(wire.Conflict, "another daemon is connected to this agent")
		}
	}
	a.logf("daemon %s connected", m.Daemon)
	r := a.describe()
	time.AfterFunc(adoptWait, func() { a.giveUpOrphans(s.conn) })
	go a.repeatExecs(s.conn)
	return &wire.Frame{Msg: r}, nil
}

func (a *Agent) isDaemon(c *wire.Conn) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.daemon == c
}

// describe makes the HelloReply.
func (a *Agent) describe() *wire.HelloReply {
	r := &wire.HelloReply{
		Version: wire.Version, Agent: a.cfg.Version, PID: os.Getpid(), Kernel: kernelRelease(), Arch: runtime.GOARCH,
		CgroupVersion: a.host.Version(), Bridge: a.net.Bridge(), NCPU: runtime.NumCPU(), Warnings: a.net.Warnings(), Features: a.host.Features(),
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		r.MemTotal = int64(info.Totalram) * int64(info.Unit)
	}
	a.mu.Lock()
	var all []*container
	for _, c := range a.containers {
		if c.phase.Load() >= phaseRunning {
			all = append(all, c)
		}
	}
	a.mu.Unlock()
	for _, c := range all {
		r.Containers = append(r.Containers, c.describe())
	}
	return r
}

func (c *container) describe() wire.Running {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := wire.Running{ID: c.id, Run: c.run.Run, Reply: c.reply(), Paused: c.paused, StdioLost: c.stdioLost}
	r.Exited = c.exited
	for id, p := range c.execs {
		if !p.isDone() {
			r.Execs = append(r.Execs, id)
		}
	}
	return r
}

// repeatExecs tells a new daemon of execs that ended while there was none.
func (a *Agent) repeatExecs(conn *wire.Conn) {
	a.mu.Lock()
	var all []*container
	for _, c := range a.containers {
		all = append(all, c)
	}
	a.mu.Unlock()
	for _, c := range all {
		c.mu.Lock()
		var ended []*wire.Exited
		for _, p := range c.execs {
			p.mu.Lock()
			if p.exited != nil {
				ended = append(ended, p.exited)
			}
			p.mu.Unlock()
		}
		c.mu.Unlock()
		for _, e := range ended {
			conn.Notify(e)
		}
	}
}

// retire answers and ends the agent; the answer is on its way before the process ends (shutdown waits for it).
func (a *Agent) retire() (*wire.Frame, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.retired != nil {
		close(a.retired)
		a.retired = nil
	}
	return okFrame(), nil
}

// shutdown ends the agent's part; containers go on.
func (a *Agent) shutdown() {
	a.mu.Lock()
	d := a.daemon
	a.mu.Unlock()
	if d != nil {
		// The daemon closes when it has read the answer to Retire. One that does not must not keep us.
		select {
		case <-d.Done():
		case <-time.After(time.Second):
		}
		d.Close()
	}
	a.cleaner.wait()
	a.mu.Lock()
	idle := true
	for _, c := range a.containers {
		idle = idle && c.phase.Load() >= phaseExited // an exit that nobody has acknowledged is in its state file
	}
	a.mu.Unlock()
	if idle {
		a.leaveNothing()
	}
	a.closeAll()
}

// leaveNothing takes away what containers share, as none runs: the cgroups' parent, the bridge and the nftables
// table. The next agent makes them anew.
func (a *Agent) leaveNothing() {
	a.cells.drain()
	a.cells.fills.Wait() // a cell that was being made is taken apart by its maker
	a.endSandboxes()
	if err := a.cgroups.Remove(); err != nil {
		a.logf("%v", err)
	}
	if err := a.net.Remove(); err != nil {
		a.logf("%v", err)
	}
}
