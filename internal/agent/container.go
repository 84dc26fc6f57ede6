//go:build linux

package agent

import (
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/cgroup"
	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/wire"
)

// phase is where one run of a container is. It only goes up.
type phase = int32

const (
	phaseStarting phase = iota
	phaseRunning        // its main process runs
	phaseExiting        // it has ended; output is being drained
	phaseExited         // Exited has been sent, or waits for a daemon
)

// container is one run of a container. What of it is still there after the exit is taken away by the cleaner, and the
// container is forgotten when that is done and the daemon has acknowledged the exit.
type container struct {
	a     *Agent
	id    string
	run   *wire.Run
	dir   string // in the exec root
	phase atomic.Int32

	// Set by the start, not changed until the exit.
	main      process
	cgroup    *cgroup.Cgroup
	endpoint  wire.Endpoint
	state     *state
	root      *os.File // the root mount, for looking things up; nil after adoption
	mounts    *os.File // its mount namespace: while we hold it the exit need not wait for the unmounts
	netns     *os.File // its network namespace, if it has one of its own; nil after adoption
	pts       *os.File // its devpts, if anything in it had a terminal from us; nil after adoption
	uid, gid  uint32
	groups    []uint32
	seccomp   []unix.SockFilter
	started   int64 // Unix ns
	stdioLost bool
	adopted   bool       // started by an earlier agent
	adopting  sync.Mutex // one Adopt at a time
	saved     *savedContainer

	decided chan struct{} // closed when the start has worked or failed
	cleaned chan struct{} // closed when nothing of this run is left in the kernel

	forgotten sync.Once

	mu      sync.Mutex // guards all below
	plan    *launch.Plan
	planned string // the plan as text
	paused  bool
	exited  *wire.Exited
	acked   bool
	keep    bool // it will be started again: its writable layer stays in spite of run.Remove
	execs   map[string]*process
	orphan  *exitStatus // it has ended, but the rest of its output, or how, may still be brought by Adopt
	handed  bool        // Adopt has come, or is not waited for any more
}

// process is one that the daemon knows: a container's main one, or an exec.
type process struct {
	c     *container
	exec  string // "" for the main process
	pid   int
	pidfd *os.File
	watch *watch // of the pidfd, where it is not our child

	identity [2]uint64 // after adoption: pidfd inode, start time
	stdio

	decided chan struct{} // of an exec: closed when its start has worked or failed

	mu     sync.Mutex // guards what is below
	done   bool       // it has ended: no more signals
	exited *wire.Exited
}

// signal sends a signal by the pidfd, so that it can only reach this very process. An exec that is killed takes its
// process group with it: a health check that hangs would leave what it has started behind, one more with each try.
func (p *process) signal(sig int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.done || p.pidfd == nil {
		return wire.Errorf(wire.Conflict, "process of container %s is not running", short(p.c.id))
	}
	err := unix.EINVAL
	if p.exec != "" && sig == int(unix.SIGKILL) {
		err = pidfdSignal(p.pidfd, sig, pidfdSignalProcessGroup) // Linux 6.9
	}
	if err == unix.EINVAL {
		err = pidfdSignal(p.pidfd, sig, 0)
	}
	if err != 0 {
		if err == unix.ESRCH {
			return wire.Errorf(wire.Conflict, "process of container %s is not running: %w", short(p.c.id), err)
		}
		if err == unix.EINVAL {
			return wire.Errorf(wire.Invalid, "sending signal %d: %w", sig, err)
		}
		return wire.Errorf(wire.Internal, "sending signal %d to container %s: %w", sig, short(p.c.id), err)
	}
	return nil
}

const pidfdSignalProcessGroup = 1 << 2 // PIDFD_SIGNAL_PROCESS_GROUP

func pidfdSignal(pidfd *os.File, sig, flags int) unix.Errno {
	err := unix.PidfdSendSignal(int(pidfd.Fd()), unix.Signal(sig), nil, flags)
	errno, _ := err.(unix.Errno)
	return errno
}

func (p *process) isDone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.done
}

// shared tells whether the processes of the container may outlive its main one: then they must be killed.
func (c *container) shared() bool { return c.run.PID != "" }

// reply is the RunReply of a container that runs, without descriptors.
func (c *container) reply() wire.RunReply {
	r := wire.RunReply{PID: c.main.pid, StartedAt: c.started, Endpoint: c.endpoint}
	if c.cgroup != nil {
		r.Cgroup = c.cgroup.Path()
	} else if c.saved != nil {
		r.Cgroup = c.saved.CgroupPath
	}
	return r
}

// process returns the main process or an exec.
func (c *container) process(exec string) (*process, error) {
	if exec == "" {
		return &c.main, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if p := c.execs[exec]; p != nil {
		return p, nil
	}
	return nil, wire.Errorf(wire.NotFound, "no exec %s in container %s", short(exec), short(c.id))
}

// forget takes the container off the list when nothing more is to be done for it. Its directory goes first: the next
// run of it, which may wait for nothing but the list, makes one of the same name.
func (c *container) forget() {
	c.mu.Lock()
	acked := c.acked
	c.mu.Unlock()
	select {
	case <-c.cleaned:
	default:
		return
	}
	if !acked {
		return
	}
	c.forgotten.Do(func() {
		c.state.close()
		if err := removeDir(c.dir); err != nil {
			c.a.logf("container %s: %v", short(c.id), err)
		}
		c.a.mu.Lock()
		defer c.a.mu.Unlock()
		if c.a.containers[c.id] == c {
			delete(c.a.containers, c.id)
		}
	})
}
