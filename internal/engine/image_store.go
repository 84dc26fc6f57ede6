package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/record"
	"runkiri.com/kiri/internal/reference"
	"runkiri.com/kiri/internal/registry"
	"runkiri.com/kiri/internal/wire"
)

// imagesConfig is what the image store is opened with.
type imagesConfig struct {
	DataRoot           string
	Layers             LayerStore
	Log                *slog.Logger
	InsecureRegistries []string
	RegistryMirrors    []string
	CertsDir           string // registries' certificates; "" is Docker's own place, /etc/docker/certs.d
	Version            string // of kiri, for the User-Agent
	Concurrent         int    // layers fetched at a time in one pull; 0 is 3, as dockerd
	Architecture       string // of the agent, as GOARCH has it; "" is the daemon's own

	// Event is told what happens to images: action is one of events.ActionPull, ...Tag, ...UnTag, ...Delete, ...Import;
	// actor is the event's Actor.ID, name its attribute "name", labels the image's. Nil drops them.
	Event func(action, actor, name string, labels map[string]string)
	// Running tells whether the container (a full id, as given to use) runs or is paused. Nil: none does.
	Running func(container string) bool

	registry registry.Options // limits on waiting, for tests
}

// images is the store of images. Its methods are safe for concurrent use.
//
// An image is what a name points at: a manifest, or an index of which some manifests are here. What is here is read
// from content itself, so a record holds no more than a name and its target.
//
// Lock order: keys, importing, then mu, then what content guards. No lock but those of keys is held across a call to an agent
// or a registry.
type images struct {
	cfg      imagesConfig
	log      *slog.Logger
	platform ocispec.Platform // of the agent
	content  *content
	registry *registry.Client
	records  *record.Store[nameRecord]
	pulls    *record.Store[pullRecord]
	keys     keyLocks // by DiffID, and by blob: who writes or deletes one holds its key

	changing sync.Mutex // one change of names at a time, records included; taken before mu
	pruning  sync.Mutex

	// An import learns its layer's DiffID only at the end, so no key can keep the layer from being collected: imports
	// hold importing for reading, and collections that cannot have it leave layers alone and set skipped.
	importing sync.RWMutex
	skipped   atomic.Bool

	mu      sync.RWMutex
	names   map[string]*nameRecord    // by canonical name, or dangling(ID)
	targets map[digest.Digest]*target // by image ID
	layers  map[string]int64          // DiffIDs that the agent has, with their size in bytes
	users   map[string]use            // by container
	pulling map[string]pullRecord     // unfinished pulls by name of their record, whether under way or not
	held    map[digest.Digest]int     // blobs and DiffIDs that pulls and imports under way need, counted
	cache   map[[2]string]*resolved   // by reference and platform as given; emptied at every change
	flights map[[2]digest.Digest]*flight
	busy    int // pulls and imports under way
	closed  context.CancelFunc
	ctx     context.Context // ends with close
}

// nameRecord is the durable form of one name, "images" among the records.
type nameRecord struct {
	Name   string             // canonical, "docker.io/library/alpine:latest"; "" for an image without a name
	Target ocispec.Descriptor // media type, digest and size
	Tagged time.Time          // when the name was last given
	Pulled string             `json:",omitempty"` // repository it was pulled from, canonical
}

// pullRecord keeps what an unfinished pull has brought from being swept, "pulls" among the records.
type pullRecord struct {
	Ref      string
	Platform string
	Blobs    []digest.Digest // manifests, configuration and layers
	Layers   []string        // DiffIDs
	At       time.Time
}

// use is what one container needs.
type use struct {
	image  string
	layers []string
}

// target is one image: what a name points at.
type target struct {
	desc     ocispec.Descriptor
	raw      *registry.Manifest // index or manifest, without its bytes
	variants []*variant         // those that are here, in the index's order
	names    map[string]bool    // keys of images.names
	blobs    []digest.Digest    // all that it refers to and that is here, itself included
}

// variant is one platform's image.
type variant struct {
	desc     ocispec.Descriptor // of its manifest
	manifest *ocispec.Manifest
	platform ocispec.Platform
	config   *dockerspec.DockerOCIImage // without its history, which is long and seldom asked for
	diffIDs  []string
}

// resolved is an image as a container needs it. What it points to is shared and never written.
type resolved struct {
	ID       string   // "sha256:<hex>" of the manifest or index that the name points at: Docker's image id
	Manifest string   // of the manifest chosen for the platform
	Layers   []string // DiffIDs, lowest first
	Names    []string // "alpine:latest", sorted; none for a dangling image
	Config   *dockerspec.DockerOCIImage
}

const danglingPrefix = "dangling@"

// dangling is the key of an image without a name.
func dangling(id digest.Digest) string { return danglingPrefix + id.String() }

// recordName is the name of a name's record: names are longer than file names may be, and hold slashes.
func recordName(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// openImages reads the store. The caller then tells the containers it knows by use, and calls sweep once.
func openImages(ctx context.Context, cfg imagesConfig) (*images, error) {
	s := &images{
		cfg: cfg, log: cfg.Log, platform: registry.DefaultPlatform(cfg.Architecture),
		names: map[string]*nameRecord{}, targets: map[digest.Digest]*target{}, layers: map[string]int64{},
		users: map[string]use{}, pulling: map[string]pullRecord{}, held: map[digest.Digest]int{},
		cache: map[[2]string]*resolved{}, flights: map[[2]digest.Digest]*flight{},
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.cfg.Concurrent <= 0 {
		s.cfg.Concurrent = 3
	}
	if s.cfg.CertsDir == "" {
		s.cfg.CertsDir = "/etc/docker/certs.d"
	}
	s.ctx, s.closed = context.WithCancel(context.Background())
	opts := cfg.registry
	opts.Insecure, opts.Mirrors, opts.CertsDir = cfg.InsecureRegistries, cfg.RegistryMirrors, s.cfg.CertsDir
	opts.UserAgent = "kiri/" + cfg.Version
	var err error
	if s.registry, err = registry.New(opts); err != nil {
		return nil, err
	}
	if s.content, err = openContent(filepath.Join(cfg.DataRoot, "content")); err != nil {
		return nil, err
	}
	list, err := cfg.Layers.Layers(ctx)
	if err != nil {
		return nil, fmt.Errorf("listing layers: %w", err)
	}
	for _, l := range list {
		s.layers[l.DiffID] = l.Size
	}
	records := filepath.Join(cfg.DataRoot, "records")
	if s.records, err = record.Open[nameRecord](filepath.Join(records, "images"), record.Options{Log: s.log}); err != nil {
		return nil, err
	}
	if s.pulls, err = record.Open[pullRecord](filepath.Join(records, "pulls"), record.Options{Log: s.log}); err != nil {
		s.records.Close()
		return nil, err
	}
	for file, r := range s.records.Load() {
		key := r.Name
		if key == "" {
			key = dangling(r.Target.Digest)
		}
		if recordName(key) != file || registry.CheckDescriptor(&r.Target, 0) != nil {
			s.log.Error("an image's record does not belong to its name and is left out", "record", file, "name", r.Name)
			continue
		}
		s.names[key] = r
	}
	for file, r := range s.pulls.Load() {
		s.pulling[file] = *r
	}
	for key, r := range s.names {
		t := s.targets[r.Target.Digest]
		if t == nil {
			if t, err = s.read(r.Target); err != nil {
				s.log.Error("an image is damaged and left out until it is pulled again", "image", key, "error", err)
				delete(s.names, key)
				continue
			}
			s.targets[r.Target.Digest] = t
		}
		t.names[key] = true
	}
	return s, nil
}

// close ends pulls under way, lets go of the registries and syncs the records.
func (s *images) close() error {
	s.closed()
	s.registry.CloseIdle()
	return errors.Join(s.records.Close(), s.pulls.Close())
}

// read reads what is here of an image. An index of which nothing is here is an error, as is a damaged manifest.
func (s *images) read(desc ocispec.Descriptor) (*target, error) {
	t := &target{desc: ocispec.Descriptor{MediaType: desc.MediaType, Digest: desc.Digest, Size: desc.Size}, names: map[string]bool{}}
	if err := s.readInto(t, t.desc, nil, 0); err != nil {
		return nil, err
	}
	if len(t.variants) == 0 {
		return nil, fmt.Errorf("reading image %s: no platform of it is here", desc.Digest)
	}
	return t, nil
}

// maxNesting is how deep indexes may lie in indexes.
const maxNesting = 4

func (s *images) readInto(t *target, desc ocispec.Descriptor, platform *ocispec.Platform, depth int) error {
	raw, err := s.content.read(desc.Digest, registry.MaxManifest)
	if err != nil {
		return err
	}
	m, err := registry.ParseManifest(desc.MediaType, raw)
	if err != nil {
		return fmt.Errorf("reading manifest %s: %w", desc.Digest, err)
	}
	t.blobs = append(t.blobs, desc.Digest)
	m.Raw = nil
	if depth == 0 {
		t.raw = m
	}
	if m.Image != nil {
		v, err := s.readVariant(m, platform)
		if err != nil {
			return err
		}
		v.desc = desc
		t.variants = append(t.variants, v)
		t.blobs = append(t.blobs, m.Image.Config.Digest)
		for _, l := range m.Image.Layers {
			if s.content.has(l.Digest) {
				t.blobs = append(t.blobs, l.Digest)
			}
		}
		return nil
	}
	if depth == maxNesting {
		return fmt.Errorf("reading index %s: indexes are nested too deep", desc.Digest)
	}
	for _, d := range m.Index.Manifests {
		if !s.content.has(d.Digest) {
			continue
		}
		if registry.IsAttestation(&d) || !registry.IsImage(d.MediaType) && !registry.IsIndex(d.MediaType) {
			t.blobs = append(t.blobs, d.Digest)
			continue
		}
		if err := s.readInto(t, d, d.Platform, depth+1); err != nil {
			if depth == 0 && len(m.Index.Manifests) > 1 { // one platform's damage is not the others'
				s.log.Warn("a platform of an image is damaged", "image", t.desc.Digest, "manifest", d.Digest, "error", err)
				continue
			}
			return err
		}
	}
	return nil
}

func (s *images) readVariant(m *registry.Manifest, platform *ocispec.Platform) (*variant, error) {
	raw, err := s.content.read(m.Image.Config.Digest, registry.MaxConfig)
	if err != nil {
		return nil, err
	}
	cfg, err := parseConfig(raw, m.Image)
	if err != nil {
		return nil, err
	}
	cfg.History = nil
	v := &variant{manifest: m.Image, config: cfg, platform: registry.Normalize(cfg.Platform)}
	if platform != nil && platform.OS != "" {
		v.platform = registry.Normalize(*platform)
	}
	for _, d := range cfg.RootFS.DiffIDs {
		v.diffIDs = append(v.diffIDs, d.String())
	}
	return v, nil
}

// whole tells whether a variant can be run: all its layers are unpacked. s.mu is held.
func (s *images) whole(v *variant) bool {
	for _, id := range v.diffIDs {
		if _, ok := s.layers[id]; !ok {
			return false
		}
	}
	return true
}

// best chooses the variant for a platform: the one asked for, or with nil the agent's, else any. s.mu is held.
func (s *images) best(t *target, want *ocispec.Platform) *variant {
	p := s.platform
	if want != nil {
		p = *want
	}
	var found *variant
	rank := -1
	for _, v := range t.variants {
		if r := registry.Rank(p, v.platform); r >= 0 && (rank < 0 || r < rank) {
			found, rank = v, r
		}
	}
	if found == nil && want == nil {
		found = t.variants[0]
	}
	return found
}

// familiar is how people write a name.
func familiar(name string) string {
	if ref, err := reference.ParseNamed(name); err == nil {
		return reference.FamiliarString(ref)
	}
	return name
}

// tags lists an image's tagged names as people write them, sorted. s.mu is held.
func (s *images) tags(t *target) []string {
	list := []string{}
	for key := range t.names {
		if ref, err := reference.ParseNamed(key); err == nil {
			if _, ok := ref.(reference.Digested); !ok {
				list = append(list, reference.FamiliarString(ref))
			}
		}
	}
	slices.Sort(list)
	return list
}

// digests lists an image as name@digest, one for each repository it has a name in, sorted. s.mu is held.
func (s *images) digests(t *target) []string {
	set := map[string]bool{}
	for key := range t.names {
		ref, err := reference.ParseNamed(key)
		if err != nil {
			continue
		}
		if _, ok := ref.(reference.Digested); !ok {
			if ref, err = reference.WithDigest(reference.TrimNamed(ref), t.desc.Digest); err != nil {
				continue
			}
		}
		set[reference.FamiliarString(ref)] = true
	}
	return slices.Sorted(maps.Keys(set))
}

// setName makes name point at t, durably, and keeps the image that it pointed at before as a dangling one. "" records
// t without a name, if it has none. s.changing is held, s.mu is not.
func (s *images) setName(name string, t *target, pulled string) error {
	key := name
	if key == "" {
		key = dangling(t.desc.Digest)
	}
	s.mu.RLock()
	known := s.targets[t.desc.Digest]
	old := s.names[key]
	named := known != nil && len(known.names) > 0
	s.mu.RUnlock()
	if name == "" && named {
		key = "" // it has a name already; its variants may be new
	}
	var lost *target
	if old != nil && old.Target.Digest != t.desc.Digest {
		s.mu.RLock()
		if prev := s.targets[old.Target.Digest]; prev != nil && len(prev.names) == 1 {
			lost = prev
		}
		s.mu.RUnlock()
		if lost != nil {
			r := &nameRecord{Target: lost.desc, Tagged: old.Tagged, Pulled: old.Pulled}
			if err := s.records.Put(recordName(dangling(lost.desc.Digest)), r); err != nil {
				return err
			}
			s.mu.Lock()
			s.names[dangling(lost.desc.Digest)] = r
			lost.names[dangling(lost.desc.Digest)] = true
			s.mu.Unlock()
		}
	}
	var r *nameRecord
	if key != "" {
		if old != nil && pulled == "" && old.Target.Digest == t.desc.Digest {
			pulled = old.Pulled
		}
		r = &nameRecord{Name: name, Target: t.desc, Tagged: time.Now(), Pulled: pulled}
		if err := s.records.Put(recordName(key), r); err != nil {
			return err
		}
	}
	s.mu.Lock()
	if known != nil && known != t {
		t.names = known.names
	}
	s.targets[t.desc.Digest] = t
	if r != nil {
		if old != nil {
			if prev := s.targets[old.Target.Digest]; prev != nil && prev != t {
				delete(prev.names, key)
			}
		}
		s.names[key] = r
		t.names[key] = true
	}
	clear(s.cache)
	nameless := name != "" && t.names[dangling(t.desc.Digest)]
	s.mu.Unlock()
	if nameless { // it has a name now
		return s.dropName(dangling(t.desc.Digest))
	}
	return nil
}

// dropName removes one key from the names. An image that had no other is gone, but not yet what it was made of:
// collect sees to that. s.changing is held, s.mu is not.
func (s *images) dropName(key string) error {
	if err := s.records.Delete(recordName(key)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.names[key]
	if r == nil {
		return nil
	}
	delete(s.names, key)
	if t := s.targets[r.Target.Digest]; t != nil {
		delete(t.names, key)
		if len(t.names) == 0 {
			delete(s.targets, r.Target.Digest)
		}
	}
	clear(s.cache)
	return nil
}

// use records that a container, by its full id, uses an image and its layers; both are kept in the container's record.
// In memory only: it is called for each container after a start of the daemon.
func (s *images) use(container, imageID string, layers []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users[container] = use{image: imageID, layers: layers}
}

// unuse ends use. Layers of an image that was removed in the meantime are given back.
func (s *images) unuse(container string) {
	s.mu.Lock()
	u, ok := s.users[container]
	delete(s.users, container)
	_, there := s.targets[digest.Digest(u.image)]
	s.mu.Unlock()
	if ok && !there && len(u.layers) > 0 {
		if _, err := s.collect(context.Background()); err != nil {
			s.log.Warn("layers of a removed image are not all given back", "image", u.image, "error", err)
		}
	}
}

// usersOf lists the containers that use an image, sorted. s.mu is held.
func (s *images) usersOf(imageID digest.Digest) []string {
	list := []string{}
	for c, u := range s.users {
		if u.image == imageID.String() {
			list = append(list, c)
		}
	}
	slices.Sort(list)
	return list
}

// count is the number of images, for info.
func (s *images) count() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.targets)
}

// event tells of an image; labels are read from its platform's configuration.
func (s *images) event(action, actor, name string, t *target) {
	if s.cfg.Event == nil {
		return
	}
	var labels map[string]string
	if t != nil && len(t.variants) > 0 {
		s.mu.RLock()
		labels = s.best(t, nil).config.Config.Labels
		s.mu.RUnlock()
	}
	s.cfg.Event(action, actor, name, labels)
}

// begin counts a pull or an import; its end gives memory and connections back when it was the last.
func (s *images) begin() (end func()) {
	s.mu.Lock()
	s.busy++
	s.mu.Unlock()
	return func() {
		s.mu.Lock()
		s.busy--
		last := s.busy == 0
		s.mu.Unlock()
		if last {
			s.registry.CloseIdle()
			go debug.FreeOSMemory() // a burst leaves buffers and decoded JSON behind; the daemon's idle size counts
		}
	}
}

// hold keeps blobs and DiffIDs from being collected until release.
type hold struct {
	s   *images
	mu  sync.Mutex
	ids []digest.Digest
}

func (s *images) newHold() *hold { return &hold{s: s} }

func (h *hold) add(ids ...digest.Digest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	for _, id := range ids {
		h.s.held[id]++
	}
	h.ids = append(h.ids, ids...)
}

func (h *hold) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.s.mu.Lock()
	defer h.s.mu.Unlock()
	for _, id := range h.ids {
		if h.s.held[id]--; h.s.held[id] == 0 {
			delete(h.s.held, id)
		}
	}
	h.ids = nil
}

// keyLocks are locks by name that can be waited for with a context.
type keyLocks struct {
	mu sync.Mutex
	m  map[string]*keyLock
}

type keyLock struct {
	ch   chan struct{} // holds one element while locked
	refs int
}

// lock waits for the lock of key; the returned function unlocks it.
func (k *keyLocks) lock(ctx context.Context, key string) (unlock func(), err error) {
	l := k.ref(key)
	select {
	case l.ch <- struct{}{}:
		return func() { <-l.ch; k.unref(key, l) }, nil
	case <-ctx.Done():
		k.unref(key, l)
		return nil, context.Cause(ctx)
	}
}

// try locks key if nobody has it, else returns nil.
func (k *keyLocks) try(key string) (unlock func()) {
	l := k.ref(key)
	select {
	case l.ch <- struct{}{}:
		return func() { <-l.ch; k.unref(key, l) }
	default:
		k.unref(key, l)
		return nil
	}
}

func (k *keyLocks) ref(key string) *keyLock {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.m == nil {
		k.m = map[string]*keyLock{}
	}
	l := k.m[key]
	if l == nil {
		l = &keyLock{ch: make(chan struct{}, 1)}
		k.m[key] = l
	}
	l.refs++
	return l
}

func (k *keyLocks) unref(key string, l *keyLock) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.refs--; l.refs == 0 {
		delete(k.m, key)
	}
}

// unpacked notes a layer that the agent has now.
func (s *images) unpacked(r *wire.UnpackReply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.layers[r.DiffID] = r.Size
}

// set returns what is held.
func (h *hold) set() map[digest.Digest]bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	m := map[digest.Digest]bool{}
	for _, id := range h.ids {
		m[id] = true
	}
	return m
}
