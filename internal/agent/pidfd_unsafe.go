//go:build linux

package agent

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// pidfdInfo is struct pidfd_info of <linux/pidfd.h> in its first size.
type pidfdInfo struct {
	mask     uint64
	cgroupID uint64
	ids      [11]uint32 // pid, tgid, ppid, then real, effective, saved and fs ids
	exitCode int32
}

const (
	pidfdGetInfo  = 0xc0<<24 | unsafe.Sizeof(pidfdInfo{})<<16 | 0xff<<8 | 11 // _IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)
	pidfdInfoExit = 1 << 3                                                   // since Linux 6.15
)

// pidfdExit reads the wait status of a process that has ended and been reaped, child of ours or not.
func pidfdExit(fd int) (unix.WaitStatus, bool) {
	info := pidfdInfo{mask: pidfdInfoExit}
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), pidfdGetInfo, uintptr(unsafe.Pointer(&info)))
	if errno != 0 || info.mask&pidfdInfoExit == 0 {
		return 0, false
	}
	return unix.WaitStatus(uint32(info.exitCode)), true
}

// pidfsMagic is the file system type of pidfds since Linux 6.9: from then on their inode is the process's alone.
const pidfsMagic = 0x50494446

// pidfdNode is the inode of a pidfd, 0 where the kernel gives all pidfds the same.
func pidfdNode(fd int) uint64 {
	var fs unix.Statfs_t
	if unix.Fstatfs(fd, &fs) != nil || uint32(fs.Type) != pidfsMagic {
		return 0
	}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return 0
	}
	return st.Ino
}
