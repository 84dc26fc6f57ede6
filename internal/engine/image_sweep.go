package engine

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/opencontainers/go-digest"
)

// collect deletes the blobs and layers that nothing refers to: no image, no container, no pull, finished or not. It
// returns the bytes given back. While an image's record stands damaged nobody can say what it refers to, so nothing
// is deleted.
func (s *images) collect(ctx context.Context) (int64, error) {
	if aside, err := filepath.Glob(filepath.Join(s.records.Dir(), "*.damaged")); err != nil || len(aside) > 0 {
		s.log.Warn("nothing is given back while an image's record stands damaged: pull the image again and remove the file", "files", aside, "error", err)
		return 0, nil
	}
	var freed int64
	var errs []error
	s.mu.Lock()
	for d, n := range s.content.list() {
		if s.needsBlob(d) {
			continue
		}
		// Under mu, so that no pull comes to count on the blob between the look and the deletion.
		if err := s.content.remove(d); err != nil {
			errs = append(errs, err)
			continue
		}
		freed += n
	}
	var layers []string
	for id := range s.layers {
		if !s.needsLayer(id) {
			layers = append(layers, id)
		}
	}
	s.mu.Unlock()
	for _, id := range layers {
		n, err := s.collectLayer(ctx, id)
		freed += n
		if err != nil {
			errs = append(errs, err)
		}
	}
	return freed, errors.Join(errs...)
}

// collectLayer deletes one layer unless it has come to be needed.
func (s *images) collectLayer(ctx context.Context, id string) (int64, error) {
	unlock := s.keys.try(id)
	if unlock == nil {
		return 0, nil // being unpacked, so it is needed
	}
	defer unlock()
	if !s.importing.TryLock() {
		s.skipped.Store(true)
		return 0, nil
	}
	defer s.importing.Unlock()
	s.mu.Lock()
	size, ok := s.layers[id]
	if !ok || s.needsLayer(id) {
		s.mu.Unlock()
		return 0, nil
	}
	delete(s.layers, id)
	s.mu.Unlock()
	if err := s.cfg.Layers.RemoveLayer(ctx, id); err != nil {
		s.mu.Lock()
		s.layers[id] = size // tried again by the next collection
		s.mu.Unlock()
		return 0, fmt.Errorf("removing layer %s: %w", id, err)
	}
	return size, nil
}

// needsBlob tells whether anything refers to a blob. s.mu is held.
func (s *images) needsBlob(d digest.Digest) bool {
	if s.held[d] > 0 {
		return true
	}
	for _, t := range s.targets {
		if slices.Contains(t.blobs, d) {
			return true
		}
	}
	for _, p := range s.pulling {
		if slices.Contains(p.Blobs, d) {
			return true
		}
	}
	return false
}

// needsLayer tells whether anything refers to a layer. s.mu is held.
func (s *images) needsLayer(id string) bool {
	if s.held[digest.Digest(id)] > 0 {
		return true
	}
	for _, u := range s.users {
		if slices.Contains(u.layers, id) {
			return true
		}
	}
	for _, t := range s.targets {
		for _, v := range t.variants {
			if slices.Contains(v.diffIDs, id) {
				return true
			}
		}
	}
	for _, p := range s.pulling {
		if slices.Contains(p.Layers, id) {
			return true
		}
	}
	return false
}

// sweep gives back what a crash left: half-fetched blobs older than a week, blobs and layers that nothing refers to.
// It is called once, when the containers that use images are known.
func (s *images) sweep(ctx context.Context) error {
	_, err := s.forget(time.Now().Add(-partsAge))
	n, perr := s.content.sweep(time.Now().Add(-partsAge), true, s.flying)
	m, cerr := s.collect(ctx)
	if n+m > 0 {
		s.log.Info("gave back what no image uses", "bytes", n+m)
	}
	return errors.Join(err, perr, cerr)
}

// forget drops the records of pulls that began before the time and are not under way.
func (s *images) forget(before time.Time) (int, error) {
	s.mu.Lock()
	var old []string
	for file, p := range s.pulling {
		if p.At.Before(before) && !slices.ContainsFunc(p.Blobs, func(d digest.Digest) bool { return s.held[d] > 0 }) {
			old = append(old, file)
		}
	}
	s.mu.Unlock()
	var errs []error
	for _, file := range old {
		if err := s.pulls.Delete(file); err != nil {
			errs = append(errs, err)
			continue
		}
		s.mu.Lock()
		delete(s.pulling, file)
		s.mu.Unlock()
	}
	return len(old), errors.Join(errs...)
}

// flying tells whether a blob is being fetched.
func (s *images) flying(d digest.Digest) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.held[d] > 0
}

// pruneParts gives up pulls that ended early, before until or else more than a day ago, and deletes the beginnings of
// blobs that they left.
func (s *images) pruneParts(until time.Time) (int64, error) {
	if until.IsZero() {
		until = time.Now().Add(-24 * time.Hour)
	}
	if _, err := s.forget(until); err != nil {
		return 0, err
	}
	return s.content.sweep(until, false, func(d digest.Digest) bool {
		s.mu.RLock()
		defer s.mu.RUnlock()
		return s.needsBlob(d)
	})
}
