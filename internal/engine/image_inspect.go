package engine

import (
	"time"

	"github.com/moby/moby/api/types/image"
	"github.com/moby/moby/api/types/storage"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// imageDriver is the storage driver told for images: the file system that containers' roots are mounted with.
const imageDriver = "overlayfs"

// inspect is ImageInspect.
func (s *images) inspect(ref string, opts ImageInspectOptions) (*image.InspectResponse, error) {
	s.mu.RLock()
	t, _, err := s.find(ref)
	if err != nil {
		s.mu.RUnlock()
		return nil, err
	}
	v := s.best(t, opts.Platform)
	if v == nil {
		s.mu.RUnlock()
		return nil, platformMissing(ref, *opts.Platform)
	}
	desc := t.desc
	if opts.Platform != nil {
		desc = v.desc
	}
	cfg := v.config
	config := cfg.Config
	r := &image.InspectResponse{
		ID: desc.Digest.String(), Descriptor: &desc,
		RepoTags: s.tags(t), RepoDigests: s.digests(t),
		Author: cfg.Author, Config: &config,
		Architecture: cfg.Architecture, Variant: cfg.Variant, Os: cfg.OS, OsVersion: cfg.OSVersion,
		Size:        s.size(t),
		GraphDriver: &storage.DriverData{Name: imageDriver},
		RootFS:      image.RootFS{Type: cfg.RootFS.Type, Layers: v.diffIDs},
	}
	if cfg.Created != nil {
		r.Created = cfg.Created.Format(time.RFC3339Nano)
	}
	var pulled []image.PullIdentity
	seen := map[string]bool{}
	for key := range t.names {
		n := s.names[key]
		if n.Tagged.After(r.Metadata.LastTagTime) {
			r.Metadata.LastTagTime = n.Tagged
		}
		if n.Pulled != "" && !seen[n.Pulled] {
			seen[n.Pulled] = true
			pulled = append(pulled, image.PullIdentity{Repository: n.Pulled})
		}
	}
	if len(pulled) > 0 {
		r.Identity = &image.Identity{Pull: pulled}
	}
	if opts.Manifests && opts.Platform == nil {
		r.Manifests = s.manifests(t)
	}
	s.mu.RUnlock()
	history, err := s.readHistory(v)
	if err != nil {
		return nil, err
	}
	if n := len(history); n > 0 {
		r.Comment = history[n-1].Comment
	}
	return r, nil
}

// history is ImageHistory.
func (s *images) history(ref string, platform *ocispec.Platform) ([]image.HistoryResponseItem, error) {
	s.mu.RLock()
	t, _, err := s.find(ref)
	if err != nil {
		s.mu.RUnlock()
		return nil, err
	}
	v := s.best(t, platform)
	if v == nil {
		s.mu.RUnlock()
		return nil, platformMissing(ref, *platform)
	}
	var sizes []int64
	for _, id := range v.diffIDs {
		sizes = append(sizes, s.layers[id])
	}
	tags := s.tags(t)
	s.mu.RUnlock()
	history, err := s.readHistory(v)
	if err != nil {
		return nil, err
	}
	list := []image.HistoryResponseItem{}
	for i, h := range history {
		item := image.HistoryResponseItem{ID: "<missing>", Comment: h.Comment, CreatedBy: h.CreatedBy}
		if !h.EmptyLayer && len(sizes) > 0 { // some builders write a history that does not match the layers
			item.Size, sizes = sizes[0], sizes[1:]
		}
		if h.Created != nil {
			item.Created = h.Created.Unix()
		}
		if i == len(history)-1 {
			item.ID, item.Tags = t.desc.Digest.String(), tags
		}
		list = append([]image.HistoryResponseItem{item}, list...)
	}
	return list, nil
}
