package rootfs

import (
	"errors"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// inRoot are the rules for every path that comes from an image or a container: it never leaves the directory it is
// resolved at, and links in /proc that are no real links are refused.
const inRoot = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS

// retry repeats a system call that a signal interrupted.
func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

// openat opens name in dir; O_CLOEXEC is added.
func openat(dir int, name string, flags int, mode uint32) (int, error) {
	for {
		fd, err := unix.Openat(dir, name, flags|unix.O_CLOEXEC, mode)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// openat2 opens path at dir under the rules in resolve; O_CLOEXEC is added. RESOLVE_IN_ROOT answers EAGAIN when a
// rename anywhere raced with a ".." (since Linux 5.6, see openat2(2)); a storm of renames may then win, after 128 tries.
func openat2(dir int, path string, flags int, resolve uint64) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Resolve: resolve}
	for try := 0; ; try++ {
		fd, err := unix.Openat2(dir, path, &how)
		if err == unix.EINTR || err == unix.EAGAIN && try < 128 {
			continue
		}
		return fd, err
	}
}

// reopen opens for reading the file that the O_PATH descriptor fd stands for. The caller has looked at its type
// first: opening a device or a FIFO has effects.
func reopen(fd int, flags int) (int, error) {
	return openat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), flags, 0)
}

// fstatat is unix.Fstatat without following a last link.
func fstatat(dir int, name string, st *unix.Stat_t) error {
	return retry(func() error { return unix.Fstatat(dir, name, st, unix.AT_SYMLINK_NOFOLLOW) })
}

// fstatPath stats the file behind any descriptor, O_PATH included.
func fstatPath(fd int, st *unix.Stat_t) error {
	return retry(func() error { return unix.Fstatat(fd, "", st, unix.AT_EMPTY_PATH) })
}

// chmodat sets the mode of name in dir and follows no link, should somebody else have put one there. fchmodat2 exists
// since Linux 6.6; before it /proc has to help, which an unpacking child, alone with its tree, has not.
func chmodat(dir int, name string, mode uint32) error {
	err := retry(func() error { return unix.Fchmodat(dir, name, mode, unix.AT_SYMLINK_NOFOLLOW) })
	if err != unix.EOPNOTSUPP && err != unix.ENOSYS {
		return err
	}
	fd, err := openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	err = retry(func() error { return unix.Chmod("/proc/self/fd/"+strconv.Itoa(fd), mode) })
	if err == unix.ENOENT {
		err = retry(func() error { return unix.Fchmodat(dir, name, mode, 0) })
	}
	return err
}

// readlinkat returns the text of the link name in dir ("" with an O_PATH descriptor of the link itself).
func readlinkat(dir int, name string) (string, error) {
	buf := make([]byte, 256)
	for {
		var n int
		err := retry(func() (err error) { n, err = unix.Readlinkat(dir, name, buf); return })
		if err != nil {
			return "", err
		}
		if n < len(buf) {
			return string(buf[:n]), nil
		}
		if len(buf) > unix.PathMax {
			return "", unix.ENAMETOOLONG
		}
		buf = make([]byte, len(buf)*4)
	}
}

// writeAll writes p to fd.
func writeAll(fd int, p []byte) error {
	for len(p) > 0 {
		n, err := unix.Write(fd, p)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrShortWrite
		}
		p = p[n:]
	}
	return nil
}

// fileOf makes an os.File of fd, keeping a nil error nil.
func fileOf(fd int, name string, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// fdOf returns the descriptor of f. Unlike f.Fd it is only used while f is kept alive by its owner.
func fdOf(f *os.File) int { return int(f.Fd()) }

// isMissing tells whether err says that a path does not lead anywhere.
func isMissing(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) }
