package rootfs

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// keptCaps are what writing a layer takes: any owner and mode, device nodes, file capabilities, trusted.* attributes.
const keptCaps = 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID |
	1<<unix.CAP_MKNOD | 1<<unix.CAP_SETFCAP | 1<<unix.CAP_SYS_ADMIN

// dropCaps gives up all other capabilities, in every thread.
func dropCaps() error {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var have [2]unix.CapUserData
	if err := unix.Capget(&head, &have[0]); err != nil {
		return fmt.Errorf("reading capabilities: %w", err)
	}
	data := [2]unix.CapUserData{}
	for i, kept := range []uint64{keptCaps & 0xffffffff, keptCaps >> 32} {
		data[i].Effective = have[i].Permitted & uint32(kept)
		data[i].Permitted = data[i].Effective
	}
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&head)), uintptr(unsafe.Pointer(&data[0])), 0)
	if errno != 0 && errno != unix.ENOTSUP { // ENOTSUP: a test binary with cgo, whose threads Go does not know
		return fmt.Errorf("dropping capabilities: %w", errno)
	}
	return nil
}
