//go:build linux

// Package cgroup makes, limits, measures and removes the control groups of containers, on hosts where all controllers
// are in the v2 tree and on hybrid ones where they are still in v1 hierarchies beside it. Existing hierarchies are left
// as they are: nothing is mounted where others see it, and only directories of kiri's own are made.
//
// On hybrid hosts a process is born in its v2 cgroup by CLONE_INTO_CGROUP and in the v1 ones because the thread that
// clones it has joined them before. Freezing and killing go through the v2 tree everywhere, limits through whichever
// tree has the controller.
package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// removeWait bounds how long Remove waits for the last process. After SIGKILL only one that the kernel holds in an
// uninterruptible call takes longer than milliseconds.
const removeWait = 10 * time.Second

// freezeWait bounds Freeze in the same way.
const freezeWait = 10 * time.Second

// Cgroup is the control group of one container: a v2 directory and, on hybrid hosts, one in each v1 hierarchy used. It
// must not be used by two goroutines at once in SetDevices, Apply, Remove and Close.
type Cgroup struct {
	m     *Manager
	name  string
	at    *place
	v1    []int // the parents' directories, as Manager.trees; owned by the manager
	fd    int   // the v2 directory; -1 if it is gone
	fresh bool  // no limit has been set since it was made, so none need be restored when one is refused
}

// Name is the name it was made with.
func (c *Cgroup) Name() string { return c.name }

// Path is the v2 path below the cgroup root, "/kiri-1a2b3c4d/NAME". It changes in SetDevices.
func (c *Cgroup) Path() string { return path.Join("/", c.m.h.v2.base, c.at.path, c.name) }

// FD is the v2 directory for CLONE_INTO_CGROUP, owned by c. It changes in SetDevices.
func (c *Cgroup) FD() int { return c.fd }

// JoinThread moves one thread into the v1 cgroups, so that the processes it clones are born there; v2 is left to
// CLONE_INTO_CGROUP. tid 0 is the calling thread, which must be locked to its goroutine.
//
// The thread counts against the pids limit and is held by cpuset until LeaveThread or its end. Its memory does not: the
// kernel charges that to the thread group's leader. Neither is it seen by the OOM killer, which looks at leaders only.
func (c *Cgroup) JoinThread(tid int) error {
	text := strconv.Itoa(tid)
	for i, dir := range c.v1 {
		if err := write(dir, c.name+"/tasks", text); err != nil {
			return fmt.Errorf("moving thread %d to cgroup %s in %s: %w", tid, c.Path(), c.m.trees[i].mount, err)
		}
	}
	return nil
}

// SetDevices replaces the default device rules by these added to them ("c 10:229 rwm"), or by all devices. It must
// be called before Apply and before any process is in the cgroup: where the rules cannot be widened in place, the
// directory that holds them is made anew elsewhere, so Path and FD change and, without BPF, a thread that joined
// before must join again. Without rules it does nothing.
func (c *Cgroup) SetDevices(rules []string, privileged bool) error {
	parsed, err := parseRules(rules)
	if err != nil {
		return err
	}
	switch {
	case privileged:
		parsed = everything
	case len(parsed) == 0:
		return nil
	default:
		parsed = merge(append(append([]rule{}, defaultRules...), parsed...))
	}
	if c.at == c.m.def {
		if err := c.move(); err != nil {
			return err
		}
	}
	if c.m.program < 0 {
		dir := c.v1[len(c.v1)-1]
		if privileged { // the parent has all, and children copy it
			return write(dir, c.name+"/devices.allow", "a")
		}
		return allowV1(dir, c.name, parsed)
	}
	p, err := loadProgram(compile(parsed))
	if err != nil {
		return err
	}
	defer unix.Close(p)
	return attach(c.fd, p)
}

// move makes the directory that holds the device rules anew in the second parent.
func (c *Cgroup) move() error {
	p, err := c.m.second()
	if err != nil {
		return err
	}
	if err := unix.Mkdirat(p.v2, c.name, 0o755); err != nil {
		return fmt.Errorf("making cgroup /%s/%s: %w", p.path, c.name, err)
	}
	fd, err := openDir(p.v2, c.name)
	if err != nil {
		return err
	}
	old := *c
	c.at, c.fd, c.v1 = p, fd, c.m.v1Of(p)
	unix.Close(old.fd)
	if err := removeDeep(old.at.v2, old.name); err != nil {
		return err
	}
	if c.m.program >= 0 {
		return nil
	}
	last := len(c.v1) - 1
	if err := evict(old.v1[last], old.name, c.m.home[last], removeWait); err != nil {
		return err
	}
	if err := removeDeep(old.v1[last], old.name); err != nil {
		return err
	}
	return mkdir(c.v1[last], c.name)
}

// Freeze stops all processes, or lets them go on, and returns when the kernel has done it. If that takes longer than
// ten seconds the processes go on and it is an error.
func (c *Cgroup) Freeze(on bool) error {
	value, state := "0", uint64(0)
	if on {
		value, state = "1", 1
	}
	if err := write(c.fd, "cgroup.freeze", value); err != nil {
		return fmt.Errorf("freezing cgroup %s: %w", c.Path(), err)
	}
	err := await(c.fd, "cgroup.events", freezeWait, func(text string) bool {
		n, ok := field(text, "frozen")
		return !ok || n == state
	})
	if err != nil {
		if on {
			err = errors.Join(err, write(c.fd, "cgroup.freeze", "0"))
		}
		return fmt.Errorf("freezing cgroup %s: %w", c.Path(), err)
	}
	return nil
}

// Kill sends SIGKILL to all processes, frozen ones too, and does not wait for their end.
func (c *Cgroup) Kill() error {
	err := write(c.fd, "cgroup.kill", "1")
	if errors.Is(err, unix.ENOENT) {
		err = c.killEach() // before Linux 5.14
	}
	if err != nil {
		return fmt.Errorf("killing cgroup %s: %w", c.Path(), err)
	}
	return nil
}

// killEach holds the processes still while it kills them, so that none forks away. A frozen process dies at once.
func (c *Cgroup) killEach() error {
	err := c.Freeze(true)
	pids, perr := c.Procs()
	for _, pid := range pids {
		if kerr := unix.Kill(pid, unix.SIGKILL); kerr != nil && !errors.Is(kerr, unix.ESRCH) {
			perr = errors.Join(perr, fmt.Errorf("killing process %d: %w", pid, kerr))
		}
	}
	return errors.Join(err, perr, write(c.fd, "cgroup.freeze", "0"))
}

// Procs lists the processes, those of child cgroups included.
func (c *Cgroup) Procs() ([]int, error) { return procs(nil, c.fd, ".") }

func procs(pids []int, dir int, at string) ([]int, error) {
	text, err := read(dir, at+"/cgroup.procs")
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) { // a threaded cgroup; its processes are listed above it
		return nil, err
	}
	for _, f := range strings.Fields(text) {
		pid, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("parsing cgroup.procs: %w", err)
		}
		pids = append(pids, pid)
	}
	sub, err := subdirs(dir, at)
	if err != nil {
		return nil, err
	}
	for _, s := range sub {
		if pids, err = procs(pids, dir, at+"/"+s); err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, err
		}
	}
	return pids, nil
}

// Populated tells whether a process that has not ended is in it or below it.
func (c *Cgroup) Populated() (bool, error) {
	text, err := read(c.fd, "cgroup.events")
	if err != nil {
		return false, err
	}
	n, _ := field(text, "populated")
	return n != 0, nil
}

// WaitEmpty returns when no process is left in it or below it, or with an os.ErrDeadlineExceeded after limit. No
// thread is held.
func (c *Cgroup) WaitEmpty(limit time.Duration) error {
	return await(c.fd, "cgroup.events", limit, empty)
}

func empty(events string) bool {
	n, ok := field(events, "populated")
	return ok && n == 0
}

// OOMKills counts the processes that the kernel has killed here because of the memory limit.
func (c *Cgroup) OOMKills() (uint64, error) {
	var text string
	var err error
	if dir, ok := c.dirV1("memory"); ok {
		text, err = read(dir, c.name+"/memory.oom_control")
	} else if c.m.h.inV2["memory"] {
		text, err = read(c.fd, "memory.events")
	} else {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("counting OOM kills of %s: %w", c.Path(), err)
	}
	n, _ := field(text, "oom_kill")
	return n, nil
}

// dirV1 is the parent's directory in the v1 hierarchy of a controller.
func (c *Cgroup) dirV1(controller string) (int, bool) {
	t := c.m.h.tree(controller)
	for i := range c.m.trees {
		if t != nil && c.m.trees[i] == t {
			return c.v1[i], true
		}
	}
	return -1, false
}

// Remove deletes the cgroup and those that processes made in it; it waits up to ten seconds for the last process to
// end, and kills nothing. c cannot be used afterwards. Quiet if it is gone.
func (c *Cgroup) Remove() error {
	end := time.Now().Add(removeWait)
	for {
		err := removeDeep(c.at.v2, c.name)
		if err == nil {
			break
		}
		// A cgroup made inside meanwhile is EBUSY too: then the wait returns at once and the loop comes round.
		if !errors.Is(err, unix.EBUSY) || c.fd < 0 || time.Now().After(end) {
			return err
		}
		if err := c.WaitEmpty(time.Until(end)); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("removing cgroup %s: %w", c.Path(), err)
		}
	}
	var failed error
	for i, dir := range c.v1 {
		err := removeDeep(dir, c.name)
		for errors.Is(err, unix.EBUSY) && time.Now().Before(end) {
			// No process is left, so what is there is a thread of ours that has not left or is just ending.
			if err = evict(dir, c.name, c.m.home[i%len(c.m.home)], time.Until(end)); err == nil {
				err = removeDeep(dir, c.name)
			}
		}
		failed = errors.Join(failed, err)
	}
	return errors.Join(failed, c.Close())
}

// evict moves the threads of this process that are in a v1 cgroup back home, and waits for the end of those that the
// kernel does not move any more because they have begun to end.
func evict(dir int, name string, home int, limit time.Duration) error {
	tids, err := tasks(dir, name)
	if err != nil {
		return err
	}
	for _, tid := range tids {
		if _, err := os.Stat("/proc/self/task/" + strconv.Itoa(tid)); err != nil {
			continue
		}
		if _, err := unix.Write(home, []byte(strconv.Itoa(tid))); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("moving thread %d out of cgroup %s: %w", tid, name, err)
		}
	}
	if tids, err = tasks(dir, name); err != nil {
		return err
	}
	for _, tid := range tids {
		if err := awaitThread(tid, limit); err != nil {
			return fmt.Errorf("waiting for the end of thread %d in cgroup %s: %w", tid, name, err)
		}
	}
	return nil
}

// tasks lists the threads in a v1 cgroup; one that is gone has none.
func tasks(dir int, name string) ([]int, error) {
	text, err := read(dir, name+"/tasks")
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var tids []int
	for _, f := range strings.Fields(text) {
		tid, err := strconv.Atoi(f)
		if err != nil {
			return nil, fmt.Errorf("parsing tasks: %w", err)
		}
		tids = append(tids, tid)
	}
	return tids, nil
}

// awaitThread returns when a thread has ended, or after limit.
func awaitThread(tid int, limit time.Duration) error {
	fd, err := unix.PidfdOpen(tid, unix.PIDFD_THREAD)
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil
	case errors.Is(err, unix.EINVAL):
		// Before Linux 6.9 there are no pidfds of threads; the caller looks again after the time a thread's end takes.
		time.Sleep(time.Millisecond)
		return nil
	case err != nil:
		return err
	}
	defer unix.Close(fd)
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	if _, err := unix.Poll(p, int(limit/time.Millisecond)+1); err != nil && !errors.Is(err, unix.EINTR) {
		return err
	}
	return nil
}

// removeDeep removes a cgroup and, only if it has any, those below it.
func removeDeep(dir int, name string) error {
	err := unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
	if errors.Is(err, unix.EBUSY) {
		sub, lerr := subdirs(dir, name)
		for _, s := range sub {
			if lerr = removeDeep(dir, name+"/"+s); lerr != nil {
				break
			}
		}
		if lerr != nil && !errors.Is(lerr, unix.ENOENT) {
			return lerr
		}
		if len(sub) > 0 {
			err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
		}
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("removing cgroup %s: %w", name, err)
	}
	return nil
}

// Close closes the descriptors and leaves the cgroup.
func (c *Cgroup) Close() error {
	if c.fd < 0 {
		return nil
	}
	err := unix.Close(c.fd)
	c.fd = -1
	return err
}

// invalid makes the error for a value that the kernel refused. Other failures keep their class.
func invalid(err error, format string, args ...any) error {
	for _, no := range []unix.Errno{unix.EINVAL, unix.ERANGE, unix.EBUSY, unix.ENODEV, unix.ENOSPC, unix.EACCES, unix.EOPNOTSUPP} {
		if errors.Is(err, no) {
			return wire.Errorf(wire.Invalid, format+": %w", append(args, err)...)
		}
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}
