//go:build linux && (amd64 || arm64)

package launch

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// CgroupDir is a container's own cgroup in one hierarchy.
type CgroupDir struct {
	Name string // its place under /sys/fs/cgroup, as "memory", "cpu,cpuacct" or "unified"; "" on a host with v2 alone
	Dir  int    // descriptor of the directory; O_PATH will do
}

// CgroupView prepares what a container sees at /sys/fs/cgroup, for Spec.Mounts. With one CgroupDir without a name that is
// the cgroup itself; else a tmpfs with a directory for each hierarchy, and links such as cpu to "cpu,cpuacct". at is an
// O_PATH descriptor of fs/cgroup in the container's own sysfs. All is read-only unless writable is set (--privileged).
// The files in the result are the caller's.
//
// The mounts are binds of the container's cgroups, which look just as a mount made inside a new cgroup namespace does,
// and can be made before there is one. They must be made on a thread that sees the host's mounts.
func CgroupView(at *os.File, dirs []CgroupDir, writable bool) (mounts []MountAt, err error) {
	defer func() {
		if err != nil {
			for _, m := range mounts {
				m.Mount.Close()
				if m.Target != at { // which is the caller's
					m.Target.Close()
				}
			}
			mounts, err = nil, wire.Errorf(wire.Internal, "prepare /sys/fs/cgroup: %w", err)
		}
	}()
	attr := &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if !writable {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	bind := func(d CgroupDir, target *os.File) error {
		fd, err := unix.OpenTree(d.Dir, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
		if err != nil {
			return fmt.Errorf("open_tree of cgroup %q: %w", d.Name, err)
		}
		desc := strings.TrimSuffix("cgroup on /sys/fs/cgroup/"+d.Name, "/")
		mounts = append(mounts, MountAt{Mount: os.NewFile(uintptr(fd), desc), Target: target, Desc: desc})
		if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
			return fmt.Errorf("mount_setattr of cgroup %q: %w", d.Name, err)
		}
		return nil
	}
	if len(dirs) == 1 && dirs[0].Name == "" {
		return mounts, bind(dirs[0], at)
	}
	tmp, err := hierarchiesMount()
	if err != nil {
		return nil, err
	}
	mounts = append(mounts, MountAt{Mount: tmp, Target: at, Desc: "tmpfs on /sys/fs/cgroup"})
	for _, d := range dirs {
		if d.Name == "" || strings.Contains(d.Name, "/") {
			return mounts, fmt.Errorf("cgroup hierarchy %q: not a name", d.Name)
		}
		if err := unix.Mkdirat(fdOf(tmp), d.Name, 0o755); err != nil {
			return mounts, fmt.Errorf("mkdir %s: %w", d.Name, err)
		}
		if strings.Contains(d.Name, ",") {
			for name := range strings.SplitSeq(d.Name, ",") {
				if err := unix.Symlinkat(d.Name, fdOf(tmp), name); err != nil {
					return mounts, fmt.Errorf("link %s to %s: %w", name, d.Name, err)
				}
			}
		}
		target, err := unix.Openat(fdOf(tmp), d.Name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return mounts, fmt.Errorf("open %s: %w", d.Name, err)
		}
		f := os.NewFile(uintptr(target), d.Name)
		if err := bind(d, f); err != nil {
			f.Close()
			return mounts, err
		}
	}
	if err := unix.MountSetattr(fdOf(tmp), "", unix.AT_EMPTY_PATH, attr); err != nil {
		return mounts, fmt.Errorf("mount_setattr: %w", err)
	}
	return mounts, nil
}

// hierarchiesMount is the tmpfs that the hierarchies of v1 are mounted in.
func hierarchiesMount() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen tmpfs: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "mode", "755"); err != nil {
		return nil, fmt.Errorf("fsconfig tmpfs: %w", err)
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, fmt.Errorf("fsconfig tmpfs: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsmount tmpfs: %w", err)
	}
	return os.NewFile(uintptr(fd), "tmpfs"), nil
}
