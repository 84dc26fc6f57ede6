//go:build linux

package agent

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// exitStatus is how a process ended.
type exitStatus struct {
	code int // 0-255; 128+n for signal n
	lost bool
	at   time.Time
}

func statusOf(ws unix.WaitStatus) exitStatus {
	s := exitStatus{code: ws.ExitStatus(), at: time.Now()}
	if ws.Signaled() {
		s.code = 128 + int(ws.Signal())
	}
	return s
}

// drainGrace is how long an ended process's output is waited for when somebody else still holds its pipes open: a
// process that left the container's namespaces, or one of another container that was given the descriptor.
const drainGrace = 2 * time.Second

// reap waits for children, ours and the orphans that came to us (PR_SET_CHILD_SUBREAPER), for ever. When one ends that
// matters, this goroutine goes on with its exit, as nothing is as urgent, and another one does the waiting.
func (a *Agent) reap() {
	for {
		// Wait without reaping, and reap under the lock: a pid is free once it is reaped, and its next owner must not
		// be found in procs before its last one is gone from it.
		err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT|unix.WALL, nil)
		if err == unix.ECHILD {
			<-a.born
			continue
		}
		if err != nil {
			if err != unix.EINTR {
				a.logf("waiting for children: %v", err)
			}
			continue
		}
		var ws unix.WaitStatus
		a.mu.Lock()
		pid, err := unix.Wait4(-1, &ws, unix.WNOHANG|unix.WALL, nil)
		if err != nil || pid <= 0 {
			a.mu.Unlock()
			continue
		}
		p := a.procs[pid]
		if p != nil {
			delete(a.procs, pid)
		} else if a.starting > 0 {
			a.strays[pid] = statusOf(ws)
		}
		a.mu.Unlock()
		if p != nil {
			go a.reap()
			p.ended(statusOf(ws))
			return
		}
	}
}

// childBorn tells the reaper, which sleeps while there are no children.
func (a *Agent) childBorn() {
	select {
	case a.born <- struct{}{}:
	default:
	}
}

// beginStart says that a child is about to be made; each call is paired with one of register or abandonStart.
func (a *Agent) beginStart() {
	a.mu.Lock()
	a.starting++
	a.mu.Unlock()
}

func (a *Agent) endStart() {
	a.starting--
	if a.starting == 0 {
		clear(a.strays)
	}
}

// register makes p known to the reaper. If it has ended already its status is returned.
func (a *Agent) register(p *process) *exitStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	st, ended := a.strays[p.pid]
	if ended {
		delete(a.strays, p.pid)
	} else {
		a.procs[p.pid] = p
	}
	a.endStart()
	a.childBorn()
	if ended {
		return &st
	}
	return nil
}

func (a *Agent) abandonStart() {
	a.mu.Lock()
	a.endStart()
	a.mu.Unlock()
	a.childBorn() // a child that failed is there to be reaped
}

// ended does what follows from the end of a process, the answer first.
func (p *process) ended(st exitStatus) {
	p.mu.Lock()
	if p.done {
		p.mu.Unlock()
		return
	}
	p.done = true
	p.mu.Unlock()
	if p.exec == "" {
		p.c.ended(st)
	} else {
		p.execEnded(st)
	}
}

func (c *container) ended(st exitStatus) {
	c.phase.Store(phaseExiting)
	if c.shared() && c.cgroup != nil { // else everything has died with PID 1
		err := c.cgroup.Kill()
		if err == nil {
			err = c.cgroup.WaitEmpty(drainGrace)
		}
		if err != nil {
			c.a.logf("killing what is left of container %s: %v", short(c.id), err)
		}
	}
	c.main.out.finish(drainGrace)
	e := &wire.Exited{ID: c.id, Run: c.run.Run, Code: st.code, At: st.at.UnixNano(), CodeLost: st.lost}
	if c.cgroup != nil && (c.run.Resources.Memory != 0 || st.code == 128+int(unix.SIGKILL)) {
		if n, err := c.cgroup.OOMKills(); err == nil && n > 0 {
			e.OOMKilled = true
			c.a.notify(&wire.OOM{ID: c.id})
		}
	}
	// From here on the exit is not forgotten, whoever dies.
	if err := c.state.putExit(e); err != nil {
		c.a.logf("container %s: %v", short(c.id), err)
	}
	fault("exit-recorded")
	c.mu.Lock()
	c.exited = e
	c.mu.Unlock()
	c.phase.Store(phaseExited)
	c.a.notify(e)
	c.main.out.release()
	c.a.cleaner.add(c)
}

// clean gives back what the container held in the kernel. It runs in the cleaner, after the exit has been told.
func (c *container) clean() {
	c.main.closeAfterExit()
	closeAll([]*os.File{c.mounts, c.root, c.pts})
	if c.cgroup != nil {
		if err := c.cgroup.Remove(); err != nil {
			c.a.logf("container %s: removing its cgroup: %v", short(c.id), err)
		}
	}
	if len(c.endpoint.Ports) > 0 { // free again at once
		closeAll([]*os.File{c.netns})
		if err := c.a.net.Release(c.endpoint); err != nil {
			c.a.logf("container %s: %v", short(c.id), err)
		}
	} else {
		c.a.endSandbox(c.netns, c.endpoint)
	}
	c.mu.Lock()
	keep := c.keep
	c.mu.Unlock()
	if c.run.Remove && !keep {
		if err := c.a.store.RemoveContainer(c.id); err != nil {
			c.a.logf("container %s: removing its files: %v", short(c.id), err)
		}
	}
	c.mu.Lock()
	c.seccomp, c.plan, c.planned = nil, nil, ""
	c.mu.Unlock()
	close(c.cleaned)
	c.forget()
}

func (p *process) closeAfterExit() {
	p.watch.stop()
	p.mu.Lock()
	p.done = true
	if p.pidfd != nil {
		p.pidfd.Close()
		p.pidfd = nil
	}
	p.mu.Unlock()
	p.stdio.close()
}
