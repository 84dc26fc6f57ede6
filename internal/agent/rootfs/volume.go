package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// volumeName is what Docker's local driver allows (its RestrictedNamePattern).
var volumeName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]+$`)

// checkVolume refuses names that are no names of volumes, with Docker's words.
func checkVolume(name string) error {
	if len(name) == 1 {
		return wire.Errorf(wire.Invalid, "volume name is too short, names should be at least two alphanumeric characters")
	}
	if !volumeName.MatchString(name) || len(name) > 255 {
		return wire.Errorf(wire.Invalid, "%q includes invalid characters for a local volume name, only \"[a-zA-Z0-9][a-zA-Z0-9_.-]\" are allowed. If you intended to pass a host directory, use absolute path", name)
	}
	return nil
}

// Volume makes sure a local volume is there and returns the path of its content, volumes/NAME/_data.
func (s *Store) Volume(name string) (string, error) {
	if err := checkVolume(name); err != nil {
		return "", err
	}
	dir := filepath.Join(s.root, "volumes", name)
	for _, d := range []struct {
		path string
		mode os.FileMode
	}{{dir, 0o701}, {dir + "/_data", 0o755}} {
		err := os.Mkdir(d.path, d.mode)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err == nil {
			err = os.Chmod(d.path, d.mode) // whatever the umask
		}
		if err != nil {
			return "", fmt.Errorf("making volume %s: %w", name, err)
		}
	}
	return dir + "/_data", nil
}

// RemoveVolume deletes a volume's directory and all in it; quiet if it is not there. It never enters a mount: one
// that somebody has put inside the volume makes it fail, with the mount untouched.
func (s *Store) RemoveVolume(name string) error {
	if err := checkVolume(name); err != nil {
		return err
	}
	return removeAll(filepath.Join(s.root, "volumes", name), "volume "+name)
}

// VolumeSize counts the bytes of a volume's files (st_size, hard links once), as `docker system df` does.
func (s *Store) VolumeSize(name string) (int64, error) {
	if err := checkVolume(name); err != nil {
		return 0, err
	}
	n, err := treeSize(filepath.Join(s.root, "volumes", name, "_data"))
	if err != nil {
		return 0, fmt.Errorf("counting volume %s: %w", name, err)
	}
	return n, nil
}

// Size counts the bytes of a container's writable layer; 0 if it has none yet.
func (s *Store) Size(id string) (int64, error) {
	if err := validID(id); err != nil {
		return 0, err
	}
	n, err := treeSize(s.ContainerDir(id) + "/upper")
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("counting container %s: %w", id, err)
	}
	return n, nil
}

// treeSize adds up the sizes of the regular files below dir on the same mount, each inode once.
func treeSize(dir string) (int64, error) {
	fd, err := openat(unix.AT_FDCWD, dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	c := counter{seen: map[uint64]bool{}}
	err = c.count(fd, 0)
	return c.bytes, err
}

type counter struct {
	bytes int64
	seen  map[uint64]bool // inodes with several names
}

// maxTreeDepth is how deep trees are read, one descriptor for each level; what lies deeper is not counted or copied.
const maxTreeDepth = 400

func (c *counter) count(dir, depth int) error {
	entries, err := readDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		var st unix.Stat_t
		if e.kind != unix.DT_DIR {
			err := fstatat(dir, e.name, &st)
			if err == unix.ENOENT {
				continue // removed meanwhile
			}
			if err != nil {
				return err
			}
			if st.Mode&unix.S_IFMT == unix.S_IFREG {
				if st.Nlink > 1 {
					if c.seen[st.Ino] {
						continue
					}
					c.seen[st.Ino] = true
				}
				c.bytes += st.Size
			}
			if st.Mode&unix.S_IFMT != unix.S_IFDIR {
				continue
			}
		}
		if depth >= maxTreeDepth {
			return fmt.Errorf("directories are nested more than %d deep: %w", maxTreeDepth, unix.ELOOP)
		}
		sub, err := openat2(dir, e.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, unix.RESOLVE_NO_XDEV|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_BENEATH)
		if isMissing(err) || err == unix.EXDEV || err == unix.ELOOP {
			continue
		}
		if err != nil {
			return err
		}
		err = c.count(sub, depth+1)
		unix.Close(sub)
		if err != nil {
			return err
		}
	}
	return nil
}
