package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/registry"
	"runkiri.com/kiri/internal/wire"
)

// flight brings one layer: fetches its blob and unpacks it, both at once where neither is here. It is shared by all
// pulls that want the layer at the same time and ends early only when the last of them has left.
type flight struct {
	s      *images
	repo   *registry.Repository
	desc   ocispec.Descriptor
	diffID string
	below  []string

	cancel context.CancelCauseFunc
	done   chan struct{} // closed when err is final
	err    error
	refs   int // guarded by images.mu

	early bool // the stream came before all layers below were unpacked; the flight's own goroutine's

	phase atomic.Int32
	bytes atomic.Int64 // of the blob, here so far
	since atomic.Int64 // Unix ns at which extracting began
}

// The phases of a flight, in order.
const (
	phaseWaiting int32 = iota
	phaseDownloading
	phaseVerifying
	phaseDownloaded
	phaseExtracting
	phaseComplete
	phaseExists // it was all here
)

// errCorrupt marks what is wrong with the image itself: nothing of such a pull is worth keeping.
var errCorrupt = errors.New("corrupt image")

// join returns the flight for a layer, starting one if there is none. The caller leaves it once.
func (s *images) join(repo *registry.Repository, desc ocispec.Descriptor, diffID string, below []string, fetching, unpacking chan struct{}) (f *flight, started bool) {
	key := [2]digest.Digest{desc.Digest, digest.Digest(diffID)}
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.flights[key]; f != nil && f.refs > 0 {
		f.refs++
		return f, false
	}
	f = &flight{s: s, repo: repo, desc: desc, diffID: diffID, below: below, done: make(chan struct{}), refs: 1}
	ctx, cancel := context.WithCancelCause(s.ctx)
	f.cancel = cancel
	s.flights[key] = f
	go func() {
		f.err = f.run(ctx, fetching, unpacking)
		cancel(nil)
		s.mu.Lock()
		if s.flights[key] == f {
			delete(s.flights, key)
		}
		s.mu.Unlock()
		close(f.done)
	}()
	return f, true
}

// leave gives up interest in a flight. When nobody is left it is stopped, and leave waits until it has let go of
// its files.
func (f *flight) leave() {
	f.s.mu.Lock()
	f.refs--
	last := f.refs == 0
	f.s.mu.Unlock()
	if last {
		f.cancel(context.Canceled)
		<-f.done
	}
}

func (f *flight) run(ctx context.Context, fetching, unpacking chan struct{}) error {
	unlock, err := f.s.keys.lock(ctx, "blob "+f.desc.Digest.String()) // a plain layer has its DiffID for a digest
	if err != nil {
		return err
	}
	defer unlock()
	if f.unpackedAlready() && f.s.content.has(f.desc.Digest) {
		f.phase.Store(phaseExists)
		return nil
	}
	for again := false; ; again = true {
		old := f.s.content.has(f.desc.Digest)
		var tried error
		if old {
			f.bytes.Store(f.desc.Size)
			f.phase.Store(phaseDownloaded)
		} else if tried, err = f.fetch(ctx, fetching); err != nil {
			return err
		}
		err = f.unpack(ctx, tried, unpacking)
		if err == nil {
			f.phase.Store(phaseComplete)
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		// A blob that has lain on the disk may have rotted there; then it is deleted, and worth another look.
		if again || !old || f.s.content.verify(f.desc.Digest) == nil {
			return err
		}
		f.s.log.Warn("a layer's blob was damaged on the disk and is fetched again", "digest", f.desc.Digest, "error", err)
	}
}

func (f *flight) unpackedAlready() bool {
	f.s.mu.RLock()
	defer f.s.mu.RUnlock()
	_, ok := f.s.layers[f.diffID]
	return ok
}

// belowThere tells whether all layers below are unpacked.
func (f *flight) belowThere() bool {
	f.s.mu.RLock()
	defer f.s.mu.RUnlock()
	for _, id := range f.below {
		if _, ok := f.s.layers[id]; !ok && id != f.diffID {
			return false
		}
	}
	return true
}

// place takes a place in sem.
func place(ctx context.Context, sem chan struct{}) (leave func(), err error) {
	select {
	case sem <- struct{}{}:
		return func() { <-sem }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// fetch brings the blob and, if nobody else is about to make the layer, streams it to the agent on the same way. tried
// is what became of that: the agent's error, nil if there was none or nothing was streamed.
func (f *flight) fetch(ctx context.Context, sem chan struct{}) (tried, err error) {
	leave, err := place(ctx, sem)
	if err != nil {
		return nil, err
	}
	defer leave()
	// Another blob may be unpacked to the very same layer just now: then only fetch, and look again afterwards.
	unlock := f.s.keys.try(f.diffID)
	if unlock == nil {
		return f.download(ctx, false)
	}
	defer unlock()
	return f.download(ctx, !f.unpackedAlready())
}

// download fetches the blob, going on from what is here of it.
func (f *flight) download(ctx context.Context, stream bool) (tried, err error) {
	f.phase.Store(phaseDownloading)
	var u *unpacking
	if stream {
		f.early = !f.belowThere()
		if u, err = f.s.startUnpacking(ctx, &wire.Unpack{DiffID: f.diffID, Below: f.below}); err != nil {
			return nil, err
		}
		defer u.abort()
	}
	feed := func(p []byte) error {
		if u != nil {
			u.write(p) // if the agent gives up the blob is fetched all the same, and tried again whole
		}
		return nil
	}
	w, err := f.s.content.resume(f.desc.Digest, f.desc.Size, feed)
	if err != nil {
		return nil, err
	}
	resumed := w.n
	f.bytes.Store(w.n)
	err = f.repo.Blob(ctx, f.desc, w.n, func(p []byte) error {
		if err := w.write(p); err != nil {
			return err
		}
		f.bytes.Store(w.n)
		return feed(p)
	})
	if err != nil {
		if errors.Is(err, registry.ErrCorrupt) {
			w.discard()
			return nil, fmt.Errorf("%w: %w", errCorrupt, err)
		}
		w.keep()
		return nil, err
	}
	f.phase.Store(phaseVerifying)
	if err := w.commit(f.desc.Digest); err != nil {
		if !errors.Is(err, errDigest) {
			return nil, err
		}
		if resumed > 0 { // perhaps it was the old part that was bad: all of it once more, without that
			if u != nil {
				u.abort()
			}
			return f.download(ctx, stream)
		}
		return nil, fmt.Errorf("%w: filesystem layer verification failed for digest %s: %w", errCorrupt, f.desc.Digest, err)
	}
	f.phase.Store(phaseDownloaded)
	if u == nil {
		return nil, nil
	}
	f.extracting()
	reply, err := u.finish()
	if err != nil {
		return err, nil
	}
	f.s.unpacked(reply)
	return nil, nil
}

func (f *flight) extracting() {
	f.since.Store(time.Now().UnixNano())
	f.phase.Store(phaseExtracting)
}

// unpack makes the layer of a blob that is here, unless it is made. Layers are unpacked side by side, so that one with
// a hard link into a layer below may come too early; then it is tried once more when those are there. tried is the
// error of an attempt that was made on the way, nil if none was.
func (f *flight) unpack(ctx context.Context, tried error, sem chan struct{}) error {
	unlock, err := f.s.keys.lock(ctx, f.diffID)
	if err != nil {
		return err
	}
	defer unlock()
	if f.unpackedAlready() {
		return nil
	}
	err = tried
	if tried == nil {
		early := !f.belowThere()
		if err = f.unpackBlob(ctx, sem); err == nil || !early || ctx.Err() != nil {
			return err
		}
	} else if !f.early && wire.ClassOf(tried) == wire.Invalid {
		return f.unpackError(tried)
	}
	if err := f.waitBelow(ctx); err != nil {
		return err
	}
	return f.unpackBlob(ctx, sem)
}

func (f *flight) unpackBlob(ctx context.Context, sem chan struct{}) error {
	leave, err := place(ctx, sem)
	if err != nil {
		return err
	}
	defer leave()
	f.extracting()
	file, err := f.s.content.open(f.desc.Digest)
	if err != nil {
		return err
	}
	defer file.Close()
	reply, err := f.s.cfg.Layers.Unpack(ctx, &wire.Unpack{DiffID: f.diffID, Below: f.below}, file)
	if err != nil {
		return f.unpackError(err)
	}
	f.s.unpacked(reply)
	return nil
}

func (f *flight) unpackError(err error) error {
	if wire.ClassOf(err) == wire.Invalid {
		return fmt.Errorf("%w: failed to register layer %s: %w", errCorrupt, f.desc.Digest, err)
	}
	return fmt.Errorf("failed to register layer %s: %w", f.desc.Digest, err)
}

// waitBelow waits for the layers below that are being brought too: a hard link may lead into them.
func (f *flight) waitBelow(ctx context.Context) error {
	for _, id := range f.below {
		if id == f.diffID {
			continue
		}
		for {
			f.s.mu.RLock()
			var other *flight
			if _, ok := f.s.layers[id]; !ok {
				for key, g := range f.s.flights {
					if key[1].String() == id && g != f {
						other = g
					}
				}
			}
			f.s.mu.RUnlock()
			if other == nil {
				break
			}
			select {
			case <-other.done:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if other.err != nil {
				return fmt.Errorf("layer %s below: %w", id, other.err)
			}
		}
	}
	return nil
}

// unpacking is an Unpack whose stream is written here.
type unpacking struct {
	w      *os.File
	failed bool // the agent reads no more
	done   chan struct{}
	reply  *wire.UnpackReply
	err    error
	cancel context.CancelFunc
	stop   func() bool
}

func (s *images) startUnpacking(ctx context.Context, m *wire.Unpack) (*unpacking, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("unpacking layer %s: %w", m.DiffID, err)
	}
	uctx, cancel := context.WithCancel(ctx)
	u := &unpacking{w: w, done: make(chan struct{}), cancel: cancel}
	// A write may wait for an agent that reads no more; closing the pipe ends it.
	u.stop = context.AfterFunc(uctx, func() { w.Close() })
	go func() {
		defer close(u.done)
		u.reply, u.err = s.cfg.Layers.Unpack(uctx, m, r)
		r.Close() // from here on a write fails
	}()
	return u, nil
}

func (u *unpacking) write(p []byte) error {
	if u.failed {
		return nil
	}
	if _, err := u.w.Write(p); err != nil {
		u.failed = true
		return err
	}
	return nil
}

// finish ends the stream and returns what the agent made of it.
func (u *unpacking) finish() (*wire.UnpackReply, error) {
	u.stop()
	u.w.Close()
	<-u.done
	u.cancel()
	return u.reply, u.err
}

// abort ends the stream before its end and waits until the agent has let go. Quiet after finish.
func (u *unpacking) abort() {
	u.cancel()
	u.w.Close()
	<-u.done
}

// corrupt tells whether err is about the image itself and not about its way here.
func corrupt(err error) bool {
	return errors.Is(err, errCorrupt) || errors.Is(err, registry.ErrCorrupt) || cerrdefs.IsInvalidArgument(err)
}
