package engine

import (
	"context"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/volume"

	"runkiri.com/kiri/internal/record"
	"runkiri.com/kiri/internal/wire"
)

const (
	volumeDriver    = "local"
	anonymousVolume = "com.docker.volume.anonymous" // the label of a volume that was made without a name
)

// volumeRecord is what is kept of a volume on disk.
type volumeRecord struct {
	Name    string
	Created time.Time
	Labels  map[string]string
	Options map[string]string
	Path    string // on the host, told by the agent
}

// volumeStore holds the volumes. What is in them is the agent's.
type volumeStore struct {
	e       *Engine
	records *record.Store[volumeRecord]
	making  sync.Mutex // one volume is made at a time; taken before mu

	mu    sync.Mutex // guards what follows
	m     map[string]*volumeRecord
	users map[string]map[string]bool // volume's name: the containers that have it
}

func (s *volumeStore) load() {
	for name, r := range s.records.Load() {
		s.m[name] = r
	}
}

func checkDriver(driver string) error {
	if driver != "" && driver != volumeDriver {
		return notFound("error looking up volume plugin %s: plugin %q not found", driver, driver)
	}
	return nil
}

// obtain returns a volume and makes container ("" for none) its user; it is made if there is none of that name.
func (s *volumeStore) obtain(ctx context.Context, name, driver string, opts *mount.VolumeOptions, container string) (*volumeRecord, error) {
	var labels, options map[string]string
	if opts != nil {
		labels = opts.Labels
		if opts.DriverConfig != nil {
			options = opts.DriverConfig.Options
		}
	}
	return s.create(ctx, name, driver, labels, options, container)
}

func (s *volumeStore) create(ctx context.Context, name, driver string, labels, options map[string]string, user string) (*volumeRecord, error) {
	if err := checkDriver(driver); err != nil {
		return nil, errf(classOf(err), "create %s: %w", name, err)
	}
	if len(options) > 0 {
		return nil, NotBuilt("options of the volume driver local (" + slices.Sorted(maps.Keys(options))[0] + ")")
	}
	s.making.Lock()
	defer s.making.Unlock()
	if name != "" {
		s.mu.Lock()
		v := s.m[name]
		if v != nil {
			s.use(name, user)
		}
		s.mu.Unlock()
		if v != nil {
			return v, nil
		}
		if err := checkVolumeName(name); err != nil {
			return nil, err
		}
	}
	v := &volumeRecord{Name: name, Created: time.Now().UTC(), Labels: labels}
	if name == "" {
		v.Name = newID()
		v.Labels = maps.Clone(labels)
		if v.Labels == nil {
			v.Labels = map[string]string{}
		}
		v.Labels[anonymousVolume] = ""
	}
	f, err := s.e.agent.call(ctx, &wire.Volume{Name: v.Name})
	r, err := reply[*wire.VolumeReply](f, err)
	if err != nil {
		return nil, errf(classOf(err), "create %s: %w", v.Name, err)
	}
	v.Path = r.Path
	if err := s.records.Put(v.Name, v); err != nil {
		return nil, internal("create %s: %w", v.Name, err)
	}
	s.mu.Lock()
	s.m[v.Name] = v
	s.use(v.Name, user)
	s.mu.Unlock()
	s.event(v.Name, events.ActionCreate)
	return v, nil
}

func checkVolumeName(name string) error {
	if len(name) == 1 {
		return invalid("create %s: volume name is too short, names should be at least two alphanumeric characters", name)
	}
	if !isName(name) {
		return invalid("create %s: %q includes invalid characters for a local volume name, only %q are allowed. If you intended to pass a host directory, use absolute path", name, name, nameChars)
	}
	if err := record.CheckName(name); err != nil {
		return invalid("create %.40s...: a volume's name has at most %d characters", name, record.MaxName)
	}
	return nil
}

// use makes a container a user of the volume. mu is held.
func (s *volumeStore) use(name, user string) {
	if user == "" {
		return
	}
	if s.users[name] == nil {
		s.users[name] = map[string]bool{}
	}
	s.users[name][user] = true
}

// adopt makes a container that was loaded the user of its volumes.
func (s *volumeStore) adopt(rec *containerRecord) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range rec.Mounts {
		if m.Type == mount.TypeVolume {
			s.use(m.Name, rec.ID)
		}
	}
}

// release ends a container's use of all its volumes and returns their names.
func (s *volumeStore) release(user string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, users := range s.users {
		if users[user] {
			names = append(names, name)
			delete(users, user)
			if len(users) == 0 {
				delete(s.users, name)
			}
		}
	}
	return names
}

// discard is release for a container that is not made after all: what was made without a name for it goes.
func (s *volumeStore) discard(user string) {
	for _, name := range s.release(user) {
		s.mu.Lock()
		v := s.m[name]
		s.mu.Unlock()
		if v != nil && isAnonymous(v) {
			s.removeUnused(context.Background(), name)
		}
	}
}

func isAnonymous(v *volumeRecord) bool {
	_, ok := v.Labels[anonymousVolume]
	return ok
}

// releaseVolumes ends a removed container's use of its volumes; with remove those that were made without a name go, in
// the background.
func (e *Engine) releaseVolumes(rec *containerRecord, remove bool) {
	e.volumes.release(rec.ID)
	if !remove {
		return
	}
	for _, m := range rec.Mounts {
		if m.Type != mount.TypeVolume || !m.Anonymous {
			continue
		}
		e.background.start(func() {
			if err := e.volumes.removeUnused(context.Background(), m.Name); err != nil && !cerrdefs.IsConflict(err) && !cerrdefs.IsNotFound(err) {
				e.log.Error("removing a container's volume", "volume", m.Name, "error", err)
			}
		})
	}
}

// removeUnused removes a volume that no container has. The record goes last: what a crash interrupts can be removed
// again.
func (s *volumeStore) removeUnused(ctx context.Context, name string) error {
	s.making.Lock()
	defer s.making.Unlock()
	s.mu.Lock()
	v, users := s.m[name], slices.Sorted(maps.Keys(s.users[name]))
	if v != nil && len(users) == 0 {
		delete(s.m, name)
	}
	s.mu.Unlock()
	if v == nil {
		return notFound("get %s: no such volume", name)
	}
	if len(users) > 0 {
		return conflict("remove %s: volume is in use - [%s]", name, strings.Join(users, ", "))
	}
	f, err := s.e.agent.call(ctx, &wire.RemoveVolume{Name: name})
	if err = done(f, err); err == nil {
		err = s.records.Delete(name)
	}
	if err != nil {
		s.mu.Lock()
		s.m[name] = v
		s.mu.Unlock()
		return errf(classOf(err), "remove %s: %w", name, err)
	}
	s.event(name, events.ActionDestroy)
	return nil
}

func (s *volumeStore) event(name string, action events.Action) {
	s.e.events.publish(events.VolumeEventType, action, name, map[string]string{"driver": volumeDriver})
}

func (v *volumeRecord) api() volume.Volume {
	return volume.Volume{
		Name: v.Name, Driver: volumeDriver, Mountpoint: v.Path, CreatedAt: v.Created.Format(time.RFC3339), Labels: v.Labels,
		Options: v.Options, Scope: "local",
	}
}

// list returns the volumes sorted by name, and how many containers have each.
func (s *volumeStore) list() ([]*volumeRecord, map[string]int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := slices.SortedFunc(maps.Values(s.m), func(a, b *volumeRecord) int { return strings.Compare(a.Name, b.Name) })
	users := make(map[string]int, len(s.users))
	for name, u := range s.users {
		users[name] = len(u)
	}
	return l, users
}

// VolumeCreate makes a volume, or returns the one of that name.
func (e *Engine) VolumeCreate(ctx context.Context, req *volume.CreateRequest) (*volume.Volume, error) {
	if req.ClusterVolumeSpec != nil {
		return nil, NotBuilt("ClusterVolumeSpec (cluster volumes)")
	}
	v, err := e.volumes.create(context.WithoutCancel(ctx), req.Name, req.Driver, req.Labels, req.DriverOpts, "")
	if err != nil {
		return nil, err
	}
	api := v.api()
	return &api, nil
}

// VolumeInspect tells about one volume.
func (e *Engine) VolumeInspect(ctx context.Context, name string) (*volume.Volume, error) {
	s := e.volumes
	s.mu.Lock()
	v := s.m[name]
	s.mu.Unlock()
	if v == nil {
		return nil, notFound("get %s: no such volume", name)
	}
	api := v.api()
	return &api, nil
}

// VolumeList lists the volumes that pass the filters.
func (e *Engine) VolumeList(ctx context.Context, filters Filters) (*volume.ListResponse, error) {
	if err := filters.validate("dangling", "name", "driver", "label"); err != nil {
		return nil, err
	}
	byUse := filters.has("dangling")
	dangling, err := filters.boolean("dangling", false)
	if err != nil {
		return nil, err
	}
	r := &volume.ListResponse{Volumes: []volume.Volume{}, Warnings: []string{}}
	list, users := e.volumes.list()
	for _, v := range list {
		if byUse && dangling == (users[v.Name] > 0) || !filters.match("name", v.Name) || !filters.exact("driver", volumeDriver) ||
			!filters.labels("label", v.Labels) {
			continue
		}
		r.Volumes = append(r.Volumes, v.api())
	}
	return r, nil
}

// VolumeRemove removes a volume that no container has. With force a missing one is no error.
func (e *Engine) VolumeRemove(ctx context.Context, name string, force bool) error {
	err := e.volumes.removeUnused(context.WithoutCancel(ctx), name)
	if force && cerrdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// VolumesPrune removes unused volumes. all tells whether named ones are meant too: what a request without the filter
// "all" means depends on its API version (before 1.42 true).
func (e *Engine) VolumesPrune(ctx context.Context, filters Filters, all bool) (*volume.PruneReport, error) {
	if err := filters.validate("label", "label!", "all"); err != nil {
		return nil, err
	}
	all, err := filters.boolean("all", all)
	if err != nil {
		return nil, err
	}
	if !e.pruningVolumes.CompareAndSwap(false, true) {
		return nil, conflict("a prune operation is already running")
	}
	defer e.pruningVolumes.Store(false)
	report := &volume.PruneReport{VolumesDeleted: []string{}}
	list, users := e.volumes.list()
	for _, v := range list {
		if ctx.Err() != nil {
			break
		}
		if users[v.Name] > 0 || !all && !isAnonymous(v) || !filters.pruneLabels(v.Labels) {
			continue
		}
		size := e.volumeSize(ctx, v.Name)
		if err := e.volumes.removeUnused(context.WithoutCancel(ctx), v.Name); err != nil {
			e.log.Warn("pruning a volume", "volume", v.Name, "error", err)
			continue
		}
		report.VolumesDeleted = append(report.VolumesDeleted, v.Name)
		report.SpaceReclaimed += uint64(max(size, 0))
	}
	e.pruneEvent(events.VolumeEventType, report.SpaceReclaimed)
	return report, nil
}

// volumeSize is the number of bytes in a volume, -1 if it cannot be told.
func (e *Engine) volumeSize(ctx context.Context, name string) int64 {
	f, err := e.agent.call(ctx, &wire.Volume{Name: name, Size: true})
	r, err := reply[*wire.VolumeReply](f, err)
	if err != nil {
		return -1
	}
	return r.Size
}

func (e *Engine) pruneEvent(typ events.Type, reclaimed uint64) {
	e.events.publish(typ, events.ActionPrune, "", map[string]string{"reclaimed": strconv.FormatUint(reclaimed, 10)})
}

// match tells whether s is one of the values of name or one of them, read as a regular expression, is found in it.
func (f Filters) match(name, s string) bool {
	if f.exact(name, s) {
		return true
	}
	for v := range f[name] {
		if re, err := regexp.Compile(v); err == nil && re.MatchString(s) {
			return true
		}
	}
	return false
}
