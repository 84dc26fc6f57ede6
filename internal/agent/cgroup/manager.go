//go:build linux

package cgroup

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Manager makes cgroups below one parent, /NAME in every hierarchy.
//
// Device rules cost nothing per container: a program (or, without BPF, a v1 list that children copy) with the default
// rules sits on the parent. As all programs from the top down must allow an access, a container with more devices
// cannot be below it; its v2 cgroup is made in a second parent, /NAME-devices, and carries a program of its own.
type Manager struct {
	h       *Host
	trees   []*hierarchy // v1: those of h and, where BPF cannot be used, devices at the end
	program int          // default rules; -1 where the v1 devices tree holds them
	home    []int        // v1: the tasks files of the cgroups this process is in
	def     *place

	mu     sync.Mutex
	more   *place            // the second parent, made when needed
	places map[string]*place // of NewAt
}

// place is one parent in every hierarchy. Its directories stay open: a file of a child is reached by two steps
// from there, and a container needs no descriptor but its v2 directory.
type place struct {
	path string // below the base of each hierarchy, without the leading /
	v2   int
	v1   []int // as Manager.trees
}

// Open makes sure parent ("/kiri-1a2b3c4d") is there in every hierarchy and that the default device rules hold below it.
// It is safe to open the same parent again after a crash; containers below it are not disturbed.
func (h *Host) Open(parent string) (*Manager, error) { return h.open(parent, true) }

func (h *Host) open(parent string, bpf bool) (*Manager, error) {
	m := &Manager{h: h, program: -1, places: map[string]*place{}}
	for i := range h.v1 {
		m.trees = append(m.trees, &h.v1[i])
	}
	var err error
	if bpf {
		m.program, err = loadProgram(compile(defaultRules))
	} else {
		err = unix.ENOSYS
	}
	if err != nil {
		// Device rules are a wall of the container: without BPF there must be the v1 tree.
		if h.devices == nil {
			return nil, err
		}
		m.trees = append(m.trees, h.devices)
	}
	if err := m.setUp(parent); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func (m *Manager) setUp(parent string) error {
	for _, t := range m.trees {
		fd, err := unix.Openat(t.root, path.Join(".", t.own, "tasks"), unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ENOENT) {
			fd, err = unix.Openat(t.root, "tasks", unix.O_WRONLY|unix.O_CLOEXEC, 0)
		}
		if err != nil {
			return fmt.Errorf("opening tasks of %s%s: %w", t.mount, t.own, err)
		}
		m.home = append(m.home, fd)
	}
	var err error
	if m.def, err = m.openPlace(parent); err != nil {
		return err
	}
	if m.program >= 0 {
		return attach(m.def.v2, m.program)
	}
	dir := m.def.v1[len(m.def.v1)-1]
	list, err := read(dir, "devices.list")
	if err != nil {
		return err
	}
	if !strings.Contains("\n"+list, "\na *:*") {
		return nil // set by an earlier agent; it cannot be set again while there are containers
	}
	return allowV1(dir, ".", defaultRules)
}

// openPlace opens a parent in every hierarchy and makes what is missing.
func (m *Manager) openPlace(name string) (*place, error) {
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	p := &place{path: clean, v2: -1}
	var err error
	if p.v2, err = m.openV2(clean); err != nil {
		return nil, err
	}
	for _, t := range m.trees {
		fd, err := t.openV1(clean)
		if err != nil {
			p.close()
			return nil, err
		}
		p.v1 = append(p.v1, fd)
	}
	return p, nil
}

func (p *place) close() {
	if p == nil {
		return
	}
	for _, fd := range append([]int{p.v2}, p.v1...) {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// openV1 opens, and makes, the directories of a parent in one v1 tree.
func (t *hierarchy) openV1(clean string) (int, error) {
	fd, err := t.walk(t.base, clean)
	if t.base == "" && t.own != "/" && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EROFS)) {
		// The top is not ours to write to, as in a container: stay below what we were given.
		t.base = strings.Trim(t.own, "/")
		fd, err = t.walk(t.base, clean)
	}
	if err != nil {
		return -1, fmt.Errorf("in %s: %w", t.mount, err)
	}
	return fd, nil
}

func (t *hierarchy) walk(base, clean string) (int, error) {
	dir, err := openDir(t.root, path.Join(".", base))
	if err != nil {
		return -1, err
	}
	for _, step := range steps(clean) {
		next, err := t.step(dir, step)
		unix.Close(dir)
		if err != nil {
			return -1, err
		}
		dir = next
	}
	if slices.Contains(t.controllers, "cpuset") && clean != "" {
		// With this, new children copy cpus and mems; without, no process could be put in them.
		if err := write(dir, "cgroup.clone_children", "1"); err != nil {
			unix.Close(dir)
			return -1, err
		}
	}
	return dir, nil
}

func (t *hierarchy) step(dir int, name string) (int, error) {
	if err := mkdir(dir, name); err != nil {
		return -1, err
	}
	if slices.Contains(t.controllers, "cpuset") {
		for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
			have, err := read(dir, name+"/"+f)
			if err != nil {
				return -1, err
			}
			if strings.TrimSpace(have) != "" {
				continue
			}
			above, err := read(dir, f)
			if err != nil {
				return -1, err
			}
			if err := write(dir, name+"/"+f, above); err != nil {
				return -1, err
			}
		}
	}
	return openDir(dir, name)
}

func steps(clean string) []string {
	if clean == "" {
		return nil
	}
	return strings.Split(clean, "/")
}

// openV2 opens, and makes, the directories of a parent in the v2 tree and hands the controllers down to its children.
func (m *Manager) openV2(clean string) (int, error) {
	t := &m.h.v2
	fd, err := m.walkV2(t.base, clean)
	if t.base == "" && t.own != "/" && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.EROFS)) {
		t.base = strings.Trim(t.own, "/")
		fd, err = m.walkV2(t.base, clean)
	}
	if err != nil {
		return -1, fmt.Errorf("in the v2 tree %s: %w", t.mount, err)
	}
	return fd, nil
}

func (m *Manager) walkV2(base, clean string) (int, error) {
	dir, err := openDir(m.h.v2.root, path.Join(".", base))
	if err != nil {
		return -1, err
	}
	if err := m.enable(dir, true); err != nil {
		unix.Close(dir)
		return -1, err
	}
	for _, step := range steps(clean) {
		if err = mkdir(dir, step); err == nil {
			var next int
			if next, err = openDir(dir, step); err == nil {
				unix.Close(dir)
				dir = next
				err = m.enable(dir, false)
			}
		}
		if err != nil {
			unix.Close(dir)
			return -1, err
		}
	}
	return dir, nil
}

// enable hands the controllers that are in v2 down to the children of a directory. In the base the processes that
// are there, ours among them, must first go to a leaf: no cgroup below the top may hold both processes and controllers.
func (m *Manager) enable(dir int, base bool) error {
	text, err := read(dir, "cgroup.controllers")
	if err != nil {
		return err
	}
	on, err := read(dir, "cgroup.subtree_control")
	if err != nil {
		return err
	}
	have, done := strings.Fields(text), strings.Fields(on)
	var want []string
	for _, c := range controllers {
		if v := v2Name(c); m.h.tree(c) == nil && slices.Contains(have, v) && !slices.Contains(done, v) {
			want = append(want, "+"+v)
		}
	}
	if want == nil {
		return nil
	}
	err = write(dir, "cgroup.subtree_control", strings.Join(want, " "))
	if base && errors.Is(err, unix.EBUSY) {
		if err := evacuate(dir, "agent"); err != nil {
			return err
		}
		err = write(dir, "cgroup.subtree_control", strings.Join(want, " "))
	}
	return err
}

// evacuate moves all processes of a v2 cgroup to a leaf below it.
func evacuate(dir int, leaf string) error {
	if err := mkdir(dir, leaf); err != nil {
		return err
	}
	for {
		text, err := read(dir, "cgroup.procs")
		if err != nil {
			return err
		}
		pids := strings.Fields(text)
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids { // those forked meanwhile are seen in the next round
			if err := write(dir, leaf+"/cgroup.procs", pid); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
	}
}

// New makes an empty cgroup with the default device rules. name must not be in use (Conflict).
func (m *Manager) New(name string) (*Cgroup, error) { return m.make(m.def, name) }

// NewAt makes the cgroup below another parent (--cgroup-parent), which is made if it is missing and never removed.
func (m *Manager) NewAt(parent, name string) (*Cgroup, error) {
	if path.Clean("/"+parent) == "/"+m.def.path {
		return m.New(name)
	}
	p, err := m.place(parent)
	if err != nil {
		return nil, err
	}
	c, err := m.make(p, name)
	if errors.Is(err, unix.ENOENT) { // whoever owns the parent has removed it since we opened it
		m.forget(p)
		if p, err = m.place(parent); err == nil {
			c, err = m.make(p, name)
		}
	}
	if err != nil {
		return nil, err
	}
	if err := m.defaults(c); err != nil {
		return nil, errors.Join(err, c.Remove())
	}
	return c, nil
}

// defaults gives a cgroup whose parent has no rules of ours the default ones.
func (m *Manager) defaults(c *Cgroup) error {
	if m.program >= 0 {
		return attach(c.fd, m.program)
	}
	return allowV1(c.v1[len(c.v1)-1], c.name, defaultRules)
}

func (m *Manager) place(parent string) (*place, error) {
	clean := strings.TrimPrefix(path.Clean("/"+parent), "/")
	m.mu.Lock()
	defer m.mu.Unlock()
	if p := m.places[clean]; p != nil {
		return p, nil
	}
	p, err := m.openPlace(clean)
	if err == nil {
		m.places[clean] = p
	}
	return p, err
}

// forget drops a parent that is gone. Its descriptors stay open for the cgroups that still use them: there are none
// that could be alive, but their owners may yet call Remove.
func (m *Manager) forget(p *place) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.places[p.path] == p {
		delete(m.places, p.path)
		m.places[p.path+"\x00"+strconv.Itoa(p.v2)] = p
	}
}

// second is the parent of cgroups with device rules of their own. Only the tree that holds the rules has it.
func (m *Manager) second() (*place, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.more != nil {
		return m.more, nil
	}
	p := &place{path: m.def.path + "-devices", v1: slices.Repeat([]int{-1}, len(m.trees))}
	var err error
	if p.v2, err = m.openV2(p.path); err != nil {
		return nil, err
	}
	if m.program < 0 {
		last := len(m.trees) - 1
		if p.v1[last], err = m.trees[last].openV1(p.path); err != nil {
			p.close()
			return nil, err
		}
	}
	m.more = p
	return p, nil
}

// v1Of tells where the v1 directories of a cgroup in p are: those that p has none for are in the first parent.
func (m *Manager) v1Of(p *place) []int {
	v1 := slices.Clone(p.v1)
	for i, fd := range v1 {
		if fd < 0 {
			v1[i] = m.def.v1[i]
		}
	}
	return v1
}

func (m *Manager) make(p *place, name string) (*Cgroup, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	c := &Cgroup{m: m, name: name, at: p, v1: slices.Clone(p.v1), fd: -1, fresh: true}
	err := unix.Mkdirat(p.v2, name, 0o755)
	if err == nil {
		c.fd, err = openDir(p.v2, name)
	} else if errors.Is(err, unix.EEXIST) {
		return nil, wire.Errorf(wire.Conflict, "making cgroup %s: %w", c.Path(), err)
	}
	for i := 0; err == nil && i < len(p.v1); i++ {
		// One that is there is what a crash left of a cgroup whose v2 directory was removed first; it has no processes.
		if err = unix.Mkdirat(p.v1[i], name, 0o755); errors.Is(err, unix.EEXIST) {
			if err = removeDeep(p.v1[i], name); err == nil {
				err = unix.Mkdirat(p.v1[i], name, 0o755)
			}
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("making cgroup %s: %w", c.Path(), err), c.Remove())
	}
	return c, nil
}

func checkName(name string) error {
	if name == "" || name == "." || name == ".." || len(name) > 255 || strings.ContainsAny(name, "/\x00\n") {
		return wire.Errorf(wire.Invalid, "invalid cgroup name %q", name)
	}
	return nil
}

// Load finds a cgroup again, by its name, or by Path (begins with "/") if NewAt made it. Error class NotFound if it is
// gone from the v2 tree; List shows what is left elsewhere.
func (m *Manager) Load(nameOrPath string) (*Cgroup, error) {
	name := nameOrPath
	candidates := []*place{m.def}
	if strings.HasPrefix(nameOrPath, "/") {
		var parent string
		parent, name = path.Split(nameOrPath)
		rel, ok := m.below(parent)
		switch {
		case !ok:
			return nil, wire.Errorf(wire.NotFound, "no cgroup %s below %s", nameOrPath, m.h.v2.base)
		case rel == m.def.path, rel == m.def.path+"-devices":
		default:
			at, err := m.existing(rel)
			if err != nil {
				return nil, err
			}
			candidates = []*place{at}
		}
	}
	if err := checkName(name); err != nil {
		return nil, err
	}
	if candidates[0] == m.def && exists(m.h.v2.root, path.Join(".", m.h.v2.base, m.def.path+"-devices")) {
		more, err := m.second()
		if err != nil {
			return nil, err
		}
		candidates = append(candidates, more)
	}
	for _, p := range candidates {
		fd, err := openDir(p.v2, name)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return &Cgroup{m: m, name: name, at: p, v1: m.v1Of(p), fd: fd}, nil
	}
	return nil, wire.Errorf(wire.NotFound, "no cgroup %s: %w", nameOrPath, unix.ENOENT)
}

// existing opens the parent of a loaded cgroup; it must be there, so that a wrong path makes nothing.
func (m *Manager) existing(rel string) (*place, error) {
	if !exists(m.h.v2.root, path.Join(".", m.h.v2.base, rel)) {
		return nil, wire.Errorf(wire.NotFound, "no cgroup /%s: %w", rel, unix.ENOENT)
	}
	return m.place(rel)
}

// below turns a directory below the v2 root into one below the base.
func (m *Manager) below(dir string) (string, bool) {
	clean := strings.TrimPrefix(path.Clean(dir), "/")
	if base := m.h.v2.base; base != "" {
		if clean == base {
			return "", true
		}
		return strings.CutPrefix(clean, base+"/")
	}
	return clean, true
}

// List names the cgroups below the parent, in no order, those too of which a crash left only a part.
func (m *Manager) List() ([]string, error) {
	var names []string
	places := []*place{m.def}
	if exists(m.h.v2.root, path.Join(".", m.h.v2.base, m.def.path+"-devices")) {
		more, err := m.second()
		if err != nil {
			return nil, err
		}
		places = append(places, more)
	}
	for _, p := range places {
		for _, dir := range append([]int{p.v2}, p.v1...) {
			if dir < 0 {
				continue
			}
			sub, err := subdirs(dir, ".")
			if err != nil {
				return nil, err
			}
			names = append(names, sub...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// Discard removes whatever there is of a cgroup below the parent by its name: what List shows and Load cannot find.
// Processes in it are killed.
func (m *Manager) Discard(name string) error {
	c, err := m.Load(name)
	if wire.ClassOf(err) == wire.NotFound {
		c, err = &Cgroup{m: m, name: name, at: m.def, v1: slices.Clone(m.def.v1), fd: -1}, nil
		m.mu.Lock()
		if m.more != nil { // in the devices tree it may be in either
			c.v1 = append(c.v1, m.v1Of(m.more)...)
		}
		m.mu.Unlock()
	}
	if err != nil {
		return err
	}
	if c.fd >= 0 {
		if err := c.Kill(); err != nil {
			return err
		}
	}
	return c.Remove()
}

// LeaveThread moves a thread that JoinThread moved back to the v1 cgroups this process was in at Open. tid 0 is the
// calling thread.
func (m *Manager) LeaveThread(tid int) error {
	text := strconv.Itoa(tid)
	for i, fd := range m.home {
		if _, err := unix.Write(fd, []byte(text)); err != nil {
			return fmt.Errorf("moving thread %d to %s%s: %w", tid, m.trees[i].mount, m.trees[i].own, err)
		}
	}
	return nil
}

// Close closes the descriptors; it removes nothing. No Cgroup of m may be used afterwards.
func (m *Manager) Close() error {
	if m.program >= 0 {
		unix.Close(m.program)
		m.program = -1
	}
	for _, fd := range m.home {
		unix.Close(fd)
	}
	m.home = nil
	m.def.close()
	m.more.close()
	for _, p := range m.places {
		p.close()
	}
	m.def, m.more, m.places = nil, nil, nil
	return nil
}

// Remove deletes the manager's own two directories in every hierarchy; the cgroups in them must have been removed.
func (m *Manager) Remove() error {
	var failed error
	for _, name := range []string{m.def.path, m.def.path + "-devices"} {
		for _, t := range append([]*hierarchy{&m.h.v2}, m.trees...) {
			p := path.Join(".", t.base, name)
			if err := unix.Unlinkat(t.root, p, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
				failed = errors.Join(failed, fmt.Errorf("removing cgroup %s in %s: %w", p, t.mount, err))
			}
		}
	}
	return failed
}
