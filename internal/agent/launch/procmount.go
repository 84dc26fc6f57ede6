//go:build linux && (amd64 || arm64)

package launch

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

const procAttrs = unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC

// ProcMount makes a detached proc for Spec.ProcMount that shows the PID namespace of process pid, or our own if pid is
// 0. The caller must make sure, by a pidfd, that pid is still the process it means when this returns.
func ProcMount(pid int) (*os.File, error) {
	f, err := procMount(pid)
	if err != nil {
		return nil, wire.Errorf(wire.Internal, "mount proc for the PID namespace of %d: %w", pid, err)
	}
	return f, nil
}

func procMount(pid int) (*os.File, error) {
	fs, err := unix.Fsopen("proc", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fs)
	if pid != 0 {
		// Linux 6.18. An older kernel makes a proc for the namespace of whoever mounts it and for no other.
		err := unix.FsconfigSetString(fs, "pidns", fmt.Sprintf("/proc/%d/ns/pid", pid))
		if errors.Is(err, unix.EINVAL) {
			return cloneProc(pid)
		}
		if err != nil {
			return nil, err
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, err
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, procAttrs)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "proc"), nil
}

// cloneProc takes a copy of the mount that process pid has at /proc. The process may have put anything there, so it
// is looked at: the root of a proc whose first process is in the same PID namespace as pid.
func cloneProc(pid int) (*os.File, error) {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(root)
	at, err := unix.Openat2(root, "proc", &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		return nil, err
	}
	defer unix.Close(at)
	var fs unix.Statfs_t
	var st, first, want unix.Stat_t
	if err := unix.Fstatfs(at, &fs); err != nil {
		return nil, err
	}
	if err := unix.Fstat(at, &st); err != nil {
		return nil, err
	}
	const procRootIno = 1
	if fs.Type != unix.PROC_SUPER_MAGIC || st.Ino != procRootIno {
		return nil, fmt.Errorf("what it has at /proc is no proc: %w", unix.EINVAL)
	}
	if err := unix.Fstatat(at, "1/ns/pid", &first, 0); err != nil {
		return nil, err
	}
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", pid), &want); err != nil {
		return nil, err
	}
	if first.Ino != want.Ino || first.Dev != want.Dev {
		return nil, fmt.Errorf("what it has at /proc shows another PID namespace: %w", unix.EINVAL)
	}
	// A mount of another mount namespace can be cloned only by one who is in there: with a thread that ends.
	var fd int
	err = onThread(func() error {
		mnt, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(mnt)
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return err
		}
		if err := unix.Setns(mnt, unix.CLONE_NEWNS); err != nil {
			return err
		}
		fd, err = unix.OpenTree(at, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: procAttrs, Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), "proc"), nil
}
