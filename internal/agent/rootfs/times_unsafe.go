package rootfs

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// futimens sets the times of an open file: utimensat without a name, for which x/sys has no function.
func futimens(fd int, t [2]time.Time) error {
	ts := [2]unix.Timespec{timespec(t[0]), timespec(t[1])}
	_, _, errno := unix.Syscall6(unix.SYS_UTIMENSAT, uintptr(fd), 0, uintptr(unsafe.Pointer(&ts[0])), 0, 0, 0)
	if errno != 0 {
		return fmt.Errorf("setting times: %w", errno)
	}
	return nil
}
