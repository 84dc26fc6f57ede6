package engine

import (
	"cmp"
	"maps"
	"path"
	"slices"
	"time"

	"github.com/moby/moby/api/types/image"
	"github.com/opencontainers/go-digest"

	"runkiri.com/kiri/internal/reference"
	"runkiri.com/kiri/internal/registry"
)

// created is when an image was made, by its own word; zero if it does not say.
func created(v *variant) time.Time {
	if v.config.Created == nil {
		return time.Time{}
	}
	return *v.config.Created
}

// list is ImageList.
func (s *images) list(opts ImageListOptions) ([]image.Summary, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	match, err := s.filter(opts.Filters)
	if err != nil {
		return nil, err
	}
	list := []image.Summary{}
	var uses map[string]int // by DiffID: how many images have the layer
	if opts.SharedSize {
		uses = s.layerUses()
	}
	for _, t := range s.targets {
		tags, ok := match(t)
		if !ok {
			continue
		}
		sum := s.summary(t, tags)
		if opts.SharedSize {
			sum.SharedSize = s.sharedSize(t, uses)
		}
		if opts.Manifests {
			sum.Manifests = s.manifests(t)
		}
		list = append(list, sum)
	}
	s.sortSummaries(list)
	return list, nil
}

// sortSummaries puts the newest first. s.mu is held.
func (s *images) sortSummaries(list []image.Summary) {
	at := func(sum image.Summary) time.Time { return created(s.best(s.targets[digest.Digest(sum.ID)], nil)) }
	slices.SortFunc(list, func(a, b image.Summary) int {
		return cmp.Or(at(b).Compare(at(a)), cmp.Compare(a.ID, b.ID))
	})
}

// summary is one line of the list. s.mu is held.
func (s *images) summary(t *target, tags []string) image.Summary {
	v := s.best(t, nil)
	desc := t.desc
	sum := image.Summary{
		Containers: -1, // not counted in lists, as in Docker's
		ID:         t.desc.Digest.String(),
		Labels:     v.config.Config.Labels,
		Descriptor: &desc,
		RepoTags:   tags,
		// The digests' tags are left out too if a filter has left out all of a repository's, but that is seldom
		// worth a second look: clients show digests beside tags.
		RepoDigests: s.digests(t),
		SharedSize:  -1,
		Size:        s.size(t),
	}
	if at := created(v); !at.IsZero() { // else 0, which clients show as unknown
		sum.Created = at.Unix()
	}
	return sum
}

// size is what an image takes on the disk, in bytes: blobs and unpacked layers of all its platforms that are here.
// s.mu is held.
func (s *images) size(t *target) int64 {
	var n int64
	blobs := map[digest.Digest]bool{}
	for _, d := range t.blobs {
		if !blobs[d] {
			blobs[d] = true
			size, _ := s.content.size(d)
			n += size
		}
	}
	for id := range layersOf(t) {
		n += s.layers[id]
	}
	return n
}

// layersOf is the set of an image's layers.
func layersOf(t *target) map[string]bool {
	set := map[string]bool{}
	for _, v := range t.variants {
		for _, id := range v.diffIDs {
			set[id] = true
		}
	}
	return set
}

// layerUses counts the images of each layer. s.mu is held.
func (s *images) layerUses() map[string]int {
	uses := map[string]int{}
	for _, t := range s.targets {
		for id := range layersOf(t) {
			uses[id]++
		}
	}
	return uses
}

// sharedSize is the size of an image's layers that others have too. s.mu is held.
func (s *images) sharedSize(t *target, uses map[string]int) int64 {
	var n int64
	for id := range layersOf(t) {
		if uses[id] > 1 {
			n += s.layers[id]
		}
	}
	return n
}

// filter makes a function of filters: it tells whether an image passes, and under which tags. s.mu is held, now and
// when the function is called.
func (s *images) filter(f Filters) (func(*target) ([]string, bool), error) {
	if err := f.validate("dangling", "label", "label!", "before", "since", "until", "reference"); err != nil {
		return nil, err
	}
	dangling, err := f.boolean("dangling", false)
	if err != nil {
		return nil, err
	}
	until, err := f.until()
	if err != nil {
		return nil, err
	}
	bound := func(name string) (*target, error) {
		var t *target
		for _, ref := range f.get(name) {
			found, _, err := s.find(ref)
			if err != nil {
				return nil, err
			}
			// Of several the strictest counts.
			if t == nil || (name == "before") == created(s.best(found, nil)).Before(created(s.best(t, nil))) {
				t = found
			}
		}
		return t, nil
	}
	before, err := bound("before")
	if err != nil {
		return nil, err
	}
	since, err := bound("since")
	if err != nil {
		return nil, err
	}
	for _, pattern := range f.get("reference") {
		if _, err := path.Match(pattern, ""); err != nil {
			return nil, invalid("invalid reference filter %q: %w", pattern, err)
		}
	}
	return func(t *target) ([]string, bool) {
		v := s.best(t, nil)
		at := created(v)
		switch {
		case f.has("dangling") && dangling != s.isDangling(t),
			!until.IsZero() && !at.Before(until),
			before != nil && !at.Before(created(s.best(before, nil))),
			since != nil && !at.After(created(s.best(since, nil))),
			!f.pruneLabels(v.config.Config.Labels):
			return nil, false
		}
		tags := s.tags(t)
		if !f.has("reference") {
			return tags, true
		}
		matched := []string{}
		digested := false
		for key := range t.names {
			ref, err := reference.ParseNamed(key)
			if err != nil || !matchesAny(ref, f.get("reference")) {
				continue
			}
			if _, ok := ref.(reference.Digested); ok {
				digested = true
			} else {
				matched = append(matched, reference.FamiliarString(ref))
			}
		}
		slices.Sort(matched)
		return matched, len(matched) > 0 || digested
	}, nil
}

func matchesAny(ref reference.Named, patterns []string) bool {
	for _, p := range patterns {
		if ok, _ := reference.FamiliarMatch(p, ref); ok {
			return true
		}
	}
	return false
}

// manifests tells of each manifest of an image, here or not. s.mu is held.
func (s *images) manifests(t *target) []image.ManifestSummary {
	list := []image.ManifestSummary{}
	if t.raw.Image != nil {
		return append(list, s.manifestSummary(t, t.variants[0]))
	}
	here := map[digest.Digest]*variant{}
	for _, v := range t.variants {
		here[v.desc.Digest] = v
	}
	for _, d := range t.raw.Index.Manifests {
		if v := here[d.Digest]; v != nil {
			list = append(list, s.manifestSummary(t, v))
			continue
		}
		m := image.ManifestSummary{ID: d.Digest.String(), Descriptor: d, Kind: image.ManifestKindUnknown}
		m.Size.Content, _ = s.content.size(d.Digest)
		m.Size.Total = m.Size.Content
		switch {
		case registry.IsAttestation(&d):
			m.Kind = image.ManifestKindAttestation
			m.AttestationData = &image.AttestationProperties{For: digest.Digest(d.Annotations["vnd.docker.reference.digest"])}
		case registry.IsImage(d.MediaType):
			m.Kind = image.ManifestKindImage
			m.ImageData = &image.ImageProperties{Containers: []string{}}
			if d.Platform != nil {
				m.ImageData.Platform = *d.Platform
			}
		}
		list = append(list, m)
	}
	return list
}

func (s *images) manifestSummary(t *target, v *variant) image.ManifestSummary {
	desc := v.desc
	m := image.ManifestSummary{ID: desc.Digest.String(), Descriptor: desc, Kind: image.ManifestKindImage, Available: s.whole(v)}
	m.ImageData = &image.ImageProperties{Platform: v.platform, Containers: []string{}}
	if s.best(t, nil) == v {
		m.ImageData.Containers = s.usersOf(t.desc.Digest)
	}
	blobs := map[digest.Digest]bool{desc.Digest: true, v.manifest.Config.Digest: true}
	for i, l := range v.manifest.Layers {
		blobs[l.Digest] = true
		m.Available = m.Available && s.content.has(l.Digest)
		if !slices.Contains(v.diffIDs[:i], v.diffIDs[i]) {
			m.ImageData.Size.Unpacked += s.layers[v.diffIDs[i]]
		}
	}
	for d := range blobs {
		n, _ := s.content.size(d)
		m.Size.Content += n
	}
	m.Size.Total = m.Size.Content + m.ImageData.Size.Unpacked
	return m
}

// diskUsage is the images' part of system df; the items are only listed if verbose. Everything under content and all
// layers count, what unfinished pulls have brought too: the sum is what the disk holds.
func (s *images) diskUsage(verbose bool) (*image.DiskUsage, error) {
	parts, err := s.content.partial()
	if err != nil {
		return nil, err
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	du := &image.DiskUsage{TotalCount: int64(len(s.targets))}
	for _, fi := range parts {
		du.TotalSize += fi.Size()
	}
	blobs := s.content.list()
	for _, n := range blobs {
		du.TotalSize += n
	}
	for _, n := range s.layers {
		du.TotalSize += n
	}
	// What images in use hold, each blob and layer once.
	var used int64
	layers := maps.Clone(s.layers)
	for _, t := range s.targets {
		if len(s.usersOf(t.desc.Digest)) == 0 {
			continue
		}
		du.ActiveCount++
		for _, d := range t.blobs {
			used += blobs[d]
			delete(blobs, d)
		}
		for id := range layersOf(t) {
			used += layers[id]
			delete(layers, id)
		}
	}
	for _, u := range s.users { // layers of images that are gone
		for _, id := range u.layers {
			used += layers[id]
			delete(layers, id)
		}
	}
	du.Reclaimable = du.TotalSize - used
	if verbose {
		uses := s.layerUses()
		for _, t := range s.targets {
			sum := s.summary(t, s.tags(t))
			sum.SharedSize = s.sharedSize(t, uses)
			sum.Containers = int64(len(s.usersOf(t.desc.Digest)))
			du.Items = append(du.Items, sum)
		}
		s.sortSummaries(du.Items)
	}
	return du, nil
}
