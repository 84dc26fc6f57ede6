package engine

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/opencontainers/go-digest"
)

// content keeps blobs by their digest: manifests, configurations and layers as the registry sent them.
//
//	blobs/sha256/HEX   whole and verified, durable
//	ingest/HEX         the beginning of a blob, to go on from
//	ingest/new-*       a blob whose digest is not known yet; worthless after a crash
//
// A blob gets its name only when all its bytes are on the disk and match, so a name is a promise. Its methods are
// safe for concurrent use, but a digest is written by one at a time: the caller's to see to.
type content struct {
	blobs, parts string

	mu    sync.Mutex
	sizes map[digest.Digest]int64 // of the blobs that are there
}

const (
	newPrefix = "new-"
	partsAge  = 7 * 24 * time.Hour // beginnings of blobs and records of unfinished pulls are kept so long
)

func openContent(dir string) (*content, error) {
	c := &content{
		blobs: filepath.Join(dir, "blobs", "sha256"), parts: filepath.Join(dir, "ingest"),
		sizes: map[digest.Digest]int64{},
	}
	for _, d := range []string{c.blobs, c.parts} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("opening content: %w", err)
		}
	}
	entries, err := os.ReadDir(c.blobs)
	if err != nil {
		return nil, fmt.Errorf("opening content: %w", err)
	}
	for _, e := range entries {
		d := digest.NewDigestFromEncoded(digest.SHA256, e.Name())
		if d.Validate() != nil {
			continue
		}
		if fi, err := e.Info(); err == nil && fi.Mode().IsRegular() {
			c.sizes[d] = fi.Size()
		}
	}
	return c, nil
}

// size is the size of a blob in bytes; ok is false if it is not there.
func (c *content) size(d digest.Digest) (n int64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n, ok = c.sizes[d]
	return n, ok
}

func (c *content) has(d digest.Digest) bool {
	_, ok := c.size(d)
	return ok
}

// list returns the blobs with their sizes.
func (c *content) list() map[digest.Digest]int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	m := make(map[digest.Digest]int64, len(c.sizes))
	for d, n := range c.sizes {
		m[d] = n
	}
	return m
}

func (c *content) path(d digest.Digest) string { return filepath.Join(c.blobs, d.Encoded()) }

// open opens a blob; it is not verified again.
func (c *content) open(d digest.Digest) (*os.File, error) {
	f, err := os.Open(c.path(d))
	if err != nil {
		return nil, fmt.Errorf("opening blob %s: %w", d, err)
	}
	return f, nil
}

// read returns a small blob, verified. A damaged one is deleted, so that the next pull brings it again.
func (c *content) read(d digest.Digest, limit int64) ([]byte, error) {
	f, err := c.open(d)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("reading blob %s: %w", d, err)
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("reading blob %s: over %d bytes", d, limit)
	}
	if digest.FromBytes(b) != d {
		c.remove(d)
		return nil, fmt.Errorf("reading blob %s: it is damaged on the disk", d)
	}
	return b, nil
}

// verify reads a whole blob and tells whether it still matches its digest; if not it is deleted.
func (c *content) verify(d digest.Digest) error {
	f, err := c.open(d)
	if err != nil {
		return err
	}
	defer f.Close()
	v := d.Verifier()
	if _, err := io.Copy(v, f); err != nil {
		return fmt.Errorf("reading blob %s: %w", d, err)
	}
	if !v.Verified() {
		c.remove(d)
		return fmt.Errorf("reading blob %s: it is damaged on the disk", d)
	}
	return nil
}

// put stores a small blob.
func (c *content) put(raw []byte) (digest.Digest, error) {
	d := digest.FromBytes(raw)
	if c.has(d) {
		return d, nil
	}
	w, err := c.create()
	if err != nil {
		return "", err
	}
	if err := w.write(raw); err != nil {
		w.discard()
		return "", err
	}
	return d, w.commit(d)
}

// remove deletes a blob and what may be there of its beginning. Quiet if there is nothing.
func (c *content) remove(d digest.Digest) error {
	c.mu.Lock()
	delete(c.sizes, d)
	c.mu.Unlock()
	for _, p := range []string{c.path(d), filepath.Join(c.parts, d.Encoded())} {
		if err := os.Remove(p); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("deleting blob %s: %w", d, err)
		}
	}
	return nil
}

// blobWriter is a blob on its way in.
type blobWriter struct {
	c    *content
	f    *os.File
	hash hash.Hash
	n    int64 // bytes written and hashed
}

// create begins a blob whose digest is not known.
func (c *content) create() (*blobWriter, error) {
	f, err := os.CreateTemp(c.parts, newPrefix)
	if err != nil {
		return nil, fmt.Errorf("creating a blob: %w", err)
	}
	return &blobWriter{c: c, f: f, hash: sha256.New()}, nil
}

// resume begins a blob or goes on with it: what is there already is hashed and given to feed, if that is not nil.
// A beginning that is longer than size is worthless and thrown away.
func (c *content) resume(d digest.Digest, size int64, feed func([]byte) error) (*blobWriter, error) {
	f, err := os.OpenFile(filepath.Join(c.parts, d.Encoded()), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("writing blob %s: %w", d, err)
	}
	w := &blobWriter{c: c, f: f, hash: sha256.New()}
	fi, err := f.Stat()
	if err == nil && fi.Size() > size {
		err = f.Truncate(0)
	} else if err == nil {
		buf := make([]byte, 64<<10)
		for {
			n, rerr := f.Read(buf)
			w.hash.Write(buf[:n])
			w.n += int64(n)
			if n > 0 && feed != nil {
				if err = feed(buf[:n]); err != nil {
					break
				}
			}
			if rerr == io.EOF {
				break
			}
			if rerr != nil {
				err = rerr
				break
			}
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("writing blob %s: %w", d, err)
	}
	return w, nil
}

func (w *blobWriter) write(p []byte) error {
	n, err := w.f.Write(p)
	w.hash.Write(p[:n])
	w.n += int64(n)
	if err != nil {
		return fmt.Errorf("writing a blob: %w", err)
	}
	return nil
}

// keep closes the writer and leaves what was written for resume.
func (w *blobWriter) keep() { w.f.Close() }

// discard closes the writer and deletes what was written.
func (w *blobWriter) discard() {
	w.f.Close()
	os.Remove(w.f.Name())
}

// digest is that of what was written so far.
func (w *blobWriter) digest() digest.Digest {
	return digest.NewDigestFromEncoded(digest.SHA256, hex.EncodeToString(w.hash.Sum(nil)))
}

// errDigest is wrapped in the error for a blob that does not match its digest.
var errDigest = errors.New("digest does not match")

// commit gives the blob its name, durable. If it does not match it is deleted.
func (w *blobWriter) commit(want digest.Digest) error {
	d := w.digest()
	if d != want {
		w.discard()
		return fmt.Errorf("verifying blob %s: it is %s: %w", want, d, errDigest)
	}
	err := w.f.Sync()
	if cerr := w.f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(w.f.Name(), w.c.path(d))
	}
	if err == nil {
		err = syncDir(w.c.blobs)
	}
	if err != nil {
		os.Remove(w.f.Name())
		return fmt.Errorf("writing blob %s: %w", d, err)
	}
	w.c.mu.Lock()
	w.c.sizes[d] = w.n
	w.c.mu.Unlock()
	return nil
}

// partial lists the beginnings of blobs: name, size and the time of the last write.
func (c *content) partial() ([]os.FileInfo, error) {
	entries, err := os.ReadDir(c.parts)
	if err != nil {
		return nil, fmt.Errorf("reading content: %w", err)
	}
	var list []os.FileInfo
	for _, e := range entries {
		if fi, err := e.Info(); err == nil && fi.Mode().IsRegular() {
			list = append(list, fi)
		}
	}
	return list, nil
}

// sweep deletes beginnings of blobs that were last written before the time; those that can never be gone on with are
// deleted if all is set, which only a fresh start may do. It returns the bytes given back.
func (c *content) sweep(before time.Time, all bool, busy func(digest.Digest) bool) (int64, error) {
	list, err := c.partial()
	if err != nil {
		return 0, err
	}
	var n int64
	var errs []error
	for _, fi := range list {
		if strings.HasPrefix(fi.Name(), newPrefix) {
			if !all {
				continue
			}
		} else if fi.ModTime().After(before) || busy(digest.NewDigestFromEncoded(digest.SHA256, fi.Name())) {
			continue
		}
		if err := os.Remove(filepath.Join(c.parts, fi.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, fmt.Errorf("sweeping content: %w", err))
			continue
		}
		n += fi.Size()
	}
	return n, errors.Join(errs...)
}

func syncDir(path string) error {
	if runtime.GOOS == "windows" {
		return nil // directories cannot be synced there
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
