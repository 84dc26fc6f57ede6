//go:build linux

package agent

import (
	"context"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// execNamespaces are those of the container's main process that an exec joins.
const execNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWCGROUP

func (a *Agent) execRequest(_ context.Context, m *wire.Exec, f *wire.Frame) (_ *wire.Frame, err error) {
	if err := validID(m.Exec); err != nil {
		return nil, err
	}
	c, err := a.findRunning(m.ID)
	if err != nil {
		return nil, err
	}
	p := &process{c: c, exec: m.Exec, decided: make(chan struct{})}
	defer close(p.decided)
	var undo undoList
	defer func() { undo.run(err) }()

	c.mu.Lock()
	if c.paused {
		c.mu.Unlock()
		return nil, wire.Errorf(wire.Conflict, "container %s is paused, unpause the container before exec", short(c.id))
	}
	if c.execs[m.Exec] != nil {
		c.mu.Unlock()
		return nil, wire.Errorf(wire.Conflict, "exec %s is there already", short(m.Exec))
	}
	if c.execs == nil {
		c.execs = map[string]*process{}
	}
	c.execs[m.Exec] = p
	c.mu.Unlock()
	undo.add(func() {
		c.mu.Lock()
		delete(c.execs, m.Exec)
		c.mu.Unlock()
	})

	spec, err := a.execSpec(c, m)
	if err != nil {
		return nil, err
	}
	if !m.Detach || m.TTY {
		var pts *os.File
		if m.TTY {
			if pts, err = c.devpts(); err != nil {
				return nil, err
			}
			defer pts.Close()
		}
		early := a.takeEarly(m.Exec)
		height, width := m.Height, m.Width
		if early.height != 0 || early.width != 0 {
			height, width = early.height, early.width
		}
		if p.stdio, err = newStdio(a.loop, a.warner(c.id), pts, m.TTY, m.Stdin, true, height, width); err != nil {
			return nil, err
		}
		undo.add(func() { p.stdio.closeChild(); p.stdio.close() })
		spec.Stdin, spec.Stdout, spec.Stderr, spec.TTY = p.child[0], p.child[1], p.child[2], m.TTY
	} else {
		p.out = newOutput(a.loop, a.warner(c.id))
	}
	var s *stream
	if file := f.Take(0); file != nil {
		if s, err = newStream(a.loop, file, m.Framed && !m.TTY); err != nil {
			return nil, err
		}
		// The daemon says on it what went wrong.
		undo.add(s.letGo)
		s.want = [2]bool{m.Stdout || m.TTY, m.Stderr && !m.TTY}
		p.connect(s, m.Stdin, m.DetachKeys, m.Buffered)
	}
	defer closeAll(spec.CgroupProcs)
	plan, err := launch.Compile(spec)
	if err != nil {
		return nil, err
	}
	a.beginStart()
	proc, err := a.template.Start(plan)
	if err != nil {
		a.abandonStart()
		return nil, err
	}
	p.stdio.closeChild()
	p.pid, p.pidfd = proc.PID, proc.PIDFD
	// Before anybody can learn of the process's end, and also if it has come already: the template may close its copies
	// of the pipes only now, and that is when the output ends.
	if err := p.stdio.begin(); err != nil {
		a.logf("exec %s: %v", short(m.Exec), err)
	}
	if st := a.register(p); st != nil {
		go p.ended(*st)
	}
	if s != nil {
		if err := s.start(); err != nil {
			s.close()
		}
	}
	return &wire.Frame{Msg: &wire.ExecReply{PID: p.pid}}, nil
}

// execSpec makes the launch spec of an exec: the container's rights, with the differences that m asks for.
func (a *Agent) execSpec(c *container, m *wire.Exec) (*launch.Spec, error) {
	r := c.run
	root, err := c.rootDir()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	user := &rootfs.User{UID: c.uid, GID: c.gid, Groups: c.groups}
	if m.User != "" {
		if user, err = rootfs.LookupUser(root, m.User, r.Groups); err != nil {
			return nil, err
		}
	}
	env := mergeEnv(r.Env, m.Env)
	if m.TTY && !hasEnv(env, "TERM") {
		env = append(env, "TERM=xterm")
	}
	env = withHome(env, user, root, m.User == "")
	cwd := m.Cwd
	if cwd == "" {
		cwd = r.Cwd
	}
	if cwd == "" {
		cwd = "/"
	}
	path, err := rootfs.LookPath(root, cwd, env, m.Args[0], user)
	if err != nil {
		return nil, err
	}
	caps, err := capsOf(r.Caps, r.Privileged || m.Privileged)
	if err != nil {
		return nil, err
	}
	procs, err := c.cgroup.OpenV1("cgroup.procs")
	if err != nil {
		return nil, err
	}
	adj := r.OOMScoreAdj
	spec := &launch.Spec{
		Into: c.main.pidfd, IntoFlags: execNamespaces, CgroupFD: c.cgroup.FD(),
		Args: m.Args, Env: env, Path: path, Cwd: cwd, UID: user.UID, GID: user.GID, Groups: user.Groups,
		Caps: launch.CapsFor(caps, user.UID), NoNewPrivs: r.NoNewPrivs, Rlimits: rlimits(r.Rlimits), AppArmor: r.AppArmor,
		OOMScoreAdj: &adj,
	}
	for _, p := range procs {
		spec.CgroupProcs = append(spec.CgroupProcs, p.File)
	}
	if !m.Privileged {
		if spec.Seccomp, err = seccompFilter(r, caps); err != nil {
			return nil, err
		}
	}
	return spec, nil
}

// execEnded tells the end of an exec.
func (p *process) execEnded(st exitStatus) {
	p.out.finish(drainGrace)
	e := &wire.Exited{ID: p.c.id, Run: p.c.run.Run, Exec: p.exec, Code: st.code, At: st.at.UnixNano(), CodeLost: st.lost}
	p.mu.Lock()
	p.exited = e
	p.mu.Unlock()
	p.c.a.notify(e)
	p.out.release()
	p.closeAfterExit()
}

// mergeEnv gives the variables of base with those of more over them, in the order of their first mention.
func mergeEnv(base, more []string) []string {
	out := append(make([]string, 0, len(base)+len(more)+2), base...)
	for _, v := range more {
		name, _, isSet := strings.Cut(v, "=")
		at := -1
		for i := range out {
			if n, _, _ := strings.Cut(out[i], "="); n == name {
				at = i
				break
			}
		}
		switch {
		case !isSet && at >= 0: // a name alone takes the variable away
			out = append(out[:at], out[at+1:]...)
		case !isSet:
		case at >= 0:
			out[at] = v
		default:
			out = append(out, v)
		}
	}
	return out
}

func hasEnv(env []string, name string) bool {
	for _, v := range env {
		if len(v) > len(name) && v[len(name)] == '=' && v[:len(name)] == name {
			return true
		}
	}
	return false
}

// withHome adds HOME as the image's passwd has it, unless it is set.
func withHome(env []string, user *rootfs.User, root *os.File, lookUp bool) []string {
	if hasEnv(env, "HOME") {
		return env
	}
	home := user.Home
	if home == "" && lookUp {
		if u, err := rootfs.LookupUser(root, uidString(user.UID), nil); err == nil {
			home = u.Home
		}
	}
	if home == "" {
		home = "/"
	}
	return append(env, "HOME="+home)
}
