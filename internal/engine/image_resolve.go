package engine

import (
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/reference"
	"runkiri.com/kiri/internal/registry"
)

// maxCache is how many resolved references are remembered.
const maxCache = 1024

// resolve finds an image by name, id, id's prefix or name@digest. platform "" is the agent's. The error for one that
// is not here is a NotFound "No such image: x". It costs a map look-up.
func (s *images) resolve(ref, platform string) (*resolved, error) {
	s.mu.RLock()
	r := s.cache[[2]string{ref, platform}]
	s.mu.RUnlock()
	if r != nil {
		return r, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.resolveLocked(ref, platform)
}

// acquire is resolve and use at once, so that the image cannot be removed in between.
func (s *images) acquire(ref, platform, container string) (*resolved, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.resolveLocked(ref, platform)
	if err != nil {
		return nil, err
	}
	s.users[container] = use{image: r.ID, layers: r.Layers}
	return r, nil
}

func (s *images) resolveLocked(ref, platform string) (*resolved, error) {
	key := [2]string{ref, platform}
	if r := s.cache[key]; r != nil {
		return r, nil
	}
	var want *ocispec.Platform
	if platform != "" {
		p, err := registry.ParsePlatform(platform, s.platform.Architecture)
		if err != nil {
			return nil, err
		}
		want = &p
	}
	t, _, err := s.find(ref)
	if err != nil {
		return nil, err
	}
	v := s.best(t, want)
	if v == nil {
		return nil, platformMissing(ref, *want)
	}
	if !s.whole(v) {
		return nil, internal("image %s is not whole: a layer of it is missing; pull it again", ref)
	}
	r := &resolved{ID: t.desc.Digest.String(), Manifest: v.desc.Digest.String(), Layers: v.diffIDs, Names: s.tags(t), Config: v.config}
	if len(s.cache) >= maxCache {
		clear(s.cache)
	}
	s.cache[key] = r
	return r, nil
}

// platformMissing has Docker's text.
func platformMissing(ref string, p ocispec.Platform) error {
	return notFound("image with reference %s was found but does not provide the specified platform (%s)", ref, registry.FormatPlatform(p))
}

// idDigits gives the hexadecimal digits of what may be an id's beginning; fewer than four are a name only.
func idDigits(ref string) (string, bool) {
	digits := strings.TrimPrefix(ref, "sha256:")
	return digits, len(digits) >= 4 && len(digits) <= 64 && strings.Trim(digits, "0123456789abcdef") == ""
}

// noSuchImage has Docker's text, which names the tag even if the request did not.
func noSuchImage(parsed reference.Reference) error {
	if named, ok := parsed.(reference.Named); ok {
		return notFound("No such image: %s", reference.FamiliarString(reference.TagNameOnly(named)))
	}
	return notFound("No such image: %s", parsed.String())
}

// find looks an image up as Docker does: an id or name@digest by its digest, else a name, else the beginning of an
// id. name is the key that matched, "" if it was found by its digest. s.mu is held.
func (s *images) find(ref string) (t *target, name string, err error) {
	parsed, err := reference.ParseAnyReference(ref)
	if err != nil {
		return nil, "", invalid("%w", err)
	}
	if d, ok := parsed.(reference.Digested); ok {
		t := s.targets[d.Digest()]
		if t == nil {
			return nil, "", noSuchImage(parsed)
		}
		named, ok := parsed.(reference.Named)
		if !ok {
			return t, "", nil
		}
		// The digest alone must not lead to an image of another repository.
		for key := range t.names {
			if have, err := reference.ParseNamed(key); err == nil && have.Name() == named.Name() {
				return t, "", nil
			}
		}
		return nil, "", noSuchImage(parsed)
	}
	named, ok := parsed.(reference.Named)
	if !ok {
		return nil, "", noSuchImage(parsed)
	}
	key := reference.TagNameOnly(named).String()
	if r := s.names[key]; r != nil {
		return s.targets[r.Target.Digest], key, nil
	}
	if digits, ok := idDigits(ref); ok {
		var found *target
		for d, t := range s.targets {
			if strings.HasPrefix(d.Encoded(), digits) {
				if found != nil {
					return nil, "", notFound("ambiguous reference")
				}
				found = t
			}
		}
		if found != nil {
			return found, "", nil
		}
	}
	return nil, "", noSuchImage(parsed)
}

// byID tells whether ref names the image by its id or the beginning of it.
func byID(id digest.Digest, ref string) bool {
	return strings.HasPrefix(id.String(), ref) || strings.HasPrefix(id.Encoded(), ref)
}
