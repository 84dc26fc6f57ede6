//go:build linux

package agent

import (
	"os"
	"strings"
	"sync"
	"time"

	"runkiri.com/kiri/internal/agent/network"
	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// roots keeps root mounts ready for images that containers are started from again and again: directories, overlay, and
// the places of the standard mounts. An image that is started for the first time has none; from the second start on a
// few are made ahead, in the background.
type roots struct {
	a *Agent

	mu     sync.Mutex // guards all below
	images map[rootKey]*imageRoots
}

// rootKey is what makes one root as good as another.
type rootKey struct {
	layers   string // DiffIDs, joined
	volatile bool
}

type imageRoots struct {
	key     rootKey
	layers  []string
	ready   []*root
	filling bool
	used    time.Time
	uses    int
	lookups map[lookupKey]lookup
}

// Bounds of what is kept: images, roots for each, look-ups for each.
const (
	maxImages  = 4
	rootsReady = poolSize
	maxLookups = 64
)

// root is the root file system of one container to come, or of one that is being started.
type root struct {
	mount    *os.File
	prepared *rootfs.Prepared // nil: it was made for its container
	places   [len(rootPlaces)]*os.File
	image    *imageRoots // nil: look nothing up from memory
}

// rootPlaces are the places of the standard mounts, files behind directories.
var rootPlaces = [...]string{"/proc", "/dev", "/sys", "/etc/" + hostsName, "/etc/" + hostnameName, "/etc/" + resolvName}

const (
	hostsName, hostnameName, resolvName = "hosts", "hostname", "resolv.conf" // network.FileNames

	placeProc, placeDev, placeSys, placeFiles = 0, 1, 2, 3
)

// lookupKey is all that the user and the path of a command depend on, next to the image.
type lookupKey struct{ user, groups, cwd, path, arg0 string }

type lookup struct {
	user rootfs.User
	path string
	cwd  bool // the working directory is in the image
}

func (s *roots) init(a *Agent) {
	s.a = a
	s.images = map[rootKey]*imageRoots{}
}

// take gives the container its root. Of an image that was used before it is a prepared one, if there is one.
func (s *roots) take(m *wire.Run) (*root, error) {
	key := rootKey{strings.Join(m.Layers, " "), m.Remove}
	s.mu.Lock()
	im := s.images[key]
	if im == nil {
		im = &imageRoots{key: key, layers: m.Layers, lookups: map[lookupKey]lookup{}}
		s.images[key] = im
	}
	im.used = time.Now()
	im.uses++
	var r *root
	if n := len(im.ready); n > 0 {
		r = im.ready[n-1]
		im.ready[n-1] = nil
		im.ready = im.ready[:n-1]
	}
	s.mu.Unlock()
	if r != nil {
		err := r.prepared.Claim(m.ID)
		if err == nil {
			r.image = im
			return r, nil
		}
		s.discard(r)
		if err != rootfs.ErrTaken {
			return nil, err
		}
	}
	mount, err := s.a.store.MountWith(m.ID, m.Layers, rootfs.MountOptions{Volatile: m.Remove, MountPoints: true})
	if err != nil {
		return nil, err
	}
	return &root{mount: mount}, nil
}

// place is the place of a standard mount, if nothing has to be made for it.
func (r *root) place(i int) (*os.File, error) {
	if r.places[i] == nil {
		f, err := rootfs.CreateTarget(r.mount, rootPlaces[i], i < placeFiles)
		if err != nil {
			return nil, err
		}
		r.places[i] = f
	}
	return r.places[i], nil
}

// started closes what a running container does not need. The mount is the container's.
func (r *root) started() { closeAll(r.places[:]) }

// refill makes roots ahead for the images that are worth it, and lets go of those that are not.
func (s *roots) refill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	var drop []*imageRoots
	for len(s.images) > maxImages {
		var oldest *imageRoots
		for _, im := range s.images {
			if oldest == nil || im.used.Before(oldest.used) {
				oldest = im
			}
		}
		delete(s.images, oldest.key)
		drop = append(drop, oldest)
	}
	for _, im := range drop {
		for _, r := range im.ready {
			go s.discard(r)
		}
	}
	for _, im := range s.images {
		if !im.filling && im.uses > 1 && len(im.ready) < min(rootsReady, im.uses) {
			im.filling = true
			go s.fill(im)
		}
	}
}

func (s *roots) fill(im *imageRoots) {
	for {
		r, err := s.prepare(im)
		s.mu.Lock()
		if err != nil || s.images[im.key] != im {
			im.filling = false
			s.mu.Unlock()
			if err != nil {
				s.a.logf("preparing for the next container: %v", err) // who needs it makes it, and gets the error
			} else {
				s.discard(r)
			}
			return
		}
		im.ready = append(im.ready, r)
		if len(im.ready) >= min(rootsReady, im.uses) {
			im.filling = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
	}
}

func (s *roots) prepare(im *imageRoots) (*root, error) {
	p, err := s.a.store.Prepare(im.layers, rootfs.MountOptions{Volatile: im.key.volatile, MountPoints: true})
	if err != nil {
		return nil, err
	}
	r := &root{mount: p.Mount, prepared: p}
	for i := range rootPlaces {
		if _, err := r.place(i); err != nil {
			// An image with a link or the wrong thing there: each start finds its own way.
			r.places[i] = nil
		}
	}
	return r, nil
}

// discard takes apart a root that no container has.
func (s *roots) discard(r *root) {
	closeAll(r.places[:])
	if err := r.prepared.Discard(); err != nil {
		s.a.logf("removing an unused root: %v", err)
	}
}

// drain lets go of all that is ready: before a layer is removed, and when it has been quiet.
func (s *roots) drain() {
	s.mu.Lock()
	var all []*root
	for key, im := range s.images {
		all = append(all, im.ready...)
		im.ready = nil
		delete(s.images, key)
	}
	s.mu.Unlock()
	for _, r := range all {
		s.discard(r)
	}
}

// known returns what was found out for an earlier container of the image that asked the same.
func (s *roots) known(r *root, k lookupKey) (lookup, bool) {
	if r.image == nil {
		return lookup{}, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l, ok := r.image.lookups[k]
	return l, ok
}

func (s *roots) learn(r *root, k lookupKey, l lookup) {
	if r.image == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(r.image.lookups) >= maxLookups {
		clear(r.image.lookups)
	}
	r.image.lookups[k] = l
}

// etcFiles are hosts, hostname and resolv.conf of one container, each a file of a small tmpfs and a detached mount of it,
// so that a start only has to write them.
type etcFiles struct {
	files  [len(network.FileNames)]*os.File
	mounts [len(network.FileNames)]*os.File
}

func (e *etcFiles) close() {
	if e != nil {
		closeAll(e.files[:])
		closeAll(e.mounts[:])
	}
}
