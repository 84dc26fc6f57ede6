package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/reference"
)

// Resolve asks which manifest a reference means: tag or digest. Only media type, digest and size are set; the size may
// be 0 if the server did not say. A server that will not tell without sending the manifest has it fetched.
//
// HEAD comes first because registries with rate limits do not count it, and a tag that has not moved needs no more.
func (r *Repository) Resolve(ctx context.Context, ref reference.Named) (ocispec.Descriptor, error) {
	var d ocispec.Descriptor
	id := identifier(ref)
	err := r.each(ctx, func(e *endpoint) error {
		resp, err := e.do(ctx, http.MethodHead, "manifests/"+id, http.Header{"Accept": accept})
		if err != nil {
			return err
		}
		defer drain(resp.Body)
		if resp.StatusCode != http.StatusOK {
			return responseError(resp)
		}
		d = ocispec.Descriptor{MediaType: resp.Header.Get("Content-Type"), Digest: digest.Digest(resp.Header.Get("Docker-Content-Digest"))}
		if resp.ContentLength > 0 {
			d.Size = resp.ContentLength
		}
		return nil
	})
	if asked, ok := ref.(reference.Digested); ok && err == nil {
		if d.Digest == "" {
			d.Digest = asked.Digest()
		} else if d.Digest != asked.Digest() {
			return d, fmt.Errorf("registry answers with manifest %.100s instead of %s", string(d.Digest), asked.Digest())
		}
	}
	var re *ResponseError
	mute := errors.As(err, &re) && re.body == "" // an answer to HEAD has no body that could say why
	if err == nil && CheckDescriptor(&d, MaxManifest) == nil || err != nil && !mute {
		return d, err
	}
	m, err := r.fetchManifest(ctx, id, "")
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	return m.Descriptor, nil
}

// Manifest fetches a manifest by its digest and verifies it.
func (r *Repository) Manifest(ctx context.Context, d ocispec.Descriptor) (*Manifest, error) {
	if err := CheckDescriptor(&d, MaxManifest); err != nil {
		return nil, err
	}
	m, err := r.fetchManifest(ctx, d.Digest.String(), d.Digest)
	if err != nil {
		return nil, err
	}
	if d.Size > 0 && d.Size != m.Descriptor.Size {
		return nil, fmt.Errorf("manifest %s has %d bytes instead of %d", d.Digest, m.Descriptor.Size, d.Size)
	}
	return m, nil
}

func (r *Repository) fetchManifest(ctx context.Context, id string, want digest.Digest) (*Manifest, error) {
	var m *Manifest
	err := r.each(ctx, func(e *endpoint) error {
		resp, err := e.do(ctx, http.MethodGet, "manifests/"+id, http.Header{"Accept": accept})
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return responseError(resp)
		}
		raw, err := io.ReadAll(io.LimitReader(resp.Body, MaxManifest+1))
		if err != nil {
			return fmt.Errorf("reading manifest %s: %w", id, err)
		}
		for _, d := range []digest.Digest{want, digest.Digest(resp.Header.Get("Docker-Content-Digest"))} {
			if got := digest.FromBytes(raw); d != "" && d.Algorithm() == digest.SHA256 && got != d {
				return fmt.Errorf("verifying manifest %s: its digest is %s: %w", d, got, ErrCorrupt)
			}
		}
		if m, err = ParseManifest(resp.Header.Get("Content-Type"), raw); err != nil {
			return fmt.Errorf("reading manifest %s: %w", id, err)
		}
		return nil
	})
	return m, err
}

// ErrCorrupt is wrapped in the error for bytes that do not match their digest or size.
var ErrCorrupt = errors.New("the registry sent other bytes than it promised")

// Blob streams a blob from byte have on to sink, in order, until its size is reached. It goes on by itself where a
// connection breaks, with or without the server's help (Range), and gives up after Options.Retries attempts in a row
// that brought nothing. The digest is the caller's to check, over all bytes; errors of sink are returned as they are.
func (r *Repository) Blob(ctx context.Context, d ocispec.Descriptor, have int64, sink func([]byte) error) error {
	if err := CheckDescriptor(&d, 0); err != nil {
		return err
	}
	buf := make([]byte, 64<<10)
	return r.each(ctx, func(e *endpoint) error {
		for have < d.Size || d.Size == 0 {
			before := have
			err := e.blob(ctx, d, &have, buf, sink)
			if err == nil {
				return nil
			}
			if have-before < minProgress || !transient(err) || ctx.Err() != nil {
				return err
			}
			// Enough came: go on at once, without counting an attempt.
		}
		return nil
	})
}

// minProgress is what a connection must bring, in bytes, for its end not to count as a failed attempt.
const minProgress = 256 << 10

// blob makes one request for what is missing of d.
func (e *endpoint) blob(ctx context.Context, d ocispec.Descriptor, have *int64, buf []byte, sink func([]byte) error) error {
	h := http.Header{}
	if *have > 0 {
		h.Set("Range", "bytes="+strconv.FormatInt(*have, 10)+"-")
	}
	resp, err := e.do(ctx, http.MethodGet, "blobs/"+d.Digest.String(), h)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var at int64 // where the body begins
	switch resp.StatusCode {
	case http.StatusOK:
		if resp.ContentLength >= 0 && resp.ContentLength != d.Size {
			return fmt.Errorf("fetching blob %s: %d bytes are offered instead of %d: %w", d.Digest, resp.ContentLength, d.Size, ErrCorrupt)
		}
	case http.StatusPartialContent:
		first, ok := contentRange(resp.Header.Get("Content-Range"))
		if !ok || first > *have {
			return fmt.Errorf("fetching blob %s: range %q is not what was asked for: %w", d.Digest, resp.Header.Get("Content-Range"), ErrCorrupt)
		}
		at = first
	default:
		return fmt.Errorf("fetching blob %s: %w", d.Digest, responseError(resp))
	}
	for at < d.Size {
		n, err := resp.Body.Read(buf)
		p := buf[:n]
		if skip := *have - at; skip > 0 { // a server without ranges begins at the beginning
			p = p[min(skip, int64(len(p))):]
		}
		if at += int64(n); at > d.Size {
			return fmt.Errorf("fetching blob %s: more than %d bytes came: %w", d.Digest, d.Size, ErrCorrupt)
		}
		if len(p) > 0 {
			if serr := sink(p); serr != nil {
				return &sinkError{serr}
			}
			*have += int64(len(p))
		}
		if err != nil && at < d.Size {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("fetching blob %s: connection ended after %d of %d bytes: %w", d.Digest, at, d.Size, err)
		}
	}
	return nil
}

// sinkError keeps an error of the receiving side from being taken for one of the network.
type sinkError struct{ error }

// contentRange reads the first byte's position from "bytes 7-99/100".
func contentRange(s string) (int64, bool) {
	s, ok := strings.CutPrefix(s, "bytes ")
	if !ok {
		return 0, false
	}
	first, _, ok := strings.Cut(s, "-")
	n, err := strconv.ParseInt(first, 10, 64)
	return n, ok && err == nil && n >= 0
}

// Config fetches an image's configuration and verifies it.
func (r *Repository) Config(ctx context.Context, d ocispec.Descriptor) ([]byte, error) {
	if err := CheckDescriptor(&d, MaxConfig); err != nil {
		return nil, err
	}
	b := make([]byte, 0, d.Size)
	err := r.Blob(ctx, d, 0, func(p []byte) error {
		b = append(b, p...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	if got := digest.FromBytes(b); got != d.Digest {
		return nil, fmt.Errorf("verifying blob %s: its digest is %s: %w", d.Digest, got, ErrCorrupt)
	}
	return b, nil
}

// maxTags is the number of tags of one repository that are listed.
const maxTags = 10000

// Tags lists a repository's tags.
func (r *Repository) Tags(ctx context.Context) ([]string, error) {
	var tags []string
	err := r.each(ctx, func(e *endpoint) error {
		tags = nil
		path := "tags/list"
		for path != "" && len(tags) <= maxTags {
			resp, err := e.do(ctx, http.MethodGet, path, nil)
			if err != nil {
				return err
			}
			list, next, err := readTags(resp)
			if err != nil {
				return err
			}
			tags = append(tags, list...)
			path = next
			if len(list) == 0 {
				break
			}
		}
		return nil
	})
	return tags, err
}

// each does f with the endpoints in turn until one succeeds. Failures that may pass are tried again.
func (r *Repository) each(ctx context.Context, f func(*endpoint) error) error {
	var err error
	for _, e := range r.endpoints {
		err = e.retry(ctx, func() error { return f(e) })
		var se *sinkError
		if errors.As(err, &se) {
			return se.error
		}
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	return err
}

func (e *endpoint) retry(ctx context.Context, f func() error) error {
	wait := e.c.opts.RetryWait
	for attempt := 1; ; attempt++ {
		err := f()
		switch {
		case err == nil || ctx.Err() != nil || attempt >= e.c.opts.Retries || !transient(err):
			return err
		case isTimeout(err) && attempt >= 2:
			return err // waiting has taken long enough
		case !e.pinged() && (isTimeout(err) || isRefused(err)):
			return err // nobody is there: a person should hear of it at once
		}
		pause := wait
		var re *ResponseError
		if errors.As(err, &re) && re.RetryAfter > pause {
			pause = min(re.RetryAfter, maxRetryAfter)
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return err
		}
		wait *= 2
	}
}
