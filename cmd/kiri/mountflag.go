package main

import (
	"encoding/csv"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/mount"
)

// mountValue is --mount: comma separated KEY=VALUE with CSV quoting.
type mountValue struct{ mounts *[]mount.Mount }

func (m *mountValue) String() string { return "" }
func (m *mountValue) Type() string   { return "mount" }
func (m *mountValue) Set(v string) error {
	mt, err := parseMount(v)
	if err != nil {
		return err
	}
	*m.mounts = append(*m.mounts, mt)
	return nil
}

func parseMount(v string) (mount.Mount, error) {
	mt := mount.Mount{Type: mount.TypeVolume}
	fields, err := csvFields(v)
	if err != nil {
		return mt, err
	}
	var (
		bind    mount.BindOptions
		vol     mount.VolumeOptions
		tmpfs   mount.TmpfsOptions
		image   mount.ImageOptions
		used    = map[string]bool{} // prefixes of options that were given
		setOpts = func(kind string) { used[kind] = true }
		flag    = func(key, val string, has bool) (bool, error) {
			if !has {
				return true, nil
			}
			b, err := strconv.ParseBool(val)
			if err != nil {
				return false, fmt.Errorf("invalid value for %s: %s", key, val)
			}
			return b, nil
		}
	)
	for _, field := range fields {
		key, val, has := strings.Cut(field, "=")
		key = strings.ToLower(key)
		if !has && !slices.Contains([]string{"readonly", "ro", "volume-nocopy", "bind-nonrecursive", "bind-create-src"}, key) {
			return mt, fmt.Errorf("invalid field '%s' must be a key=value pair", field)
		}
		var err error
		switch key {
		case "type":
			mt.Type = mount.Type(strings.ToLower(val))
		case "source", "src":
			mt.Source = val
			if val == "." || strings.HasPrefix(val, "./") || strings.HasPrefix(val, "../") || val == ".." {
				if abs, err := filepath.Abs(val); err == nil {
					mt.Source = abs
				}
			}
		case "target", "dst", "destination":
			mt.Target = val
		case "readonly", "ro":
			mt.ReadOnly, err = flag(key, val, has)
		case "consistency":
			mt.Consistency = mount.Consistency(strings.ToLower(val))
		case "bind-propagation":
			setOpts("bind")
			bind.Propagation = mount.Propagation(strings.ToLower(val))
		case "bind-nonrecursive":
			setOpts("bind")
			bind.NonRecursive, err = flag(key, val, has)
		case "bind-create-src":
			setOpts("bind")
			bind.CreateMountpoint, err = flag(key, val, has)
		case "bind-recursive":
			setOpts("bind")
			switch val {
			case "enabled":
			case "disabled":
				bind.NonRecursive = true
			case "writable":
				bind.ReadOnlyNonRecursive = true
			case "readonly":
				bind.ReadOnlyForceRecursive = true
			default:
				return mt, fmt.Errorf(`invalid value for %s: %s (must be "enabled", "disabled", "writable", or "readonly")`, key, val)
			}
		case "volume-subpath":
			setOpts("volume")
			vol.Subpath = val
		case "volume-nocopy":
			setOpts("volume")
			vol.NoCopy, err = flag(key, val, has)
		case "volume-label":
			setOpts("volume")
			k, l, _ := strings.Cut(val, "=")
			if vol.Labels == nil {
				vol.Labels = map[string]string{}
			}
			vol.Labels[k] = l
		case "volume-driver":
			setOpts("volume")
			driver(&vol).Name = val
		case "volume-opt":
			setOpts("volume")
			k, o, _ := strings.Cut(val, "=")
			if d := driver(&vol); d.Options == nil {
				d.Options = map[string]string{k: o}
			} else {
				d.Options[k] = o
			}
		case "tmpfs-size":
			setOpts("tmpfs")
			if tmpfs.SizeBytes, err = units.RAMInBytes(val); err != nil {
				return mt, fmt.Errorf("invalid value for %s: %s", key, val)
			}
		case "tmpfs-mode":
			setOpts("tmpfs")
			n, err := strconv.ParseUint(val, 8, 32)
			if err != nil {
				return mt, fmt.Errorf("invalid value for %s: %s", key, val)
			}
			tmpfs.Mode = os.FileMode(n)
		case "image-subpath":
			setOpts("image")
			image.Subpath = val
		default:
			return mt, fmt.Errorf("unexpected key '%s' in '%s'", key, field)
		}
		if err != nil {
			return mt, err
		}
	}
	if mt.Type == "" {
		return mt, errors.New("type is required")
	}
	if mt.Target == "" {
		return mt, errors.New("target is required")
	}
	for _, kind := range []struct {
		name string
		typ  mount.Type
		set  func()
	}{
		{"bind", mount.TypeBind, func() { mt.BindOptions = &bind }},
		{"volume", mount.TypeVolume, func() { mt.VolumeOptions = &vol }},
		{"tmpfs", mount.TypeTmpfs, func() { mt.TmpfsOptions = &tmpfs }},
		{"image", mount.TypeImage, func() { mt.ImageOptions = &image }},
	} {
		if !used[kind.name] {
			continue
		}
		if mt.Type != kind.typ {
			return mt, fmt.Errorf("cannot mix '%s-*' options with mount type '%s'", kind.name, mt.Type)
		}
		kind.set()
	}
	if o := mt.BindOptions; o != nil {
		if o.ReadOnlyNonRecursive && !mt.ReadOnly {
			return mt, errors.New("option 'bind-recursive=writable' requires 'readonly' to be specified in conjunction")
		}
		if o.ReadOnlyForceRecursive {
			if !mt.ReadOnly {
				return mt, errors.New("option 'bind-recursive=readonly' requires 'readonly' to be specified in conjunction")
			}
			if o.Propagation != mount.PropagationRPrivate {
				return mt, errors.New("option 'bind-recursive=readonly' requires 'bind-propagation=rprivate' to be specified in conjunction")
			}
		}
	}
	return mt, nil
}

func driver(v *mount.VolumeOptions) *mount.Driver {
	if v.DriverConfig == nil {
		v.DriverConfig = &mount.Driver{}
	}
	return v.DriverConfig
}

// csvFields splits one line of CSV, the form of --mount and of the long --network.
func csvFields(v string) ([]string, error) {
	v = strings.TrimSpace(v)
	if v == "" {
		return nil, errors.New("value is empty")
	}
	return csv.NewReader(strings.NewReader(v)).Read()
}
