package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Prepared is the root of a container that has no name yet: its directories are there and its overlay is mounted, so
// that what the kernel and the disk take for that is spent before a start and not in it. It is for one container.
type Prepared struct {
	Mount *os.File // detached

	s    *Store
	name string // below containers/
}

// ErrTaken says that the container has directories of its own already, as one that was started before.
var ErrTaken = errors.New("container has a writable layer already")

// Prepare makes a root of layers for a container to come. A layer that is removed must not be in one that is claimed
// later: the caller discards those first.
func (s *Store) Prepare(layers []string, opt MountOptions) (*Prepared, error) {
	infos, err := s.lookup(layers)
	if err != nil {
		return nil, fmt.Errorf("preparing a root: %w", err)
	}
	p := &Prepared{s: s, name: fmt.Sprintf("+%x", s.prepared.Add(1))}
	err = s.makeContainer(p.name, infos)
	if err == nil {
		o := overlay{store: s, lower: opt.lower(infos), upper: "containers/" + p.name, volatile: opt.Volatile, readonly: opt.ReadOnly}
		p.Mount, err = o.mount()
	}
	if err != nil {
		p.Discard()
		return nil, fmt.Errorf("preparing a root: %w", err)
	}
	return p, nil
}

// Claim gives the root to the container id. ErrTaken if that has one; p is then as it was.
func (p *Prepared) Claim(id string) error {
	if err := validID(id); err != nil {
		return err
	}
	from, to := p.s.ContainerDir(p.name), p.s.ContainerDir(id)
	err := retry(func() error { return unix.Renameat2(unix.AT_FDCWD, from, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE) })
	if err == unix.EEXIST {
		return ErrTaken
	}
	if err != nil {
		return &os.LinkError{Op: "rename", Old: from, New: to, Err: err}
	}
	return nil
}

// Discard unmounts and deletes a root that nobody has claimed.
func (p *Prepared) Discard() error {
	if p.Mount != nil {
		p.Mount.Close()
		p.Mount = nil
	}
	return p.s.removeContainerDir(p.name)
}

// sweepPrepared deletes the roots that an earlier agent had prepared.
func (s *Store) sweepPrepared() error {
	left, err := os.ReadDir(filepath.Join(s.root, "containers"))
	if err != nil {
		return err
	}
	for _, dir := range left {
		if dir.Name()[0] != '+' {
			continue
		}
		if err := s.removeContainerDir(dir.Name()); err != nil {
			return err
		}
	}
	return nil
}

// mountPoints is the lowest layer of a container (MountOptions.MountPoints): the places that the engine mounts things on, and what Docker
// puts in its containers. What an image has at these paths is above it and hides it; where an image lacks one, nothing
// has to be made in the writable layer at each start, which on a disk costs more than the mount.
const mountPoints = "mountpoints"

// makeMountPoints makes that layer, or completes it.
func (s *Store) makeMountPoints() error {
	fs := filepath.Join(s.root, mountPoints)
	for _, d := range []string{"dev", "etc", "proc", "sys"} {
		if err := os.MkdirAll(filepath.Join(fs, d), 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{".dockerenv", "etc/hosts", "etc/hostname", "etc/resolv.conf"} {
		f, err := os.OpenFile(filepath.Join(fs, name), os.O_CREATE|os.O_WRONLY, 0o755)
		if err != nil {
			return err
		}
		f.Close()
	}
	if err := os.Symlink("/proc/mounts", filepath.Join(fs, "etc/mtab")); err != nil && !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}
