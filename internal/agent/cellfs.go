//go:build linux

package agent

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/cgroup"
	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/network"
)

// cellFS are the mounts that are the same in every container of a kind, detached: /dev with its nodes, /dev/pts,
// /dev/shm, /dev/mqueue and /sys. They are made on the cell's thread, because /sys shows the network namespace, and
// /dev/mqueue the IPC namespace, of who mounts them.
type cellFS struct {
	dev, pts, mqueue, sys *os.File
	shm                   *os.File  // nil: none
	etc                   *etcFiles // nil: there are none, or not in this way

	null                   *os.File // dev's null device, open for reading and writing
	ptsAt, shmAt, mqueueAt *os.File // their places in dev
	cgroupAt               *os.File // the place of the cgroup tree in sys; nil: this kernel has none
	cgroups                []launch.MountAt

	// together: what goes into dev and sys is mounted there already, and they are attached with it.
	together bool
}

// defaultShm is the size of /dev/shm unless another is asked for, in bytes; Docker's.
const defaultShm = 64 << 20

func newCellFS(k cellKind, j joins, cg *cgroup.Cgroup) (_ *cellFS, err error) {
	m := &cellFS{}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	if m.dev, err = newDev(); err != nil {
		return nil, err
	}
	null, err := unix.Openat(fdOf(m.dev), "null", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("opening /dev/null: %w", err)
	}
	m.null = os.NewFile(uintptr(null), "null device")
	for name, at := range map[string]**os.File{"pts": &m.ptsAt, "shm": &m.shmAt, "mqueue": &m.mqueueAt} {
		if *at, err = openPath(m.dev, name); err != nil {
			return nil, err
		}
	}
	if m.pts, err = newMount("devpts", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC,
		"source=devpts", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"); err != nil {
		return nil, err
	}
	switch k.ipc {
	case "":
		m.shm, err = newShm(defaultShm)
	case "host":
		m.shm, err = cloneTree(unix.AT_FDCWD, "/dev/shm", false)
	case "container":
		m.shm, err = shmOf(j.ipcMounts)
	}
	if err != nil {
		return nil, err
	}
	if k.net == "container" {
		m.etc, err = etcOf(j.netMounts)
	} else {
		m.etc, err = newEtc()
	}
	if err != nil {
		return nil, err
	}
	if m.mqueue, err = newMount("mqueue", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, "source=mqueue"); err != nil {
		return nil, err
	}
	if k.net != "host" {
		if m.sys, err = newMount("sysfs", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC|unix.MOUNT_ATTR_RDONLY, "source=sysfs"); err != nil {
			return nil, err
		}
	} else if m.sys, err = hostSys(); err != nil {
		return nil, err
	}
	if m.cgroupAt, err = openPath(m.sys, "fs/cgroup"); isMissing(err) {
		m.cgroupAt = nil
	} else if err != nil {
		return nil, err
	}
	if err = m.viewCgroup(cg, false); err != nil {
		return nil, err
	}
	if !k.split {
		m.together, err = m.assemble()
	}
	return m, err
}

// hostSys is a sysfs that shows the host's network.
func hostSys() (*os.File, error) {
	sys, err := cloneTree(unix.AT_FDCWD, "/sys", false)
	if err != nil {
		return nil, err
	}
	if err := setAttr(sys, false, unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY, Propagation: unix.MS_PRIVATE}); err != nil {
		sys.Close()
		return nil, err
	}
	return sys, nil
}

// viewCgroup prepares what the container sees of its cgroup at /sys/fs/cgroup.
func (m *cellFS) viewCgroup(cg *cgroup.Cgroup, writable bool) error {
	m.closeCgroups()
	if m.cgroupAt == nil {
		return nil
	}
	v1, err := cg.OpenV1("")
	if err != nil {
		return err
	}
	dirs := []launch.CgroupDir{{Dir: cg.FD()}}
	for _, d := range v1 {
		defer d.Close()
		dirs = append(dirs, launch.CgroupDir{Name: d.Name, Dir: fdOf(d.File)})
	}
	if len(v1) > 0 {
		dirs[0].Name = "unified"
	}
	m.cgroups, err = launch.CgroupView(m.cgroupAt, dirs, writable)
	return err
}

func (m *cellFS) closeCgroups() {
	for _, c := range m.cgroups {
		c.Mount.Close()
		if c.Target != m.cgroupAt {
			c.Target.Close()
		}
	}
	m.cgroups = nil
}

// assemble mounts the small mounts in the two large ones, so that a start attaches two trees and not a dozen mounts.
// It tells whether the kernel does that to mounts that are attached nowhere (since Linux 6.15).
func (m *cellFS) assemble() (bool, error) {
	list := append([]launch.MountAt{{Mount: m.pts, Target: m.ptsAt}, {Mount: m.mqueue, Target: m.mqueueAt}}, m.cgroups...)
	if m.shm != nil {
		list = append(list, launch.MountAt{Mount: m.shm, Target: m.shmAt})
	}
	for i, c := range list {
		err := unix.MoveMount(fdOf(c.Mount), "", fdOf(c.Target), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
		if err == unix.EINVAL && i == 0 {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("assembling the standard mounts: %w", err)
		}
	}
	return true, nil
}

func (m *cellFS) close() {
	m.etc.close()
	m.closeCgroups()
	closeAll([]*os.File{m.dev, m.null, m.pts, m.shm, m.mqueue, m.sys, m.ptsAt, m.shmAt, m.mqueueAt, m.cgroupAt})
}

// visit calls fn with the calling thread in another mount namespace: the kernel copies a mount only for who is in its
// namespace. It is for a cell's thread, which nothing else uses. Paths in there are a container's to decide: see openThere.
func visit(mnt *os.File, fn func() error) error {
	home, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return fmt.Errorf("visiting a container's mounts: %w", err)
	}
	defer home.Close()
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // threads share root and directory, which the visit changes
		return fmt.Errorf("visiting a container's mounts: %w", err)
	}
	if err := unix.Setns(fdOf(mnt), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("visiting a container's mounts: %w", err)
	}
	err = fn()
	if back := unix.Setns(fdOf(home), unix.CLONE_NEWNS); back != nil {
		return fmt.Errorf("coming back from a container's mounts: %w", back) // the thread is given up
	}
	return err
}

// cloneThere takes a mount from the namespace that is visited. No link is followed.
func cloneThere(path string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC | flags, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return nil, fmt.Errorf("opening %s of another container: %w", path, err)
	}
	defer unix.Close(fd)
	return cloneTree(fd, "", false)
}

// shmOf takes /dev/shm out of another container's mount namespace.
func shmOf(mnt *os.File) (shm *os.File, err error) {
	err = visit(mnt, func() error {
		shm, err = cloneThere("/dev/shm", unix.O_DIRECTORY)
		return err
	})
	return shm, err
}

// etcOf takes the files that the engine wrote for another container, in so far as they are still there.
func etcOf(mnt *os.File) (*etcFiles, error) {
	e := &etcFiles{}
	err := visit(mnt, func() error {
		for i, name := range network.FileNames {
			m, err := cloneThere("/etc/"+name, 0)
			if err != nil && !isMissing(err) && !errors.Is(err, unix.ELOOP) {
				return err
			}
			e.mounts[i] = m
		}
		return nil
	})
	if err != nil {
		e.close()
		return nil, err
	}
	return e, nil
}

// newEtc makes empty files. It returns nil where the kernel does not copy a mount that is attached nowhere (before
// Linux 6.15); then they are files in the exec root, made by the start.
func newEtc() (_ *etcFiles, err error) {
	dir, err := newMount("tmpfs", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC, "source=etc", "mode=755", "size=16m")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	e := &etcFiles{}
	defer func() {
		if err != nil {
			e.close()
		}
	}()
	for i, name := range network.FileNames {
		fd, err := unix.Openat(fdOf(dir), name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC, 0o644)
		if err != nil {
			return nil, fmt.Errorf("making %s: %w", name, err)
		}
		e.files[i] = os.NewFile(uintptr(fd), name)
		if err := unix.Fchmod(fd, 0o644); err != nil {
			return nil, fmt.Errorf("making %s: %w", name, err)
		}
		if e.mounts[i], err = cloneTree(fdOf(dir), name, false); err != nil {
			if errors.Is(err, unix.EINVAL) {
				e.close()
				return nil, nil
			}
			return nil, err
		}
	}
	return e, nil
}

func newShm(size int64) (*os.File, error) {
	return newMount("tmpfs", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC,
		"source=shm", "mode=1777", fmt.Sprintf("size=%d", size))
}

// devNodes are the devices of every container, Docker's list.
var devNodes = []struct {
	name         string
	major, minor uint32
}{{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}}

var devLinks = [][2]string{
	{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"},
	{"pts/ptmx", "ptmx"}, {"/proc/kcore", "core"},
}

// newDev makes /dev.
func newDev() (_ *os.File, err error) {
	dev, err := newMount("tmpfs", unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_STRICTATIME, "source=tmpfs", "mode=755", "size=65536k")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			dev.Close()
		}
	}()
	for _, n := range devNodes {
		if err := mknod(dev, n.name, unix.S_IFCHR, 0o666, n.major, n.minor, 0, 0); err != nil {
			return nil, err
		}
	}
	for _, l := range devLinks {
		if err := unix.Symlinkat(l[0], fdOf(dev), l[1]); err != nil {
			return nil, fmt.Errorf("making /dev/%s: %w", l[1], err)
		}
	}
	for _, d := range []string{"pts", "shm", "mqueue"} {
		if err := unix.Mkdirat(fdOf(dev), d, 0o755); err != nil {
			return nil, fmt.Errorf("making /dev/%s: %w", d, err)
		}
	}
	return dev, nil
}

// mknod makes a device in dir. The mode is set after it, as the agent's umask is not to matter.
func mknod(dir *os.File, name string, typ, mode, major, minor uint32, uid, gid int) error {
	if err := unix.Mknodat(fdOf(dir), name, typ|mode, int(unix.Mkdev(major, minor))); err != nil {
		return fmt.Errorf("making device %s: %w", name, err)
	}
	if err := unix.Fchmodat(fdOf(dir), name, mode, 0); err != nil {
		return fmt.Errorf("giving device %s its mode: %w", name, err)
	}
	if uid != 0 || gid != 0 {
		if err := unix.Fchownat(fdOf(dir), name, uid, gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("giving device %s its owner: %w", name, err)
		}
	}
	return nil
}

// newMount makes a detached mount of a new file system. options are "key=value" or "flag".
func newMount(fstype string, attrs int, options ...string) (*os.File, error) {
	fs, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("mounting %s: %w", fstype, err)
	}
	defer unix.Close(fs)
	for _, o := range options {
		if err := setOption(fs, o); err != nil {
			return nil, fmt.Errorf("mounting %s with option %s: %w", fstype, o, explain(fs, err))
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("mounting %s: %w", fstype, explain(fs, err))
	}
	m, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attrs)
	if err != nil {
		return nil, fmt.Errorf("mounting %s: %w", fstype, err)
	}
	return os.NewFile(uintptr(m), fstype), nil
}

func setOption(fs int, o string) error {
	for i := range len(o) {
		if o[i] == '=' {
			return unix.FsconfigSetString(fs, o[:i], o[i+1:])
		}
	}
	return unix.FsconfigSetFlag(fs, o)
}

// explain adds what the kernel says about a mount that it refused: it can be read from the descriptor of fsopen.
func explain(fs int, err error) error {
	var buf [512]byte
	if n, rerr := unix.Read(fs, buf[:]); rerr == nil && n > 2 {
		return fmt.Errorf("%w (%s)", err, trimLine(string(buf[2:n])))
	}
	return err
}

func trimLine(s string) string {
	for len(s) > 0 && (s[len(s)-1] == '\n' || s[len(s)-1] == 0) {
		s = s[:len(s)-1]
	}
	return s
}

// cloneTree takes a detached copy of the mount at path, with those below it if recursive.
func cloneTree(dir int, path string, recursive bool) (*os.File, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	fd, err := unix.OpenTree(dir, path, flags)
	if err != nil {
		return nil, fmt.Errorf("taking mount %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// setAttr changes attributes of a detached mount, and with recursive of all below it.
func setAttr(m *os.File, recursive bool, attr unix.MountAttr) error {
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(fdOf(m), "", flags, &attr); err != nil {
		return fmt.Errorf("setting attributes of mount %s: %w", m.Name(), err)
	}
	return nil
}

// isMissing tells whether err says that a path is not there.
func isMissing(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) }
