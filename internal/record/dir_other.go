//go:build !unix

package record

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// directory names files by path where there is no openat.
type directory struct{ path string }

func openDirectory(path string) (*directory, error) { return &directory{path: path}, nil }

func (d *directory) create(name string) (file, error) {
	f, err := os.OpenFile(filepath.Join(d.path, name), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	return file{f}, err
}

func (d *directory) open(name string) (file, error) {
	f, err := os.OpenFile(filepath.Join(d.path, name), os.O_RDWR, 0)
	return file{f}, err
}

func (d *directory) read(name string, limit int64) ([]byte, error) {
	f, err := os.Open(filepath.Join(d.path, name))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("%w: over %d bytes", errDamaged, limit)
	}
	return b, err
}

func (d *directory) rename(from, to string) error {
	return os.Rename(filepath.Join(d.path, from), filepath.Join(d.path, to))
}

func (d *directory) unlink(name string) error { return os.Remove(filepath.Join(d.path, name)) }

// sync has nothing to do: directories cannot be synced here.
func (d *directory) sync() error { return nil }

func (d *directory) close() error { return nil }

type file struct{ f *os.File }

func (f file) write(b []byte) error {
	_, err := f.f.Write(b)
	return err
}
func (f file) sync() error  { return f.f.Sync() }
func (f file) close() error { return f.f.Close() }
