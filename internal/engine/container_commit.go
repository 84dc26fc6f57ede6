package engine

import (
	"bufio"
	"cmp"
	"context"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/reference"
	"runkiri.com/kiri/internal/wire"
)

// ContainerCommit makes an image of a container: its image's layers and one more with what the container changed. cfg
// is the client's configuration, nil for the container's own; CommitOptions.Changes are applied to it, and what it
// leaves open is the container's. The container is paused meanwhile unless told otherwise, and whoever wants to start,
// stop or remove it waits.
func (e *Engine) ContainerCommit(ctx context.Context, ref string, opts CommitOptions, cfg *container.Config) (id string, err error) {
	named, err := commitName(opts.Repo, opts.Tag)
	if err != nil {
		return "", err
	}
	c, err := e.containers.get(ref)
	if err != nil {
		return "", err
	}
	c.op.Lock()
	defer c.op.Unlock()
	c.mu.Lock()
	rec, removing, removed := c.rec, c.removing, c.removed
	c.mu.Unlock()
	switch {
	case removed:
		return "", notFound("No such container: %s", ref)
	case rec.Dead:
		return "", conflict("You cannot commit container %s which is Dead", c.id)
	case removing:
		return "", conflict("You cannot commit container %s which is being removed", c.id)
	}
	own := imageConfigOf(rec.Config)
	config := own
	if cfg != nil {
		config = imageConfigOf(cfg)
	}
	if err := applyChanges(&config, opts.Changes); err != nil {
		return "", err
	}
	mergeCommit(&config, &own)
	if s := &rec.State; s.Running && !s.Paused && !s.Restarting && !opts.NoPause {
		// A container that has just ended cannot be paused, and need not be.
		if err := e.freeze(context.WithoutCancel(ctx), c, true); err == nil {
			defer func() {
				if err := e.freeze(context.WithoutCancel(ctx), c, false); err != nil && !isNotRunning(err) {
					e.log.Error("a container that was paused for a commit cannot go on", "container", c.id, "error", err)
				}
			}()
		} else if !isNotRunning(err) {
			return "", errf(classOf(err), "cannot pause container %s: %w", c.id, err)
		}
	}
	s, err := e.openArchive(ctx, &wire.Archive{ID: c.id, Spec: filesSpec(&rec), Layer: true}, nil)
	if err != nil {
		return "", err
	}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	id, err = e.images.commit(ctx, &rec, &config, opts, named, s)
	stop()
	s.Close()
	<-s.done
	if err != nil {
		return "", errf(classOf(err), "committing container %s: %w", ref, err)
	}
	imageRef := ""
	if named != nil {
		imageRef = reference.FamiliarString(named)
	}
	e.containerEvent(c, events.ActionCommit, "comment", opts.Comment, "imageID", id, "imageRef", imageRef)
	return id, nil
}

// commitName reads the name of the new image; nil if it gets none.
func commitName(repo, tag string) (reference.Named, error) {
	if repo == "" {
		return nil, nil
	}
	named, err := reference.ParseNormalizedNamed(repo)
	if err != nil {
		return nil, invalid("%w", err)
	}
	if _, ok := named.(reference.Digested); ok {
		return nil, invalid("cannot import digest reference")
	}
	if tag != "" {
		if named, err = reference.WithTag(named, tag); err != nil {
			return nil, invalid("%w", err)
		}
	}
	return reference.TagNameOnly(named), nil
}

// imageConfigOf is a container's configuration as an image has it: what is about one run alone is left out. Nothing is
// shared with c, for it is about to be changed.
func imageConfigOf(c *container.Config) dockerspec.DockerOCIImageConfig {
	ports := make(map[string]struct{}, len(c.ExposedPorts))
	for p := range c.ExposedPorts {
		ports[p.String()] = struct{}{}
	}
	var health *dockerspec.HealthcheckConfig
	if h := c.Healthcheck; h != nil {
		health = &dockerspec.HealthcheckConfig{
			Test: slices.Clone(h.Test), Interval: h.Interval, Timeout: h.Timeout, StartPeriod: h.StartPeriod,
			StartInterval: h.StartInterval, Retries: h.Retries,
		}
	}
	return dockerspec.DockerOCIImageConfig{
		ImageConfig: ocispec.ImageConfig{
			User: c.User, ExposedPorts: ports, Env: slices.Clone(c.Env), Entrypoint: slices.Clone(c.Entrypoint), Cmd: slices.Clone(c.Cmd),
			Volumes: maps.Clone(c.Volumes), WorkingDir: c.WorkingDir, Labels: maps.Clone(c.Labels), StopSignal: c.StopSignal,
		},
		DockerOCIImageConfigExt: dockerspec.DockerOCIImageConfigExt{
			Healthcheck: health, OnBuild: slices.Clone(c.OnBuild), Shell: slices.Clone(c.Shell),
		},
	}
}

// mergeCommit fills what an image's configuration leaves open from the container's, by the rules of Docker's commit.
func mergeCommit(c, from *dockerspec.DockerOCIImageConfig) {
	c.User = cmp.Or(c.User, from.User)
	c.WorkingDir = cmp.Or(c.WorkingDir, from.WorkingDir)
	c.StopSignal = cmp.Or(c.StopSignal, from.StopSignal)
	c.ExposedPorts = union(c.ExposedPorts, from.ExposedPorts)
	c.Volumes = union(c.Volumes, from.Volumes)
	own := len(c.Env)
	for _, env := range from.Env {
		key, _, _ := strings.Cut(env, "=")
		if !slices.ContainsFunc(c.Env[:own], func(s string) bool {
			k, _, _ := strings.Cut(s, "=")
			return k == key
		}) {
			c.Env = append(c.Env, env)
		}
	}
	for k, v := range from.Labels {
		if _, ok := c.Labels[k]; !ok {
			if c.Labels == nil {
				c.Labels = map[string]string{}
			}
			c.Labels[k] = v
		}
	}
	if len(c.Entrypoint) == 0 {
		if len(c.Cmd) == 0 {
			c.Cmd = from.Cmd
		}
		if c.Entrypoint == nil {
			c.Entrypoint = from.Entrypoint
		}
	}
	if len(c.Shell) == 0 {
		c.Shell = from.Shell
	}
	h, f := c.Healthcheck, from.Healthcheck
	switch {
	case f == nil:
	case h == nil:
		c.Healthcheck = f
	default:
		if len(h.Test) == 0 {
			h.Test = f.Test
		}
		h.Interval, h.Timeout = cmp.Or(h.Interval, f.Interval), cmp.Or(h.Timeout, f.Timeout)
		h.StartPeriod, h.StartInterval = cmp.Or(h.StartPeriod, f.StartPeriod), cmp.Or(h.StartInterval, f.StartInterval)
		h.Retries = cmp.Or(h.Retries, f.Retries)
	}
}

func union(a, b map[string]struct{}) map[string]struct{} {
	if len(b) == 0 {
		return a
	}
	if a == nil {
		a = make(map[string]struct{}, len(b))
	}
	maps.Copy(a, b)
	return a
}

// commit makes an image of the container's image and the layer r, and gives it the name, if there is one.
func (s *images) commit(ctx context.Context, rec *containerRecord, config *dockerspec.DockerOCIImageConfig, opts CommitOptions, named reference.Named, r io.Reader) (id string, err error) {
	defer s.begin()()
	hold := s.newHold()
	defer func() {
		hold.release()
		if err == nil && !s.skipped.Swap(false) {
			return
		}
		if _, cerr := s.collect(context.WithoutCancel(ctx)); cerr != nil {
			s.log.Warn("what a failed commit left is not all given back", "error", cerr)
		}
	}()
	base, err := s.heldBase(rec, hold)
	if err != nil {
		return "", err
	}
	cfg := dockerspec.DockerOCIImage{}
	cfg.Platform, cfg.Author, cfg.Config = base.config.Platform, opts.Author, *config
	cfg.RootFS = ocispec.RootFS{Type: "layers", DiffIDs: slices.Clone(base.config.RootFS.DiffIDs)}
	if cfg.History, err = s.readHistory(base); err != nil {
		return "", err
	}
	layers := slices.Clone(base.manifest.Layers)
	br := bufio.NewReaderSize(r, 64<<10)
	empty, err := emptyTar(br)
	if err != nil {
		return "", errf(classOf(err), "reading what the container changed: %w", err)
	}
	if !empty {
		s.importing.RLock()
		layer, reply, err := s.importLayer(ctx, br, &wire.Unpack{Below: rec.Layers}, hold)
		s.importing.RUnlock()
		if err != nil {
			return "", err
		}
		layers = append(layers, layer)
		cfg.RootFS.DiffIDs = append(cfg.RootFS.DiffIDs, digest.Digest(reply.DiffID))
	}
	now := time.Now().UTC()
	cfg.Created = &now
	cfg.History = append(cfg.History, ocispec.History{
		Created: &now, CreatedBy: strings.Join(rec.Config.Cmd, " "), Author: opts.Author, Comment: opts.Comment, EmptyLayer: empty,
	})
	t, err := s.compose(&cfg, layers, hold)
	if err != nil {
		return "", err
	}
	name := ""
	if named != nil {
		name = named.String()
	}
	s.changing.Lock()
	err = s.setName(name, t, "")
	s.changing.Unlock()
	if err != nil {
		return "", err
	}
	id = t.desc.Digest.String()
	if named != nil {
		s.event(string(events.ActionTag), id, reference.FamiliarString(named), t)
	}
	return id, nil
}

// heldBase finds the image that a container was made of and keeps all of it until the hold is released.
func (s *images) heldBase(rec *containerRecord, hold *hold) (*variant, error) {
	s.mu.RLock()
	var base *variant
	if t := s.targets[digest.Digest(rec.Image)]; t != nil {
		for _, v := range t.variants {
			if slices.Equal(v.diffIDs, rec.Layers) {
				base = v
				break
			}
		}
	}
	s.mu.RUnlock()
	gone := conflict("the image %s that it was made of is gone", rec.Image)
	if base == nil {
		return nil, gone
	}
	hold.add(base.manifest.Config.Digest)
	for _, l := range base.manifest.Layers {
		hold.add(l.Digest)
	}
	for _, id := range base.config.RootFS.DiffIDs {
		hold.add(id)
	}
	for _, l := range base.manifest.Layers { // what is held now cannot go any more
		if !s.content.has(l.Digest) {
			return nil, gone
		}
	}
	return base, nil
}

// emptyTar tells whether a tar has no entries: it begins with its end.
func emptyTar(r *bufio.Reader) (bool, error) {
	head, err := r.Peek(512)
	if err != nil {
		return false, err
	}
	return !slices.ContainsFunc(head, func(b byte) bool { return b != 0 }), nil
}
