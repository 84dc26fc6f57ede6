package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/reference"
	"runkiri.com/kiri/internal/registry"
)

// pull is ImagePull.
func (s *images) pull(ctx context.Context, ref string, opts PullOptions, progress func(jsonstream.Message)) error {
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return invalid("%w", err)
	}
	var platform *ocispec.Platform
	if opts.Platform != "" {
		p, err := registry.ParsePlatform(opts.Platform, s.platform.Architecture)
		if err != nil {
			return err
		}
		platform = &p
	}
	repo, err := s.registry.Repository(named, opts.Auth)
	if err != nil {
		return err
	}
	defer s.begin()()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(errf(cerrdefs.ErrUnavailable, "the daemon is shutting down")) })()
	out := newReporter(progress)
	defer out.close()
	if !reference.IsNameOnly(named) || !opts.AllTags {
		return s.pullOne(ctx, repo, reference.TagNameOnly(named), platform, out)
	}
	tags, err := repo.Tags(ctx)
	if err != nil {
		return repo.Explain(named, err)
	}
	for _, tag := range tags {
		tagged, err := reference.WithTag(named, tag)
		if err != nil {
			s.log.Warn("a registry lists a tag that is none", "repository", named.Name(), "tag", tag)
			continue
		}
		if err := s.pullOne(ctx, repo, tagged, platform, out); err != nil {
			return fmt.Errorf("error pulling %s: %w", reference.FamiliarString(tagged), err)
		}
	}
	return nil
}

// chosen is what a pull has decided to bring.
type chosen struct {
	target   ocispec.Descriptor   // what the name will point at
	path     []*registry.Manifest // from the target down to the image's manifest
	manifest *ocispec.Manifest
	diffIDs  []string
}

// pullOne pulls one tag or digest.
func (s *images) pullOne(ctx context.Context, repo *registry.Repository, ref reference.Named, platform *ocispec.Platform, out *reporter) error {
	desc, err := repo.Resolve(ctx, ref)
	if err != nil {
		return s.pullError(ctx, repo, ref, err)
	}
	// A name of the form name:tag@digest says no more than name@digest.
	if d, ok := ref.(reference.Digested); ok {
		if ref, err = reference.WithDigest(reference.TrimNamed(ref), d.Digest()); err != nil {
			return invalid("%w", err)
		}
	}
	hold := s.newHold()
	defer hold.release()
	file := recordName(ref.String() + " " + platformKey(platform))
	c, err := s.choose(ctx, repo, desc, platform, hold)
	if err == nil {
		out.message(identifier(ref), "Pulling from "+reference.Path(ref))
		err = s.bring(ctx, repo, ref, platform, c, file, hold, out)
	}
	if err != nil {
		s.drop(hold, file, corrupt(err))
		return s.pullError(ctx, repo, ref, err)
	}
	s.changing.Lock()
	defer s.changing.Unlock()
	newer := s.current(ref.String()) != c.target.Digest
	t, err := s.read(c.target)
	if err != nil {
		return err
	}
	if err := s.setName(ref.String(), t, ref.Name()); err != nil {
		return err
	}
	if err := s.unfinished(file, nil); err != nil {
		s.log.Warn("a finished pull is still recorded as unfinished", "image", ref, "error", err)
	}
	if err := s.records.Sync(); err != nil {
		s.log.Warn("a pulled image is not yet safe from a loss of power", "image", ref, "error", err)
	}
	s.event(string(events.ActionPull), reference.FamiliarString(ref), reference.FamiliarName(ref), t)
	out.message("", "Digest: "+c.target.Digest.String())
	if newer {
		out.message("", "Status: Downloaded newer image for "+reference.FamiliarString(ref))
	} else {
		out.message("", "Status: Image is up to date for "+reference.FamiliarString(ref))
	}
	return nil
}

// identifier is the id of a pull's first message: the tag, or the digest.
func identifier(ref reference.Named) string {
	if d, ok := ref.(reference.Digested); ok {
		return d.Digest().String()
	}
	if t, ok := ref.(reference.Tagged); ok {
		return t.Tag()
	}
	return ref.String()
}

func platformKey(p *ocispec.Platform) string {
	if p == nil {
		return ""
	}
	return registry.FormatPlatform(*p)
}

// current is the image ID that a canonical name points at, "" if there is none.
func (s *images) current(name string) digest.Digest {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if r := s.names[name]; r != nil {
		return r.Target.Digest
	}
	return ""
}

// pullError gives an error Docker's text and the client's own reason for ending a pull its place.
func (s *images) pullError(ctx context.Context, repo *registry.Repository, ref reference.Named, err error) error {
	if ctx.Err() != nil {
		return errf(cerrdefs.ErrUnavailable, "pulling %s: %w", reference.FamiliarString(ref), context.Cause(ctx))
	}
	if errors.Is(err, errCorrupt) || errors.Is(err, registry.ErrCorrupt) {
		return internal("pulling %s: %w", reference.FamiliarString(ref), err)
	}
	return repo.Explain(ref, err)
}

// manifest returns a manifest by its digest, from here or from the registry, in which case it is kept.
func (s *images) manifest(ctx context.Context, repo *registry.Repository, d ocispec.Descriptor, hold *hold) (*registry.Manifest, error) {
	hold.add(d.Digest)
	if s.content.has(d.Digest) {
		if raw, err := s.content.read(d.Digest, registry.MaxManifest); err == nil {
			return registry.ParseManifest(d.MediaType, raw)
		}
	}
	m, err := repo.Manifest(ctx, d)
	if err != nil {
		return nil, err
	}
	_, err = s.content.put(m.Raw)
	return m, err
}

// choose fetches manifests, and the configuration, until it is clear which image the platform gets.
func (s *images) choose(ctx context.Context, repo *registry.Repository, desc ocispec.Descriptor, platform *ocispec.Platform, hold *hold) (*chosen, error) {
	m, err := s.manifest(ctx, repo, desc, hold)
	if err != nil {
		return nil, err
	}
	want := s.platform
	if platform != nil {
		want = *platform
	}
	c, err := s.descend(ctx, repo, []*registry.Manifest{m}, nil, want, hold)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return nil, notFound("no matching manifest for %s in the manifest list entries", registry.FormatPlatform(want))
	}
	c.target = m.Descriptor
	return c, nil
}

// descend walks from the last manifest of path to an image for the platform; nil if there is none. named is the
// platform that an index gave the manifest, nil if its configuration has to tell.
func (s *images) descend(ctx context.Context, repo *registry.Repository, path []*registry.Manifest, named *ocispec.Platform, want ocispec.Platform, hold *hold) (*chosen, error) {
	m := path[len(path)-1]
	if m.Image != nil {
		raw, err := s.config(ctx, repo, m.Image.Config, hold)
		if err != nil {
			return nil, err
		}
		cfg, err := parseConfig(raw, m.Image)
		if err != nil {
			return nil, err
		}
		if (named == nil || named.OS == "") && cfg.Architecture != "" && registry.Rank(want, cfg.Platform) < 0 {
			return nil, nil
		}
		if cfg.OS != "linux" {
			return nil, invalid("image operating system %q cannot be used on this platform", cfg.OS)
		}
		c := &chosen{path: path, manifest: m.Image}
		for _, id := range cfg.RootFS.DiffIDs {
			c.diffIDs = append(c.diffIDs, id.String())
		}
		return c, nil
	}
	if len(path) > maxNesting {
		return nil, invalid("indexes are nested too deep")
	}
	for _, d := range registry.Candidates(m.Index, want) {
		next, err := s.manifest(ctx, repo, d, hold)
		if err != nil {
			return nil, err
		}
		c, err := s.descend(ctx, repo, append(slices.Clone(path), next), d.Platform, want, hold)
		if c != nil || err != nil {
			return c, err
		}
	}
	return nil, nil
}

func (s *images) config(ctx context.Context, repo *registry.Repository, d ocispec.Descriptor, hold *hold) ([]byte, error) {
	hold.add(d.Digest)
	if s.content.has(d.Digest) {
		if raw, err := s.content.read(d.Digest, registry.MaxConfig); err == nil {
			return raw, nil
		}
	}
	raw, err := repo.Config(ctx, d)
	if err != nil {
		return nil, err
	}
	_, err = s.content.put(raw)
	return raw, err
}

// bring fetches and unpacks the layers that are missing, several at a time.
func (s *images) bring(ctx context.Context, repo *registry.Repository, ref reference.Named, platform *ocispec.Platform, c *chosen, file string, hold *hold, out *reporter) error {
	p := pullRecord{Ref: ref.String(), Platform: platformKey(platform), Layers: c.diffIDs, At: time.Now()}
	for _, m := range c.path {
		p.Blobs = append(p.Blobs, m.Descriptor.Digest)
	}
	p.Blobs = append(p.Blobs, c.manifest.Config.Digest)
	for i, l := range c.manifest.Layers {
		p.Blobs = append(p.Blobs, l.Digest)
		hold.add(l.Digest, digest.Digest(c.diffIDs[i]))
	}
	if s.allHere(c) {
		return nil
	}
	if err := s.unfinished(file, &p); err != nil {
		return err
	}
	fetching := make(chan struct{}, s.cfg.Concurrent)
	unpacking := make(chan struct{}, s.cfg.Concurrent)
	var flights []*flight
	defer func() {
		for _, f := range flights {
			f.leave()
		}
	}()
	seen := map[string]bool{}
	for i, l := range c.manifest.Layers {
		key := l.Digest.String() + c.diffIDs[i]
		if seen[key] {
			continue
		}
		seen[key] = true
		f, _ := s.join(repo, l, c.diffIDs[i], c.diffIDs[:i], fetching, unpacking)
		flights = append(flights, f)
	}
	return out.follow(ctx, flights)
}

// allHere tells whether nothing of an image is missing.
func (s *images) allHere(c *chosen) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for i, l := range c.manifest.Layers {
		if _, ok := s.layers[c.diffIDs[i]]; !ok || !s.content.has(l.Digest) {
			return false
		}
	}
	return true
}

// unfinished records that a pull has begun, so that what it brings is kept if it ends early; nil that it is done.
func (s *images) unfinished(file string, p *pullRecord) error {
	if p != nil {
		if err := s.pulls.Put(file, p); err != nil {
			return fmt.Errorf("recording a pull: %w", err)
		}
		s.mu.Lock()
		s.pulling[file] = *p
		s.mu.Unlock()
		return nil
	}
	if err := s.pulls.Delete(file); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.pulling, file)
	s.mu.Unlock()
	return nil
}

// drop ends a failed pull. What it brought is kept for the next one, unless all of it is worthless.
func (s *images) drop(hold *hold, file string, worthless bool) {
	ids := hold.set()
	hold.release()
	var err error
	if worthless {
		err = s.unfinished(file, nil)
		s.mu.Lock()
		for d := range ids {
			if !s.needsBlob(d) {
				err = errors.Join(err, s.content.remove(d)) // the beginning of one too, which collect leaves alone
			}
		}
		s.mu.Unlock()
	}
	_, cerr := s.collect(context.Background())
	if err = errors.Join(err, cerr); err != nil {
		s.log.Warn("what a failed pull brought is not all given back", "error", err)
	}
}
