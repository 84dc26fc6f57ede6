package rootfs

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Store is the agent's part of the data root. All methods are safe for concurrent use.
type Store struct {
	root     string   // absolute path of the data root
	layerDir *os.File // layers/

	mu      sync.Mutex
	layers  map[string]layerInfo // by DiffID; guarded by mu
	next    uint64               // last number given to a layer directory; guarded by mu
	flights map[string]*flight   // layers being unpacked, by DiffID; guarded by mu
	changed chan struct{}        // closed and replaced when layers or flights change; guarded by mu

	prepared atomic.Uint64 // number of the last root that was prepared

	syncer syncer
	copies keyLock        // volumes being filled
	sweeps sync.WaitGroup // sweeps that wait for a dying unpack process
}

// layerInfo is what is known of a layer; the file "layer" in its directory holds it as text.
type layerInfo struct {
	name   string // directory below layers/
	DiffID string
	Size   int64 // bytes of file content
	// HasRoot tells that the tar had an entry for the root directory itself; the other three are its attributes.
	// They matter because in an overlay the root's attributes are those of the writable layer alone.
	HasRoot  bool
	Mode     uint32
	UID, GID uint32
}

const (
	layerMagic = "kiri layer 1"
	emptyLayer = "empty"
)

// OpenStore opens or makes the agent's directories below dataRoot and deletes what an earlier agent left half made.
func OpenStore(dataRoot string) (*Store, error) {
	root, err := filepath.Abs(dataRoot)
	if err != nil {
		return nil, fmt.Errorf("opening store at %s: %w", dataRoot, err)
	}
	s := &Store{root: root, layers: map[string]layerInfo{}, flights: map[string]*flight{}, changed: make(chan struct{})}
	for _, d := range []struct {
		name string
		mode os.FileMode
	}{{"", 0o711}, {"layers", 0o700}, {"layers/" + emptyLayer, 0o755}, {"containers", 0o710}, {"volumes", 0o701}} {
		if err := os.MkdirAll(filepath.Join(root, d.name), d.mode); err != nil {
			return nil, fmt.Errorf("opening store: %w", err)
		}
	}
	if s.layerDir, err = os.Open(filepath.Join(root, "layers")); err != nil {
		return nil, fmt.Errorf("opening store: %w", err)
	}
	s.syncer.fd = fdOf(s.layerDir)
	err = s.load()
	if err == nil {
		err = s.makeMountPoints()
	}
	if err == nil {
		err = s.sweepPrepared()
	}
	if err != nil {
		s.layerDir.Close()
		return nil, fmt.Errorf("opening store: %w", err)
	}
	return s, nil
}

// Close gives back the store's descriptor.
func (s *Store) Close() error { return s.layerDir.Close() }

// load reads the list of layers and sweeps half-made and half-removed ones.
func (s *Store) load() error {
	entries, err := readDir(fdOf(s.layerDir))
	if err != nil {
		return fmt.Errorf("reading layers: %w", err)
	}
	for _, e := range entries {
		if e.name == emptyLayer {
			continue
		}
		if e.name[0] == '+' || e.name[0] == '-' {
			s.sweep(e.name)
		}
		n, err := strconv.ParseUint(strings.TrimLeft(e.name, "+-"), 36, 64)
		if err != nil {
			continue // not ours; left alone
		}
		s.next = max(s.next, n)
		if e.name[0] == '+' || e.name[0] == '-' {
			continue
		}
		info, err := s.readInfo(e.name)
		if err != nil {
			// The name is only given to a whole layer, so this is damage from outside. The layer is lost, the store is not.
			fmt.Fprintf(os.Stderr, "kiri-init: %v; the layer is removed\n", err)
			s.sweep(e.name)
			continue
		}
		if _, twice := s.layers[info.DiffID]; twice {
			s.sweep(e.name)
			continue
		}
		s.layers[info.DiffID] = info
	}
	return nil
}

// sweep deletes a directory of layers/. An unpacking child dies with its agent (PDEATHSIG) but perhaps not before the
// next agent is here; it holds a lock on the directory, and the sweep waits for that out of the way.
func (s *Store) sweep(name string) {
	fd, err := openat(fdOf(s.layerDir), name+"/fs", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		s.swept(name, removeTree(fdOf(s.layerDir), name))
		return
	}
	if err := retry(func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) }); err != unix.EWOULDBLOCK {
		unix.Close(fd)
		s.swept(name, removeTree(fdOf(s.layerDir), name))
		return
	}
	dir, err := unix.FcntlInt(s.layerDir.Fd(), unix.F_DUPFD_CLOEXEC, 0) // outlives a Close of the store
	if err != nil {
		unix.Close(fd)
		s.swept(name, err)
		return
	}
	s.sweeps.Go(func() {
		defer unix.Close(dir)
		err := retry(func() error { return unix.Flock(fd, unix.LOCK_EX) })
		unix.Close(fd)
		if err == nil {
			err = removeTree(dir, name)
		}
		s.swept(name, err)
	})
}

func (s *Store) swept(name string, err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "kiri-init: sweeping layer directory %s: %v\n", name, err)
	}
}

// readInfo reads the metadata of the layer in directory name.
func (s *Store) readInfo(name string) (layerInfo, error) {
	b, err := os.ReadFile(filepath.Join(s.root, "layers", name, "layer"))
	if err != nil {
		return layerInfo{}, fmt.Errorf("reading layer %s: %w", name, err)
	}
	info, err := parseInfo(string(b))
	if err != nil {
		return layerInfo{}, fmt.Errorf("reading layer %s: %w", name, err)
	}
	info.name = name
	return info, nil
}

// text is the content of the metadata file: a line that names the form, then a word and its values on each line.
func (l *layerInfo) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\ndiffid %s\nsize %d\n", layerMagic, l.DiffID, l.Size)
	if l.HasRoot {
		fmt.Fprintf(&b, "root %o %d %d\n", l.Mode, l.UID, l.GID)
	}
	b.WriteString("end\n")
	return b.String()
}

func parseInfo(text string) (layerInfo, error) {
	var l layerInfo
	sc := bufio.NewScanner(strings.NewReader(text))
	if !sc.Scan() || sc.Text() != layerMagic {
		return l, errors.New("not a layer of this version")
	}
	for sc.Scan() {
		word, rest, _ := strings.Cut(sc.Text(), " ")
		var err error
		switch word {
		case "diffid":
			l.DiffID = rest
			err = checkDiffID(rest)
		case "size":
			l.Size, err = strconv.ParseInt(rest, 10, 64)
		case "root":
			l.HasRoot = true
			_, err = fmt.Sscanf(rest, "%o %d %d", &l.Mode, &l.UID, &l.GID)
		case "end":
			if l.DiffID == "" {
				return l, errors.New("no DiffID")
			}
			return l, nil
		}
		if err != nil {
			return l, fmt.Errorf("line %q: %w", sc.Text(), err)
		}
	}
	return l, errors.New("cut short")
}

// checkDiffID tells whether id has the form sha256:<64 lower-case hex digits>.
func checkDiffID(id string) error {
	hex, ok := strings.CutPrefix(id, "sha256:")
	if !ok || len(hex) != 64 || strings.Trim(hex, "0123456789abcdef") != "" {
		return wire.Errorf(wire.Invalid, "invalid DiffID %q", id)
	}
	return nil
}

// Layers lists the layers that are whole, in no order.
func (s *Store) Layers() ([]wire.UnpackReply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]wire.UnpackReply, 0, len(s.layers))
	for _, l := range s.layers {
		out = append(out, wire.UnpackReply{DiffID: l.DiffID, Size: l.Size})
	}
	return out, nil
}

// RemoveLayer deletes a layer; quiet if it is not there. That nothing uses it is for the daemon to know: a container
// that is mounted on it keeps what it has open and sees the rest vanish.
func (s *Store) RemoveLayer(diffID string) error {
	if err := checkDiffID(diffID); err != nil {
		return err
	}
	s.mu.Lock()
	l, ok := s.layers[diffID]
	if ok {
		// The rename is what removes the layer; from then on a sweep would finish the work. It is done under the lock so
		// that a layer unpacked again at once does not meet it.
		err := retry(func() error {
			return unix.Renameat(fdOf(s.layerDir), l.name, fdOf(s.layerDir), "-"+l.name)
		})
		if err != nil && err != unix.ENOENT {
			s.mu.Unlock()
			return fmt.Errorf("removing layer %s: %w", diffID, err)
		}
		delete(s.layers, diffID)
		s.notify()
	}
	s.mu.Unlock()
	if !ok {
		return nil
	}
	if err := removeTree(fdOf(s.layerDir), "-"+l.name); err != nil {
		return fmt.Errorf("removing layer %s: %w", diffID, err)
	}
	return nil
}

// lookup returns what is known of each of the layers.
func (s *Store) lookup(diffIDs []string) ([]layerInfo, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]layerInfo, len(diffIDs))
	for i, id := range diffIDs {
		l, ok := s.layers[id]
		if !ok {
			return nil, wire.Errorf(wire.NotFound, "layer %s is not here", id)
		}
		out[i] = l
	}
	return out, nil
}

// notify wakes those who wait for layers; the caller holds mu.
func (s *Store) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// newName gives a number to a layer directory, in base 36.
func (s *Store) newName() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	return strconv.FormatUint(s.next, 36)
}

// syncer does one syncfs for all who asked before it began.
type syncer struct {
	fd   int // any descriptor of the file system
	mu   sync.Mutex
	next *syncRun // collecting callers; guarded by mu
	busy bool     // a run is under way; guarded by mu
}

type syncRun struct {
	done chan struct{}
	err  error
}

// sync writes everything of the file system that was dirty when it was called to the disk.
func (y *syncer) sync() error {
	y.mu.Lock()
	if y.next == nil {
		y.next = &syncRun{done: make(chan struct{})}
	}
	mine := y.next
	if !y.busy {
		y.busy = true
		go y.run()
	}
	y.mu.Unlock()
	<-mine.done
	return mine.err
}

func (y *syncer) run() {
	y.mu.Lock()
	for y.next != nil {
		run := y.next
		y.next = nil
		y.mu.Unlock()
		run.err = retry(func() error { return unix.Syncfs(y.fd) })
		close(run.done)
		y.mu.Lock()
	}
	y.busy = false
	y.mu.Unlock()
}

// keyLock is a mutex for each key in use.
type keyLock struct {
	mu   sync.Mutex
	held map[any]*keyHolder
}

type keyHolder struct {
	sync.Mutex
	users int
}

// lock waits for key and returns what gives it back.
func (k *keyLock) lock(key any) (unlock func()) {
	k.mu.Lock()
	if k.held == nil {
		k.held = map[any]*keyHolder{}
	}
	h := k.held[key]
	if h == nil {
		h = &keyHolder{}
		k.held[key] = h
	}
	h.users++
	k.mu.Unlock()
	h.Lock()
	return func() {
		h.Unlock()
		k.mu.Lock()
		if h.users--; h.users == 0 {
			delete(k.held, key)
		}
		k.mu.Unlock()
	}
}

// validID tells whether id can be a name below containers/: the daemon's 64 hex digits, or a test's word.
func validID(id string) error {
	if id == "" || len(id) > 128 || id[0] == '.' || strings.Trim(id, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.-") != "" {
		return wire.Errorf(wire.Invalid, "invalid container id %q", id)
	}
	return nil
}

// ContainerDir is where a container's files are. It may not be there yet.
func (s *Store) ContainerDir(id string) string { return filepath.Join(s.root, "containers", id) }

// RemoveContainer deletes a container's writable layer, its logs and all else in its directory; quiet if it is not
// there. The usual container that wrote nothing costs a handful of rmdirs.
func (s *Store) RemoveContainer(id string) error {
	if err := validID(id); err != nil {
		return err
	}
	return s.removeContainerDir(id)
}

func (s *Store) removeContainerDir(id string) error {
	dir, err := openat(unix.AT_FDCWD, filepath.Join(s.root, "containers"), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("removing container %s: %w", id, err)
	}
	defer unix.Close(dir)
	if err := removeTree(dir, id); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing container %s: %w", id, err)
	}
	return nil
}
