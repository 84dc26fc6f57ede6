package rootfs

import (
	"archive/tar"
	"context"
	"fmt"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Layer writes what a container changed against its layers to out, as the tar of one more layer (OCI image
// specification, "Image Layer Filesystem Changeset"): what Changes lists, with a whiteout for what is gone. A container
// that changed nothing gives a tar without entries. Files whose names would mean something else in a layer (".wh.x")
// are left out.
func (s *Store) Layer(ctx context.Context, id string, layers, targets []string, out *os.File) error {
	w := newPacker(ctx, out)
	w.shallow = true
	err := s.packLayer(w, id, layers, targets)
	if err == nil {
		err = w.end()
	}
	if err != nil {
		return fmt.Errorf("packing changes of container %s: %w", id, err)
	}
	return nil
}

func (s *Store) packLayer(w *packer, id string, layers, targets []string) error {
	upper, changes, err := s.diff(w.ctx, id, layers, targets)
	if err != nil || upper < 0 {
		return err
	}
	defer unix.Close(upper)
	if err := s.packRoot(w, upper, layers); err != nil {
		return err
	}
	files := map[string]bool{} // what is no directory now: nothing below it can be said to be gone
	for _, c := range changes {
		name := c[len("A /"):]
		dir, base := path.Split(name)
		if strings.HasPrefix(base, whiteoutPrefix) {
			continue
		}
		if c[0] == 'D' {
			if files[strings.TrimSuffix(dir, "/")] {
				continue
			}
			h := &tar.Header{Typeflag: tar.TypeReg, Name: dir + whiteoutPrefix + base, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
			if err := w.header(h); err != nil {
				return err
			}
			continue
		}
		isFile, err := w.changed(upper, name)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if isFile {
			files[name] = true
		}
	}
	return nil
}

// changed packs one changed file or directory of a writable layer, unless it is gone again.
func (w *packer) changed(upper int, name string) (isFile bool, err error) {
	fd, err := openat2(upper, name, unix.O_PATH|unix.O_NOFOLLOW, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_SYMLINKS|unix.RESOLVE_NO_XDEV)
	if isMissing(err) || err == unix.ELOOP {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := fstatPath(fd, &st); err != nil {
		return false, err
	}
	if isWhiteout(&st) {
		return true, nil
	}
	return st.Mode&unix.S_IFMT != unix.S_IFDIR, w.add(fd, name, 0)
}

// packRoot packs an entry for the root directory if its owner or mode is another than the layers say.
func (s *Store) packRoot(w *packer, upper int, layers []string) error {
	infos, err := s.lookup(layers)
	if err != nil {
		return err
	}
	was := rootOf(infos)
	var st unix.Stat_t
	if err := fstatPath(upper, &st); err != nil {
		return err
	}
	if st.Mode&0o7777 == was.Mode && st.Uid == was.UID && st.Gid == was.GID {
		return nil
	}
	return w.add(upper, ".", 0)
}

// rootOf returns the attributes of the root directory: those of the uppermost layer that speaks of it.
func rootOf(layers []layerInfo) layerInfo {
	for i := len(layers) - 1; i >= 0; i-- {
		if layers[i].HasRoot {
			return layers[i]
		}
	}
	return layerInfo{Mode: 0o755}
}
