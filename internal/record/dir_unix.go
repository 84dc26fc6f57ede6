//go:build unix

package record

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// directory is an open directory; files in it are reached by descriptor. The calls are made straight to the kernel:
// os.File adds a poller registration and a cleanup to each file, which is a third of the cost of a small Put.
type directory struct {
	path string
	fd   int
}

func openDirectory(path string) (*directory, error) {
	fd, err := ignoringEINTR(func() (int, error) {
		return unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	return &directory{path: path, fd: fd}, nil
}

func (d *directory) create(name string) (file, error) {
	fd, err := ignoringEINTR(func() (int, error) {
		return unix.Openat(d.fd, name, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	})
	if err != nil {
		return -1, fmt.Errorf("create %s: %w", name, err)
	}
	return file(fd), nil
}

func (d *directory) open(name string) (file, error) {
	fd, err := ignoringEINTR(func() (int, error) {
		return unix.Openat(d.fd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return -1, fmt.Errorf("open %s: %w", name, err)
	}
	return file(fd), nil
}

// read returns the whole of a file of at most limit bytes; a larger one, or what is not a file, is errDamaged.
func (d *directory) read(name string, limit int64) ([]byte, error) {
	fd, err := d.open(name)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Size() > limit {
		return nil, fmt.Errorf("%w: %s of %d bytes", errDamaged, fi.Mode(), fi.Size())
	}
	b := make([]byte, fi.Size())
	if _, err := io.ReadFull(f, b); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return b, nil
}

func (d *directory) rename(from, to string) error {
	_, err := ignoringEINTR(func() (int, error) { return 0, unix.Renameat(d.fd, from, d.fd, to) })
	if err != nil {
		return fmt.Errorf("rename %s to %s: %w", from, to, err)
	}
	return nil
}

func (d *directory) unlink(name string) error {
	_, err := ignoringEINTR(func() (int, error) { return 0, unix.Unlinkat(d.fd, name, 0) })
	if err != nil {
		return fmt.Errorf("unlink %s: %w", name, err)
	}
	return nil
}

func (d *directory) sync() error { return file(d.fd).sync() }

func (d *directory) close() error { return file(d.fd).close() }

type file int

func (f file) write(b []byte) error {
	for len(b) > 0 {
		n, err := ignoringEINTR(func() (int, error) { return unix.Write(int(f), b) })
		if err != nil {
			return fmt.Errorf("write: %w", err)
		}
		if n == 0 {
			return fmt.Errorf("write: %w", io.ErrShortWrite)
		}
		b = b[n:]
	}
	return nil
}

func (f file) sync() error {
	if _, err := ignoringEINTR(func() (int, error) { return 0, unix.Fsync(int(f)) }); err != nil {
		return fmt.Errorf("fsync: %w", err)
	}
	return nil
}

// close does not repeat after EINTR: on Linux the descriptor is gone then.
func (f file) close() error {
	if err := unix.Close(int(f)); err != nil && err != unix.EINTR {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

func ignoringEINTR(f func() (int, error)) (int, error) {
	for {
		n, err := f()
		if err != unix.EINTR {
			return n, err
		}
	}
}
