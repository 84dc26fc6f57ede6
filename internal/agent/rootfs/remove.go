package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxDepth is how many directories deep removeTree goes, with one descriptor for each, before it moves what lies
// deeper up to the top. A container can nest directories without limit; descriptors have one.
const maxDepth = 64

// removeTree deletes name in the directory dir with everything in it; quiet if it is not there. It never follows a
// link and never enters another mount: a tree that somebody has mounted something in is left there with EBUSY or
// EXDEV.
func removeTree(dir int, name string) error {
	err := unlinkat(dir, name, unix.AT_REMOVEDIR)
	switch {
	case err == nil || err == unix.ENOENT:
		return nil
	case err == unix.ENOTDIR:
		err = unlinkat(dir, name, 0)
		if err == unix.ENOENT {
			return nil
		}
		return err
	case err != unix.ENOTEMPTY && err != unix.EEXIST:
		return err
	}
	r := remover{buf: make([]byte, 32<<10)}
	if r.top, err = r.enter(dir, name); err != nil {
		return err
	}
	defer unix.Close(r.top)
	if err := r.empty(r.top, 0); err != nil {
		return err
	}
	return unlinkat(dir, name, unix.AT_REMOVEDIR)
}

type remover struct {
	top  int    // the directory being removed
	next int    // number for the next directory moved up
	buf  []byte // for listings; free again once its entries are parsed
}

// enter opens a directory for listing if it is on the same mount.
func (r *remover) enter(dir int, name string) (int, error) {
	return openat2(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW,
		unix.RESOLVE_NO_XDEV|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_BENEATH)
}

// empty deletes everything in the directory fd. It lists until a listing is empty: what a listing shows while
// entries go away is up to the file system, and deeper directories are moved up to the top meanwhile.
func (r *remover) empty(fd, depth int) error {
	for {
		if _, err := unix.Seek(fd, 0, 0); err != nil {
			return err
		}
		found, err := r.pass(fd, depth)
		if err != nil || !found {
			return err
		}
	}
}

// pass lists the directory once and deletes what it sees.
func (r *remover) pass(fd, depth int) (found bool, err error) {
	for {
		var n int
		err := retry(func() (err error) { n, err = unix.Getdents(fd, r.buf); return })
		if err != nil || n == 0 {
			return found, err
		}
		for _, e := range parseDirents(r.buf[:n]) {
			found = true
			if err := r.remove(fd, depth, e); err != nil {
				return found, err
			}
		}
	}
}

func (r *remover) remove(fd, depth int, e dirent) error {
	if e.kind != unix.DT_DIR {
		err := unlinkat(fd, e.name, 0)
		if err == nil || err == unix.ENOENT {
			return nil
		}
		if err != unix.EISDIR { // a file system that tells no types
			return fmt.Errorf("removing %s: %w", e.name, err)
		}
	}
	err := unlinkat(fd, e.name, unix.AT_REMOVEDIR)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.ENOTEMPTY && err != unix.EEXIST {
		return fmt.Errorf("removing %s: %w", e.name, err)
	}
	if depth >= maxDepth {
		return r.hoist(fd, e.name)
	}
	sub, err := r.enter(fd, e.name)
	if err != nil {
		return fmt.Errorf("removing %s: %w", e.name, err)
	}
	err = r.empty(sub, depth+1)
	unix.Close(sub)
	if err != nil {
		return err
	}
	err = unlinkat(fd, e.name, unix.AT_REMOVEDIR)
	if err != nil && err != unix.ENOENT {
		return fmt.Errorf("removing %s: %w", e.name, err)
	}
	return nil
}

// hoist moves a directory that lies too deep to the top, under a name that is free there.
func (r *remover) hoist(fd int, name string) error {
	for {
		r.next++
		err := unix.Renameat2(fd, name, r.top, ".kiri-rm-"+strconv.Itoa(r.next), unix.RENAME_NOREPLACE)
		if err == unix.EEXIST || err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("removing %s: %w", name, err)
		}
		return nil
	}
}

func unlinkat(dir int, name string, flags int) error {
	return retry(func() error { return unix.Unlinkat(dir, name, flags) })
}

// dirent is one entry of a directory. kind is a DT_ constant, DT_UNKNOWN where the file system does not tell.
type dirent struct {
	name string
	kind uint8
}

// parseDirents splits what getdents64 returned, without "." and "..".
func parseDirents(buf []byte) []dirent {
	var out []dirent
	for len(buf) >= 19 { // u64 inode, i64 offset, u16 length, u8 type, name
		n := int(buf[16]) | int(buf[17])<<8
		if n < 19 || n > len(buf) {
			break
		}
		name := buf[19:n]
		for i, b := range name {
			if b == 0 {
				name = name[:i]
				break
			}
		}
		if s := string(name); s != "." && s != ".." && s != "" {
			out = append(out, dirent{s, buf[18]})
		}
		buf = buf[n:]
	}
	return out
}

// readDir lists the directory fd from its start.
func readDir(fd int) ([]dirent, error) {
	if _, err := unix.Seek(fd, 0, 0); err != nil {
		return nil, err
	}
	var out []dirent
	buf := make([]byte, 32<<10)
	for {
		var n int
		err := retry(func() (err error) { n, err = unix.Getdents(fd, buf); return })
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return out, nil
		}
		out = append(out, parseDirents(buf[:n])...)
	}
}

// removeAll is removeTree for a path of kiri's own. what names the thing in the error.
func removeAll(path, what string) error {
	dir, err := os.Open(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("removing %s: %w", what, err)
	}
	defer dir.Close()
	if err := removeTree(fdOf(dir), filepath.Base(path)); err != nil {
		return fmt.Errorf("removing %s: %w", what, err)
	}
	return nil
}
