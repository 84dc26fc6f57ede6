package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Paths of archives follow Docker's rules: they are taken from the root whatever they begin with; the last component
// is not followed if it is a link, unless the path ends in "/" or "/.".

// splitPath makes p absolute and cuts it into the directory to be resolved and the last name, "." for the directory
// itself. base is the name that the archive gives it.
func splitPath(p string) (dir, name, base string) {
	clean := path.Clean("/" + p)
	dot := strings.HasSuffix(p, "/.") || p == "."
	switch {
	case dot:
		return clean, ".", "."
	case clean == "/":
		return clean, ".", "/"
	case strings.HasSuffix(p, "/"):
		return clean, ".", path.Base(clean)
	}
	return path.Dir(clean), path.Base(clean), path.Base(clean)
}

// notFound is the error for a path that is not there. The daemon knows the container's name and finishes the text.
func notFound(p string, err error) error {
	if isMissing(err) {
		return wire.Errorf(wire.NotFound, "Could not find the file %s in container: %w", p, err)
	}
	return entryError("looking up", p, err)
}

// Stat describes what is at path in root, as Docker's archive calls tell it: a link itself, with the path inside the
// container that it leads to.
//
// Errors: wire.NotFound.
func Stat(root *os.File, p string) (*wire.ArchiveReply, error) {
	fd, r, err := statPath(root, p)
	if err != nil {
		return nil, err
	}
	unix.Close(fd)
	return r, nil
}

// statPath is Stat, and returns an O_PATH descriptor of what it describes.
func statPath(root *os.File, p string) (int, *wire.ArchiveReply, error) {
	dir, name, base := splitPath(p)
	parent, err := openat2(fdOf(root), dir, unix.O_PATH|unix.O_DIRECTORY, inRoot)
	if err != nil {
		return -1, nil, notFound(p, err)
	}
	defer unix.Close(parent)
	fd, err := openat(parent, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return -1, nil, notFound(p, err)
	}
	var st unix.Stat_t
	if err := fstatPath(fd, &st); err != nil {
		unix.Close(fd)
		return -1, nil, notFound(p, err)
	}
	r := &wire.ArchiveReply{Name: base, Size: st.Size, Mode: uint32(goMode(st.Mode)), ModTime: st.Mtim.Nano()}
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		r.LinkTarget = linkTarget(root, p)
	}
	return fd, r, nil
}

// linkTarget returns where in root a link leads to in the end; what is missing there is taken as it is written.
func linkTarget(root *os.File, p string) string {
	at, rest := "/", path.Clean("/" + p)[1:]
	links := 0
	for rest != "" {
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		next := path.Join(at, name)
		fd, err := openat2(fdOf(root), next, unix.O_PATH|unix.O_NOFOLLOW, inRoot)
		if err != nil {
			return path.Join(next, rest)
		}
		_, mode, err := identify(fd)
		text := ""
		if err == nil && mode&unix.S_IFMT == unix.S_IFLNK {
			text, err = readlinkat(fd, "")
		}
		unix.Close(fd)
		if links++; err != nil || links > 255 {
			return path.Join(next, rest)
		}
		if text == "" {
			at = next
			continue
		}
		if path.IsAbs(text) {
			at = "/"
		}
		rest = strings.TrimLeft(path.Join(text, rest), "/")
		for strings.HasPrefix(rest, "..") && (len(rest) == 2 || rest[2] == '/') { // climbing stops at the root
			at, rest = path.Dir(at), strings.TrimLeft(rest[2:], "/")
		}
		if rest == "." {
			rest = ""
		}
	}
	return at
}

// goMode converts st_mode to Go's form.
func goMode(mode uint32) fs.FileMode {
	m := fs.FileMode(mode & 0o777)
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		m |= fs.ModeDir
	case unix.S_IFLNK:
		m |= fs.ModeSymlink
	case unix.S_IFIFO:
		m |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		m |= fs.ModeSocket
	case unix.S_IFCHR:
		m |= fs.ModeDevice | fs.ModeCharDevice
	case unix.S_IFBLK:
		m |= fs.ModeDevice
	}
	for bit, goBit := range map[uint32]fs.FileMode{unix.S_ISUID: fs.ModeSetuid, unix.S_ISGID: fs.ModeSetgid, unix.S_ISVTX: fs.ModeSticky} {
		if mode&bit != 0 {
			m |= goBit
		}
	}
	return m
}

// Get writes what is at path in root to out as a tar and describes it: a tree under its last name, or under "." for a
// path that ends in "/.". Owners are numbers; times, extended attributes and hard links are kept; sockets are left
// out. Mounts in the tree are part of it. A file that changes meanwhile is sent with the size it had first.
//
// Errors: wire.NotFound before anything is written.
func Get(ctx context.Context, root *os.File, p string, out *os.File) (*wire.ArchiveReply, error) {
	fd, r, err := statPath(root, p)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	name := r.Name
	if name == "/" {
		name = ""
	}
	w := newPacker(ctx, out)
	if err := w.add(fd, name, 0); err != nil {
		return nil, fmt.Errorf("packing %s: %w", p, err)
	}
	if err := w.end(); err != nil {
		return nil, fmt.Errorf("packing %s: %w", p, err)
	}
	return r, nil
}

// Export writes all of root to out as a tar, with names relative to it, as `docker export` does. What is mounted in it
// is left out: a directory is empty then and a file too.
func Export(ctx context.Context, root, out *os.File) error {
	fd, err := openat(fdOf(root), ".", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("exporting: %w", err)
	}
	defer unix.Close(fd)
	w := newPacker(ctx, out)
	at, _, err := identify(fd)
	if err != nil {
		return fmt.Errorf("exporting: %w", err)
	}
	w.mount, w.contentOnly = at.mount, true
	if err := w.add(fd, "", 0); err != nil {
		return fmt.Errorf("exporting: %w", err)
	}
	if err := w.end(); err != nil {
		return fmt.Errorf("exporting: %w", err)
	}
	return nil
}

// packer writes a tar of files it is given by descriptor. Trees may change under it and their owner may be hostile:
// every step is by descriptor and without following links, and only what has been seen to be a regular file is opened.
type packer struct {
	ctx         context.Context
	out         *os.File
	buf         bytes.Buffer // headers and small files not yet written
	links       map[place]string
	mount       uint64 // with contentOnly: the only mount whose content is packed
	contentOnly bool
	shallow     bool // directories without what is in them
	chunk       []byte
}

const packBuffer = 256 << 10

func newPacker(ctx context.Context, out *os.File) *packer {
	return &packer{ctx: ctx, out: out, links: map[place]string{}}
}

func (w *packer) flush() error {
	_, err := w.out.Write(w.buf.Bytes())
	w.buf.Reset()
	return err
}

// end writes the end-of-archive mark.
func (w *packer) end() error {
	w.buf.Write(make([]byte, 1024))
	return w.flush()
}

// add packs the file behind the O_PATH descriptor fd, and what is in it, as name.
func (w *packer) add(fd int, name string, depth int) error {
	if err := w.ctx.Err(); err != nil {
		return context.Cause(w.ctx)
	}
	if depth > maxTreeDepth {
		return fmt.Errorf("directories are nested more than %d deep: %w", maxTreeDepth, unix.ELOOP)
	}
	var st unix.Stat_t
	if err := fstatPath(fd, &st); err != nil {
		return err
	}
	at, _, err := identify(fd)
	if err != nil {
		return err
	}
	covered := w.contentOnly && at.mount != w.mount
	h := &tar.Header{Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return w.dir(fd, h, covered, depth)
	case unix.S_IFREG:
		h.Typeflag, h.Size = tar.TypeReg, st.Size
		if covered {
			h.Size = 0
		}
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = readlinkat(fd, ""); err != nil {
			return err
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		h.Typeflag = tar.TypeChar
		if st.Mode&unix.S_IFMT == unix.S_IFBLK {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default:
		return nil // a socket has no form in a tar
	}
	if st.Nlink > 1 {
		inode := place{st.Dev, st.Ino}
		if first, ok := w.links[inode]; ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeLink, first, 0
			return w.header(h)
		}
		w.links[inode] = name
	}
	if h.Typeflag != tar.TypeReg || covered {
		return w.header(h)
	}
	file, err := reopen(fd, unix.O_RDONLY|unix.O_NOCTTY)
	if err != nil {
		return err
	}
	defer unix.Close(file)
	if err := packXattrs(h, file); err != nil {
		return err
	}
	if err := w.header(h); err != nil {
		return err
	}
	return w.content(file, h.Size)
}

func (w *packer) dir(fd int, h *tar.Header, covered bool, depth int) error {
	dir, err := openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	prefix := h.Name
	if prefix != "" {
		prefix += "/"
	}
	if prefix == "./" {
		prefix = ""
	}
	h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
	if h.Name != "/" || !w.contentOnly { // an export begins with what is in the root
		if err := packXattrs(h, dir); err != nil {
			return err
		}
		if err := w.header(h); err != nil {
			return err
		}
	}
	if covered || w.shallow {
		return nil
	}
	entries, err := readDir(dir)
	if err != nil {
		return err
	}
	slices.SortFunc(entries, func(a, b dirent) int { return strings.Compare(a.name, b.name) })
	for _, e := range entries {
		sub, err := openat(dir, e.name, unix.O_PATH|unix.O_NOFOLLOW, 0)
		if err == unix.ENOENT {
			continue // removed meanwhile
		}
		if err != nil {
			return fmt.Errorf("%s: %w", prefix+e.name, err)
		}
		err = w.add(sub, prefix+e.name, depth+1)
		unix.Close(sub)
		if err != nil {
			return err
		}
	}
	return nil
}

// packXattrs puts the extended attributes of an open file into its header.
func packXattrs(h *tar.Header, fd int) error {
	attrs, err := readXattrs(fd)
	if err != nil {
		return err
	}
	for name, value := range attrs {
		if h.PAXRecords == nil {
			h.PAXRecords = make(map[string]string, len(attrs))
		}
		h.PAXRecords[paxXattr+name] = value
	}
	return nil
}

// header writes h. A tar.Writer is made for each: it wants to see the content too, which goes past it.
func (w *packer) header(h *tar.Header) error {
	if w.buf.Len() >= packBuffer {
		if err := w.flush(); err != nil {
			return err
		}
	}
	err := tar.NewWriter(&w.buf).WriteHeader(h)
	if err != nil && len(h.PAXRecords) > 0 { // an attribute whose name the form cannot hold
		h.PAXRecords = nil
		err = tar.NewWriter(&w.buf).WriteHeader(h)
	}
	return err
}

// content writes exactly size bytes of the file, and the padding. What a file has lost meanwhile is sent as zeros.
func (w *packer) content(file int, size int64) error {
	left := size
	if size < packBuffer/4 {
		w.buf.Grow(int(size))
		for p := w.buf.AvailableBuffer()[:size]; left > 0; {
			n, err := unix.Pread(file, p[size-left:], size-left)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return err
			}
			if n == 0 {
				clear(p[size-left:])
				n = int(left)
			}
			if left -= int64(n); left == 0 {
				w.buf.Write(p)
			}
		}
	} else {
		if err := w.flush(); err != nil {
			return err
		}
		if err := w.send(file, size); err != nil {
			return err
		}
	}
	if pad := size % 512; pad != 0 {
		w.buf.Write(make([]byte, 512-pad))
	}
	return nil
}

// send writes size bytes of a file without bringing them here where the kernel can do that.
func (w *packer) send(file int, size int64) error {
	out := fdOf(w.out)
	for off := int64(0); off < size; {
		n, err := unix.Sendfile(out, file, &off, int(min(size-off, 1<<20)))
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN: // who shares the description has made it non-blocking
			if err := retry(func() error {
				_, err := unix.Poll([]unix.PollFd{{Fd: int32(out), Events: unix.POLLOUT}}, -1)
				return err
			}); err != nil {
				return fmt.Errorf("sending: %w", err)
			}
		case err == unix.EINVAL || err == unix.ENOSYS: // a file system or a pipe that cannot (pipes: before Linux 5.12)
			if w.chunk == nil {
				w.chunk = make([]byte, packBuffer)
			}
			n, err := unix.Pread(file, w.chunk[:min(size-off, packBuffer)], off)
			if err != nil && err != unix.EINTR {
				return err
			}
			if n == 0 {
				return w.zeros(size - off)
			}
			if _, err := w.out.Write(w.chunk[:max(n, 0)]); err != nil {
				return err
			}
			off += int64(max(n, 0))
		case err != nil:
			return fmt.Errorf("sending: %w", err)
		case n == 0:
			return w.zeros(size - off)
		}
		if err := w.ctx.Err(); err != nil {
			return context.Cause(w.ctx)
		}
	}
	return nil
}

// zeros stand for what a file has lost while it was sent.
func (w *packer) zeros(n int64) error {
	p := make([]byte, min(n, packBuffer))
	for n > 0 {
		m, err := w.out.Write(p[:min(n, packBuffer)])
		if err != nil {
			return err
		}
		n -= int64(m)
	}
	return nil
}
