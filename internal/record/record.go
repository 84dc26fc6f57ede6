// Package record keeps the engine's objects as durable files, one JSON file an object, and nothing else.
//
// The guarantee, for every object by itself:
//
//   - When Put returns, the record is visible to whoever opens the directory next: it outlives a kill -9 of the
//     process at any instant. It stands in NAME.json.new (or NAME.json.new2), whole, under a checksum.
//   - Within about a second (Options.Delay) it is synced and renamed to NAME.json in the background; from then on it
//     outlives a loss of power too. A record that is put and deleted within that second never costs an fsync.
//   - When Delete returns the record is gone for whoever opens the directory next; within the same second also
//     after a loss of power.
//   - At any instant, after any of these, Open finds the old record or the new one, never a mixture.
//
// While nothing is pending there is no goroutine and no timer.
package record

import (
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"os"
	"sync"
	"time"
)

// ErrName is returned for a name that cannot be a record's: empty, over MaxName bytes, or with other characters than
// letters, digits, '_', '.' and '-', or not beginning with a letter or a digit.
var ErrName = errors.New("not a record name")

// MaxName is the longest name of a record in bytes: the file system's 255 less the longest suffix.
const MaxName = 200

// Options of a store. The zero value is good.
type Options struct {
	Log   *slog.Logger  // where damaged records and failing background work are told; nil: slog's default
	Delay time.Duration // between Put and the background sync; 0 is one second

	// Fault is called before each file operation with the operation's label (see Points) and the record's name. An
	// error from it fails that operation as if the kernel had. For tests; nil otherwise.
	Fault func(point, name string) error
}

// The labels of the file operations, in the order in which a record's life meets them.
const (
	PointPutOpen    = "put.open"    // create NAME.json.new, or NAME.json.new2 if an unsynced NAME.json.new stands
	PointPutWrite   = "put.write"   // write the record into it
	PointPutHalf    = "put.half"    // half of it is written (the write is cut in two only if Options.Fault is set)
	PointPutClose   = "put.close"   // close it
	PointPutDrop    = "put.drop"    // unlink the unsynced one that stood before
	PointSyncOpen   = "sync.open"   // open the unsynced record
	PointSyncFile   = "sync.file"   // fsync it
	PointSyncRename = "sync.rename" // it over NAME.json
	PointSyncDir    = "sync.dir"    // fsync the directory
	PointDeleteOld  = "delete.old"  // unlink NAME.json
	PointDeleteNew  = "delete.new"  // unlink the unsynced one
)

// Points lists all labels, for tests that walk them.
func Points() []string {
	return []string{PointPutOpen, PointPutWrite, PointPutHalf, PointPutClose, PointPutDrop, PointSyncOpen,
		PointSyncFile, PointSyncRename, PointSyncDir, PointDeleteOld, PointDeleteNew}
}

const (
	extOld     = ".json"
	extNew     = ".json.new"
	extNew2    = ".json.new2"
	extDamaged = ".damaged"
)

// Store keeps records of type T in one directory. Its methods are safe for concurrent use; calls for one name are
// done one after the other. Only one process may have a directory open (the daemon's lock on its data root).
type Store[T any] struct {
	dir   *directory
	log   *slog.Logger
	delay time.Duration
	fault func(point, name string) error
	seed  maphash.Seed
	names [16]sync.Mutex // by hash of the name: one operation on a record at a time; taken before mu

	flushing sync.Mutex // one flush at a time; taken before names

	mu       sync.Mutex
	files    map[string]state // what stands on disk
	pending  map[string]bool  // names whose .new waits for its sync
	dirDirty bool             // an unlink or a rename in the directory is not synced yet
	timer    *time.Timer      // nil until first needed
	armed    bool
	backoff  time.Duration // 0 while flushes succeed
	closed   bool

	loaded map[string]*T // by Open, until Load takes it
}

// state is what stands on disk for one name.
type state struct {
	old bool   // NAME.json
	new string // the suffix of the unsynced record, extNew or extNew2; "" if there is none
	gen uint64 // counts Puts; written in the file, so that of two unsynced ones the newer is known
}

// Open opens the store in dir, which is made (mode 0700) if it is missing, and reads all records.
//
// A damaged file never stops it: it is renamed to FILE.damaged and told in the log, and the record's other
// file, if that is whole, is taken.
func Open[T any](dir string, opts Options) (*Store[T], error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("opening records: %w", err)
	}
	d, err := openDirectory(dir)
	if err != nil {
		return nil, fmt.Errorf("opening records in %s: %w", dir, err)
	}
	s := &Store[T]{
		dir: d, log: opts.Log, delay: opts.Delay, fault: opts.Fault, seed: maphash.MakeSeed(),
		files: map[string]state{}, pending: map[string]bool{}, loaded: map[string]*T{},
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.delay == 0 {
		s.delay = time.Second
	}
	if err := s.readAll(); err != nil {
		d.close()
		return nil, err
	}
	return s, nil
}

// Load returns the records found by Open. The map is the caller's; a second call returns an empty one.
func (s *Store[T]) Load() map[string]*T {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.loaded
	s.loaded = map[string]*T{}
	return m
}

// Dir is the store's directory.
func (s *Store[T]) Dir() string { return s.dir.path }

// Put writes v as the record name, in place of the one that stands. After an error the one that stood still stands.
func (s *Store[T]) Put(name string, v *T) error {
	if err := CheckName(name); err != nil {
		return err
	}
	buf := buffers.Get().(*buffer)
	defer buf.free()
	if err := buf.encode(v); err != nil {
		return fmt.Errorf("writing record %s: %w", name, err)
	}
	l := s.lock(name)
	defer l.Unlock()
	s.mu.Lock()
	st, closed := s.files[name], s.closed
	s.mu.Unlock()
	if closed {
		return fmt.Errorf("writing record %s: %w", name, os.ErrClosed)
	}
	// An unsynced record that stands was promised to the caller of the last Put, so it is never written over. Nor is it
	// renamed over: ext4 then begins to write the new file's blocks at once, which takes longer than all the rest.
	before := st.new
	st.new = extNew
	if before == extNew {
		st.new = extNew2
	}
	st.gen++
	if err := buf.seal(st.gen); err != nil {
		return fmt.Errorf("writing record %s: %w", name, err)
	}
	err := s.write(name, name+st.new, buf.b)
	if err == nil && before != "" {
		if err = s.at(PointPutDrop, name); err == nil {
			err = s.dir.unlink(name + before)
		}
		if err != nil {
			s.dir.unlink(name + st.new)
		}
	}
	if err != nil {
		return fmt.Errorf("writing record %s: %w", name, err)
	}
	s.mu.Lock()
	s.files[name] = st
	s.pending[name] = true
	s.arm()
	s.mu.Unlock()
	return nil
}

// write makes file hold b and nothing else; after an error there is no such file.
func (s *Store[T]) write(name, file string, b []byte) (err error) {
	if err := s.at(PointPutOpen, name); err != nil {
		return err
	}
	f, err := s.dir.create(file)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			s.dir.unlink(file)
		}
	}()
	err = s.at(PointPutWrite, name)
	if err == nil && s.fault != nil {
		if err = f.write(b[:len(b)/2]); err == nil {
			err = s.at(PointPutHalf, name)
		}
		b = b[len(b)/2:]
	}
	if err == nil {
		err = f.write(b)
	}
	if err == nil {
		err = s.at(PointPutClose, name)
	}
	if cerr := f.close(); err == nil {
		err = cerr
	}
	return err
}

// Delete removes the record name; it is quiet if there is none.
//
// The order matters: were the unsynced one unlinked first, a kill between the two would bring back the state before it.
func (s *Store[T]) Delete(name string) error {
	if err := CheckName(name); err != nil {
		return err
	}
	l := s.lock(name)
	defer l.Unlock()
	s.mu.Lock()
	st, closed := s.files[name], s.closed
	s.mu.Unlock()
	if closed {
		return fmt.Errorf("deleting record %s: %w", name, os.ErrClosed)
	}
	if st.old {
		if err := s.drop(PointDeleteOld, name, extOld); err != nil {
			return err
		}
		st.old = false
		s.mu.Lock()
		s.files[name] = st
		s.dirDirty = true // a record that was never synced has nothing that a loss of power could bring back
		s.arm()
		s.mu.Unlock()
	}
	if st.new != "" {
		if err := s.drop(PointDeleteNew, name, st.new); err != nil {
			return err
		}
	}
	s.mu.Lock()
	delete(s.files, name)
	delete(s.pending, name)
	s.mu.Unlock()
	return nil
}

// drop unlinks one file of a record.
func (s *Store[T]) drop(point, name, ext string) error {
	err := s.at(point, name)
	if err == nil {
		err = s.dir.unlink(name + ext)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("deleting record %s: %w", name, err)
	}
	return nil
}

// Sync makes everything that was put and deleted before it durable against a loss of power.
func (s *Store[T]) Sync() error { return s.flush() }

// Close syncs and releases the directory. The store cannot be used afterwards.
func (s *Store[T]) Close() error {
	err := s.flush()
	s.mu.Lock()
	closed := s.closed
	s.closed = true
	if s.timer != nil {
		s.timer.Stop()
	}
	s.mu.Unlock()
	if closed {
		return nil
	}
	for i := range s.names { // whoever holds one is done before the descriptor goes
		s.names[i].Lock()
		defer s.names[i].Unlock()
	}
	if cerr := s.dir.close(); err == nil && cerr != nil {
		err = fmt.Errorf("closing records in %s: %w", s.dir.path, cerr)
	}
	return err
}

func (s *Store[T]) lock(name string) *sync.Mutex {
	l := &s.names[maphash.String(s.seed, name)%uint64(len(s.names))]
	l.Lock()
	return l
}

// at passes the fault point.
func (s *Store[T]) at(point, name string) error {
	if s.fault == nil {
		return nil
	}
	return s.fault(point, name)
}

// CheckName returns ErrName, wrapped with the name, if a record cannot have it.
func CheckName(name string) error {
	ok := len(name) > 0 && len(name) <= MaxName && alphanumeric(name[0])
	for i := 1; ok && i < len(name); i++ {
		ok = alphanumeric(name[i]) || name[i] == '_' || name[i] == '.' || name[i] == '-'
	}
	if !ok {
		return fmt.Errorf("%.64q: %w", name, ErrName)
	}
	return nil
}

func alphanumeric(b byte) bool {
	return b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= '0' && b <= '9'
}
