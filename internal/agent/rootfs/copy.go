package rootfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"golang.org/x/sys/unix"
)

const copyChunk = 1 << 20

// copyContent copies size bytes from src to dst, both at offset 0, leaving holes where src has them. dst is new.
func copyContent(dst, src int, size int64) error {
	if size == 0 {
		return nil
	}
	if err := retry(func() error { return unix.Ftruncate(dst, size) }); err != nil {
		return err
	}
	var buf []byte
	for off := int64(0); off < size; {
		data, err := unix.Seek(src, off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return nil // a hole to the end
		}
		end := size
		if err == nil {
			if end, err = unix.Seek(src, data, unix.SEEK_HOLE); err != nil {
				return err
			}
		} else { // a file system without the call
			data = off
		}
		end = min(end, size)
		for off = data; off < end; {
			if buf == nil {
				rOff, wOff := off, off
				n, err := unix.CopyFileRange(src, &rOff, dst, &wOff, int(min(end-off, 1<<30)), 0)
				if err == nil && n > 0 {
					off += int64(n)
					continue
				}
				if err == unix.EINTR {
					continue
				}
				if err == nil { // the source became shorter
					return nil
				}
				buf = make([]byte, min(copyChunk, size)) // EXDEV, EINVAL, ENOSYS ...: by hand from here
			}
			n, err := unix.Pread(src, buf[:min(int64(len(buf)), end-off)], off)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return err
			}
			if n == 0 {
				return nil
			}
			if err := pwriteAll(dst, buf[:n], off); err != nil {
				return err
			}
			off += int64(n)
		}
	}
	return nil
}

func pwriteAll(fd int, p []byte, off int64) error {
	for len(p) > 0 {
		n, err := unix.Pwrite(fd, p, off)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrShortWrite
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

var zeros [4 << 10]byte

// pwriteHoles writes p at off but for pages of zeros, which the file (new and long enough) has already.
func pwriteHoles(fd int, p []byte, off int64) error {
	for len(p) > 0 {
		skip := zeroPages(p)
		p, off = p[skip:], off+int64(skip)
		n := 0
		for n < len(p) {
			page := p[n:min(n+len(zeros), len(p))]
			if bytes.Equal(page, zeros[:len(page)]) {
				break
			}
			n += len(page)
		}
		if err := pwriteAll(fd, p[:n], off); err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// zeroPages returns how many bytes p begins with that are whole pages of zeros, or zeros to its end.
func zeroPages(p []byte) int {
	n := 0
	for n < len(p) {
		page := p[n:min(n+len(zeros), len(p))]
		if !bytes.Equal(page, zeros[:len(page)]) {
			break
		}
		n += len(page)
	}
	return n
}

// copyOwnerMode gives the open file or directory dst the owner and mode in st.
func copyOwnerMode(dst int, st *unix.Stat_t) error {
	if err := retry(func() error { return unix.Fchown(dst, int(st.Uid), int(st.Gid)) }); err != nil {
		return fmt.Errorf("chown: %w", err)
	}
	if err := retry(func() error { return unix.Fchmod(dst, st.Mode&0o7777) }); err != nil {
		return fmt.Errorf("chmod: %w", err)
	}
	return nil
}

// copyXattrs copies the extended attributes of src, without overlayfs' own, to dst; both are open.
func copyXattrs(dst, src int) error {
	attrs, err := readXattrs(src)
	if err != nil {
		return err
	}
	for name, value := range attrs {
		if err := setXattr(name, func() error { return unix.Fsetxattr(dst, name, []byte(value), 0) }); err != nil {
			return err
		}
	}
	return nil
}

// readXattrs returns the extended attributes of an open file without overlayfs' own; nil if there are none.
func readXattrs(fd int) (map[string]string, error) {
	names, err := listXattrs(fd)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	out := make(map[string]string, len(names))
	for _, name := range names {
		value, err := getXattr(fd, name)
		if errors.Is(err, unix.ENODATA) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading extended attribute %q: %w", name, err)
		}
		out[name] = string(value)
	}
	return out, nil
}

// listXattrs returns the names of the extended attributes of the open file fd, without overlayfs' own.
func listXattrs(fd int) ([]string, error) {
	var buf []byte
	for {
		n, err := unix.Flistxattr(fd, nil)
		if err == unix.ENOTSUP || err == nil && n == 0 {
			return nil, nil
		}
		if err != nil {
			return nil, fmt.Errorf("listing extended attributes: %w", err)
		}
		buf = make([]byte, n+128)
		n, err = unix.Flistxattr(fd, buf)
		if err == unix.ERANGE {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("listing extended attributes: %w", err)
		}
		buf = buf[:n]
		break
	}
	var out []string
	for name := range strings.SplitSeq(string(buf), "\x00") {
		if name != "" && !strings.HasPrefix(name, overlayXattrs) {
			out = append(out, name)
		}
	}
	return out, nil
}

func getXattr(fd int, name string) ([]byte, error) {
	buf := make([]byte, 256)
	for {
		n, err := unix.Fgetxattr(fd, name, buf)
		if err == unix.ERANGE && len(buf) <= maxXattrValue {
			buf = make([]byte, maxXattrValue+1)
			continue
		}
		if err != nil {
			return nil, err
		}
		return buf[:n], nil
	}
}

// copyNode copies what is not a directory, with content, owner, mode, extended attributes (of files) and times. st is
// the source's. EEXIST if there is something in its place.
func copyNode(from int, name string, st *unix.Stat_t, to int, toName string) error {
	times := []unix.Timespec{st.Atim, st.Mtim}
	switch kind := st.Mode & unix.S_IFMT; kind {
	case unix.S_IFREG:
		return copyFile(from, name, to, toName)
	case unix.S_IFLNK:
		text, err := readlinkat(from, name)
		if err != nil {
			return err
		}
		if err := retry(func() error { return unix.Symlinkat(text, to, toName) }); err != nil {
			return err
		}
	case unix.S_IFSOCK, unix.S_IFIFO, unix.S_IFCHR, unix.S_IFBLK:
		if err := retry(func() error { return unix.Mknodat(to, toName, st.Mode&(unix.S_IFMT|0o777), int(st.Rdev)) }); err != nil {
			return err
		}
	default:
		return unix.EINVAL
	}
	if err := fchownat(to, toName, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFLNK && st.Mode&0o7000 != 0 {
		if err := chmodat(to, toName, st.Mode&0o7777); err != nil {
			return fmt.Errorf("chmod: %w", err)
		}
	}
	return retry(func() error { return unix.UtimesNanoAt(to, toName, times, unix.AT_SYMLINK_NOFOLLOW) })
}

func copyFile(from int, name string, to int, toName string) error {
	// O_NONBLOCK: should the name have become a FIFO since, the open does not hang.
	src, err := openat(from, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(src)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unix.EINVAL
	}
	dst, err := openat(to, toName, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	if err := copyContent(dst, src, st.Size); err != nil {
		return err
	}
	if err := copyOwnerMode(dst, &st); err != nil {
		return err
	}
	if err := copyXattrs(dst, src); err != nil {
		return err
	}
	return retry(func() error {
		return unix.UtimesNanoAt(dst, "", []unix.Timespec{st.Atim, st.Mtim}, unix.AT_EMPTY_PATH)
	})
}
