//go:build linux

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxFile caps what is read of one cgroup file: the longest, memory.stat, stays below 8 KiB, and lists of processes
// are read in pieces.
const maxFile = 1 << 20

// openDir opens a cgroup directory below dir. The descriptor serves openat, CLONE_INTO_CGROUP and bpf.
func openDir(dir int, path string) (int, error) {
	fd, err := unix.Openat(dir, path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return -1, fmt.Errorf("opening cgroup %s: %w", path, err)
	}
	return fd, nil
}

// read returns the text of a file below dir without the final newline.
func read(dir int, path string) (string, error) {
	fd, err := unix.Openat(dir, path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("opening %s: %w", path, err)
	}
	defer unix.Close(fd)
	return readFD(fd, path)
}

func readFD(fd int, path string) (string, error) {
	buf := make([]byte, 4096)
	n := 0
	for {
		if n == len(buf) {
			if n >= maxFile {
				return "", fmt.Errorf("reading %s: %w", path, unix.EFBIG)
			}
			buf = append(buf, make([]byte, len(buf))...)
		}
		r, err := unix.Read(fd, buf[n:])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("reading %s: %w", path, err)
		}
		if r == 0 {
			return strings.TrimSuffix(string(buf[:n]), "\n"), nil
		}
		n += r
	}
}

// write stores value in a file below dir. An empty value is sent as a newline: a write of no bytes never reaches the
// kernel's handler.
func write(dir int, path, value string) error {
	fd, err := unix.Openat(dir, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening %s: %w", path, err)
	}
	defer unix.Close(fd)
	if value == "" {
		value = "\n"
	}
	for {
		_, err = unix.Write(fd, []byte(value))
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("writing %q to %s: %w", strings.TrimSpace(value), path, err)
	}
	return nil
}

func exists(dir int, path string) bool {
	return unix.Faccessat(dir, path, unix.F_OK, 0) == nil
}

// mkdir makes one directory; that it is there already is no error.
func mkdir(dir int, path string) error {
	if err := unix.Mkdirat(dir, path, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("making cgroup %s: %w", path, err)
	}
	return nil
}

// number reads a file with one number. "max" and numbers that do not fit are the largest.
func number(dir int, path string) (uint64, error) {
	s, err := read(dir, path)
	if err != nil {
		return 0, err
	}
	return parse(s)
}

func parse(s string) (uint64, error) {
	s = strings.TrimSpace(s)
	if s == "max" || s == "-1" {
		return ^uint64(0), nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil && !errors.Is(err, strconv.ErrRange) {
		return 0, fmt.Errorf("parsing %q: %w", s, err)
	}
	return n, nil
}

// field finds the number beside key in a file of lines "key number".
func field(text, key string) (uint64, bool) {
	for line := range strings.Lines(text) {
		k, v, ok := strings.Cut(line, " ")
		if ok && k == key {
			n, err := parse(v)
			return n, err == nil
		}
	}
	return 0, false
}

// await returns when done is true of the text of a cgroup.events file, or after limit with an error that is
// os.ErrDeadlineExceeded. The kernel signals each change of such a file to poll, so the runtime's poller is what waits
// and no thread is held however many wait at once.
func await(dir int, path string, limit time.Duration, done func(text string) bool) error {
	fd, err := unix.Openat(dir, path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("opening %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if err := f.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return fmt.Errorf("waiting for %s: %w", path, err)
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("waiting for %s: %w", path, err)
	}
	var text string
	var failed error
	err = conn.Read(func(fd uintptr) bool {
		if _, failed = unix.Seek(int(fd), 0, unix.SEEK_SET); failed != nil {
			return true
		}
		text, failed = readFD(int(fd), path)
		return failed != nil || done(text)
	})
	if err != nil {
		return fmt.Errorf("waiting %s for %s (it says %s): %w", limit, path, strings.ReplaceAll(text, "\n", ", "), err)
	}
	return failed
}

// subdirs names the directories in dir, which is not moved: a descriptor of its own is used for reading.
func subdirs(dir int, path string) ([]string, error) {
	fd, err := openDir(dir, path)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	var names []string
	buf := make([]byte, 8192)
	for {
		n, err := unix.ReadDirent(fd, buf)
		if err != nil {
			return nil, fmt.Errorf("listing cgroup %s: %w", path, err)
		}
		if n <= 0 {
			return names, nil
		}
		names = appendDirs(names, buf[:n])
	}
}
