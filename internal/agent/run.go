//go:build linux

package agent

import (
	"context"
	"fmt"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// undoList is what to do when something that has several steps fails in the middle: newest first.
type undoList []func()

func (u *undoList) add(f func()) { *u = append(*u, f) }

// run undoes all if err is not nil.
func (u *undoList) run(err error) {
	if err == nil {
		return
	}
	for i := len(*u) - 1; i >= 0; i-- {
		(*u)[i]()
	}
}

// runRequest starts a container. Top to bottom it is the start path; what can be ready before is in the cell.
func (a *Agent) runRequest(_ context.Context, m *wire.Run) (_ *wire.Frame, err error) {
	tr := newTrace()
	if err := checkRun(m); err != nil {
		return nil, err
	}
	policy, err := parseLogConfig(&m.Log)
	if err != nil {
		return nil, err
	}
	a.cleaner.admit()
	a.active()
	var undo undoList
	defer func() { undo.run(err) }()

	c := &container{a: a, id: m.ID, run: m, decided: make(chan struct{}), cleaned: make(chan struct{})}
	defer close(c.decided)
	c.main.c = c
	if err := a.reserve(c); err != nil {
		return nil, err
	}
	undo.add(func() { a.unreserve(c) })

	a.calm.begin()
	defer a.calm.end()
	cell, err := a.takeCell(c)
	if err != nil {
		return nil, err
	}
	undo.add(func() { a.cells.discard(cell) })
	c.cgroup, c.dir, c.state = cell.cgroup, cell.dir, cell.state
	tr.step("cell")
	if cell.sandbox != nil {
		c.endpoint, c.netns = cell.sandbox.Endpoint, cell.sandbox.NS
		if len(m.Net.Ports) > 0 {
			if c.endpoint.Ports, err = a.net.Publish(cell.sandbox, m.Net.Ports); err != nil {
				return nil, err
			}
			cell.sandbox.Endpoint = c.endpoint // whoever releases it unpublishes them too
		}
	}
	devices, err := a.limit(c, cell)
	if err != nil {
		return nil, err
	}

	tr.step("limits")
	root, err := a.roots.take(m)
	if err != nil {
		return nil, err
	}
	c.root = root.mount
	undo.add(func() {
		root.started()
		c.root.Close()
		if m.Remove {
			a.store.RemoveContainer(m.ID)
		}
	})
	tr.step("root")
	early := a.takeEarly(m.ID)
	undo.add(early.close)
	if early.height != 0 || early.width != 0 {
		m.Height, m.Width = early.height, early.width
	}
	if c.main.stdio, err = newStdio(a.loop, a.warner(m.ID), cell.fs.pts, m.TTY, m.OpenStdin, m.StdinOnce, m.Height, m.Width); err != nil {
		return nil, err
	}
	undo.add(func() { c.main.closeChild(); c.main.stdio.close() })
	if m.TTY {
		if c.pts, err = dupFile(fdOf(cell.fs.pts), "devpts"); err != nil {
			return nil, err
		}
		undo.add(func() { c.pts.Close() })
	}

	tr.step("stdio")
	mounts := &mounter{a: a, c: c, cell: cell, root: root}
	defer mounts.close()
	if err := mounts.prepare(); err != nil {
		return nil, err
	}
	if len(devices) > 0 {
		if err := makeDevices(c.root, cell.fs.dev, devices); err != nil {
			return nil, err
		}
	}
	tr.step("mounts")
	spec, err := a.runSpec(c, cell, mounts)
	if err != nil {
		return nil, err
	}
	if m.ReadOnly {
		// Only now: the places of the mounts had to be made.
		if err := setAttr(c.root, false, unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return nil, err
		}
	}
	tr.step("spec")
	c.saved = &savedContainer{Run: *m, Endpoint: c.endpoint, Cgroup: cgroupKey(m, c.cgroup), CgroupPath: c.cgroup.Path(),
		UID: c.uid, GID: c.gid, Groups: c.groups}
	if err := c.state.begin(c.saved); err != nil {
		return nil, err
	}
	c.saved = nil
	if !policy.none {
		c.main.out.setLog(a.logPath(m.ID), c.dir, policy, c.state.putLog)
	}
	for _, s := range early.streams {
		c.main.connect(s.stream, s.stdin, s.keys, s.buffered)
	}

	tr.step("state")
	plan, err := launch.Compile(spec)
	if err != nil {
		return nil, err
	}
	tr.step("compile")
	a.beginStart()
	proc, err := a.startPlan(cell, plan)
	if err != nil {
		a.abandonStart()
		if c.shared() {
			c.cgroup.Kill()
		}
		return nil, err
	}
	tr.step("child")
	f, err := a.started(c, cell, root, plan, proc, early)
	tr.step("started")
	if tr != nil {
		a.logf("run %s:%s", short(c.id), tr.line.String())
	}
	return f, err
}

// started is the half of a start that does not fail any more: the process runs.
func (a *Agent) started(c *container, cell *cell, root *root, plan *launch.Plan, proc launch.Proc, early *earlyStdio) (*wire.Frame, error) {
	c.started = time.Now().UnixNano()
	c.main.closeChild()
	c.main.pid, c.main.pidfd = proc.PID, proc.PIDFD
	c.plan = plan
	if mnt, err := proc.MountNS(); err == nil {
		c.mounts = mnt
	}
	node, begun := processIdentity(proc)
	if err := c.state.putWords(offPID, uint64(proc.PID), node, begun, uint64(c.started)); err != nil {
		a.logf("container %s: %v", short(c.id), err)
	}
	if err := c.state.putWords(offStdio, c.main.nodes[0], c.main.nodes[1], c.main.nodes[2]); err != nil {
		a.logf("container %s: %v", short(c.id), err)
	}
	fault("started")
	reply := c.reply()
	f := &wire.Frame{Msg: &reply}
	var err error
	if f.Files, err = c.descriptors(); err != nil {
		a.logf("container %s: its descriptors cannot be handed over: %v", short(c.id), err)
	}
	c.phase.Store(phaseRunning)
	early.release()
	// Before its end can be known: if others hold its pipes, that is when the end of the output is waited for.
	if err := c.main.begin(); err != nil {
		a.logf("container %s: %v", short(c.id), err)
	}
	if st := a.register(&c.main); st != nil {
		go c.main.ended(*st)
	}
	go func() {
		root.started()
		a.cells.used(cell)
		a.cells.refill()
		a.roots.refill()
	}()
	return f, nil
}

// checkRun refuses what cannot be before anything is made.
func checkRun(m *wire.Run) error {
	if err := validID(m.ID); err != nil {
		return err
	}
	if len(m.Args) == 0 {
		return wire.Errorf(wire.Invalid, "no command specified")
	}
	for _, id := range []string{m.IPC, m.PID} {
		if id != "" && id != "host" && id != "shareable" && id != "private" && id != "none" {
			if err := validID(id); err != nil {
				return err
			}
		}
	}
	if m.Net.Mode == "container" {
		return validID(m.Net.Container)
	}
	return nil
}

// reserve takes the id. One that has exited is waited for until nothing of it is left.
func (a *Agent) reserve(c *container) error {
	for {
		a.mu.Lock()
		old := a.containers[c.id]
		if old == nil {
			a.containers[c.id] = c
			a.mu.Unlock()
			return nil
		}
		a.mu.Unlock()
		if old.phase.Load() < phaseExiting {
			return wire.Errorf(wire.Conflict, "container %s is running already", short(c.id))
		}
		<-old.cleaned
		old.mu.Lock()
		old.acked = true // who starts it again knows that it has ended
		old.mu.Unlock()
		old.forget()
	}
}

func (a *Agent) unreserve(c *container) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.containers[c.id] == c {
		delete(a.containers, c.id)
	}
}

// takeCell finds out which namespaces the container has of its own and takes a cell of that kind.
func (a *Agent) takeCell(c *container) (*cell, error) {
	m := c.run
	k := cellKind{net: m.Net.Mode}
	var j joins
	defer func() { closeAll([]*os.File{j.net, j.netMounts, j.ipc, j.ipcMounts}) }()
	var err error
	switch k.net {
	case "none", "bridge", "host":
	case "container":
		if j.net, err = a.namespaceOf(m.Net.Container, "net"); err != nil {
			return nil, err
		}
		if j.netMounts, err = a.namespaceOf(m.Net.Container, "mnt"); err != nil {
			return nil, err
		}
	default:
		return nil, wire.Errorf(wire.Invalid, "unknown network mode %q", k.net)
	}
	switch m.IPC {
	case "", "private", "shareable":
	case "none", "host":
		k.ipc = m.IPC
	default:
		k.ipc = "container"
		if j.ipc, err = a.namespaceOf(m.IPC, "ipc"); err != nil {
			return nil, err
		}
		if j.ipcMounts, err = a.namespaceOf(m.IPC, "mnt"); err != nil {
			return nil, err
		}
	}
	// What changes the cgroup, or puts something in place of /dev or /sys, needs the standard mounts one by one.
	k.split = m.CgroupParent != "" || needsDevices(m) || slices.ContainsFunc(m.Mounts, func(w wire.Mount) bool {
		t := path.Clean("/" + w.Target)
		return t == "/dev" || t == "/sys" || t == "/sys/fs"
	})
	cell, err := a.cells.take(k, j, &m.Net)
	if err != nil || m.CgroupParent == "" {
		return cell, err
	}
	// Elsewhere in the tree: the cell's own cgroup is not used.
	cg, err := a.cgroups.NewAt(m.CgroupParent, m.ID)
	if err == nil {
		err = cg.JoinThread(cell.thread.TID())
	}
	if err != nil {
		a.cells.discard(cell)
		return nil, err
	}
	old := cell.cgroup
	cell.cgroup = cg
	if err := old.Remove(); err != nil {
		a.logf("removing an unused cgroup: %v", err)
	}
	return cell, nil
}

// namespaceOf opens a namespace of another container.
func (a *Agent) namespaceOf(id, name string) (*os.File, error) {
	other, err := a.findRunning(id)
	if err != nil {
		return nil, wire.Errorf(wire.Conflict, "cannot join %s namespace of a non running container: %s", name, id)
	}
	f, err := os.Open("/proc/" + strconv.Itoa(other.main.pid) + "/ns/" + name)
	if err != nil {
		return nil, fmt.Errorf("opening the %s namespace of container %s: %w", name, short(id), err)
	}
	if other.phase.Load() != phaseRunning { // it ended: the pid may be another process's by now
		f.Close()
		return nil, wire.Errorf(wire.Conflict, "cannot join %s namespace of a non running container: %s", name, id)
	}
	return f, nil
}

// needsDevices tells whether a container has other device rules than the default ones.
func needsDevices(m *wire.Run) bool {
	return m.Privileged || len(m.Devices) > 0 || len(m.DeviceRules) > 0
}

// limit sets the limits and the device rules, and returns the device nodes to be made.
func (a *Agent) limit(c *container, cell *cell) ([]device, error) {
	m := c.run
	var devices []device
	if needsDevices(m) {
		var err error
		if devices, err = devicesOf(m); err != nil {
			return nil, err
		}
		rules := m.DeviceRules
		if !m.Privileged {
			for i := range devices {
				rules = append(rules, devices[i].rule())
			}
		}
		if err := cell.cgroup.SetDevices(rules, m.Privileged); err != nil {
			return nil, err
		}
		if err := cell.cgroup.JoinThread(cell.thread.TID()); err != nil {
			return nil, err
		}
	}
	if m.CgroupParent != "" || needsDevices(m) { // the cgroup is not the one the cell was made with
		if err := cell.fs.viewCgroup(cell.cgroup, m.Privileged); err != nil {
			return nil, err
		}
	}
	if !m.Resources.IsZero() {
		if err := cell.cgroup.Apply(&m.Resources); err != nil {
			return nil, err
		}
	}
	return devices, nil
}

// runSpec makes the launch spec.
func (a *Agent) runSpec(c *container, cell *cell, mounts *mounter) (*launch.Spec, error) {
	m := c.run
	cwd := m.Cwd
	if cwd == "" {
		cwd = "/"
	}
	found, err := a.lookUp(m, cwd, mounts)
	if err != nil {
		return nil, err
	}
	user := &found.user
	c.uid, c.gid, c.groups = user.UID, user.GID, user.Groups
	env := m.Env
	if !hasEnv(env, "HOME") {
		home := user.Home
		if home == "" {
			home = "/"
		}
		env = append(env[:len(env):len(env)], "HOME="+home)
	}
	caps, err := capsOf(m.Caps, m.Privileged)
	if err != nil {
		return nil, err
	}
	if c.seccomp, err = seccompFilter(m, caps); err != nil {
		return nil, err
	}
	spec := &launch.Spec{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWCGROUP, CgroupFD: cell.cgroup.FD(),
		Root: c.root, Mounts: mounts.attached, Proc: mounts.proc, Masked: m.MaskedPaths, Readonly: m.ReadonlyPaths, Sysctls: m.Sysctls,
		Args: m.Args, Env: env, Path: found.path, Cwd: cwd, UID: user.UID, GID: user.GID, Groups: user.Groups,
		Caps: launch.CapsFor(caps, user.UID), NoNewPrivs: m.NoNewPrivs, Seccomp: c.seccomp, AppArmor: m.AppArmor,
		Rlimits: rlimits(m.Rlimits), TTY: m.TTY,
		Stdin: c.main.child[0], Stdout: c.main.child[1], Stderr: c.main.child[2], Null: cell.fs.null,
	}
	if m.OOMScoreAdj != 0 {
		spec.OOMScoreAdj = &m.OOMScoreAdj
	}
	if m.Cgroup == "host" {
		spec.Cloneflags &^= unix.CLONE_NEWCGROUP
	}
	if m.UTS != "host" {
		spec.Cloneflags |= unix.CLONE_NEWUTS
		spec.Hostname, spec.Domainname = m.Hostname, m.Domainname
	}
	if m.Init {
		spec.Init = a.self
	}
	if m.PID != "" {
		if err := a.sharePID(c, cell, mounts, spec); err != nil {
			return nil, err
		}
	}
	return spec, nil
}

// lookUp finds the user, the command, and the working directory, which is made if it is missing. What was found for a
// fresh container of the same image, and nothing of the user's is mounted in this one, needs no second look.
func (a *Agent) lookUp(m *wire.Run, cwd string, mounts *mounter) (lookup, error) {
	key := lookupKey{user: m.User, groups: strings.Join(m.Groups, " "), cwd: cwd, arg0: m.Args[0]}
	for _, v := range m.Env {
		if value, ok := strings.CutPrefix(v, "PATH="); ok {
			key.path = value
		}
	}
	fresh := len(m.Mounts) == 0
	if l, ok := a.roots.known(mounts.root, key); ok && fresh && l.cwd {
		return l, nil
	}
	user, err := rootfs.LookupUser(mounts.root.mount, m.User, m.Groups)
	if err != nil {
		return lookup{}, err
	}
	l := lookup{user: *user, cwd: cwd == "/"}
	if !l.cwd {
		dir, err := mounts.view.Mkdir(cwd, 0o755, 0, 0)
		if err != nil {
			return lookup{}, err
		}
		dir.Close()
	}
	if l.path, err = mounts.view.LookPath(cwd, m.Env, m.Args[0], user); err != nil {
		return lookup{}, err
	}
	if fresh {
		a.roots.learn(mounts.root, key, l)
	}
	return l, nil
}

// seccompFilter is the filter of a container: a privileged one has none, unless it was given one.
func seccompFilter(m *wire.Run, caps uint64) ([]unix.SockFilter, error) {
	if m.Seccomp == "unconfined" || m.Privileged && m.Seccomp == "" {
		return nil, nil
	}
	return launch.SeccompFilter(m.Seccomp, caps)
}

func capsOf(names []string, privileged bool) (uint64, error) {
	if privileged {
		return launch.AllCaps(), nil
	}
	return launch.ParseCaps(names)
}

// nofile is the limit on open files where none is asked for: it must not be whatever the daemon was started with, nor
// so high that programs which close every possible descriptor take minutes. It is what Docker's packages settled on.
var nofile = sync.OnceValue(func() wire.Rlimit {
	l := wire.Rlimit{Name: "nofile", Soft: 1024, Hard: 524288}
	var own unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &own) == nil { // more than our own we may not be allowed to give
		l.Hard = min(l.Hard, own.Max)
		l.Soft = min(l.Soft, l.Hard)
	}
	return l
})

func rlimits(asked []wire.Rlimit) []wire.Rlimit {
	if slices.ContainsFunc(asked, func(l wire.Rlimit) bool { return l.Name == "nofile" }) {
		return asked
	}
	return append(asked[:len(asked):len(asked)], nofile())
}

func uidString(uid uint32) string { return strconv.FormatUint(uint64(uid), 10) }
