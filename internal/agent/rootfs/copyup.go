package rootfs

import (
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// copyStage is where CopyUp gathers the content inside the volume. It is renamed out only when all of it is there, so
// that an agent killed in between leaves a volume that is empty but for this, and the next start begins anew.
const copyStage = ".kiri-copy-up"

// CopyUp fills an empty volume with what the image has at target: content, and the directory's own owner and mode.
// volume is a directory descriptor of it. A volume that is not empty is left alone, and so is one whose target the
// image does not have. Calls for the same volume wait for each other.
//
// Errors: wire.Invalid if target is there and no directory.
func (s *Store) CopyUp(root *os.File, target string, volume *os.File) error {
	dst, err := openat(fdOf(volume), ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("opening the volume for %s: %w", target, err)
	}
	defer unix.Close(dst)
	var st unix.Stat_t
	if err := unix.Fstat(dst, &st); err != nil {
		return fmt.Errorf("opening the volume for %s: %w", target, err)
	}
	defer s.copies.lock(place{st.Dev, st.Ino})()
	if err := copyUp(root, target, dst); err != nil {
		return fmt.Errorf("filling the volume for %s: %w", target, err)
	}
	return nil
}

func copyUp(root *os.File, target string, dst int) error {
	entries, err := readDir(dst)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.name != copyStage {
			return nil
		}
	}
	if len(entries) > 0 {
		if err := removeTree(dst, copyStage); err != nil {
			return err
		}
	}
	src, err := openat2(fdOf(root), path.Clean("/"+target), unix.O_RDONLY|unix.O_DIRECTORY, inRoot)
	switch err {
	case nil:
	case unix.ENOENT:
		return nil
	case unix.ENOTDIR:
		return wire.Errorf(wire.Invalid, "cannot mount volume over existing file, file exists %s", target)
	default:
		return err
	}
	defer unix.Close(src)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	list, err := readDir(src)
	if err != nil {
		return err
	}
	c := treeCopier{links: map[place]linkedCopy{}}
	if len(list) > 0 {
		if err := retry(func() error { return unix.Mkdirat(dst, copyStage, 0o700) }); err != nil {
			return err
		}
		stage, err := openat(dst, copyStage, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		defer unix.Close(stage)
		c.stage = stage
		err = c.entries(src, list, stage, "", 0)
		if err == nil {
			for _, e := range list {
				err = retry(func() error { return unix.Renameat2(stage, e.name, dst, e.name, unix.RENAME_NOREPLACE) })
				if err == unix.EEXIST { // another container that has the volume was quicker
					err = nil
				}
				if err != nil {
					break
				}
			}
		}
		if rmErr := removeTree(dst, copyStage); err == nil {
			err = rmErr
		}
		if err != nil {
			return err
		}
	}
	if err := copyOwnerMode(dst, &st); err != nil {
		return err
	}
	if err := copyXattrs(dst, src); err != nil {
		return err
	}
	return setTimes(dst, &st)
}

func setTimes(fd int, st *unix.Stat_t) error {
	return retry(func() error {
		return unix.UtimesNanoAt(fd, "", []unix.Timespec{st.Atim, st.Mtim}, unix.AT_EMPTY_PATH)
	})
}

// treeCopier copies a directory tree with everything but what is mounted in it.
type treeCopier struct {
	stage int                  // the top of the copy
	links map[place]linkedCopy // files with several names that have been copied
}

type linkedCopy struct{ path string } // below stage

// entries copies what list names from src to dst, whose path below the stage is at.
func (c *treeCopier) entries(src int, list []dirent, dst int, at string, depth int) error {
	for _, e := range list {
		var st unix.Stat_t
		if err := fstatat(src, e.name, &st); err != nil {
			return fmt.Errorf("copying %s: %w", e.name, err)
		}
		p := at + e.name
		if st.Mode&unix.S_IFMT == unix.S_IFDIR {
			if err := c.dir(src, e.name, dst, p, depth); err != nil {
				return err
			}
			continue
		}
		inode := place{st.Dev, st.Ino}
		if st.Nlink > 1 {
			if first, ok := c.links[inode]; ok {
				if err := retry(func() error { return unix.Linkat(c.stage, first.path, dst, e.name, 0) }); err == nil {
					continue
				}
			}
		}
		if err := copyNode(src, e.name, &st, dst, e.name); err != nil {
			return fmt.Errorf("copying %s: %w", p, err)
		}
		if st.Nlink > 1 {
			c.links[inode] = linkedCopy{p}
		}
	}
	return nil
}

func (c *treeCopier) dir(from int, name string, to int, p string, depth int) error {
	if depth >= maxTreeDepth {
		return fmt.Errorf("copying %s: directories are nested more than %d deep: %w", p, maxTreeDepth, unix.ELOOP)
	}
	src, err := openat2(from, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_BENEATH)
	if err != nil {
		return fmt.Errorf("copying %s: %w", p, err)
	}
	defer unix.Close(src)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return fmt.Errorf("copying %s: %w", p, err)
	}
	if err := retry(func() error { return unix.Mkdirat(to, name, 0o700) }); err != nil {
		return fmt.Errorf("copying %s: %w", p, err)
	}
	dst, err := openat(to, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fmt.Errorf("copying %s: %w", p, err)
	}
	defer unix.Close(dst)
	list, err := readDir(src)
	if err == nil {
		err = c.entries(src, list, dst, p+"/", depth+1)
	}
	if err != nil {
		return err
	}
	if err := copyOwnerMode(dst, &st); err != nil {
		return fmt.Errorf("copying %s: %w", p, err)
	}
	if err := copyXattrs(dst, src); err != nil {
		return fmt.Errorf("copying %s: %w", p, err)
	}
	return setTimes(dst, &st)
}
