package rootfs

import (
	"errors"
	"fmt"
	"os"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// UnpackMain is the whole of `kiri-init unpack MODE DIFFID`, the process that makes one layer; its result is the exit
// status. Store.Unpack starts it, nobody else should: its descriptors are those in control.go.
//
// It runs in a mount namespace of its own in which the layer's directory is the root and nothing else is mounted, so
// that whatever a hostile archive makes it do, it does there. Its memory is given back by its end.
func UnpackMain() int {
	info, err := unpackChild(os.Args)
	var p []byte
	if err == nil {
		p = append([]byte{packetDone}, info.text()...)
	} else {
		e := wire.AsError(err)
		if len(e.Text) > maxPacket/2 {
			e.Text = e.Text[:maxPacket/2] + "..."
		}
		if p, err = wire.AppendEncode([]byte{packetError}, e); err != nil {
			return 2
		}
	}
	if err := sendPacket(childControl, p, -1); err != nil {
		return 2 // the agent is gone
	}
	return 0
}

func unpackChild(args []string) (layerInfo, error) {
	var info layerInfo
	if len(args) != 4 || args[2] != "layer" && args[2] != "import" {
		return info, errors.New("usage: kiri-init unpack layer|import DIFFID (started by the agent only)")
	}
	want := args[3]
	unix.Umask(0)
	debug.SetMemoryLimit(40 << 20)
	if err := enterLayer(); err != nil {
		return info, err
	}
	// A pipe of 64 KiB means a change of process for each of its fillings. It may be no pipe, or refuse: no matter.
	unix.FcntlInt(childStream, unix.F_SETPIPE_SZ, 1<<20)
	src, err := decompress(fdReader(childStream))
	if err != nil {
		return info, damaged(err)
	}
	p := newPipeline(src)
	a := newApplier(childRoot)
	defer a.close()
	a.whiteouts = args[2] == "layer"
	a.below = askBelow
	a.ownCwd = true
	if err := a.apply(p); err != nil {
		return info, err
	}
	got, err := p.rest()
	if err != nil {
		return info, damaged(err)
	}
	if want != "" && want != got {
		return info, wire.Errorf(wire.Invalid, "wrong diff id calculated on extraction %q, want %q", got, want)
	}
	a.info.DiffID = got
	return a.info, nil
}

// enterLayer makes the layer's directory the process's root: child, in its own mount namespace, still with all of
// the agent's mounts and capabilities.
func enterLayer() error {
	// Private first, or the mounts below would show in the agent's namespace, and pivot_root refuses shared parents.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}
	if err := unix.MountSetattr(childRoot, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("restricting the layer's mount: %w", err)
	}
	if err := unix.MoveMount(childRoot, "", unix.AT_FDCWD, "/", unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mounting the layer's directory: %w", err)
	}
	if err := unix.Fchdir(childRoot); err != nil {
		return fmt.Errorf("entering the layer's directory: %w", err)
	}
	err := unix.PivotRoot(".", ".")
	if err == unix.EINVAL { // the initramfs of a VM is a root that cannot be pivoted away
		if err = unix.Chroot("."); err != nil {
			return fmt.Errorf("changing root to the layer's directory: %w", err)
		}
	} else if err != nil {
		return fmt.Errorf("changing root to the layer's directory: %w", err)
	} else if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detaching the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("entering the layer's directory: %w", err)
	}
	return dropCaps()
}

// askBelow asks the agent for the layers below. -1: there are none.
func askBelow() (int, error) {
	if err := sendPacket(childControl, []byte{packetBelow}, -1); err != nil {
		return -1, fmt.Errorf("asking for the layers below: %w", err)
	}
	buf := make([]byte, maxPacket)
	n, fd, err := recvPacketFile(childControl, buf)
	if err != nil {
		return -1, fmt.Errorf("asking for the layers below: %w", err)
	}
	if buf[0] == packetError {
		e := new(wire.Error)
		if err := wire.Decode(buf[1:n], e); err != nil {
			return -1, fmt.Errorf("asking for the layers below: %w", err)
		}
		return -1, e
	}
	return fd, nil
}
