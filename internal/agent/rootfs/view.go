package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// maxLinks is how many symbolic links one path may lead through, as in the kernel.
const maxLinks = 40

// MountAt is a detached mount and the place it will be attached at: an O_PATH descriptor from CreateTarget.
type MountAt struct {
	Mount  *os.File
	Target *os.File
}

// View is a root file system as the container will see it: a detached root and mounts that are still detached too,
// each seen in its place. (Linux can attach mounts to a detached one only since 6.15.) Paths in it belong to the
// container; they are resolved as chroot would, links included, and never leave it.
//
// A View is not safe for concurrent use. It owns none of the descriptors.
type View struct {
	root   *os.File
	mounts []viewMount
}

// place identifies a directory or file in one mount.
type place struct {
	mount, ino uint64
}

type viewMount struct {
	at place
	fd int
}

// NewView makes a view of a root, a directory descriptor of any kind (O_PATH, a detached mount, /proc/PID/root).
func NewView(root *os.File) *View { return &View{root: root} }

// Add puts a mount in its place. Later mounts cover earlier ones.
func (v *View) Add(m MountAt) error {
	at, _, err := identify(fdOf(m.Target))
	if err != nil {
		return fmt.Errorf("identifying mount target %s: %w", m.Target.Name(), err)
	}
	v.mounts = append(v.mounts, viewMount{at, fdOf(m.Mount)})
	return nil
}

// identify tells where the file behind fd is, and its type and mode.
func identify(fd int) (place, uint16, error) {
	var st unix.Statx_t
	err := retry(func() error {
		return unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_NO_AUTOMOUNT, unix.STATX_TYPE|unix.STATX_MODE|unix.STATX_INO|unix.STATX_MNT_ID, &st)
	})
	return place{st.Mnt_id, st.Ino}, st.Mode, err
}

// open resolves p in the view and opens it: flags as of openat2. With O_NOFOLLOW a last link is opened itself.
// The error is bare.
func (v *View) open(p string, flags int) (int, error) {
	if strings.IndexByte(p, 0) >= 0 {
		return -1, unix.EINVAL
	}
	if len(v.mounts) == 0 {
		if p == "" {
			p = "/"
		}
		return openat2(fdOf(v.root), p, flags, inRoot)
	}
	w := walker{view: v}
	defer w.close()
	fd, err := w.walk(p, flags&unix.O_NOFOLLOW == 0)
	if err != nil {
		return -1, err
	}
	if flags&unix.O_PATH != 0 && flags&unix.O_DIRECTORY == 0 {
		return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	}
	if flags&unix.O_DIRECTORY != 0 {
		return openat(fd, ".", flags, 0)
	}
	return reopen(fd, flags&^unix.O_NOFOLLOW)
}

// walker resolves one path by hand. Its stack holds the directories from the root to where it is.
type walker struct {
	view  *View
	stack []int // owned, but for the first and those that are mounts' own: see own
	own   []bool
	links int
}

func (w *walker) close() {
	for i, fd := range w.stack {
		if w.own[i] {
			unix.Close(fd)
		}
	}
	w.stack, w.own = nil, nil
}

func (w *walker) push(fd int, own bool) { w.stack, w.own = append(w.stack, fd), append(w.own, own) }

func (w *walker) pop() {
	last := len(w.stack) - 1
	if w.own[last] {
		unix.Close(w.stack[last])
	}
	w.stack, w.own = w.stack[:last], w.own[:last]
}

// walk returns an O_PATH descriptor, or a mount's own, of what p leads to. It stays the walker's.
func (w *walker) walk(p string, follow bool) (int, error) {
	w.push(fdOf(w.view.root), false)
	if len(p) > unix.PathMax {
		return -1, unix.ENAMETOOLONG
	}
	rest := p
	for {
		rest = strings.TrimLeft(rest, "/")
		if rest == "" {
			return w.stack[len(w.stack)-1], nil
		}
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		switch name {
		case ".":
			if _, mode, err := identify(w.stack[len(w.stack)-1]); err != nil || mode&unix.S_IFMT != unix.S_IFDIR {
				return -1, orNotDir(err)
			}
			continue
		case "..":
			if _, mode, err := identify(w.stack[len(w.stack)-1]); err != nil || mode&unix.S_IFMT != unix.S_IFDIR {
				return -1, orNotDir(err)
			}
			if len(w.stack) > 1 {
				w.pop()
			}
			continue
		}
		dir := w.stack[len(w.stack)-1]
		fd, err := openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
		if err != nil {
			return -1, err
		}
		at, mode, err := identify(fd)
		if err != nil {
			unix.Close(fd)
			return -1, err
		}
		if mode&unix.S_IFMT == unix.S_IFLNK && (follow || strings.Trim(rest, "/") != "") {
			text, err := readlinkat(fd, "")
			unix.Close(fd)
			if err != nil {
				return -1, err
			}
			if w.links++; w.links > maxLinks {
				return -1, unix.ELOOP
			}
			if text == "" || len(text)+1+len(rest) > unix.PathMax {
				return -1, unix.ENAMETOOLONG
			}
			if text[0] == '/' {
				for len(w.stack) > 1 {
					w.pop()
				}
			}
			rest = text + "/" + rest
			if strings.Trim(rest, "/") == "" {
				rest = ""
			}
			continue
		}
		own := true
		for i := len(w.view.mounts) - 1; i >= 0; i-- { // the newest on top; its root may be covered by none
			if m := w.view.mounts[i]; m.at == at {
				unix.Close(fd)
				fd, own = m.fd, false
				break
			}
		}
		w.push(fd, own)
	}
}

func orNotDir(err error) error {
	if err != nil {
		return err
	}
	return unix.ENOTDIR
}

// Mkdir is MkdirIn in a view.
func (v *View) Mkdir(p string, mode uint32, uid, gid uint32) (*os.File, error) {
	fd, err := v.mkdirs(p, mode, uid, gid)
	if errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EEXIST) {
		return nil, wire.Errorf(wire.Invalid, "Cannot mkdir: %s is not a directory", p)
	}
	f, err := fileOf(fd, p, err)
	if err != nil {
		return nil, entryError("making directory", p, err)
	}
	return f, nil
}

// MkdirIn makes the directory p in root with all that is missing above it, and returns an O_PATH descriptor of it. New
// directories get mode (permission bits) and the owner; what is there already stays as it is. A link in the way is
// followed inside the root; where it leads to nothing, that is made.
//
// Errors: wire.Invalid if something that is no directory is in the way ("Cannot mkdir: P is not a directory", Docker's
// text for a working directory).
func MkdirIn(root *os.File, p string, mode uint32, uid, gid uint32) (*os.File, error) {
	return NewView(root).Mkdir(p, mode, uid, gid)
}

// mkdirs opens the directory p, making what is missing. The error is bare.
func (v *View) mkdirs(p string, mode uint32, uid, gid uint32) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY
	fd, err := v.open(p, flags)
	if err != unix.ENOENT {
		return fd, err
	}
	// From the front, each piece in turn; a link that leads nowhere is replaced by its text.
	done, rest := "/", strings.TrimLeft(p, "/")
	links := 0
	for rest != "" {
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		rest = strings.TrimLeft(rest, "/")
		next := done + "/" + name
		if len(next) > unix.PathMax {
			return -1, unix.ENAMETOOLONG
		}
		fd, err := v.open(next, flags)
		if err == nil {
			unix.Close(fd)
			done = next
			continue
		}
		if err != unix.ENOENT {
			return -1, err
		}
		parent, err := v.open(done, flags)
		if err != nil {
			return -1, err
		}
		var st unix.Stat_t
		err = fstatat(parent, name, &st)
		switch {
		case err == unix.ENOENT:
			err = makeDir(parent, name, mode, uid, gid)
			done = next
		case err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK:
			var text string
			if text, err = readlinkat(parent, name); err == nil {
				if links++; links > maxLinks {
					err = unix.ELOOP
				}
				if path.IsAbs(text) {
					done = "/"
				}
				rest = strings.TrimLeft(text+"/"+rest, "/")
			}
		case err == nil: // it came into being since
		}
		unix.Close(parent)
		if err != nil {
			return -1, err
		}
	}
	return v.open(done, flags)
}

// makeDir makes one directory with owner and mode, whatever the umask.
func makeDir(parent int, name string, mode uint32, uid, gid uint32) error {
	err := retry(func() error { return unix.Mkdirat(parent, name, mode&0o777) })
	if err == unix.EEXIST {
		return nil
	}
	if err != nil {
		return err
	}
	fd, err := openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Uid != uid || st.Gid != gid {
		if err := retry(func() error { return unix.Fchown(fd, int(uid), int(gid)) }); err != nil {
			return err
		}
	}
	if st.Mode&0o7777 != mode {
		return retry(func() error { return unix.Fchmod(fd, mode) })
	}
	return nil
}

// CreateTarget returns an O_PATH descriptor of the place for a mount in root: a directory (dir) or a file. If it is
// missing it is made, an empty file or directory with root as owner, with all directories above it. Links are
// followed inside the root, but for targets at or below /proc, /sys and /dev, where any link is refused: those are
// places other parts of the engine trust.
//
// Errors: wire.Invalid if what is there is not of the kind asked for, or is refused.
func CreateTarget(root *os.File, p string, dir bool) (*os.File, error) {
	return NewView(root).Target(p, dir)
}

// Target is CreateTarget in a view.
func (v *View) Target(p string, dir bool) (*os.File, error) {
	clean := path.Clean("/" + p)
	if err := v.refuseLinks(clean); err != nil {
		return nil, err
	}
	fd, err := v.target(clean, dir)
	if err != nil {
		return nil, entryError("creating mount target", p, err)
	}
	_, mode, err := identify(fd)
	if err == nil && (mode&unix.S_IFMT == unix.S_IFDIR) != dir {
		// Docker's words, which its users search for.
		err = wire.Errorf(wire.Invalid, "cannot create mount target %q: %w: Are you trying to mount a directory onto a file (or vice-versa)? Check if the specified host path exists and is the expected type", p, unix.ENOTDIR)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), p), nil
}

// refuseLinks refuses a path at or below /proc, /sys or /dev with a link in it.
func (v *View) refuseLinks(clean string) error {
	top, _, _ := strings.Cut(clean[1:], "/")
	if top != "proc" && top != "sys" && top != "dev" {
		return nil
	}
	for i := 1; i <= len(clean); i++ {
		if i < len(clean) && clean[i] != '/' {
			continue
		}
		fd, err := v.open(clean[:i], unix.O_PATH|unix.O_NOFOLLOW)
		if isMissing(err) {
			return nil
		}
		if err != nil {
			return entryError("looking at mount target", clean, err)
		}
		_, mode, err := identify(fd)
		unix.Close(fd)
		if err != nil {
			return entryError("looking at mount target", clean, err)
		}
		if mode&unix.S_IFMT == unix.S_IFLNK {
			return wire.Errorf(wire.Invalid, "mount target %s: %s is a symbolic link, which is refused there", clean, clean[:i])
		}
	}
	return nil
}

// target opens or makes the mount target; its kind is for the caller to check. The error is bare.
func (v *View) target(clean string, dir bool) (int, error) {
	fd, err := v.open(clean, unix.O_PATH)
	if err == nil {
		return fd, nil
	}
	if err != unix.ENOENT {
		return -1, err
	}
	if dir {
		return v.mkdirs(clean, 0o755, 0, 0)
	}
	links := 0
	for {
		up, base := path.Split(clean)
		parent, err := v.mkdirs(up, 0o755, 0, 0)
		if err != nil {
			return -1, err
		}
		fd, err := openat(parent, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o644)
		if err == nil {
			unix.Fchmod(fd, 0o644) // whatever the umask; failing that it is a mount target all the same
			unix.Close(fd)
			unix.Close(parent)
			return v.open(clean, unix.O_PATH)
		}
		text, linkErr := "", error(nil)
		if err == unix.EEXIST { // a link that leads nowhere
			text, linkErr = readlinkat(parent, base)
		}
		unix.Close(parent)
		if err != unix.EEXIST || linkErr == unix.EINVAL {
			return -1, err
		}
		if linkErr != nil {
			return -1, linkErr
		}
		if links++; links > maxLinks || text == "" {
			return -1, unix.ELOOP
		}
		if path.IsAbs(text) {
			clean = text
		} else {
			clean = up + text
		}
		clean = strings.TrimRight(clean, "/")
	}
}
