package engine

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/windows"
)

// lockDataRoot takes the lock that makes one daemon the only one of its data root, until the file is closed.
func lockDataRoot(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the data root: %w", err)
	}
	// The lock is on a byte far behind the text, so that others can read who holds it.
	at := windows.Overlapped{Offset: 1 << 30}
	err = windows.LockFileEx(windows.Handle(f.Fd()), windows.LOCKFILE_EXCLUSIVE_LOCK|windows.LOCKFILE_FAIL_IMMEDIATELY, 0, 1, 0, &at)
	if err != nil {
		defer f.Close()
		if errors.Is(err, windows.ERROR_LOCK_VIOLATION) {
			b, _ := os.ReadFile(path)
			return nil, fmt.Errorf("a kiri daemon (process %.20s) already uses this data root: it holds %s", b, path)
		}
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	f.Truncate(0)
	f.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return f, nil
}
