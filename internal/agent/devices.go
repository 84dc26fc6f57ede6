//go:build linux

package agent

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// device is one device node to be made in a container.
type device struct {
	target       string // in the container
	typ          uint32 // S_IFCHR or S_IFBLK
	mode         uint32
	major, minor uint32
	uid, gid     uint32
	access       string
}

func (d *device) rule() string {
	c := byte('c')
	if d.typ == unix.S_IFBLK {
		c = 'b'
	}
	return fmt.Sprintf("%c %d:%d %s", c, d.major, d.minor, d.access)
}

// errNoDevice is a path that is no device.
var errNoDevice = errors.New("not a device node")

func deviceAt(source, target, access string) (device, error) {
	var st unix.Stat_t
	if err := unix.Stat(source, &st); err != nil { // a link to a device is that device
		return device{}, wire.Errorf(wire.Invalid, "error gathering device information while adding custom device %q: %w", source, err)
	}
	typ := st.Mode & unix.S_IFMT
	if typ != unix.S_IFCHR && typ != unix.S_IFBLK {
		return device{}, wire.Errorf(wire.Invalid, "error gathering device information while adding custom device %q: %w", source, errNoDevice)
	}
	return device{target: target, typ: typ, mode: st.Mode & 0o777, major: unix.Major(st.Rdev), minor: unix.Minor(st.Rdev),
		uid: st.Uid, gid: st.Gid, access: access}, nil
}

// devicesOf finds the devices that r asks for: one by one, the content of directories, or with Privileged all.
func devicesOf(r *wire.Run) ([]device, error) {
	var list []device
	if r.Privileged {
		var err error
		if list, err = devicesBelow("/dev", "/dev", "rwm", true); err != nil {
			return nil, err
		}
	}
	for _, w := range r.Devices {
		target := w.Target
		if target == "" {
			target = w.Source
		}
		st, err := os.Stat(w.Source)
		if err == nil && st.IsDir() {
			more, err := devicesBelow(w.Source, target, w.Access, false)
			if err != nil {
				return nil, err
			}
			list = append(list, more...)
			continue
		}
		d, err := deviceAt(w.Source, target, w.Access)
		if err != nil {
			return nil, err
		}
		list = append(list, d)
	}
	return list, nil
}

// devicesBelow finds the device nodes in a directory of the host's. all leaves out what containers have of their own.
func devicesBelow(source, target, access string, all bool) ([]device, error) {
	real, err := filepath.EvalSymlinks(source)
	if err != nil {
		return nil, wire.Errorf(wire.Invalid, "error gathering device information while adding custom device %q: %w", source, err)
	}
	var list []device
	err = filepath.WalkDir(real, func(p string, e os.DirEntry, err error) error {
		if err != nil {
			return nil // gone since, or not ours to see
		}
		rel := strings.TrimPrefix(p, real)
		if e.IsDir() {
			switch rel {
			case "/pts", "/shm", "/fd", "/mqueue", "/.lxc", "/.lxd-mounts", "/.udev":
				if all {
					return filepath.SkipDir
				}
			}
			return nil
		}
		if e.Type()&os.ModeDevice == 0 || all && rel == "/console" {
			return nil
		}
		if d, err := deviceAt(p, target+rel, access); err == nil {
			list = append(list, d)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading devices in %s: %w", source, err)
	}
	return list, nil
}

// makeDevices makes device nodes in the container, through the view that has /dev in its place.
func makeDevices(root, dev *os.File, list []device) error {
	view := rootfs.NewView(root)
	for i := range list {
		d := &list[i]
		target := path.Clean("/" + d.target)
		dir, name := path.Split(target)
		at, in := view, dir
		if rest, ok := strings.CutPrefix(target, "/dev/"); ok {
			at, in = rootfs.NewView(dev), path.Dir("/"+rest)
		}
		parent, err := at.Mkdir(in, 0o755, 0, 0)
		if err != nil {
			return err
		}
		err = makeDevice(parent, name, d)
		parent.Close()
		if err != nil {
			return fmt.Errorf("making device %s: %w", d.target, err)
		}
	}
	return nil
}

func makeDevice(parent *os.File, name string, d *device) error {
	err := mknod(parent, name, d.typ, d.mode, d.major, d.minor, int(d.uid), int(d.gid))
	if errors.Is(err, unix.EEXIST) { // a standard node, or one that the image brought
		if err := unix.Unlinkat(fdOf(parent), name, 0); err != nil {
			return err
		}
		err = mknod(parent, name, d.typ, d.mode, d.major, d.minor, int(d.uid), int(d.gid))
	}
	return err
}
