package rootfs

import (
	"archive/tar"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// later notes what is to be set on a directory at the end.
func (a *applier) later(h *tar.Header, name string, mode uint32, setMode bool) error {
	ts := entryTimes(h)
	a.late = append(a.late, lateDir{path: name, mode: mode, setMode: setMode, xattrs: xattrs(h), atime: ts[0], mtime: ts[1]})
	if len(a.late) < maxLate {
		return nil
	}
	// Archives list a directory's content behind it, so all but this one's ancestors are done with.
	if err := a.finish(len(a.late) - 1); err != nil {
		return err
	}
	kept := a.late[:0]
	for _, d := range a.late {
		if d.path == "" || d.path == name || strings.HasPrefix(name, d.path+"/") {
			kept = append(kept, d)
		}
	}
	clear(a.late[len(kept):])
	a.late = kept
	a.removed = nil // those it spoke of are out of the list or stand
	return nil
}

// finish sets the noted attributes; with keep, of all but the last entries from keep on that lead to the newest.
func (a *applier) finish(keep int) error {
	list := a.late
	if keep > 0 {
		list = list[:keep]
	}
	for i := range list {
		d := &list[i]
		if a.wasRemoved(d.path, i) {
			continue
		}
		if err := a.finishDir(d); err != nil {
			return entryError("setting attributes of", d.path, err)
		}
	}
	return nil
}

// wasRemoved tells whether the directory of entry i of late, or one above it, was removed after the entry.
func (a *applier) wasRemoved(p string, i int) bool {
	for len(a.removed) > 0 && p != "" {
		if at, ok := a.removed[p]; ok && at > i {
			return true
		}
		p = dirOf(p)
	}
	return false
}

func (a *applier) finishDir(d *lateDir) error {
	ts := [2]time.Time{d.atime, d.mtime}
	parent, base := a.dirs.top, "."
	if d.path != "" {
		dir, last := splitLast(d.path)
		var err error
		if parent, err = a.dirs.open(dir); isMissing(err) {
			return nil // an odd archive has put something else there since
		} else if err != nil {
			return err
		}
		base = last
	}
	if !d.setMode && len(d.xattrs) == 0 {
		err := utimensat(parent, base, ts)
		if isMissing(err) {
			return nil
		}
		return err
	}
	fd, err := openat(parent, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if isMissing(err) || err == unix.ELOOP {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if d.setMode {
		if err := retry(func() error { return unix.Fchmod(fd, d.mode) }); err != nil {
			return fmt.Errorf("chmod: %w", err)
		}
	}
	for key, value := range d.xattrs {
		if err := setXattr(key, func() error { return unix.Fsetxattr(fd, key, []byte(value), 0) }); err != nil {
			return err
		}
	}
	return futimens(fd, ts)
}

const paxXattr = "SCHILY.xattr."

// xattrs returns the entry's extended attributes without overlayfs' own, which would speak to the mount: nil if none.
func xattrs(h *tar.Header) map[string]string {
	var out map[string]string
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, paxXattr)
		if !ok || strings.HasPrefix(name, overlayXattrs) {
			continue
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = value
	}
	return out
}

// checkXattrs bounds the extended attributes of an entry before anything is made of them, and what else of a header
// the kernel would cut to fewer bits without a word.
func checkXattrs(h *tar.Header) error {
	n := 0
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, paxXattr)
		if !ok {
			continue
		}
		if n++; n > maxXattrs {
			return wire.Errorf(wire.Invalid, "more than %d extended attributes", maxXattrs)
		}
		if name == "" || len(name) > 255 || len(value) > maxXattrValue || strings.IndexByte(name, 0) >= 0 {
			return wire.Errorf(wire.Invalid, "extended attribute of %d bytes with a name of %d bytes is out of bounds", len(value), len(name))
		}
	}
	if h.Uid < 0 || h.Gid < 0 || uint64(h.Uid) >= 1<<32-1 || uint64(h.Gid) >= 1<<32-1 {
		return wire.Errorf(wire.Invalid, "owner %d:%d is out of range", h.Uid, h.Gid)
	}
	return nil
}

// setXattr does set and says which attribute failed. An attribute the file system does not know, or does not allow
// on this kind of file, is left out as Docker does; a file capability never is.
func setXattr(key string, set func() error) error {
	err := retry(set)
	if err == nil || (err == unix.ENOTSUP || err == unix.EPERM) && key != "security.capability" {
		return nil
	}
	return fmt.Errorf("setting extended attribute %q: %w", key, err)
}

// entryTimes returns access and modification time as Docker sets them: an access time that is missing or older than
// the modification is the modification's.
func entryTimes(h *tar.Header) [2]time.Time {
	if h.AccessTime.Before(h.ModTime) {
		return [2]time.Time{h.ModTime, h.ModTime}
	}
	return [2]time.Time{h.AccessTime, h.ModTime}
}

// timespec makes t one the kernel takes; times before 1901 or beyond the file system's are clamped by it.
func timespec(t time.Time) unix.Timespec {
	if t.IsZero() {
		t = time.Unix(0, 0)
	}
	return unix.Timespec{Sec: t.Unix(), Nsec: int64(t.Nanosecond())}
}

func utimensat(dir int, name string, t [2]time.Time) error {
	ts := []unix.Timespec{timespec(t[0]), timespec(t[1])}
	err := retry(func() error { return unix.UtimesNanoAt(dir, name, ts, unix.AT_SYMLINK_NOFOLLOW) })
	if err != nil && !isMissing(err) {
		return fmt.Errorf("setting times: %w", err)
	}
	return err
}

func fchownat(dir int, name string, uid, gid int) error {
	err := retry(func() error { return unix.Fchownat(dir, name, uid, gid, unix.AT_SYMLINK_NOFOLLOW) })
	if err != nil {
		return fmt.Errorf("chown: %w", err)
	}
	return nil
}

// dirCache keeps descriptors of the directories that entries came to last. Paths are relative to the directory top,
// "" is it; links in them are resolved in the root.
type dirCache struct {
	root   int
	top    int    // not owned, as root
	at     string // where top is in the root, with a slash at its end; "" if it is the root
	last   string
	lastFD int // valid if last is not ""
	fds    map[string]int
	order  []string // as they were opened
}

const maxDirs = 128

// open returns an O_PATH descriptor of the directory p, valid until the next open or flush. The error is bare.
func (c *dirCache) open(p string) (int, error) {
	if p == "" {
		return c.top, nil
	}
	if p == c.last {
		return c.lastFD, nil
	}
	fd, ok := c.fds[p]
	if !ok {
		var err error
		if fd, err = openat2(c.root, c.at+p, unix.O_PATH|unix.O_DIRECTORY, inRoot); err != nil {
			return -1, err
		}
		if c.fds == nil {
			c.fds = make(map[string]int, maxDirs)
		}
		if len(c.order) == maxDirs { // the older half goes
			for _, old := range c.order[:maxDirs/2] {
				unix.Close(c.fds[old])
				delete(c.fds, old)
			}
			c.order = append(c.order[:0], c.order[maxDirs/2:]...)
		}
		c.fds[p] = fd
		c.order = append(c.order, p)
	}
	c.last, c.lastFD = p, fd
	return fd, nil
}

// flush closes all descriptors.
func (c *dirCache) flush() {
	for _, fd := range c.fds {
		unix.Close(fd)
	}
	clear(c.fds)
	c.order, c.last = c.order[:0], ""
}
