package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"strings"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"

	"runkiri.com/kiri/internal/wire"
)

// mountPoint is one mount of a container as it was decided at create.
type mountPoint struct {
	Type        mount.Type
	Name        string `json:",omitempty"` // the volume's
	Source      string `json:",omitempty"` // a host path; of a volume, where it is
	Destination string
	Driver      string `json:",omitempty"`
	Mode        string `json:",omitempty"` // as the user wrote it behind -v
	RW          bool
	Propagation mount.Propagation `json:",omitempty"`

	CreateSource bool   `json:",omitempty"` // bind: make a missing source
	NonRecursive bool   `json:",omitempty"` // bind: without what is mounted below the source
	Recursive    string `json:",omitempty"` // bind, read-only: wire.Mount.Recursive
	NoCopy       bool   `json:",omitempty"` // volume: not filled from the image
	Subpath      string `json:",omitempty"` // volume
	Options      string `json:",omitempty"` // tmpfs
	Anonymous    bool   `json:",omitempty"` // volume: made without a name, for this container
}

func (m *mountPoint) api() container.MountPoint {
	p := container.MountPoint{
		Type: m.Type, Name: m.Name, Source: m.Source, Destination: m.Destination, Driver: m.Driver, Mode: m.Mode, RW: m.RW,
		Propagation: m.Propagation,
	}
	return p
}

func (m *mountPoint) wire() wire.Mount {
	w := wire.Mount{
		Type: string(m.Type), Source: m.Source, Target: m.Destination, ReadOnly: !m.RW, Recursive: m.Recursive,
		Propagation: string(m.Propagation), CreateSource: m.CreateSource, NonRecursive: m.NonRecursive, NoCopy: m.NoCopy,
		Subpath: m.Subpath, Options: m.Options,
	}
	if m.Type == mount.TypeVolume {
		w.Source = m.Name
	}
	return w
}

// The words of a -v mode, by what they say; at most one of each kind may stand in a mode.
var (
	rwModes          = []string{"rw", "ro"}
	labelModes       = []string{"z", "Z"}
	propagationModes = []string{"private", "rprivate", "slave", "rslave", "shared", "rshared"}
	copyModes        = []string{"nocopy"}
	consistencyModes = []string{"consistent", "cached", "delegated"}
)

func validMode(mode string) bool {
	if mode == "" {
		return true
	}
	seen := map[int]bool{}
	for word := range strings.SplitSeq(mode, ",") {
		kind := slices.IndexFunc([][]string{rwModes, labelModes, propagationModes, copyModes, consistencyModes}, func(words []string) bool {
			return slices.Contains(words, word)
		})
		if kind < 0 || seen[kind] {
			return false
		}
		seen[kind] = true
	}
	return true
}

func hasWord(mode, word string) bool { return slices.Contains(strings.Split(mode, ","), word) }

func propagationOf(mode string) mount.Propagation {
	for word := range strings.SplitSeq(mode, ",") {
		if slices.Contains(propagationModes, word) {
			return mount.Propagation(word)
		}
	}
	return ""
}

// parseBind reads SOURCE:TARGET[:MODE], or TARGET alone for an anonymous volume.
func parseBind(raw string) (mountPoint, error) {
	spec := func() error { return invalid("invalid volume specification: '%s'", raw) }
	parts := strings.SplitN(raw, ":", 4)
	if parts[0] == "" {
		return mountPoint{}, spec()
	}
	var source, target, mode string
	switch len(parts) {
	case 1:
		target = parts[0]
	case 2:
		if validMode(parts[1]) {
			return mountPoint{}, spec()
		}
		source, target = parts[0], parts[1]
	case 3:
		source, target, mode = parts[0], parts[1], parts[2]
	default:
		return mountPoint{}, spec()
	}
	if !validMode(mode) {
		return mountPoint{}, invalid("invalid mode: %s", mode)
	}
	m := mountPoint{Type: mount.TypeVolume, Destination: path.Clean(target), Mode: mode, RW: !hasWord(mode, "ro")}
	if path.IsAbs(source) {
		m.Type, m.Source, m.CreateSource = mount.TypeBind, path.Clean(source), true
		m.Propagation = propagationOf(mode)
		if m.Propagation == "" {
			m.Propagation = mount.PropagationRPrivate
		}
	} else {
		m.Name, m.NoCopy = source, hasWord(mode, "nocopy")
	}
	if err := validTarget(target); err != nil {
		return mountPoint{}, invalid("invalid volume specification: '%s': invalid mount config for type %q: %v", raw, m.Type, err)
	}
	return m, nil
}

func validTarget(target string) error {
	switch {
	case target == "":
		return errors.New("field Target must not be empty")
	case path.Clean(target) == "/":
		return errors.New("invalid specification: destination can't be '/'")
	case !path.IsAbs(target):
		return fmt.Errorf("invalid mount path: '%s' mount path must be absolute", target)
	}
	return nil
}

// parseMount reads one of HostConfig.Mounts.
func parseMount(s *mount.Mount) (mountPoint, error) {
	m, err := mountOf(s)
	if err != nil && !errors.Is(err, cerrdefs.ErrNotImplemented) {
		err = invalid("invalid mount config for type %q: %w", s.Type, err)
	}
	return m, err
}

func mountOf(s *mount.Mount) (mountPoint, error) {
	extra := func(field string) error { return fmt.Errorf("field %s must not be specified", field) }
	switch {
	case s.Type != mount.TypeBind && s.BindOptions != nil:
		return mountPoint{}, extra("BindOptions")
	case s.Type != mount.TypeVolume && s.VolumeOptions != nil:
		return mountPoint{}, extra("VolumeOptions")
	case s.Type != mount.TypeImage && s.ImageOptions != nil:
		return mountPoint{}, extra("ImageOptions")
	case s.Type != mount.TypeTmpfs && s.TmpfsOptions != nil:
		return mountPoint{}, extra("TmpfsOptions")
	case s.Type != mount.TypeCluster && s.ClusterOptions != nil:
		return mountPoint{}, extra("ClusterOptions")
	}
	if err := validTarget(s.Target); err != nil {
		return mountPoint{}, err
	}
	m := mountPoint{Type: s.Type, Destination: path.Clean(s.Target), RW: !s.ReadOnly}
	switch s.Type {
	case mount.TypeBind:
		return bindOf(s, m)
	case mount.TypeVolume:
		return volumeOf(s, m)
	case mount.TypeTmpfs:
		if s.Source != "" {
			return m, extra("Source")
		}
		var err error
		m.Options, err = tmpfsOptions(s.TmpfsOptions)
		return m, err
	case mount.TypeImage:
		return m, NotBuilt(`a mount of type "image"`)
	}
	return m, errors.New("mount type unknown")
}

func bindOf(s *mount.Mount, m mountPoint) (mountPoint, error) {
	if s.Source == "" {
		return m, errors.New("field Source must not be empty")
	}
	if !path.IsAbs(s.Source) {
		return m, fmt.Errorf("invalid mount path: '%s' mount path must be absolute", s.Source)
	}
	m.Source, m.Propagation = path.Clean(s.Source), mount.PropagationRPrivate
	if o := s.BindOptions; o != nil {
		if o.Propagation != "" {
			if !slices.Contains(propagationModes, string(o.Propagation)) {
				return m, fmt.Errorf("invalid propagation mode: %s", o.Propagation)
			}
			m.Propagation = o.Propagation
		}
		m.CreateSource, m.NonRecursive = o.CreateMountpoint, o.NonRecursive
		switch {
		case o.ReadOnlyNonRecursive && o.ReadOnlyForceRecursive:
			return m, errors.New("mount options conflict: ReadOnlyNonRecursive && ReadOnlyForceRecursive")
		case (o.ReadOnlyNonRecursive || o.ReadOnlyForceRecursive) && m.RW:
			return m, errors.New("mount options conflict: ReadOnlyNonRecursive and ReadOnlyForceRecursive need ReadOnly")
		case o.ReadOnlyNonRecursive:
			m.Recursive = "writable"
		case o.ReadOnlyForceRecursive:
			m.Recursive = "readonly"
		}
	}
	if !m.CreateSource {
		if _, err := os.Stat(m.Source); errors.Is(err, os.ErrNotExist) {
			return m, fmt.Errorf("bind source path does not exist: %s", s.Source)
		} else if err != nil {
			return m, err
		}
	}
	return m, nil
}

func volumeOf(s *mount.Mount, m mountPoint) (mountPoint, error) {
	m.Name = s.Source
	if o := s.VolumeOptions; o != nil {
		m.NoCopy, m.Subpath = o.NoCopy, o.Subpath
		if o.Subpath != "" {
			if m.Name == "" {
				return m, errors.New("must not set Subpath when using anonymous volumes")
			}
			if !filepath.IsLocal(o.Subpath) {
				return m, errors.New("subpath must be a relative path within the volume")
			}
		}
		if o.DriverConfig != nil {
			m.Driver = o.DriverConfig.Name
		}
	}
	return m, nil
}

// tmpfsOptions writes the options as mount(8) takes them.
func tmpfsOptions(o *mount.TmpfsOptions) (string, error) {
	if o == nil {
		return "", nil
	}
	var l []string
	if o.Mode != 0 {
		l = append(l, fmt.Sprintf("mode=%o", o.Mode))
	}
	if o.SizeBytes != 0 {
		l = append(l, fmt.Sprintf("size=%d", o.SizeBytes))
	}
	for _, opt := range o.Options {
		if len(opt) < 1 || len(opt) > 2 {
			return "", errors.New("invalid option array length")
		}
		if opt[0] != "exec" && opt[0] != "noexec" {
			return "", errors.New("invalid option: " + opt[0])
		}
		l = append(l, strings.Join(opt, "="))
	}
	return strings.Join(l, ","), nil
}

// duplicateMount is the error of two mounts with one destination.
func duplicateMount(target string) error { return invalid("Duplicate mount point: %s", target) }

// planMounts decides all mounts of a container that is being created: those of other containers (--volumes-from), then
// binds, then mounts, which override what went before; then the volumes of its image for what is left. Volumes that do not
// exist are made, and c is their user. On an error the volumes made for it are removed.
func (e *Engine) planMounts(ctx context.Context, c *ctr) (_ []mountPoint, err error) {
	host, config := c.rec.Host, c.rec.Config
	if len(host.Binds)+len(host.Mounts)+len(host.VolumesFrom)+len(config.Volumes)+len(host.Tmpfs) == 0 {
		return nil, nil
	}
	points := map[string]mountPoint{}
	taken := map[string]bool{} // by a bind or a mount: a second one is an error
	defer func() {
		if err != nil {
			e.volumes.discard(c.id)
		}
	}()
	for _, from := range host.VolumesFrom {
		if err := e.volumesFrom(from, points); err != nil {
			return nil, err
		}
	}
	for _, raw := range host.Binds {
		m, err := parseBind(raw)
		if err != nil {
			return nil, err
		}
		_, tmpfs := host.Tmpfs[m.Destination]
		if taken[m.Destination] || tmpfs {
			return nil, duplicateMount(m.Destination)
		}
		m.Driver = ""
		if m.Type == mount.TypeVolume {
			m.Driver = host.VolumeDriver
			if m.Mode == "" {
				m.Mode = "z" // as Docker shows it
			}
		}
		points[m.Destination], taken[m.Destination] = m, true
	}
	options := map[string]*mount.VolumeOptions{}
	for i := range host.Mounts {
		m, err := parseMount(&host.Mounts[i])
		if err != nil {
			return nil, err
		}
		if taken[m.Destination] {
			return nil, duplicateMount(host.Mounts[i].Target)
		}
		if m.Type == mount.TypeVolume {
			m.Mode = "z"
			options[m.Destination] = host.Mounts[i].VolumeOptions
		}
		points[m.Destination], taken[m.Destination] = m, true
	}
	for target := range host.Tmpfs {
		if err := validTarget(target); err != nil {
			return nil, invalid("%w", err)
		}
		delete(points, path.Clean(target))
	}
	for target := range config.Volumes {
		if err := validTarget(target); err != nil {
			return nil, invalid("%w", err)
		}
		target = path.Clean(target)
		if _, ok := points[target]; ok {
			continue
		}
		if _, ok := host.Tmpfs[target]; ok {
			continue
		}
		points[target] = mountPoint{Type: mount.TypeVolume, Destination: target, Driver: host.VolumeDriver, RW: true}
	}
	list := make([]mountPoint, 0, len(points))
	for target, m := range points {
		if m.Type == mount.TypeVolume {
			m.Anonymous = m.Anonymous || m.Name == ""
			v, err := e.volumes.obtain(ctx, m.Name, m.Driver, options[target], c.id)
			if err != nil {
				return nil, err
			}
			m.Name, m.Driver, m.Source = v.Name, volumeDriver, v.Path
		}
		list = append(list, m)
	}
	sortMounts(list)
	return list, nil
}

// sortMounts orders mounts so that none hides one that came before it: shallow targets first.
func sortMounts(l []mountPoint) {
	sort.Slice(l, func(i, j int) bool {
		a, b := strings.Count(l[i].Destination, "/"), strings.Count(l[j].Destination, "/")
		if a != b {
			return a < b
		}
		return l[i].Destination < l[j].Destination
	})
}

// volumesFrom adds the mounts of another container, CONTAINER[:ro|rw].
func (e *Engine) volumesFrom(spec string, points map[string]mountPoint) error {
	if spec == "" {
		return invalid("volumes-from specification cannot be an empty string")
	}
	ref, mode, _ := strings.Cut(spec, ":")
	if !validMode(mode) || propagationOf(mode) != "" || hasWord(mode, "nocopy") {
		return invalid("invalid mode: %s", mode)
	}
	from, err := e.containers.get(ref)
	if err != nil {
		return &failure{class: cerrdefs.ErrInvalidArgument, text: err.Error()}
	}
	rec := from.snapshot()
	for _, m := range rec.Mounts {
		m.RW = m.RW && !hasWord(mode, "ro")
		m.NoCopy, m.Mode = true, mode
		points[m.Destination] = m
	}
	return nil
}
