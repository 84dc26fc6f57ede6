//go:build linux

package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/wire"
)

// How a container is found again. At its start an agent reads the state files that an earlier one left. A container
// whose process still lives is looked after at once: pidfd by pid, checked against the identity in the state file, and
// the pipes through /proc/PID/fd where the inode is the right one. What cannot be had that way (a terminal, pipes
// that the main process has given away, the exit code of one that has ended) may come with Adopt from the daemon, who
// holds the descriptors. A process that has ended and whose pidfd nobody held is reported with CodeLost.

// adoptWait is how long after Hello a daemon may still adopt a container whose process has ended.
const adoptWait = 2 * time.Second

// findContainers reads the state files.
func (a *Agent) findContainers() error {
	dir := a.stateRoot()
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("reading state files: %w", err)
	}
	keep := map[string]bool{}
	for _, e := range entries {
		c, err := a.findContainer(filepath.Join(dir, e.Name()))
		if err != nil {
			a.logf("state %s: %v", e.Name(), err)
		}
		if c == nil {
			if err := removeDir(filepath.Join(dir, e.Name())); err != nil {
				a.logf("state %s: %v", e.Name(), err)
			}
			continue
		}
		if old := a.containers[c.id]; old != nil {
			// The earlier run's exit was known to who started it again; only its clean-up was cut short.
			if old.run.Run > c.run.Run {
				old, c = c, old
			}
			old.acked = true
		}
		a.containers[c.id] = c
		if c.cgroup != nil {
			keep[c.cgroup.Name()] = true
		}
	}
	names, err := a.cgroups.List()
	if err != nil {
		return err
	}
	for _, name := range names {
		if keep[name] {
			continue
		}
		// Cells that were never used, and starts that were cut short.
		if err := a.cgroups.Discard(name); err != nil {
			a.logf("removing what an earlier agent left: %v", err)
		}
	}
	return nil
}

// findContainer makes a container of a state file. It returns nil for one that was never started.
func (a *Agent) findContainer(dir string) (*container, error) {
	f, err := readState(dir)
	if errors.Is(err, errTorn) || errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	id := f.Run.ID
	if err := validID(id); err != nil {
		return nil, err
	}
	c := &container{
		a: a, id: id, run: &f.Run, dir: dir, endpoint: f.Endpoint, state: f.state, uid: f.UID, gid: f.GID, groups: f.Groups,
		started: f.started, adopted: true, paused: f.paused, decided: make(chan struct{}), cleaned: make(chan struct{}),
	}
	close(c.decided)
	c.saved = &savedContainer{CgroupPath: f.CgroupPath}
	c.main.c, c.main.pid, c.main.nodes, c.main.identity = c, f.pid, f.stdio, [2]uint64{f.pidNode, f.begun}
	c.main.out = newOutput(a.loop, a.warner(id))
	c.main.out.tty = f.Run.TTY
	if cg, err := a.cgroups.Load(f.Cgroup); err == nil {
		c.cgroup = cg
	} else if wire.ClassOf(err) != wire.NotFound {
		a.logf("container %s: %v", short(id), err)
	}
	if f.pid == 0 {
		if c.cgroup != nil {
			c.cgroup.Kill()
			c.cgroup.Close()
			c.cgroup = nil
		}
		f.state.close()
		if f.Run.Remove {
			return nil, a.store.RemoveContainer(id)
		}
		return nil, nil
	}
	if f.Endpoint.Address != "" {
		if err := a.net.Adopt(f.Endpoint); err != nil {
			a.logf("container %s: %v", short(id), err)
		}
	}
	if f.exit != nil {
		c.exited = f.exit
		c.main.done = true
		c.phase.Store(phaseExited)
		a.cleaner.add(c)
		return c, nil
	}
	policy, err := parseLogConfig(&f.Run.Log)
	if err != nil {
		return c, err
	}
	if !policy.none {
		c.main.out.setLog(a.logPath(id), dir, policy, c.state.putLog)
		if err := c.main.out.adoptSpools(f.log); err != nil {
			a.logf("container %s: %v", short(id), err)
		}
	}
	c.phase.Store(phaseRunning)
	pidfd, err := unix.PidfdOpen(f.pid, 0)
	if err == nil {
		c.main.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
		if !c.main.isSame(launch.Proc{PID: f.pid, PIDFD: c.main.pidfd}) {
			err = unix.ESRCH
			c.main.pidfd.Close()
			c.main.pidfd = nil
		}
	}
	if err != nil {
		c.orphan = &exitStatus{code: 255, lost: true, at: time.Now()}
		return c, nil
	}
	c.main.reopenStdio()
	c.stdioLost = c.main.stdioMissing()
	return c, c.main.watchPIDFD()
}

// isSame tells whether p is the process of the state file, and not one that has its pid now.
func (p *process) isSame(q launch.Proc) bool {
	if p.identity[0] != 0 {
		return pidfdNode(fdOf(q.PIDFD)) == p.identity[0]
	}
	return p.identity[1] != 0 && startTime(q.PID) == p.identity[1]
}

// reopenStdio opens the pipes through the process that has their other ends.
func (p *process) reopenStdio() {
	if p.out.tty {
		return
	}
	open := func(n, flags int) int {
		name := "/proc/" + strconv.Itoa(p.pid) + "/fd/" + strconv.Itoa(n)
		var st unix.Stat_t
		if p.nodes[n] == 0 || unix.Stat(name, &st) != nil || st.Ino != p.nodes[n] || st.Mode&unix.S_IFMT != unix.S_IFIFO {
			return -1
		}
		fd, err := unix.Open(name, flags|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return -1
		}
		if unix.Fstat(fd, &st) != nil || st.Ino != p.nodes[n] {
			unix.Close(fd)
			return -1
		}
		return fd
	}
	for i := range p.out.src {
		if fd := open(i+1, unix.O_RDONLY); fd >= 0 {
			p.addSource(i, fd)
		}
	}
	if p.c.run.OpenStdin && !p.c.run.StdinOnce {
		if fd := open(0, unix.O_WRONLY); fd >= 0 {
			p.in = &stdinEnd{fd: fd}
		}
	}
}

func (p *process) addSource(i, fd int) {
	if err := p.out.add(i, fd); err != nil {
		p.c.a.logf("container %s: %v", short(p.c.id), err)
	}
}

// stdioMissing tells whether output goes where nobody reads it.
func (p *process) stdioMissing() bool {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	return p.out.src[0].fd < 0 && (p.out.tty || p.nodes[1] != 0) || p.out.src[1].fd < 0 && !p.out.tty && p.nodes[2] != 0
}

// watchPIDFD waits for the end of a process that is not our child.
func (p *process) watchPIDFD() (err error) {
	p.watch, err = p.c.a.loop.watch(fdOf(p.pidfd), unix.EPOLLIN|unix.EPOLLET, func(uint32) { go p.pidfdReady() })
	return err
}

// zombieWait is how long the code of a process that has ended, and that its parent has not reaped, is waited for where
// neither the kernel nor its zombie tells it.
const zombieWait = 2 * time.Second

// pidfdReady is called when a process that is not our child has ended. Its parent, the host's init, reaps it when it
// likes. Until then the code stands in its stat file, after that the kernel keeps it with the pidfd (Linux 6.15).
func (p *process) pidfdReady() {
	at := time.Now()
	told := func() bool {
		if ws, ok := zombieExit(p.pid, p.pidfd); ok {
			p.c.adoptedEnded(statusOf(ws))
			return true
		}
		if ws, ok := pidfdExit(fdOf(p.pidfd)); ok {
			p.c.adoptedEnded(statusOf(ws))
			return true
		}
		return false
	}
	if told() {
		return
	}
	time.AfterFunc(zombieWait, func() {
		if !p.isDone() && !told() {
			p.c.adoptedEnded(exitStatus{code: 255, lost: true, at: at})
		}
	})
}

// adoptedEnded is the end of an adopted container. If pipes of it are missing, the daemon may be about to bring them,
// with output in them: then that is waited for.
func (c *container) adoptedEnded(st exitStatus) {
	c.mu.Lock()
	wait := !c.handed && c.main.stdioMissing()
	if wait {
		c.orphan = &st
	}
	c.mu.Unlock()
	if !wait {
		c.main.ended(st)
	}
}

// zombieExit reads how a process ended from /proc/PID/stat, whose last field is the status as wait(2) gives it
// (proc_pid_stat(5), exit_code). The pid is the process's own as long as the pidfd can be signalled.
func zombieExit(pid int, pidfd *os.File) (unix.WaitStatus, bool) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil || unix.PidfdSendSignal(fdOf(pidfd), 0, nil, 0) != nil {
		return 0, false
	}
	// The command, in parentheses, may hold anything; the state follows it.
	f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(f) < 50 || f[0] != "Z" && f[0] != "X" {
		return 0, false
	}
	code, err := strconv.Atoi(f[49])
	return unix.WaitStatus(code), err == nil
}

// adoptRequest takes the descriptors that a daemon holds of a container.
func (a *Agent) adoptRequest(_ context.Context, m *wire.Adopt, f *wire.Frame) (*wire.Frame, error) {
	if err := validID(m.ID); err != nil {
		return nil, err
	}
	c, err := a.find(m.ID)
	if err != nil {
		return nil, err
	}
	if c.run.Run != m.Run {
		return nil, wire.Errorf(wire.Conflict, "container %s: run %d is not the one here (%d)", short(m.ID), m.Run, c.run.Run)
	}
	if !c.adopted || c.phase.Load() != phaseRunning {
		return okFrame(), nil // it never was without an agent, or its exit is known
	}
	c.adopting.Lock()
	defer c.adopting.Unlock()
	c.takeStdio(f, m.Stdin)
	c.mu.Lock()
	orphan := c.orphan
	c.orphan, c.handed = nil, true
	c.stdioLost = c.main.stdioMissing()
	c.mu.Unlock()
	if orphan == nil {
		return okFrame(), nil
	}
	if orphan.lost && c.main.pidfd == nil {
		// The daemon's pidfd knows how a process ended that was gone before we came.
		if pidfd := f.Take(0); pidfd != nil && c.main.isSame(launch.Proc{PID: c.main.pid, PIDFD: pidfd}) {
			c.main.pidfd = pidfd
			if err := c.main.watchPIDFD(); err == nil { // it tells at once
				return okFrame(), nil
			}
		} else if pidfd != nil {
			pidfd.Close()
		}
	}
	go c.main.ended(*orphan)
	return okFrame(), nil
}

// takeStdio takes those of the daemon's descriptors that are missing and are what they should be.
func (c *container) takeStdio(f *wire.Frame, stdin bool) {
	p := &c.main
	take := func(i int, node uint64) int {
		file := f.Take(i)
		if file == nil {
			return -1
		}
		fd, err := takeFD(file)
		if err != nil {
			return -1
		}
		var st unix.Stat_t
		if unix.Fstat(fd, &st) != nil || node != 0 && st.Ino != node || unix.SetNonblock(fd, true) != nil {
			unix.Close(fd)
			return -1
		}
		return fd
	}
	p.out.mu.Lock()
	missing := [2]bool{p.out.src[0].fd < 0, p.out.src[1].fd < 0}
	p.out.mu.Unlock()
	if p.out.tty {
		if !missing[0] {
			return
		}
		fd := take(1, 0)
		if fd < 0 {
			return
		}
		if _, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ); err != nil {
			unix.Close(fd)
			return
		}
		p.tty, _ = dupFile(fd, "terminal")
		if c.run.OpenStdin {
			if in, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3); err == nil {
				p.in = &stdinEnd{fd: in, tty: true}
			}
		}
		p.addSource(0, fd)
		return
	}
	for i := range missing {
		if missing[i] && p.nodes[i+1] != 0 {
			if fd := take(i+1, p.nodes[i+1]); fd >= 0 {
				p.addSource(i, fd)
			}
		}
	}
	if stdin && p.in == nil && p.nodes[0] != 0 {
		if fd := take(3, p.nodes[0]); fd >= 0 {
			p.in = &stdinEnd{fd: fd}
		}
	}
}

// giveUpOrphans reports the containers whose process had ended before this agent began and that nobody has adopted.
func (a *Agent) giveUpOrphans(conn *wire.Conn) {
	if !a.isDaemon(conn) || conn.Err() != nil {
		return
	}
	a.mu.Lock()
	var all []*container
	for _, c := range a.containers {
		all = append(all, c)
	}
	a.mu.Unlock()
	for _, c := range all {
		c.mu.Lock()
		orphan := c.orphan
		c.orphan, c.handed = nil, true
		c.mu.Unlock()
		if orphan != nil {
			c.main.ended(*orphan)
		}
	}
}

// startTime is when a process began, in clock ticks since boot; 0 if it is gone.
func startTime(pid int) uint64 {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	// The second field is the command in parentheses and may hold anything; the 22nd is what we want.
	i := bytes.LastIndexByte(text, ')')
	if i < 0 {
		return 0
	}
	f := strings.Fields(string(text[i+1:]))
	if len(f) < 20 {
		return 0
	}
	n, err := strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
