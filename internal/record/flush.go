package record

import (
	"errors"
	"fmt"
	"os"
	"time"
)

// maxBackoff is the longest pause between two tries of a background sync that fails.
const maxBackoff = time.Minute

// arm sets the timer if it is not set. s.mu is held.
func (s *Store[T]) arm() {
	if s.armed || s.closed {
		return
	}
	s.armed = true
	wait := s.delay + s.backoff
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, s.background)
		return
	}
	s.timer.Reset(wait)
}

// background is the timer's function: it lives as long as one flush.
func (s *Store[T]) background() {
	s.mu.Lock()
	s.armed = false
	s.mu.Unlock()
	err := s.flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.backoff = 0
		return
	}
	if s.closed {
		return
	}
	s.backoff = min(max(2*s.backoff, s.delay), maxBackoff)
	s.log.Error("records are visible but not yet safe from a loss of power", "error", err, "again", s.backoff)
	s.arm()
}

// flush syncs and renames every pending record, then the directory once. What fails stays pending.
//
// The fsync runs without the record's lock, so that a Put never waits for the disk; the rename is done only if no
// Put has come in between, else the file that was synced is not the one that stands.
func (s *Store[T]) flush() error {
	s.flushing.Lock()
	defer s.flushing.Unlock()
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	work := make(map[string]state, len(s.pending))
	for name := range s.pending {
		work[name] = s.files[name]
	}
	s.mu.Unlock()

	var errs []error
	for name, st := range work {
		if err := s.settle(name, st); err != nil {
			errs = append(errs, fmt.Errorf("syncing record %s: %w", name, err))
		}
	}
	s.mu.Lock()
	dirty := s.dirDirty
	s.dirDirty = false
	s.mu.Unlock()
	if dirty {
		err := s.at(PointSyncDir, "")
		if err == nil {
			err = s.dir.sync()
		}
		if err != nil {
			s.mu.Lock()
			s.dirDirty = true
			s.mu.Unlock()
			errs = append(errs, fmt.Errorf("syncing %s: %w", s.dir.path, err))
		}
	}
	if len(errs) > 8 { // one cause, as a full disk, for all of them
		errs = append(errs[:8:8], fmt.Errorf("and %d more", len(errs)-8))
	}
	return errors.Join(errs...)
}

// settle makes one pending record durable up to the directory's entry, if it still is what it was at the look before.
func (s *Store[T]) settle(name string, before state) error {
	if err := s.at(PointSyncOpen, name); err != nil {
		return err
	}
	f, err := s.dir.open(name + before.new)
	if errors.Is(err, os.ErrNotExist) {
		return nil // deleted or put again meanwhile
	}
	if err != nil {
		return err
	}
	if err = s.at(PointSyncFile, name); err == nil {
		err = f.sync()
	}
	if cerr := f.close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	l := s.lock(name)
	defer l.Unlock()
	s.mu.Lock()
	st, ok := s.files[name]
	s.mu.Unlock()
	if !ok || st.new != before.new || st.gen != before.gen {
		return nil // deleted, or put again and pending still
	}
	if err := s.at(PointSyncRename, name); err != nil {
		return err
	}
	if err := s.dir.rename(name+st.new, name+extOld); err != nil {
		return err
	}
	st.old, st.new = true, ""
	s.mu.Lock()
	s.files[name] = st
	delete(s.pending, name)
	s.dirDirty = true
	s.mu.Unlock()
	return nil
}
