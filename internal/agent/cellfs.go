//go:build linux

package agent

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// cellFS are the mounts that are the same in every container of a kind, detached: /dev with its nodes, /dev/pts,
// /dev/shm, /dev/mqueue and /sys. They are made on the cell's thread, because /sys shows the network namespace, and
// /dev/mqueue the IPC namespace, of who mounts them.
type cellFS struct {
	dev, pts, mqueue, sys *os.File
	shm                   *os.File // nil: none

	ptsAt, shmAt, mqueueAt *os.File // their places in dev
}

// defaultShm is the size of /dev/shm unless another is asked for, in bytes; Docker's.
const defaultShm = 64 << 20

func newCellFS(k cellKind, j joins) (_ *cellFS, err error) {
	m := &cellFS{}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	if m.dev, err = newDev(); err != nil {
		return nil, err
	}
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
		m.shm, err = shmOf(j.mnt)
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
	} else if m.sys, err = cloneTree(unix.AT_FDCWD, "/sys", false); err != nil { // a sysfs of the host's network is the host's
		return nil, err
	}
	return m, nil
}

func (m *cellFS) close() {
	closeAll([]*os.File{m.dev, m.pts, m.shm, m.mqueue, m.sys, m.ptsAt, m.shmAt, m.mqueueAt})
}

// shmOf takes /dev/shm out of another container's mount namespace. It runs on a cell's thread, which visits there: the
// kernel copies a mount only for who is in its namespace. What is at the path is the other container's to decide, so
// no link is followed.
func shmOf(mnt *os.File) (*os.File, error) {
	const what = "sharing /dev/shm of another container"
	home, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, fmt.Errorf(what+": %w", err)
	}
	defer home.Close()
	if err := unix.Unshare(unix.CLONE_FS); err != nil { // threads share root and directory, which the visit changes
		return nil, fmt.Errorf(what+": %w", err)
	}
	if err := unix.Setns(fdOf(mnt), unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf(what+": %w", err)
	}
	tree, err := cloneShm()
	if back := unix.Setns(fdOf(home), unix.CLONE_NEWNS); back != nil {
		closeAll([]*os.File{tree})
		return nil, fmt.Errorf(what+": coming back: %w", back) // the thread is given up
	}
	if err != nil {
		return nil, fmt.Errorf(what+": %w", err)
	}
	return tree, nil
}

func cloneShm() (*os.File, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, "/dev/shm", &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return cloneTree(fd, "", false)
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
