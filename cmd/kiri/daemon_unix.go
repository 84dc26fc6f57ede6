//go:build unix

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// makeDir makes a directory and what is above it. Others may pass through, so that the group of the socket reaches
// it, but not look around.
func makeDir(path string) error {
	if err := os.MkdirAll(path, 0o711); err != nil {
		return fmt.Errorf("making %s: %w", path, err)
	}
	return nil
}

// lockPidfile writes this process's number to path and holds a lock on the file for the daemon's life: unlike the
// number, a lock can be neither stale nor another process's.
func lockPidfile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		return nil, fmt.Errorf("opening the PID file: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		defer f.Close()
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, fmt.Errorf("locking %s: %w", path, err)
		}
		var b [20]byte
		n, _ := f.Read(b[:])
		return nil, fmt.Errorf("a kiri daemon is running already, with process %s and PID file %s; give this one its own --data-root and --exec-root", strings.TrimSpace(string(b[:n])), path)
	}
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("writing %s: %w", path, err)
	}
	return f, nil
}

// passedFiles returns the sockets passed by a service manager. They are this process's only if it is the one named;
// its children must not see them.
func passedFiles() ([]*os.File, error) {
	pid, count := os.Getenv("LISTEN_PID"), os.Getenv("LISTEN_FDS")
	os.Unsetenv("LISTEN_PID")
	os.Unsetenv("LISTEN_FDS")
	os.Unsetenv("LISTEN_FDNAMES")
	n, err := strconv.Atoi(count)
	if pid != strconv.Itoa(os.Getpid()) || err != nil || n < 1 {
		return nil, errors.New("no sockets were passed; fd:// is for a service manager's socket activation")
	}
	var files []*os.File
	for fd := firstPassed; fd < firstPassed+n; fd++ {
		syscall.CloseOnExec(fd)
		files = append(files, os.NewFile(uintptr(fd), "LISTEN_FD_"+strconv.Itoa(fd)))
	}
	return files, nil
}

// notify tells the service manager about the daemon's state, if there is one: sd_notify(3).
func notify(state string) {
	path := os.Getenv("NOTIFY_SOCKET")
	if path == "" {
		return
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return // no service manager is there to tell
	}
	defer conn.Close()
	conn.Write([]byte(state))
}
