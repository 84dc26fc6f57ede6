package rootfs

import (
	"bytes"
	"compress/bzip2"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

const (
	// blockSize and blockCount bound the bytes between decompression and files: 4 MiB.
	blockSize  = 256 << 10
	blockCount = 16
	// maxWindow is the largest zstd window accepted, in bytes; it is what the zstd program accepts without being asked
	// for more. Registries' layers use 8 MiB at most.
	maxWindow = 128 << 20
)

// decompress returns the plain bytes of r, whose compression is told by its first bytes as Docker does.
func decompress(r io.Reader) (io.Reader, error) {
	head := make([]byte, 6)
	n, err := io.ReadFull(r, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return nil, err
	}
	head = head[:n]
	all := io.MultiReader(bytes.NewReader(head), r)
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b, 8}):
		z, err := gzip.NewReader(&bigReads{r: all})
		if err != nil {
			return nil, fmt.Errorf("gzip: %w", cutShort(err))
		}
		return z, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}) || len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18}):
		z, err := zstd.NewReader(all, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, fmt.Errorf("zstd: %w", err)
		}
		return z, nil
	case bytes.HasPrefix(head, []byte("BZh")):
		return bzip2.NewReader(all), nil
	case bytes.HasPrefix(head, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		return nil, wire.Errorf(wire.Unsupported, "the archive is compressed with xz, which is not supported")
	}
	return all, nil
}

// cutShort makes the end of a stream where there must be more of it say so.
func cutShort(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// bigReads is a reader with a buffer that gzip can use as it is (io.ByteReader), so that it adds none of 4 KiB.
type bigReads struct {
	r   io.Reader
	buf []byte
	pos int
	end int
}

func (b *bigReads) fill() error {
	if b.buf == nil {
		b.buf = make([]byte, 128<<10)
	}
	for range 16 {
		n, err := b.r.Read(b.buf)
		if n > 0 {
			b.pos, b.end = 0, n
			return nil // an error comes again at the next read
		}
		if err != nil {
			return err
		}
	}
	return io.ErrNoProgress
}

func (b *bigReads) ReadByte() (byte, error) {
	if b.pos == b.end {
		if err := b.fill(); err != nil {
			return 0, err
		}
	}
	c := b.buf[b.pos]
	b.pos++
	return c, nil
}

func (b *bigReads) Read(p []byte) (int, error) {
	if b.pos == b.end {
		if err := b.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, b.buf[b.pos:b.end])
	b.pos += n
	return n, nil
}

// fdReader reads a descriptor without Go's poller: the child has it alone and may block.
type fdReader int

func (fd fdReader) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(fd), p)
		if err == unix.EINTR {
			continue
		}
		if err == unix.EAGAIN { // somebody made the description non-blocking
			if err := retry(func() error {
				_, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
				return err
			}); err != nil {
				return 0, err
			}
			continue
		}
		if err != nil {
			return 0, os.NewSyscallError("read", err)
		}
		if n == 0 {
			return 0, io.EOF
		}
		return n, nil
	}
}

// block is a piece of the plain stream.
type block struct {
	buf []byte
	n   int
	err error // after the n bytes; io.EOF at the good end
}

// pipeline decompresses and hashes a stream ahead of its reader, in two goroutines.
type pipeline struct {
	ready chan *block // hashed, in order
	free  chan *block
	cur   *block
	off   int
	err   error // of the source, once all before it is read
	sum   hash.Hash
}

func newPipeline(src io.Reader) *pipeline {
	p := &pipeline{ready: make(chan *block, blockCount), free: make(chan *block, blockCount), sum: sha256.New()}
	for range blockCount {
		p.free <- &block{}
	}
	filled := make(chan *block, blockCount)
	go func() {
		defer close(filled)
		for b := range p.free {
			if b.buf == nil {
				b.buf = make([]byte, blockSize)
			}
			for b.n, b.err = 0, nil; b.n < len(b.buf) && b.err == nil; {
				var n int
				n, b.err = src.Read(b.buf[b.n:])
				b.n += n
			}
			filled <- b
			if b.err != nil {
				return
			}
		}
	}()
	go func() {
		defer close(p.ready)
		for b := range filled {
			p.sum.Write(b.buf[:b.n])
			p.ready <- b
		}
	}()
	return p
}

// fill makes cur a block with bytes in it.
func (p *pipeline) fill() error {
	for p.cur == nil || p.off == p.cur.n {
		if p.err != nil {
			return p.err
		}
		if p.cur != nil {
			p.free <- p.cur
		}
		p.cur, p.off = <-p.ready, 0
		p.err = p.cur.err
	}
	return nil
}

// Read gives the plain bytes. Its errors, but for io.EOF, are those of the source or its compression.
func (p *pipeline) Read(b []byte) (int, error) {
	if err := p.fill(); err != nil {
		return 0, err
	}
	n := copy(b, p.cur.buf[p.off:p.cur.n])
	p.off += n
	return n, nil
}

// rest reads to the end and returns the digest of everything.
func (p *pipeline) rest() (string, error) {
	for {
		if err := p.fill(); err == io.EOF {
			return "sha256:" + hex.EncodeToString(p.sum.Sum(nil)), nil
		} else if err != nil {
			return "", err
		}
		p.off = p.cur.n
	}
}

// damaged makes an error of the stream itself (not of the file system) one the caller can blame on its sender.
func damaged(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if e := (*wire.Error)(nil); errors.As(err, &e) {
		return err
	}
	return wire.Errorf(wire.Invalid, "reading the archive: %w", err)
}
