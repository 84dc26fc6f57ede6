package engine

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/klauspost/compress/gzip"
	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/reference"
	"runkiri.com/kiri/internal/registry"
	"runkiri.com/kiri/internal/wire"
)

// importTar is ImageImport: the archive becomes the one layer of an image. gzip and zstd archives are kept as they
// are, others are compressed with gzip, so that the image can be pushed; the agent unpacks on the same way.
func (s *images) importTar(ctx context.Context, opts ImportOptions, r io.Reader, progress func(jsonstream.Message)) (string, error) {
	var named reference.Named
	if opts.Ref != "" {
		var err error
		if named, err = reference.ParseNormalizedNamed(opts.Ref); err != nil {
			return "", invalid("%w", err)
		}
		if _, ok := named.(reference.Digested); ok {
			return "", invalid("cannot import digest reference")
		}
		named = reference.TagNameOnly(named)
	}
	platform := s.platform
	if opts.Platform != "" {
		var err error
		if platform, err = registry.ParsePlatform(opts.Platform, s.platform.Architecture); err != nil {
			return "", err
		}
	}
	cfg := dockerspec.DockerOCIImage{}
	if err := applyChanges(&cfg.Config, opts.Changes); err != nil {
		return "", err
	}
	defer s.begin()()
	hold := s.newHold()
	s.importing.RLock()
	layer, reply, err := s.importLayer(ctx, r, &wire.Unpack{Import: true}, hold)
	s.importing.RUnlock()
	if err != nil || s.skipped.Swap(false) {
		if err != nil {
			hold.release()
		}
		if _, cerr := s.collect(context.WithoutCancel(ctx)); cerr != nil {
			s.log.Warn("what a failed import left is not all given back", "error", cerr)
		}
	}
	if err != nil {
		return "", err
	}
	defer hold.release()
	now := time.Now().UTC()
	cfg.Platform, cfg.Created = platform, &now
	cfg.RootFS = ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.Digest(reply.DiffID)}}
	cfg.History = []ocispec.History{{Created: &now, Comment: opts.Message}}
	t, err := s.compose(&cfg, []ocispec.Descriptor{layer}, hold)
	if err != nil {
		return "", err
	}
	id := t.desc.Digest.String()
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
	s.event(string(events.ActionImport), id, id, t)
	if named != nil {
		s.event(string(events.ActionTag), id, reference.FamiliarString(named), t)
	}
	if progress != nil {
		progress(jsonstream.Message{Status: id})
	}
	return id, nil
}

// compose stores a configuration and a manifest over layers that are here, and returns the image.
func (s *images) compose(cfg *dockerspec.DockerOCIImage, layers []ocispec.Descriptor, hold *hold) (*target, error) {
	store := func(mediaType string, v any) (ocispec.Descriptor, error) {
		raw, err := json.Marshal(v)
		if err != nil {
			return ocispec.Descriptor{}, fmt.Errorf("writing an image: %w", err)
		}
		hold.add(digest.FromBytes(raw))
		d, err := s.content.put(raw)
		return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(raw))}, err
	}
	config, err := store(ocispec.MediaTypeImageConfig, cfg)
	if err != nil {
		return nil, err
	}
	desc, err := store(ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: config, Layers: layers,
	})
	if err != nil {
		return nil, err
	}
	return s.read(desc)
}

// importLayer stores an archive as a layer's blob and has it unpacked as m says. s.importing is held for reading.
func (s *images) importLayer(ctx context.Context, r io.Reader, m *wire.Unpack, hold *hold) (ocispec.Descriptor, *wire.UnpackReply, error) {
	fail := func(err error) (ocispec.Descriptor, *wire.UnpackReply, error) {
		return ocispec.Descriptor{}, nil, err
	}
	br := bufio.NewReaderSize(r, 64<<10)
	head, err := br.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return fail(errf(errReading(ctx, err), "reading the archive: %w", err))
	}
	var plain io.Reader
	mediaType := ocispec.MediaTypeImageLayerGzip
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		mediaType = ocispec.MediaTypeImageLayerZstd
	case bytes.HasPrefix(head, []byte("BZh")):
		plain = bzip2.NewReader(br)
	case bytes.HasPrefix(head, []byte("\xfd7zXZ\x00")):
		return fail(invalid("archives compressed with xz are not supported: compress with gzip or zstd, or not at all"))
	default:
		plain = br
	}
	w, err := s.content.create()
	if err != nil {
		return fail(err)
	}
	u, err := s.startUnpacking(ctx, m)
	if err != nil {
		w.discard()
		return fail(err)
	}
	defer u.abort()
	if plain == nil {
		err = copyTo(ctx, br, func(p []byte) error {
			if err := w.write(p); err != nil {
				return err
			}
			return u.write(p)
		})
	} else {
		z, zerr := gzip.NewWriterLevel(writerFunc(w.write), gzip.BestSpeed) // speed: the blob is for a later push
		if zerr != nil {
			w.discard()
			return fail(zerr)
		}
		err = copyTo(ctx, plain, func(p []byte) error {
			if _, err := z.Write(p); err != nil {
				return err
			}
			return u.write(p)
		})
		if err == nil {
			err = z.Close()
		}
	}
	if err != nil {
		w.discard()
		if u.failed {
			u.finish()
		} else {
			u.abort()
		}
		if u.err == nil { // the archive was cut where it could also have ended: the layer must not stay
			hold.add(digest.Digest(u.reply.DiffID))
			s.unpacked(u.reply)
		}
		switch {
		case ctx.Err() != nil:
			return fail(errf(cerrdefs.ErrUnavailable, "importing the archive: %w", context.Cause(ctx)))
		case u.failed && u.err != nil: // the agent knows better what is wrong with the archive
			return fail(importError(u.err))
		}
		return fail(errf(errReading(ctx, err), "reading the archive: %w", err))
	}
	reply, err := u.finish()
	if err != nil {
		w.discard()
		return fail(importError(err))
	}
	hold.add(digest.Digest(reply.DiffID))
	s.unpacked(reply)
	size := w.n
	d := w.digest()
	hold.add(d) // before it is there, for a collection would find it unneeded
	if err := w.commit(d); err != nil {
		return fail(err)
	}
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: size}, reply, nil
}

// errReading sorts an error of reading a user's archive: the client's fault, unless it is the disk's.
func errReading(ctx context.Context, err error) error {
	var bz bzip2.StructuralError
	switch {
	case ctx.Err() != nil:
		return cerrdefs.ErrUnavailable
	case errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &bz):
		return cerrdefs.ErrInvalidArgument
	}
	return cerrdefs.ErrInternal
}

// importError sorts what the agent says of a user's archive.
func importError(err error) error {
	return fromAgent(fmt.Errorf("importing the archive: %w", err))
}

// copyTo reads r to its end, giving each piece to sink; ctx ends it between two pieces.
func copyTo(ctx context.Context, r io.Reader, sink func([]byte) error) error {
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if serr := sink(buf[:n]); serr != nil {
				return serr
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
}

type writerFunc func([]byte) error

func (f writerFunc) Write(p []byte) (int, error) {
	if err := f(p); err != nil {
		return 0, err
	}
	return len(p), nil
}
