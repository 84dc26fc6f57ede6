package rootfs

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// placesOfOurs are what a container's start creates in its writable layer for mounts to sit on, if neither the image
// nor the layer of mount points under it shows them. They are no changes of the user's.
var placesOfOurs = []string{"/dev", "/proc", "/sys", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/.dockerenv", "/run/.containerenv"}

// Changes lists what a container changed against its layers, each path behind one letter as `docker diff` prints it:
// A added, C changed, D deleted; sorted by path. A file is changed if its kind, mode, owner, size, time, device or
// file capability is another; a directory if its mode or owner is, or if something in it is changed. Empty files and
// directories that were made only as places for mounts are left out: the usual ones and those in targets.
func (s *Store) Changes(ctx context.Context, id string, layers, targets []string) ([]string, error) {
	upper, changes, err := s.diff(ctx, id, layers, targets)
	if err != nil {
		return nil, fmt.Errorf("reading changes of container %s: %w", id, err)
	}
	if upper >= 0 {
		unix.Close(upper)
	}
	return changes, nil
}

// diff is Changes, and returns a descriptor of the writable layer; -1 if there is none, for it was never started.
func (s *Store) diff(ctx context.Context, id string, layers, targets []string) (upper int, changes []string, err error) {
	if err := validID(id); err != nil {
		return -1, nil, err
	}
	c := differ{ctx: ctx, ignore: map[string]bool{}}
	for _, p := range slices.Concat(placesOfOurs, targets) {
		c.ignore[path.Clean("/"+p)] = true
	}
	upper, err = openat(unix.AT_FDCWD, s.ContainerDir(id)+"/upper", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err == unix.ENOENT {
		return -1, nil, nil
	}
	if err != nil {
		return -1, nil, err
	}
	if err := c.against(s, upper, layers); err != nil {
		unix.Close(upper)
		return -1, nil, err
	}
	return upper, c.out, nil
}

// against compares the writable layer with what is below it.
func (c *differ) against(s *Store, upper int, layers []string) error {
	infos, err := s.lookup(layers)
	if err != nil {
		return err
	}
	below := MountOptions{MountPoints: true}
	o := overlay{store: s, lower: below.lower(infos), readonly: true}
	lower, err := o.mount()
	if err != nil {
		return err
	}
	defer lower.Close()
	root, err := openat(fdOf(lower), ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	if _, err := c.dir("", upper, root, false, 0); err != nil {
		return err
	}
	slices.SortFunc(c.out, func(a, b string) int { return strings.Compare(a[2:], b[2:]) })
	return nil
}

type differ struct {
	ctx    context.Context
	ignore map[string]bool
	out    []string // "A /path"
}

func (c *differ) note(kind byte, p string) { c.out = append(c.out, string(kind)+" "+p) }

// dir compares a directory of the writable layer with the same one below, -1 if there is none. found: it has changes.
// opaque: one above it hides all that is below, and overlayfs marks only the topmost of them.
func (c *differ) dir(p string, upper, lower int, opaque bool, depth int) (found bool, err error) {
	if err := c.ctx.Err(); err != nil {
		return false, context.Cause(c.ctx)
	}
	if depth > maxTreeDepth {
		return false, fmt.Errorf("directories are nested more than %d deep: %w", maxTreeDepth, unix.ELOOP)
	}
	entries, err := readDir(upper)
	if err != nil {
		return false, err
	}
	opaque = opaque || isOpaque(upper)
	there := make(map[string]bool, len(entries))
	for _, e := range entries {
		there[e.name] = true
		some, err := c.entry(p+"/"+e.name, e.name, upper, lower, opaque, depth)
		if err != nil {
			return false, err
		}
		found = found || some
	}
	if lower >= 0 && opaque {
		gone, err := readDir(lower)
		if err != nil {
			return false, err
		}
		for _, e := range gone {
			if !there[e.name] {
				c.note('D', p+"/"+e.name)
				found = true
			}
		}
	}
	return found, nil
}

func isOpaque(fd int) bool {
	var v [1]byte
	n, err := unix.Fgetxattr(fd, opaqueXattr, v[:])
	return err == nil && n == 1 && v[0] == 'y'
}

// entry compares one name.
func (c *differ) entry(p, name string, upper, lower int, opaque bool, depth int) (found bool, err error) {
	var now, was unix.Stat_t
	if err := fstatat(upper, name, &now); err == unix.ENOENT {
		return false, nil // gone meanwhile: the container runs
	} else if err != nil {
		return false, err
	}
	err = unix.ENOENT
	if lower >= 0 {
		err = fstatat(lower, name, &was)
	}
	existed := err == nil
	if err != nil && !isMissing(err) {
		return false, err
	}
	if isWhiteout(&now) {
		if existed {
			c.note('D', p)
		}
		return existed, nil
	}
	isDir, wasDir := now.Mode&unix.S_IFMT == unix.S_IFDIR, existed && was.Mode&unix.S_IFMT == unix.S_IFDIR
	at := len(c.out)
	if isDir {
		if found, err = c.below(p, name, upper, lower, wasDir, opaque, depth); err != nil {
			return false, err
		}
	} else if wasDir { // what was in it is gone
		if err := c.allGone(p, name, lower); err != nil {
			return false, err
		}
	}
	switch {
	case !existed:
		if c.ignore[p] && !found && (isDir || now.Mode&unix.S_IFMT == unix.S_IFREG && now.Size == 0) || isDir && !found && c.leadsToOurs(p) {
			return false, nil
		}
		c.out = slices.Insert(c.out, at, "A "+p)
	case found || isDir != wasDir || c.differs(name, upper, lower, &now, &was):
		c.out = slices.Insert(c.out, at, "C "+p)
	default:
		return false, nil
	}
	return true, nil
}

// leadsToOurs tells whether p is above a place that was made for a mount.
func (c *differ) leadsToOurs(p string) bool {
	for q := range c.ignore {
		if strings.HasPrefix(q, p+"/") {
			return true
		}
	}
	return false
}

// below compares the content of a directory.
func (c *differ) below(p, name string, upper, lower int, wasDir, opaque bool, depth int) (bool, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW
	up, err := openat(upper, name, flags, 0)
	if isMissing(err) || err == unix.ELOOP {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(up)
	low := -1
	if wasDir {
		if low, err = openat(lower, name, flags, 0); err != nil {
			return false, err
		}
		defer unix.Close(low)
	}
	return c.dir(p, up, low, opaque, depth+1)
}

// allGone notes everything directly in a directory below as deleted.
func (c *differ) allGone(p, name string, lower int) error {
	fd, err := openat(lower, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	entries, err := readDir(fd)
	for _, e := range entries {
		c.note('D', p+"/"+e.name)
	}
	return err
}

// differs tells whether something that was there before is changed itself.
func (c *differ) differs(name string, upper, lower int, now, was *unix.Stat_t) bool {
	if now.Mode != was.Mode || now.Uid != was.Uid || now.Gid != was.Gid || now.Rdev != was.Rdev {
		return true
	}
	kind := now.Mode & unix.S_IFMT
	if kind == unix.S_IFDIR {
		return false
	}
	if now.Size != was.Size || now.Mtim != was.Mtim {
		return true
	}
	return kind == unix.S_IFREG && capability(upper, name) != capability(lower, name)
}

// capability returns the raw file capability of a regular file, "" if it has none.
func capability(dir int, name string) string {
	fd, err := openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	_, mode, err := identify(fd)
	if err != nil || mode&unix.S_IFMT != unix.S_IFREG {
		return ""
	}
	rfd, err := reopen(fd, unix.O_RDONLY)
	if err != nil {
		return ""
	}
	defer unix.Close(rfd)
	v, err := getXattr(rfd, "security.capability")
	if errors.Is(err, unix.ENODATA) || err != nil {
		return ""
	}
	return string(v)
}
