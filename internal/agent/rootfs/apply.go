package rootfs

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Names that mean something in a layer (OCI image specification, "Whiteouts"; older ones are from aufs).
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh."
	whiteoutOpaque = ".wh..wh..opq"
	opaqueXattr    = "trusted.overlay.opaque"
	overlayXattrs  = "trusted.overlay."
)

// Bounds on one entry. archive/tar itself stops at 1 MiB of extended header.
const (
	maxXattrs     = 256
	maxXattrValue = 64 << 10 // XATTR_SIZE_MAX
	maxLate       = 1 << 16  // directories whose attributes are still to be set
)

// applier writes the entries of a tar into a directory by descriptors. Whatever names and links the tar holds, it
// stays in that directory: names are made relative and may not climb, and the parent of every entry is resolved with
// RESOLVE_IN_ROOT, so a link in the way means what it would mean after a chroot.
type applier struct {
	whiteouts bool        // the tar is a layer
	ownCwd    bool        // the process is this applier's alone: its working directory may be changed, its umask is 0
	put       *putOptions // the tar is a client's, for a directory that is in use; nil for a layer
	below     func() (int, error)

	dirs    dirCache
	late    []lateDir      // in the order of the tar
	removed map[string]int // directories removed: path, and how long late was then
	belowFD int            // -1: none; valid when asked
	asked   bool
	chowns  bool  // new files do not belong to root by themselves
	marks   bool  // the layer has whiteouts so far
	sparse  int64 // the largest sparse file, in bytes
	buf     []byte
	info    layerInfo
}

// lateDir holds what is set on a directory after its last entry is written: entries change its times, a
// set-group-ID bit or a default ACL would change them.
type lateDir struct {
	path         string
	mode         uint32
	setMode      bool // mkdir has not set all of it
	atime, mtime time.Time
	xattrs       map[string]string
}

func newApplier(root int) *applier {
	return &applier{belowFD: -1, dirs: dirCache{root: root, top: root}, chowns: os.Geteuid() != 0 || os.Getegid() != 0,
		sparse: maxSparse, buf: make([]byte, 256<<10)}
}

func (a *applier) close() {
	a.dirs.flush()
	if a.belowFD >= 0 {
		unix.Close(a.belowFD)
	}
}

// entryError tells what failed on which entry. What the archive itself is to blame for is wire.Invalid.
func entryError(op, name string, err error) error {
	if e := (*wire.Error)(nil); errors.As(err, &e) {
		return fmt.Errorf("%s %q: %w", op, name, err)
	}
	switch {
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.EISDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG),
		errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPERM), errors.Is(err, unix.EEXIST), errors.Is(err, unix.ENOENT):
		return wire.Errorf(wire.Invalid, "%s %q: %w", op, name, err)
	}
	return fmt.Errorf("%s %q: %w", op, name, err)
}

// apply reads the tar to its end-of-archive mark.
func (a *applier) apply(r io.Reader) error {
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if err == io.EOF {
			return a.finish(0)
		}
		if err != nil {
			return damaged(err)
		}
		if err := a.entry(h, t); err != nil {
			return err
		}
	}
}

// cleanName makes an entry's name a path without dots, relative to the root; "" is the root itself. A name that
// climbs out is refused, one that begins with "/" is taken from the root, as GNU tar and Docker do.
func cleanName(name string) (string, error) {
	c := path.Clean(strings.TrimLeft(name, "/"))
	if c == "." {
		return "", nil
	}
	if c == ".." || strings.HasPrefix(c, "../") {
		return "", wire.Errorf(wire.Invalid, "%q is outside of the archive's root", name)
	}
	return c, nil
}

func splitLast(p string) (dir, base string) {
	i := strings.LastIndexByte(p, '/')
	if i < 0 {
		return "", p
	}
	return p[:i], p[i+1:]
}

func (a *applier) entry(h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := cleanName(h.Name)
	if err != nil {
		return err
	}
	if err := checkXattrs(h); err != nil {
		return entryError("reading attributes of", h.Name, err)
	}
	if a.put != nil && a.put.owner != nil {
		h.Uid, h.Gid = int(a.put.owner.UID), int(a.put.owner.GID)
	}
	if name == "" {
		return a.rootEntry(h)
	}
	dir, base := splitLast(name)
	if a.whiteouts && strings.Contains(name, whiteoutPrefix) {
		done, err := a.whiteout(name, dir, base)
		if done || err != nil {
			return err
		}
	}
	parent, err := a.parent(dir)
	if err != nil {
		return entryError("making the parent of", name, err)
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		err = a.file(h, content, parent, base, name)
	case tar.TypeDir:
		err = a.dir(h, parent, base, name)
	case tar.TypeSymlink:
		err = a.symlink(h, parent, base, name)
	case tar.TypeLink:
		err = a.link(h, base, name)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		err = a.node(h, parent, base, name)
	default:
		err = wire.Errorf(wire.Invalid, "unhandled tar header type %q", h.Typeflag)
	}
	if err != nil {
		return entryError("unpacking", name, err)
	}
	return nil
}

// parent returns a descriptor of the directory dir, made if it is missing. It stays the cache's.
func (a *applier) parent(dir string) (int, error) {
	fd, err := a.dirs.open(dir)
	if err == nil {
		return fd, nil
	}
	if err == unix.ENOTDIR && a.marks { // a whiteout may be in the way
		err = unix.ENOENT
	}
	if err != unix.ENOENT {
		return -1, err
	}
	return a.makeParents(dir)
}

// makeParents makes the directories of dir that the archive has no entry for. One that exists below keeps the
// attributes it has there, because in the overlay this one hides them.
func (a *applier) makeParents(dir string) (int, error) {
	for i := 0; i <= len(dir); i++ {
		if i < len(dir) && dir[i] != '/' {
			continue
		}
		p := dir[:i]
		if _, err := a.dirs.open(p); err == nil {
			continue
		}
		up, base := splitLast(p)
		parent, err := a.dirs.open(up)
		if err != nil {
			return -1, err
		}
		err = retry(func() error { return unix.Mkdirat(parent, base, 0o755) })
		if err == unix.EEXIST {
			var st unix.Stat_t
			if err := fstatat(parent, base, &st); err != nil {
				return -1, err
			}
			if !isWhiteout(&st) {
				return -1, unix.ENOTDIR // or a link that leads nowhere
			}
			if err := a.replaceWhiteout(parent, base, 0o755); err != nil {
				return -1, err
			}
			continue // hidden by the whiteout: nothing below counts
		}
		if err != nil {
			return -1, err
		}
		if err := a.likeBelow(p, parent, base); err != nil {
			return -1, err
		}
	}
	return a.dirs.open(dir)
}

// replaceWhiteout puts a directory in the place of a whiteout: what is below stays hidden.
func (a *applier) replaceWhiteout(parent int, base string, mode uint32) error {
	if err := unlinkat(parent, base, 0); err != nil {
		return err
	}
	if err := retry(func() error { return unix.Mkdirat(parent, base, mode) }); err != nil {
		return err
	}
	return setOpaque(parent, base)
}

func setOpaque(parent int, base string) error {
	fd, err := openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return retry(func() error { return unix.Fsetxattr(fd, opaqueXattr, []byte{'y'}, 0) })
}

func isWhiteout(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 }

// whiteout handles the names that mean something in a layer. done: it was one.
//
// A whiteout speaks of the layers below only. So if this layer has an entry of that name too, before or after it, the
// entry stands, and a directory among them is opaque.
func (a *applier) whiteout(name, dir, base string) (done bool, err error) {
	for rest := name; rest != ""; {
		var part string
		part, rest, _ = strings.Cut(rest, "/")
		if strings.HasPrefix(part, whiteoutMeta) && part != whiteoutOpaque {
			return true, nil // aufs' own bookkeeping
		}
	}
	if !strings.HasPrefix(base, whiteoutPrefix) {
		return false, nil
	}
	parent, err := a.parent(dir)
	if err != nil {
		return true, entryError("making the parent of", name, err)
	}
	if base == whiteoutOpaque {
		if err := setOpaque(parent, "."); err != nil {
			return true, entryError("marking as opaque", dir, err)
		}
		return true, nil
	}
	gone := base[len(whiteoutPrefix):]
	if gone == "" || gone == "." || gone == ".." {
		return true, wire.Errorf(wire.Invalid, "invalid whiteout %q", name)
	}
	a.marks = true
	err = retry(func() error { return unix.Mknodat(parent, gone, unix.S_IFCHR, 0) })
	if err == unix.EEXIST {
		var st unix.Stat_t
		if err = fstatat(parent, gone, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
			err = setOpaque(parent, gone)
		}
	}
	if err != nil {
		return true, entryError("unpacking whiteout", name, err)
	}
	return true, nil
}

// clear takes away what stands in the way of a new entry. It may flush the cache of directories.
func (a *applier) clear(parent int, base, name string) error {
	var st unix.Stat_t
	if err := fstatat(parent, base, &st); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		if a.put != nil && a.put.noOverwrite {
			return wire.Errorf(wire.Invalid, "cannot overwrite directory %q with non-directory %q", name, name)
		}
		if a.removed == nil {
			a.removed = map[string]int{}
		}
		a.removed[name] = len(a.late)
		a.dirs.flush() // what the cache holds may be below it
		return removeTree(parent, base)
	case unix.S_IFLNK:
		a.dirs.flush() // a path in the cache may lead through it
	}
	return unlinkat(parent, base, 0)
}

// create calls do; if something is in the way it is cleared and do is called again.
func (a *applier) create(parent int, base, name string, do func(parent int) error) error {
	err := retry(func() error { return do(parent) })
	if err != unix.EEXIST {
		return err
	}
	// clear may flush the cache the descriptor is from.
	own, err := openat(parent, ".", unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(own)
	if err := a.clear(own, base, name); err != nil {
		return err
	}
	return retry(func() error { return do(own) })
}

func (a *applier) file(h *tar.Header, content io.Reader, parent int, base, name string) error {
	mode := uint32(h.Mode & 0o7777)
	fd := -1
	err := a.create(parent, base, name, func(parent int) (err error) {
		fd, err = openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, mode&0o777)
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if isSparse(h) || a.put != nil && h.Size >= minHoles {
		err = a.copySparse(fd, content, h.Size)
	} else {
		err = a.copy(fd, content, h.Size)
	}
	if err != nil {
		return err
	}
	a.info.Size += h.Size
	// The order matters: writing and chown take file capabilities and set-ID bits away.
	if h.Uid != 0 || h.Gid != 0 || a.chowns {
		if err := retry(func() error { return unix.Fchown(fd, h.Uid, h.Gid) }); err != nil {
			return fmt.Errorf("chown: %w", err)
		}
	}
	if mode&0o7000 != 0 || a.put != nil {
		if err := retry(func() error { return unix.Fchmod(fd, mode) }); err != nil {
			return fmt.Errorf("chmod: %w", err)
		}
	}
	for key, value := range xattrs(h) {
		if err := setXattr(key, func() error { return unix.Fsetxattr(fd, key, []byte(value), 0) }); err != nil {
			return err
		}
	}
	return futimens(fd, entryTimes(h))
}

// copy writes the content of a file.
func (a *applier) copy(fd int, content io.Reader, size int64) error {
	for size > 0 {
		n, err := io.ReadFull(content, a.buf[:min(int64(len(a.buf)), size)])
		if err != nil {
			return damaged(err)
		}
		if err := writeAll(fd, a.buf[:n]); err != nil {
			return err
		}
		size -= int64(n)
	}
	return nil
}

// maxSparse bounds a sparse file, in bytes: its holes cost time although they cost no space.
const maxSparse = 1 << 42

// isSparse tells whether the entry is stored as one of GNU tar's sparse forms.
func isSparse(h *tar.Header) bool {
	if h.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// copySparse writes the content of a file stored with holes, leaving out blocks of zeros.
func (a *applier) copySparse(fd int, content io.Reader, size int64) error {
	if size > a.sparse {
		return wire.Errorf(wire.Invalid, "sparse file of %d bytes: %w", size, unix.EFBIG)
	}
	if err := retry(func() error { return unix.Ftruncate(fd, size) }); err != nil {
		return err
	}
	for off := int64(0); off < size; {
		p := a.buf[:min(int64(len(a.buf)), size-off)]
		if _, err := io.ReadFull(content, p); err != nil {
			return damaged(err)
		}
		if err := pwriteHoles(fd, p, off); err != nil {
			return err
		}
		off += int64(len(p))
	}
	return nil
}

func (a *applier) dir(h *tar.Header, parent int, base, name string) error {
	mode := uint32(h.Mode & 0o7777)
	err := retry(func() error { return unix.Mkdirat(parent, base, mode&0o777) })
	there := err == unix.EEXIST
	if there {
		err = a.existingDir(h, parent, base, name, mode)
	} else if err == nil && (h.Uid != 0 || h.Gid != 0 || a.chowns) {
		err = fchownat(parent, base, h.Uid, h.Gid)
	}
	if err != nil {
		return err
	}
	return a.later(h, name, mode, there || mode&0o7000 != 0 || a.put != nil)
}

// existingDir makes base a directory with the entry's owner and mode whatever it was before; a directory is kept.
func (a *applier) existingDir(h *tar.Header, parent int, base, name string, mode uint32) error {
	var st unix.Stat_t
	if err := fstatat(parent, base, &st); err != nil {
		return err
	}
	if a.whiteouts && isWhiteout(&st) {
		if err := a.replaceWhiteout(parent, base, mode&0o777); err != nil {
			return err
		}
	} else if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if a.put != nil && a.put.noOverwrite {
			return wire.Errorf(wire.Invalid, "cannot overwrite non-directory %q with directory %q", name, name)
		}
		err := a.create(parent, base, name, func(parent int) error { return unix.Mkdirat(parent, base, mode&0o777) })
		if err != nil {
			return err
		}
		if parent, err = a.dirs.open(dirOf(name)); err != nil { // the cache was flushed
			return err
		}
	}
	fd, err := openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := retry(func() error { return unix.Fchown(fd, h.Uid, h.Gid) }); err != nil {
		return fmt.Errorf("chown: %w", err)
	}
	return retry(func() error { return unix.Fchmod(fd, mode&0o777) })
}

func dirOf(name string) string {
	dir, _ := splitLast(name)
	return dir
}

// rootEntry handles the entry for the root directory itself.
func (a *applier) rootEntry(h *tar.Header) error {
	if h.Typeflag != tar.TypeDir {
		return wire.Errorf(wire.Invalid, "entry %q for the root is no directory", h.Name)
	}
	if a.put != nil {
		return nil // the directory is the user's already
	}
	mode := uint32(h.Mode & 0o7777)
	if err := a.existingDir(h, a.dirs.top, ".", "", mode); err != nil {
		return entryError("unpacking", h.Name, err)
	}
	a.info.HasRoot, a.info.Mode, a.info.UID, a.info.GID = true, mode, uint32(h.Uid), uint32(h.Gid)
	return a.later(h, "", mode, true)
}

func (a *applier) symlink(h *tar.Header, parent int, base, name string) error {
	if h.Linkname == "" {
		return wire.Errorf(wire.Invalid, "symbolic link without a target")
	}
	err := a.create(parent, base, name, func(parent int) error { return unix.Symlinkat(h.Linkname, parent, base) })
	if err != nil {
		return err
	}
	return a.attributes(h, name, base, 0)
}

func (a *applier) node(h *tar.Header, parent int, base, name string) error {
	mode := uint32(h.Mode & 0o7777)
	kind := uint32(unix.S_IFIFO)
	dev := uint64(0)
	if h.Typeflag != tar.TypeFifo {
		if h.Devmajor < 0 || h.Devmajor > 0xfff || h.Devminor < 0 || h.Devminor > 0xfffff {
			return wire.Errorf(wire.Invalid, "device number %d:%d is out of range", h.Devmajor, h.Devminor)
		}
		dev = unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor))
		if kind = unix.S_IFCHR; h.Typeflag == tar.TypeBlock {
			kind = unix.S_IFBLK
		}
	}
	err := a.create(parent, base, name, func(parent int) error { return unix.Mknodat(parent, base, kind|mode&0o777, int(dev)) })
	if err != nil {
		return err
	}
	return a.attributes(h, name, base, mode)
}

// attributes sets owner, bits that creation does not set, extended attributes and times of an entry that cannot be
// opened. The last component is not followed; mode 0 leaves the mode (a link has none).
func (a *applier) attributes(h *tar.Header, name, base string, mode uint32) error {
	parent, err := a.dirs.open(dirOf(name)) // again: creating it may have flushed the cache
	if err != nil {
		return err
	}
	if h.Uid != 0 || h.Gid != 0 || a.chowns {
		if err := fchownat(parent, base, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	if mode&0o7000 != 0 || mode != 0 && a.put != nil {
		if err := chmodat(parent, base, mode); err != nil {
			return fmt.Errorf("chmod: %w", err)
		}
	}
	for key, value := range xattrs(h) {
		if err := a.setXattrAt(parent, base, key, value); err != nil {
			return err
		}
	}
	return utimensat(parent, base, entryTimes(h))
}

// setXattrAt sets an attribute of something that cannot be opened and is not followed. setxattrat exists since
// Linux 6.13 only; before it, the way is a relative path.
func (a *applier) setXattrAt(parent int, base, key, value string) error {
	if a.ownCwd {
		return setXattr(key, func() error {
			if err := unix.Fchdir(parent); err != nil {
				return err
			}
			return unix.Lsetxattr(base, key, []byte(value), 0)
		})
	}
	return setXattr(key, func() error {
		return unix.Lsetxattr(fmt.Sprintf("/proc/self/fd/%d/%s", parent, base), key, []byte(value), 0)
	})
}

func (a *applier) link(h *tar.Header, base, name string) error {
	target, err := cleanName(h.Linkname)
	if err != nil || target == "" || target == name {
		return wire.Errorf(wire.Invalid, "invalid hardlink %q -> %q", h.Name, h.Linkname)
	}
	tdir, tbase := splitLast(target)
	from, err := a.dirs.open(tdir)
	var st unix.Stat_t
	if err == nil {
		// Held on its own: the cache may drop it while what is in the way is cleared.
		if from, err = openat(from, ".", unix.O_PATH|unix.O_DIRECTORY, 0); err == nil {
			defer unix.Close(from)
			err = fstatat(from, tbase, &st)
		}
	}
	if isMissing(err) {
		return a.linkBelow(h, target, base, name)
	}
	if err != nil {
		return fmt.Errorf("invalid hardlink %q -> %q: %w", h.Name, h.Linkname, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR || a.marks && isWhiteout(&st) {
		return wire.Errorf(wire.Invalid, "invalid hardlink %q -> %q", h.Name, h.Linkname)
	}
	parent, err := a.parent(dirOf(name)) // looking for the target may have dropped it from the cache
	if err != nil {
		return err
	}
	err = a.create(parent, base, name, func(parent int) error { return unix.Linkat(from, tbase, parent, base, 0) })
	if err == unix.EMLINK { // the file system's limit; equal content is the best that is left
		return a.copyIn(from, tbase, &st, name, base)
	}
	if err != nil {
		return fmt.Errorf("invalid hardlink %q -> %q: %w", h.Name, h.Linkname, err)
	}
	return nil
}

// linkBelow makes a link to a file of the layers below: a copy, for a layer can hold no link to another.
func (a *applier) linkBelow(h *tar.Header, target, base, name string) error {
	missing := wire.Errorf(wire.Invalid, "invalid hardlink %q -> %q: %w", h.Name, h.Linkname, unix.ENOENT)
	below, err := a.layersBelow()
	if err != nil {
		return err
	}
	if below < 0 {
		return missing
	}
	fd, err := openat2(below, target, unix.O_PATH|unix.O_NOFOLLOW, inRoot)
	if isMissing(err) {
		return missing
	}
	if err != nil {
		return err
	}
	var st unix.Stat_t
	err = fstatPath(fd, &st)
	unix.Close(fd)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return wire.Errorf(wire.Invalid, "invalid hardlink %q -> %q", h.Name, h.Linkname)
	}
	tdir, tbase := splitLast(target)
	from := below
	if tdir != "" {
		if from, err = openat2(below, tdir, unix.O_PATH|unix.O_DIRECTORY, inRoot); err != nil {
			return err
		}
		defer unix.Close(from)
	}
	return a.copyIn(from, tbase, &st, name, base)
}

// copyIn copies what is not a directory to name, with all its attributes.
func (a *applier) copyIn(from int, tbase string, st *unix.Stat_t, name, base string) error {
	parent, err := a.dirs.open(dirOf(name))
	if err != nil {
		return err
	}
	err = a.create(parent, base, name, func(parent int) error { return copyNode(from, tbase, st, parent, base) })
	if err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG {
		a.info.Size += st.Size
	}
	return err
}

// layersBelow returns a descriptor of the layers below, merged; -1 if there are none.
func (a *applier) layersBelow() (int, error) {
	if !a.asked && a.below != nil {
		fd, err := a.below()
		if err != nil {
			return -1, err
		}
		a.belowFD = fd
	}
	a.asked = true
	return a.belowFD, nil
}

// likeBelow gives a directory the attributes of the one it will cover.
func (a *applier) likeBelow(name string, parent int, base string) error {
	below, err := a.layersBelow()
	if err != nil || below < 0 {
		return err
	}
	src, err := openat2(below, name, unix.O_RDONLY|unix.O_DIRECTORY, inRoot)
	if isMissing(err) || err == unix.ELOOP {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(src)
	dst, err := openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(dst)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	if err := fchownat(dst, ".", int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	attrs, err := readXattrs(src)
	if err != nil {
		return err
	}
	a.late = append(a.late, lateDir{path: name, mode: st.Mode & 0o7777, setMode: true, xattrs: attrs,
		atime: time.Unix(st.Atim.Unix()), mtime: time.Unix(st.Mtim.Unix())})
	return nil
}
