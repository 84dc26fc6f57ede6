//go:build linux

package agent

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/network"
	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// mounter gathers the mounts of one start, and finds the place for each inside the root.
type mounter struct {
	a    *Agent
	c    *container
	cell *cell
	root *root
	view *rootfs.View // the root with all mounts that have their place, in so far as something may have to be found in them
	list []mountEntry
	own  []*os.File // to be closed after the start

	proc     *os.File // the place of /proc
	attached []launch.MountAt
}

// mountEntry is a mount and where it goes.
type mountEntry struct {
	target string // clean and absolute
	mount  *os.File
	at     *os.File // the place, where it is known already
	file   bool     // it is a file and not a directory
	desc   string
	user   bool // asked for, not one of the standard ones
}

func (m *mounter) close() { closeAll(m.own) }

// keep makes f closed after the start.
func (m *mounter) keep(f *os.File) *os.File {
	m.own = append(m.own, f)
	return f
}

func (m *mounter) add(e mountEntry) { m.list = append(m.list, e) }

// prepare makes all mounts of the container and resolves their places.
func (m *mounter) prepare() error {
	m.view = rootfs.NewView(m.root.mount)
	if err := m.user(); err != nil {
		return err
	}
	users := len(m.list)
	if err := m.standard(); err != nil {
		return err
	}
	if err := m.files(); err != nil {
		return err
	}
	// Where a user's mount has the very place of a standard one, it replaces it.
	if users > 0 {
		m.list = slices.DeleteFunc(m.list, func(e mountEntry) bool {
			return !e.user && slices.ContainsFunc(m.list[:users], func(u mountEntry) bool { return u.target == e.target })
		})
		// What lies below another comes after it; else the order is that of the request, behind the standard ones.
		slices.SortStableFunc(m.list, func(a, b mountEntry) int {
			if d := depth(a.target) - depth(b.target); d != 0 {
				return d
			}
			return boolInt(a.user) - boolInt(b.user)
		})
	}
	var err error
	if m.proc, err = m.root.place(placeProc); err != nil {
		return err
	}
	for _, e := range m.list {
		// The place of a standard mount that lies in a user's is found in that.
		if users > 0 && e.at != nil && slices.ContainsFunc(m.list, func(u mountEntry) bool { return u.user && strings.HasPrefix(e.target, u.target+"/") }) {
			e.at = nil
		}
		if err := m.place(e, users > 0); err != nil {
			return err
		}
	}
	return nil
}

func depth(p string) int { return strings.Count(p, "/") }

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// procTargets are the only places in /proc that something may be mounted on: what tools like lxcfs need. (As runc;
// anything else there would let a container change what its own walls read.)
var procTargets = []string{"/proc/cpuinfo", "/proc/diskstats", "/proc/meminfo", "/proc/stat", "/proc/swaps", "/proc/uptime",
	"/proc/loadavg", "/proc/slabinfo", "/proc/net/dev", "/proc/sys/kernel/ns_last_pid", "/proc/sys/crypto/fips_enabled"}

// place resolves the target of e and queues it.
func (m *mounter) place(e mountEntry, nested bool) error {
	if e.target == "/" {
		return wire.Errorf(wire.Invalid, "invalid mount: destination can't be '/'")
	}
	if e.target == "/proc" || strings.HasPrefix(e.target, "/proc/") {
		if !slices.Contains(procTargets, e.target) {
			return wire.Errorf(wire.Invalid, "%q cannot be mounted because it is inside /proc", e.target)
		}
		m.attached = append(m.attached, launch.MountAt{Mount: e.mount, Proc: strings.TrimPrefix(e.target, "/proc/"), Desc: e.desc})
		return nil
	}
	at := e.at
	if at == nil {
		var err error
		if at, err = m.view.Target(e.target, !e.file); err != nil {
			return err
		}
		m.keep(at)
	}
	if nested { // later targets may lie in this mount
		if err := m.view.Add(rootfs.MountAt{Mount: e.mount, Target: at}); err != nil {
			return err
		}
	}
	m.attached = append(m.attached, launch.MountAt{Mount: e.mount, Target: at, Desc: e.desc})
	return nil
}

// standard adds what every container has.
func (m *mounter) standard() error {
	r, fs := m.c.run, m.cell.fs
	dev, err := m.root.place(placeDev)
	if err != nil {
		return err
	}
	sys, err := m.root.place(placeSys)
	if err != nil {
		return err
	}
	m.add(mountEntry{target: "/dev", mount: fs.dev, at: dev, desc: "tmpfs on /dev"})
	m.add(mountEntry{target: "/sys", mount: fs.sys, at: sys, desc: "sysfs on /sys"})
	if !fs.together {
		m.add(mountEntry{target: "/dev/pts", mount: fs.pts, at: fs.ptsAt, desc: "devpts on /dev/pts"})
		m.add(mountEntry{target: "/dev/mqueue", mount: fs.mqueue, at: fs.mqueueAt, desc: "mqueue on /dev/mqueue"})
		if fs.shm != nil {
			m.add(mountEntry{target: "/dev/shm", mount: fs.shm, at: fs.shmAt, desc: "tmpfs on /dev/shm"})
		}
		for _, c := range fs.cgroups { // "cgroup on /sys/fs/cgroup/memory"
			_, target, _ := strings.Cut(c.Desc, " on ")
			m.add(mountEntry{target: target, mount: c.Mount, at: c.Target, desc: c.Desc})
		}
	}
	if r.ShmSize > 0 && r.ShmSize != defaultShm && m.cell.kind.ipc == "" { // over the one of usual size
		shm, err := newShm(r.ShmSize)
		if err != nil {
			return err
		}
		m.add(mountEntry{target: "/dev/shm", mount: m.keep(shm), at: fs.shmAt, desc: "tmpfs on /dev/shm"})
	}
	if r.Privileged {
		if err := setAttr(fs.sys, true, unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return err
		}
	}
	if r.TTY {
		// The other end of the terminal, so that programs find it under its usual name too. Before Linux 6.15 the
		// mount it is in must be attached to be cloned; then /dev/console is left out.
		if tree, err := cloneTree(fdOf(m.c.main.child[0]), "", false); err == nil {
			m.add(mountEntry{target: "/dev/console", mount: m.keep(tree), file: true, desc: "terminal on /dev/console"})
			if fd, err := unix.Openat(fdOf(fs.dev), "console", unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o600); err == nil {
				unix.Close(fd)
			}
			at, err := openPath(fs.dev, "console")
			if err != nil {
				return err
			}
			m.list[len(m.list)-1].at = m.keep(at)
		}
	}
	return nil
}

// files adds the files that the engine writes for the container.
func (m *mounter) files() error {
	r := m.c.run
	etc := m.cell.fs.etc
	if r.Net.Mode == "container" {
		if etc == nil {
			return nil
		}
	} else {
		texts, err := network.FileTexts(r, m.c.endpoint)
		if err != nil {
			return err
		}
		if etc == nil {
			if etc, err = writeEtc(m.c.dir, texts); err != nil {
				return err
			}
			m.own = append(m.own, etc.mounts[:]...)
		} else {
			for i, text := range texts {
				if _, err := unix.Pwrite(fdOf(etc.files[i]), []byte(text), 0); err != nil {
					return fmt.Errorf("writing %s: %w", network.FileNames[i], err)
				}
			}
		}
	}
	for i, name := range network.FileNames {
		if etc.mounts[i] == nil {
			continue
		}
		at, err := m.root.place(placeFiles + i)
		if err != nil {
			return err
		}
		m.add(mountEntry{target: "/etc/" + name, mount: etc.mounts[i], at: at, file: true, desc: name + " on /etc/" + name})
	}
	return nil
}

// writeEtc is the way of older kernels: files in the container's state directory, bound from there.
func writeEtc(dir string, texts [len(network.FileNames)]string) (*etcFiles, error) {
	e := &etcFiles{}
	for i, text := range texts {
		name := filepath.Join(dir, network.FileNames[i])
		err := os.WriteFile(name, []byte(text), 0o644)
		if err == nil {
			e.mounts[i], err = cloneTree(unix.AT_FDCWD, name, false)
		}
		if err == nil {
			err = setAttr(e.mounts[i], false, unix.MountAttr{Propagation: unix.MS_PRIVATE})
		}
		if err != nil {
			e.close()
			return nil, fmt.Errorf("writing %s: %w", network.FileNames[i], err)
		}
	}
	return e, nil
}

// user adds what was asked for.
func (m *mounter) user() error {
	for i := range m.c.run.Mounts {
		w := &m.c.run.Mounts[i]
		e := mountEntry{target: path.Clean("/" + w.Target), user: true, desc: w.Type + " " + w.Source + " on " + w.Target}
		var err error
		switch w.Type {
		case "bind":
			err = m.bind(w, &e)
		case "volume":
			err = m.volume(w, &e)
		case "tmpfs":
			err = m.tmpfs(w, &e)
		default:
			err = wire.Errorf(wire.Invalid, "mount of unknown type %q on %s", w.Type, w.Target)
		}
		if err != nil {
			return err
		}
		m.add(e)
	}
	return nil
}

// bind takes a host path as a detached mount: from here on it is a descriptor, whatever becomes of the path.
func (m *mounter) bind(w *wire.Mount, e *mountEntry) error {
	fd, err := unix.Open(w.Source, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err == unix.ENOENT && w.CreateSource {
		if err := os.MkdirAll(w.Source, 0o755); err != nil {
			return wire.Errorf(wire.Invalid, "error while creating mount source path '%s': %w", w.Source, err)
		}
		fd, err = unix.Open(w.Source, unix.O_PATH|unix.O_CLOEXEC, 0)
	}
	if isMissing(err) {
		return wire.Errorf(wire.Invalid, "bind source path does not exist: %s", w.Source)
	}
	if err != nil {
		return wire.Errorf(wire.Invalid, "opening bind source %s: %w", w.Source, err)
	}
	defer unix.Close(fd)
	if err := checkPropagation(fd, w); err != nil {
		return err
	}
	return m.take(fd, w, e)
}

// take makes the mount of what fd, an O_PATH descriptor, is.
func (m *mounter) take(fd int, w *wire.Mount, e *mountEntry) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat of mount source %s: %w", w.Source, err)
	}
	e.file = st.Mode&unix.S_IFMT != unix.S_IFDIR
	tree, err := cloneTree(fd, "", !w.NonRecursive && w.Recursive != "disabled")
	if err != nil {
		return wire.Errorf(wire.Invalid, "mounting %s on %s: %w", w.Source, w.Target, err)
	}
	e.mount = m.keep(tree)
	return setMountOptions(tree, w)
}

// propagations are Docker's words.
var propagations = map[string]uint64{
	"": unix.MS_PRIVATE, "private": unix.MS_PRIVATE, "rprivate": unix.MS_PRIVATE, "slave": unix.MS_SLAVE, "rslave": unix.MS_SLAVE,
	"shared": unix.MS_SHARED, "rshared": unix.MS_SHARED,
}

func setMountOptions(tree *os.File, w *wire.Mount) error {
	kind, ok := propagations[w.Propagation]
	if !ok {
		return wire.Errorf(wire.Invalid, "invalid propagation mode %q for mount %s", w.Propagation, w.Target)
	}
	recursive := w.Propagation == "" || w.Propagation[0] == 'r'
	attr := unix.MountAttr{Propagation: kind}
	if w.ReadOnly && recursive && w.Recursive != "writable" {
		// All in one call, which is all or nothing.
		attr.Attr_set = unix.MOUNT_ATTR_RDONLY
		err := setAttr(tree, true, attr)
		if err == nil || w.Recursive == "readonly" {
			if err != nil {
				return wire.Errorf(wire.Invalid, "making mount %s recursively read-only: %w", w.Target, err)
			}
			return nil
		}
		attr.Attr_set = 0 // a mount below that cannot be: as Docker does without the word, only the top one is
	}
	if err := setAttr(tree, recursive, attr); err != nil {
		return err
	}
	if !w.ReadOnly {
		return nil
	}
	err := setAttr(tree, w.Recursive != "writable", unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	if err != nil && w.Recursive == "readonly" {
		return wire.Errorf(wire.Invalid, "making mount %s recursively read-only: %w", w.Target, err)
	}
	if err != nil {
		err = setAttr(tree, false, unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	}
	return err
}

// checkPropagation refuses shared and slave for a source whose own mount is not, as Docker does: mounts made on the
// host would never arrive.
func checkPropagation(fd int, w *wire.Mount) error {
	if kind := propagations[w.Propagation]; kind != unix.MS_SHARED && kind != unix.MS_SLAVE {
		return nil
	}
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return fmt.Errorf("finding the mount of %s: %w", w.Source, err)
	}
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("finding the mount of %s: %w", w.Source, err)
	}
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 7 || f[0] != strconv.FormatUint(st.Mnt_id, 10) {
			continue
		}
		shared, slave := false, false
		for _, tag := range f[6:] {
			if tag == "-" {
				break
			}
			shared = shared || strings.HasPrefix(tag, "shared:")
			slave = slave || strings.HasPrefix(tag, "master:")
		}
		switch {
		case strings.HasSuffix(w.Propagation, "shared") && !shared:
			return wire.Errorf(wire.Invalid, "path %s is mounted on %s but it is not a shared mount", w.Source, f[4])
		case strings.HasSuffix(w.Propagation, "slave") && !shared && !slave:
			return wire.Errorf(wire.Invalid, "path %s is mounted on %s but it is not a shared or slave mount", w.Source, f[4])
		}
		return nil
	}
	return nil
}

// volume mounts a local volume, filled from the image if it is empty.
func (m *mounter) volume(w *wire.Mount, e *mountEntry) error {
	dir, err := m.a.store.Volume(w.Source)
	if err != nil {
		return err
	}
	vol, err := os.OpenFile(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("opening volume %s: %w", w.Source, err)
	}
	defer vol.Close()
	if !w.NoCopy && w.Subpath == "" {
		if err := m.a.store.CopyUp(m.root.mount, e.target, vol); err != nil {
			return err
		}
	}
	if w.Subpath == "" {
		return m.take(fdOf(vol), w, e)
	}
	fd, err := unix.Openat2(fdOf(vol), w.Subpath, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV})
	if err != nil {
		return wire.Errorf(wire.Invalid, "cannot access path %s in volume %s: %w", w.Subpath, w.Source, err)
	}
	defer unix.Close(fd)
	return m.take(fd, w, e)
}

// tmpfs makes a file system in memory. Without a mode it looks like the directory it covers.
func (m *mounter) tmpfs(w *wire.Mount, e *mountEntry) error {
	attrs := unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC
	options := []string{"source=tmpfs"}
	mode := false
	for _, o := range strings.Split(w.Options, ",") {
		switch o {
		case "", "rw", "sync", "async", "diratime", "defaults":
		case "ro":
			attrs |= unix.MOUNT_ATTR_RDONLY
		case "suid":
			attrs &^= unix.MOUNT_ATTR_NOSUID
		case "nosuid":
			attrs |= unix.MOUNT_ATTR_NOSUID
		case "dev":
			attrs &^= unix.MOUNT_ATTR_NODEV
		case "nodev":
			attrs |= unix.MOUNT_ATTR_NODEV
		case "exec":
			attrs &^= unix.MOUNT_ATTR_NOEXEC
		case "noexec":
			attrs |= unix.MOUNT_ATTR_NOEXEC
		case "noatime":
			attrs |= unix.MOUNT_ATTR_NOATIME
		case "nodiratime":
			attrs |= unix.MOUNT_ATTR_NODIRATIME
		case "relatime", "private", "rprivate", "slave", "rslave", "shared", "rshared":
		case "strictatime":
			attrs |= unix.MOUNT_ATTR_STRICTATIME
		default:
			mode = mode || strings.HasPrefix(o, "mode=")
			options = append(options, o)
		}
	}
	if w.ReadOnly {
		attrs |= unix.MOUNT_ATTR_RDONLY
	}
	if !mode {
		fd, err := unix.Openat2(fdOf(m.root.mount), e.target, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
		if err == nil {
			var st unix.Stat_t
			if unix.Fstat(fd, &st) == nil {
				options = append(options, fmt.Sprintf("mode=%04o", st.Mode&0o7777))
			}
			unix.Close(fd)
		}
	}
	mnt, err := newMount("tmpfs", attrs, options...)
	if err != nil {
		return wire.Errorf(wire.Invalid, "tmpfs on %s: %w", w.Target, err)
	}
	e.mount = m.keep(mnt)
	return nil
}

// openPath opens what name is in dir, and not what it leads to.
func openPath(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(fdOf(dir), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s in %s: %w", name, dir.Name(), err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
