//go:build linux && (amd64 || arm64)

package launch

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// root changes to the new root and builds what is inside it. Still root in the agent's user namespace, in a mount
// namespace of our own.
func (c *compiler) root() {
	if c.Root == nil {
		return
	}
	p := c.p
	root := p.file(c.Root, "root")
	attach := func() {
		p.add("attach the root", "", unix.SYS_MOVE_MOUNT, root, p.str(""), atFDCWD(), p.str("/"), flagsOf(unix.MOVE_MOUNT_F_EMPTY_PATH, moveBits))
		p.add("enter the root", "", unix.SYS_FCHDIR, root)
	}
	if !c.plan.template {
		// In a copy of a Thread's mount namespace: nothing is under the new root that would have to go.
		attach()
		p.add("change to the root", "", unix.SYS_CHROOT, p.str("."))
	} else {
		// Before the first mount: it would reach the host through a shared parent, and pivot_root refuses one.
		p.add("make mounts private", "", unix.SYS_MOUNT, num(0), p.str("/"), num(0), flagsOf(unix.MS_REC|unix.MS_PRIVATE, mountBits), num(0))
		attach()
		// The old root ends up on top of the new one, where the umount takes it away with all that is below.
		p.add("pivot to the root", "", unix.SYS_PIVOT_ROOT, p.str("."), p.str("."))
		p.add("detach the old root", "", unix.SYS_UMOUNT2, p.str("."), flagsOf(unix.MNT_DETACH, umountBits))
		p.add("enter the root", "", unix.SYS_CHDIR, p.str("/"))
	}
	c.proc()
	for _, m := range c.Mounts {
		c.mount(m)
	}
	// Before /proc/sys becomes read-only.
	for _, k := range sortedKeys(c.Sysctls) {
		c.sysctl(k, c.Sysctls[k])
	}
	for _, name := range c.Readonly {
		c.readonly(path.Clean("/" + name))
	}
	// After read-only: a path may be in both lists, and hidden is the stronger of the two.
	for _, name := range c.Masked {
		c.mask(path.Clean("/" + name))
	}
}

// proc mounts proc. The instance shows the PID namespace of the process that makes it, so unless the caller has one
// ready it is made here.
func (c *compiler) proc() {
	if c.Proc == nil {
		return
	}
	p := c.p
	if c.ProcMount != nil {
		c.procfs = p.file(c.ProcMount, "proc")
	} else {
		const what = "mount proc on /proc"
		fs, mnt := p.newSlot(), p.newSlot()
		p.add(what, "", unix.SYS_FSOPEN, p.str("proc"), flagsOf(unix.FSOPEN_CLOEXEC, fsopenBits)).to = fs
		p.add(what, "", unix.SYS_FSCONFIG, slot(fs), shown(unix.FSCONFIG_CMD_CREATE, "FSCONFIG_CMD_CREATE"), num(0), num(0), num(0))
		p.add(what, "", unix.SYS_FSMOUNT, slot(fs), flagsOf(unix.FSMOUNT_CLOEXEC, fsmountBits),
			flagsOf(unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, attrBits)).to = mnt
		c.procfs = slot(mnt)
	}
	p.add("attach proc to /proc", "", unix.SYS_MOVE_MOUNT, c.procfs, p.str(""), p.file(c.Proc, "/proc"), p.str(""),
		flagsOf(unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH, moveBits))
}

// mount attaches a prepared mount.
func (c *compiler) mount(m MountAt) {
	p := c.p
	from := p.file(m.Mount, m.Desc)
	if m.Target != nil {
		p.add("mount ", m.Desc, unix.SYS_MOVE_MOUNT, from, p.str(""), p.file(m.Target, "its target"), p.str(""),
			flagsOf(unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH, moveBits))
		return
	}
	if c.procfs.kind == wordNone || !plainProc(m.Proc) {
		c.fail(wire.Errorf(wire.Invalid, "mount %s: %q is no place in /proc", m.Desc, m.Proc))
		return
	}
	p.add("mount ", m.Desc, unix.SYS_MOVE_MOUNT, from, p.str(""), c.procfs, p.str(m.Proc), flagsOf(unix.MOVE_MOUNT_F_EMPTY_PATH, moveBits))
}

// plainProc tells whether name, a path below /proc, is one of the kernel's global entries: not in a process's
// directory, where links lead out of it.
func plainProc(name string) bool {
	if name == "" || path.Clean("/"+name) != "/"+name {
		return false
	}
	first, _, _ := strings.Cut(name, "/")
	return first != "self" && first != "thread-self" && strings.Trim(first, "0123456789") != ""
}

// sysctl writes one kernel parameter of the namespaces that were made. Which may be set is the daemon's rule.
func (c *compiler) sysctl(key, value string) {
	p := c.p
	// As sysctl(8): the separator is what comes first, dot or slash; the other then stands for itself, with the dot
	// written as a slash ("net.ipv4.conf.eth0/1.forwarding").
	file := key
	if dot := strings.IndexByte(key, '.'); dot >= 0 && !strings.Contains(key[:dot], "/") {
		file = strings.NewReplacer(".", "/", "/", ".").Replace(key)
	}
	if file == "" || strings.IndexByte(file, 0) >= 0 || path.Clean("/"+file) != "/"+file {
		c.fail(wire.Errorf(wire.Invalid, "sysctl %q: not a parameter", key))
		return
	}
	file = "sys/" + file
	fd := p.newSlot()
	p.add("set sysctl ", key, unix.SYS_OPENAT, c.procfs, p.str(file), flagsOf(unix.O_WRONLY|unix.O_CLOEXEC, openBits)).to = fd
	p.add("set sysctl ", key, unix.SYS_WRITE, slot(fd), p.str(value), num(len(value)))
	p.add("set sysctl ", key, unix.SYS_CLOSE, slot(fd))
}

// place resolves name for a mount on top of it: a directory descriptor and a path under it. Entries of /proc that no
// one else can shape are named by the descriptor of proc; for others an O_PATH descriptor is opened, without magic
// links. The step returned is one whose ENOENT means that there is nothing there.
func (c *compiler) place(what, name string) (dir, rel word, first label) {
	p := c.p
	if rest, ok := strings.CutPrefix(name, "/proc/"); ok && c.procfs.kind != wordNone && plainProc(rest) {
		return c.procfs, p.str(rest), noLabel
	}
	fd := p.newSlot()
	first = p.here()
	p.add(what, name, unix.SYS_OPENAT2, atFDCWD(), p.str(name), c.how(unix.O_PATH|unix.O_CLOEXEC), num(sizeofHow)).to = fd
	return slot(fd), p.str(""), first
}

// how is an open_how that stays inside the root and follows no magic link.
func (c *compiler) how(flags uint64) word {
	off := c.p.words(word{v: flags}, num(0), word{v: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	return dataAs(off, asHow)
}

const sizeofHow = 24

// readonly covers a path with a read-only bind of itself. It keeps the other attributes of the mount it is on.
func (c *compiler) readonly(name string) {
	p := c.p
	const what = "make read-only "
	dir, rel, first := c.place(what, name)
	tree := p.newSlot()
	flags := uint64(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_RECURSIVE | unix.AT_EMPTY_PATH)
	if first == noLabel {
		first = p.here()
	}
	p.add(what, name, unix.SYS_OPEN_TREE, dir, rel, flagsOf(flags, treeBits)).to = tree
	p.add(what, name, unix.SYS_MOUNT_SETATTR, slot(tree), p.str(""), flagsOf(unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, treeBits),
		c.readonlyAttr(), num(sizeofAttr))
	p.add(what, name, unix.SYS_MOVE_MOUNT, slot(tree), p.str(""), dir, rel,
		flagsOf(unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH, moveBits))
	c.skip(first)
}

// skip lets the step go on behind the ones added since when what it names is not there.
func (c *compiler) skip(l label) {
	s := &c.p.steps[l]
	s.alt, s.only = c.p.here(), unix.ENOENT
}

// mask hides a path: a file under the null device, a directory under an empty read-only one.
//
// Entries of /proc and /sys are the same in every instance, so whether one is a file, a directory or not there at all
// is looked up now, on the host's. What others are only the child can see, in the mounts it has attached.
func (c *compiler) mask(name string) {
	p := c.p
	const what = "mask "
	to := flagsOf(unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH, moveBits)
	kernels := strings.HasPrefix(name, "/proc/") || strings.HasPrefix(name, "/sys/")
	if kernels {
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			return // not in this kernel
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			dir, rel, first := c.place(what, name)
			if first == noLabel {
				first = p.here()
			}
			c.cover(name, dir, rel)
			c.skip(first)
			return
		}
		mnt, ok := c.emptyOfProc(name)
		if !ok {
			mnt, ok = c.empty()
		}
		if !ok {
			return
		}
		dir, rel, first := c.place(what, name)
		if first == noLabel {
			first = p.here()
		}
		p.add(what, name, unix.SYS_MOVE_MOUNT, mnt, p.str(""), dir, rel, to)
		c.skip(first)
		return
	}
	empty, ok := c.empty()
	if !ok {
		return
	}
	dir, rel, first := c.place(what, name)
	isDir := p.here()
	p.add(what, name, unix.SYS_OPENAT2, atFDCWD(), p.str(name), c.how(unix.O_PATH|unix.O_CLOEXEC|unix.O_DIRECTORY), num(sizeofHow))
	covered := p.here()
	p.add(what, name, unix.SYS_MOVE_MOUNT, empty, p.str(""), dir, rel, to)
	p.steps[isDir].alt, p.steps[isDir].only = p.here(), unix.ENOTDIR
	c.cover(name, dir, rel)
	p.steps[covered].zero = p.here()
	c.skip(first)
}

// emptyOfProc is a mount of an empty directory that the container's proc has anyway, which saves the making of a file
// system and its end: tty/ldisc has been kept for programs that look for it since line disciplines have no files there
// (fs/proc/proc_tty.c), and nobody can put anything into a directory of proc.
func (c *compiler) emptyOfProc(name string) (word, bool) {
	if c.procfs.kind == wordNone || !procHasEmpty() {
		return word{}, false
	}
	p := c.p
	const what = "mask "
	tree := p.newSlot()
	p.add(what, name, unix.SYS_OPEN_TREE, c.procfs, p.str(emptyInProc), flagsOf(unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC, treeBits)).to = tree
	p.add(what, name, unix.SYS_MOUNT_SETATTR, slot(tree), p.str(""), flagsOf(unix.AT_EMPTY_PATH, treeBits), c.readonlyAttr(), num(sizeofAttr))
	return slot(tree), true
}

const emptyInProc = "tty/ldisc"

var procHasEmpty = sync.OnceValue(func() bool {
	l, err := os.ReadDir("/proc/" + emptyInProc)
	return err == nil && len(l) == 0
})

// readonlyAttr is a mount_attr that makes read-only.
func (c *compiler) readonlyAttr() word {
	return shownData(c.p.words(word{v: unix.MOUNT_ATTR_RDONLY}, num(0), num(0), num(0)), "{MOUNT_ATTR_RDONLY}")
}

const sizeofAttr = 32

// empty is a detached mount of an empty read-only directory.
func (c *compiler) empty() (word, bool) {
	// A clone shares the file system of the first and costs a tenth of another one. Of a mount that is attached
	// nowhere it needs Linux 6.15.
	if c.emptyDir != nil {
		fd, err := unix.OpenTree(fdOf(c.emptyDir), "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
		if err == nil {
			return c.prepared(os.NewFile(uintptr(fd), "empty directory"), "empty directory", nil)
		}
		if !errors.Is(err, unix.EINVAL) {
			return c.prepared(nil, "", fmt.Errorf("clone the empty directory: %w", err))
		}
	}
	f, err := emptyMount()
	c.emptyDir = f
	return c.prepared(f, "empty directory", err)
}

// prepared makes f the plan's.
func (c *compiler) prepared(f *os.File, name string, err error) (word, bool) {
	if err != nil {
		c.fail(wire.Errorf(wire.Internal, "prepare masked paths: %w", err))
		return word{}, false
	}
	c.plan.own = append(c.plan.own, f)
	return c.p.file(f, name), true
}

func emptyMount() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen tmpfs: %w", err)
	}
	defer unix.Close(fs)
	// One inode, the root itself, and read-only as a file system and not only as a mount: whoever gets to remount it
	// still cannot put anything in.
	for _, o := range [][2]string{{"nr_inodes", "1"}, {"size", "4k"}, {"mode", "0555"}} {
		if err := unix.FsconfigSetString(fs, o[0], o[1]); err != nil {
			return nil, fmt.Errorf("fsconfig tmpfs %s=%s: %w", o[0], o[1], err)
		}
	}
	if err := unix.FsconfigSetFlag(fs, "ro"); err != nil {
		return nil, fmt.Errorf("fsconfig tmpfs ro: %w", err)
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("fsconfig tmpfs: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsmount tmpfs: %w", err)
	}
	return os.NewFile(uintptr(fd), "empty directory"), nil
}
