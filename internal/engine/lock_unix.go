//go:build unix

package engine

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// lockDataRoot takes the lock that makes one daemon the only one of its data root. It is held until the file is
// closed, and by the kernel let go when the process ends, however it ends.
func lockDataRoot(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the data root: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, lockHeld(path)
		}
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	if err := f.Truncate(0); err == nil {
		_, err = f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
		if err != nil {
			f.Close()
			return nil, fmt.Errorf("writing the process id to %s: %w", path, err)
		}
	}
	return f, nil
}

func lockHeld(path string) error {
	who := "another process"
	if b, err := os.ReadFile(path); err == nil && len(b) > 0 {
		who = "process " + strings.TrimSpace(string(b))
	}
	return fmt.Errorf("a kiri daemon (%s) already uses this data root: it holds %s", who, path)
}
