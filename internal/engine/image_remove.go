package engine

import (
	"context"
	"slices"
	"strings"

	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/image"
	"github.com/opencontainers/go-digest"

	cerrdefs "github.com/containerd/errdefs"

	"runkiri.com/kiri/internal/reference"
	"runkiri.com/kiri/internal/registry"
)

// tag is ImageTag.
func (s *images) tag(ctx context.Context, ref, name string) error {
	named, err := reference.ParseNormalizedNamed(name)
	if err != nil {
		return invalid("%w", err)
	}
	if _, ok := named.(reference.Digested); ok {
		return invalid("refusing to create a tag with a digest reference")
	}
	named = reference.TagNameOnly(named)
	if reference.FamiliarName(named) == string(digest.Canonical) {
		return invalid("refusing to create an ambiguous tag using digest algorithm as name")
	}
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.RLock()
	t, _, err := s.find(ref)
	s.mu.RUnlock()
	if err != nil {
		return err
	}
	if err := s.setName(named.String(), t, ""); err != nil {
		return err
	}
	s.event(string(events.ActionTag), t.desc.Digest.String(), reference.FamiliarString(named), t)
	return nil
}

// removal is what ImageRemove has found out.
type removal struct {
	t     *target
	short string
	names []string // all keys of the image, sorted
	same  []string // those that mean what the request named
	byID  bool
}

// remove is ImageRemove. The rules are Docker's with the containerd image store:
//
//   - a name of an image that has other names is only taken away
//   - the last name, or an id, deletes the image, if no container uses it
//   - force overrules stopped containers, and several names with an id, but no running container
//   - force with a name takes the name away in any case; an image in use stays, without a name
func (s *images) remove(ctx context.Context, ref string, opts ImageRemoveOptions) ([]image.DeleteResponse, error) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.RLock()
	t, key, err := s.find(ref)
	if err != nil {
		s.mu.RUnlock()
		return nil, err
	}
	r := &removal{t: t, short: shortID(t.desc.Digest.Encoded()), byID: key == "" && byID(t.desc.Digest, ref)}
	for k := range t.names {
		r.names = append(r.names, k)
	}
	slices.Sort(r.names)
	r.same = sameNames(ref, key, r)
	users := s.usersOf(t.desc.Digest)
	s.mu.RUnlock()

	if len(opts.Platforms) > 0 {
		return s.removePlatforms(ctx, ref, r, opts, users)
	}
	if !r.byID && len(r.same) < len(r.names) {
		return s.untag(r, r.same)
	}
	if key != "" && len(users) > 0 {
		if !opts.Force {
			return nil, conflict("conflict: unable to delete %s (must be forced) - container %s is using its referenced image %s",
				familiar(key), shortID(users[0]), r.short)
		}
		if err := s.setNameless(t); err != nil {
			return nil, err
		}
		return s.untag(r, r.names)
	}
	for _, c := range users {
		if s.cfg.Running != nil && s.cfg.Running(c) {
			return nil, conflict("conflict: unable to delete %s (cannot be forced) - image is being used by running container %s", r.short, shortID(c))
		}
	}
	if len(users) > 0 && !opts.Force {
		return nil, conflict("conflict: unable to delete %s (must be forced) - image is being used by stopped container %s", r.short, shortID(users[0]))
	}
	if r.byID && len(r.same) < len(r.names) && !opts.Force {
		return nil, conflict("conflict: unable to delete %s (must be forced) - image is referenced in multiple repositories", r.short)
	}
	list, err := s.untag(r, r.names)
	if err != nil {
		return list, err
	}
	id := t.desc.Digest.String()
	s.event(string(events.ActionDelete), id, id, t)
	list = append(list, image.DeleteResponse{Deleted: id})
	if _, err := s.collect(context.WithoutCancel(ctx)); err != nil {
		s.log.Warn("an image is removed, but not all it was made of", "image", id, "error", err)
	}
	return list, nil
}

// sameNames lists the names that mean the same as the one asked for: itself, and with it the name@digest forms of its
// repository if no other tag is there. For an id they are those of the first name. s.mu is held.
func sameNames(ref, key string, r *removal) []string {
	first := key
	if first == "" {
		if named, err := reference.ParseNormalizedNamed(ref); err == nil && !r.byID {
			// name@digest: all names of the repository
			return slices.DeleteFunc(slices.Clone(r.names), func(k string) bool {
				have, err := reference.ParseNamed(k)
				return err != nil || have.Name() != named.Name()
			})
		}
		for _, k := range r.names {
			if _, err := reference.ParseNamed(k); err == nil {
				first = k
				break
			}
		}
		if first == "" {
			return r.names
		}
	}
	named, err := reference.ParseNamed(first)
	if err != nil {
		return []string{first}
	}
	same := []string{first}
	var digested []string
	for _, k := range r.names {
		have, err := reference.ParseNamed(k)
		if k == first || err != nil || have.Name() != named.Name() {
			continue
		}
		if _, ok := have.(reference.Digested); !ok {
			return []string{first} // another tag of the repository keeps its digests
		}
		digested = append(digested, k)
	}
	return append(same, digested...)
}

// setNameless records an image as dangling besides its names, so that it outlives them.
func (s *images) setNameless(t *target) error {
	key := dangling(t.desc.Digest)
	s.mu.RLock()
	there := t.names[key]
	s.mu.RUnlock()
	if there {
		return nil
	}
	r := &nameRecord{Target: t.desc}
	if err := s.records.Put(recordName(key), r); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names[key] = r
	t.names[key] = true
	return nil
}

// untag takes names from an image and tells of each.
func (s *images) untag(r *removal, keys []string) ([]image.DeleteResponse, error) {
	list := []image.DeleteResponse{}
	for _, k := range keys {
		if err := s.dropName(k); err != nil {
			return list, err
		}
		if strings.HasPrefix(k, danglingPrefix) {
			continue
		}
		s.event(string(events.ActionUnTag), r.t.desc.Digest.String(), familiar(k), r.t)
		list = append(list, image.DeleteResponse{Untagged: familiar(k)})
	}
	return list, nil
}

// removePlatforms deletes some platforms of an image, and the image with its last.
func (s *images) removePlatforms(ctx context.Context, ref string, r *removal, opts ImageRemoveOptions, users []string) ([]image.DeleteResponse, error) {
	gone := map[digest.Digest]bool{}
	for _, p := range opts.Platforms {
		found := false
		for _, v := range r.t.variants {
			if registry.Same(p, v.platform) {
				gone[v.desc.Digest], found = true, true
			}
		}
		if !found {
			return nil, platformMissing(ref, p)
		}
	}
	if len(gone) == len(r.t.variants) {
		return nil, conflict("conflict: unable to delete %s - all its platforms would be gone; remove the image", r.short)
	}
	if len(users) > 0 && !opts.Force {
		return nil, conflict("conflict: unable to delete %s (must be forced) - image is being used by container %s", r.short, shortID(users[0]))
	}
	list := []image.DeleteResponse{}
	s.mu.Lock()
	for d := range gone {
		for _, t := range s.targets {
			if t != r.t && slices.Contains(t.blobs, d) {
				s.mu.Unlock()
				return nil, conflict("conflict: unable to delete %s - its manifest %s is another image's too", r.short, d)
			}
		}
	}
	s.mu.Unlock()
	for d := range gone {
		// Without its manifest a platform counts as one that was never pulled.
		if err := s.content.remove(d); err != nil {
			return list, err
		}
		list = append(list, image.DeleteResponse{Deleted: d.String()})
	}
	t, err := s.read(r.t.desc)
	if err != nil {
		return list, err
	}
	s.mu.Lock()
	t.names = r.t.names
	s.targets[t.desc.Digest] = t
	clear(s.cache)
	s.mu.Unlock()
	if _, err := s.collect(context.WithoutCancel(ctx)); err != nil {
		s.log.Warn("platforms of an image are removed, but not all they were made of", "image", r.t.desc.Digest, "error", err)
	}
	return list, nil
}

// prune is ImagesPrune.
func (s *images) prune(ctx context.Context, filters Filters) (*image.PruneReport, error) {
	if err := filters.validate("dangling", "label", "label!", "until"); err != nil {
		return nil, err
	}
	danglingOnly, err := filters.boolean("dangling", true)
	if err != nil {
		return nil, err
	}
	until, err := filters.until()
	if err != nil {
		return nil, err
	}
	if !s.pruning.TryLock() {
		return nil, errf(cerrdefs.ErrConflict, "a prune operation is already running")
	}
	defer s.pruning.Unlock()
	report := &image.PruneReport{ImagesDeleted: []image.DeleteResponse{}}
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.RLock()
	var list []*removal
	for _, t := range s.targets {
		v := s.best(t, nil)
		if danglingOnly && !s.isDangling(t) || len(s.usersOf(t.desc.Digest)) > 0 ||
			!until.IsZero() && !created(v).Before(until) || !filters.pruneLabels(v.config.Config.Labels) {
			continue
		}
		r := &removal{t: t}
		for k := range t.names {
			r.names = append(r.names, k)
		}
		slices.Sort(r.names)
		list = append(list, r)
	}
	s.mu.RUnlock()
	slices.SortFunc(list, func(a, b *removal) int { return strings.Compare(string(a.t.desc.Digest), string(b.t.desc.Digest)) })
	for _, r := range list {
		if ctx.Err() != nil {
			break
		}
		s.mu.RLock()
		taken := len(s.usersOf(r.t.desc.Digest)) > 0
		s.mu.RUnlock()
		if taken {
			continue
		}
		gone, err := s.untag(r, r.names)
		report.ImagesDeleted = append(report.ImagesDeleted, gone...)
		if err != nil {
			return report, err
		}
		id := r.t.desc.Digest.String()
		s.event(string(events.ActionDelete), id, id, r.t)
		report.ImagesDeleted = append(report.ImagesDeleted, image.DeleteResponse{Deleted: id})
	}
	n, err := s.pruneParts(until)
	if err != nil {
		return report, err
	}
	freed, err := s.collect(context.WithoutCancel(ctx))
	report.SpaceReclaimed = uint64(n + freed)
	return report, err
}

// isDangling tells whether an image has no name. s.mu is held.
func (s *images) isDangling(t *target) bool {
	return len(t.names) == 1 && t.names[dangling(t.desc.Digest)]
}
