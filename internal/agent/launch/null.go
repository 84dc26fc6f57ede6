//go:build linux && (amd64 || arm64)

package launch

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// nullDevice is what stands for stdio that is not given: Null, or one made for this plan; nil after a failure.
func (c *compiler) nullDevice() *os.File {
	if c.Null != nil {
		return c.Null
	}
	if c.ownNull == nil {
		f, err := newNull()
		if err != nil {
			c.fail(wire.Errorf(wire.Internal, "prepare a null device: %w", err))
			return nil
		}
		c.plan.own = append(c.plan.own, f)
		c.ownNull = f
	}
	return c.ownNull
}

// cover hides the file at rel in dir under the null device.
//
// The kernel clones a mount only for who is in its mount namespace: for us if it is attached nowhere and ours (Linux
// 6.15), for the child once it has attached the container's /dev. If neither is so, the container was given a /dev by
// its user instead of its own, and an older kernel runs; then the host's device is what there is.
func (c *compiler) cover(name string, dir, rel word) {
	p := c.p
	const what = "mask "
	to := flagsOf(unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH, moveBits)
	null := c.nullDevice()
	if null == nil {
		return
	}
	mnt, err := cloneMount(fdOf(null), "")
	if err == nil {
		if w, ok := c.prepared(mnt, "null device", nil); ok {
			p.add(what, name, unix.SYS_MOVE_MOUNT, w, p.str(""), dir, rel, to)
		}
		return
	}
	if !errors.Is(err, unix.EINVAL) {
		c.prepared(nil, "", fmt.Errorf("clone the null device: %w", err))
		return
	}
	mnt, err = cloneMount(unix.AT_FDCWD, os.DevNull)
	host, ok := c.prepared(mnt, "host's null device", err)
	if !ok {
		return
	}
	tree := p.newSlot()
	clone := p.here()
	p.add(what, name, unix.SYS_OPEN_TREE, p.file(null, "null device"), p.str(""),
		flagsOf(unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH, treeBits)).to = tree
	covered := p.here()
	p.add(what, name, unix.SYS_MOVE_MOUNT, slot(tree), p.str(""), dir, rel, to)
	p.steps[clone].alt, p.steps[clone].only = p.here(), unix.EINVAL
	p.add(what, name, unix.SYS_MOVE_MOUNT, host, p.str(""), dir, rel, to)
	p.steps[covered].zero = p.here()
}

// cloneMount is replaced by tests that want an older kernel.
var cloneMount = func(dir int, name string) (*os.File, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	fd, err := unix.OpenTree(dir, name, flags)
	if err != nil {
		return nil, fmt.Errorf("open_tree: %w", err)
	}
	return os.NewFile(uintptr(fd), "null device"), nil
}

// nullFS is a file system that is attached nowhere, for null devices.
var nullFS = sync.OnceValues(func() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen tmpfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("fsconfig tmpfs: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsmount tmpfs: %w", err)
	}
	return os.NewFile(uintptr(fd), "null devices"), nil
})

var nulls atomic.Uint64 // made so far

// newNull opens a null device that is nobody else's: its file has no name any more, and goes with its last descriptor.
func newNull() (*os.File, error) {
	dir, err := nullFS()
	if err != nil {
		return nil, err
	}
	name := strconv.FormatUint(nulls.Add(1), 10)
	if err := unix.Mknodat(fdOf(dir), name, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))); err != nil {
		return nil, fmt.Errorf("mknod null device: %w", err)
	}
	defer unix.Unlinkat(fdOf(dir), name, 0)
	if err := unix.Fchmodat(fdOf(dir), name, 0o666, 0); err != nil { // whatever our umask
		return nil, fmt.Errorf("chmod null device: %w", err)
	}
	fd, err := unix.Openat(fdOf(dir), name, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open null device: %w", err)
	}
	return os.NewFile(uintptr(fd), "null device"), nil
}
