package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
)

// Limits on what the other end may make us allocate. A frame beyond them is refused before any memory is taken for it.
const (
	MaxPayload = 8 << 20 // bytes in one frame's payload; bulk data never travels in frames
	maxItems   = 1 << 16 // elements in one list or map
)

// ErrTooLarge is returned for a frame, string or list whose announced length is over the limit.
var ErrTooLarge = errors.New("length over the wire's limit")

// Coder walks the fields of a message in order. The same walk encodes and decodes, so the two can never disagree:
// each message has one Fields method that names every field once.
//
// Integers are little endian and fixed width, strings and byte slices are a 32-bit length and the bytes, lists and
// maps a 32-bit count and the elements. The first error sticks; every later call is a no-op.
type Coder struct {
	buf    []byte
	off    int
	decode bool
	err    error
}

// Encode returns the payload of m.
func Encode(m Message) ([]byte, error) {
	return AppendEncode(nil, m)
}

// AppendEncode appends the payload of m to buf, so that a caller can reserve room for a header before it.
func AppendEncode(buf []byte, m Message) ([]byte, error) {
	start := len(buf)
	c := Coder{buf: buf}
	m.Fields(&c)
	if c.err == nil && len(c.buf)-start > MaxPayload {
		c.err = fmt.Errorf("encoding %T of %d bytes: %w", m, len(c.buf)-start, ErrTooLarge)
	}
	return c.buf, c.err
}

// Decode fills m from payload. A payload that ends early gives io.ErrUnexpectedEOF, one that goes on after the last
// field an error that says so; m is then half filled and must not be used.
func Decode(payload []byte, m Message) error {
	c := Coder{buf: payload, decode: true}
	m.Fields(&c)
	if c.err != nil {
		return c.err
	}
	if c.off != len(payload) {
		return fmt.Errorf("decoding %T: %d bytes after the last field", m, len(payload)-c.off)
	}
	return nil
}

// Decoding tells whether the walk fills the message (true) or reads it (false).
func (c *Coder) Decoding() bool { return c.decode }

// Fail records err as the walk's error unless there is one already.
func (c *Coder) Fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *Coder) take(n int) []byte {
	if c.err != nil {
		return nil
	}
	if n > len(c.buf)-c.off {
		c.err = io.ErrUnexpectedEOF
		return nil
	}
	b := c.buf[c.off : c.off+n]
	c.off += n
	return b
}

// U8 walks an unsigned byte.
func (c *Coder) U8(v *uint8) {
	if !c.decode {
		c.buf = append(c.buf, *v)
	} else if b := c.take(1); b != nil {
		*v = b[0]
	}
}

// U32 walks an unsigned 32-bit integer.
func (c *Coder) U32(v *uint32) {
	if !c.decode {
		c.buf = binary.LittleEndian.AppendUint32(c.buf, *v)
	} else if b := c.take(4); b != nil {
		*v = binary.LittleEndian.Uint32(b)
	}
}

// U64 walks an unsigned 64-bit integer.
func (c *Coder) U64(v *uint64) {
	if !c.decode {
		c.buf = binary.LittleEndian.AppendUint64(c.buf, *v)
	} else if b := c.take(8); b != nil {
		*v = binary.LittleEndian.Uint64(b)
	}
}

// I64 walks a signed 64-bit integer.
func (c *Coder) I64(v *int64) {
	u := uint64(*v)
	c.U64(&u)
	if c.decode {
		*v = int64(u)
	}
}

// Int walks an int as 64 bits; a value that does not fit the platform's int is an error.
func (c *Coder) Int(v *int) {
	i := int64(*v)
	c.I64(&i)
	if c.decode {
		if i > math.MaxInt || i < math.MinInt {
			c.Fail(fmt.Errorf("decoding integer %d: does not fit", i))
			return
		}
		*v = int(i)
	}
}

// Bool walks a boolean; a byte that is neither 0 nor 1 is an error.
func (c *Coder) Bool(v *bool) {
	var b uint8
	if *v {
		b = 1
	}
	c.U8(&b)
	if c.decode && c.err == nil {
		if b > 1 {
			c.Fail(fmt.Errorf("decoding boolean: byte %d", b))
		}
		*v = b == 1
	}
}

// Str walks a string.
func (c *Coder) Str(v *string) {
	if !c.decode {
		c.length(len(*v))
		c.buf = append(c.buf, *v...)
		return
	}
	if b := c.take(c.count(MaxPayload)); b != nil {
		*v = string(b)
	}
}

// Bytes walks a byte slice; empty decodes to nil.
func (c *Coder) Bytes(v *[]byte) {
	if !c.decode {
		c.length(len(*v))
		c.buf = append(c.buf, *v...)
		return
	}
	if b := c.take(c.count(MaxPayload)); len(b) > 0 {
		*v = append([]byte(nil), b...)
	}
}

// Strs walks a list of strings; empty decodes to nil.
func (c *Coder) Strs(v *[]string) { List(c, v, (*Coder).Str) }

// StrMap walks a map of strings. The order on the wire is the map's and so is not fixed; empty decodes to nil.
func (c *Coder) StrMap(v *map[string]string) {
	if !c.decode {
		c.length(len(*v))
		for k, s := range *v {
			c.Str(&k)
			c.Str(&s)
		}
		return
	}
	n := c.count(maxItems)
	if n == 0 || c.err != nil {
		return
	}
	m := make(map[string]string, min(n, 64))
	for range n {
		var k, s string
		c.Str(&k)
		c.Str(&s)
		if c.err != nil {
			return
		}
		m[k] = s
	}
	*v = m
}

// List walks a list whose elements item walks; empty decodes to nil. Memory grows with the bytes that are really
// there, not with the announced count.
func List[T any](c *Coder, v *[]T, item func(*Coder, *T)) {
	if !c.decode {
		c.length(len(*v))
		for i := range *v {
			item(c, &(*v)[i])
		}
		return
	}
	n := c.count(maxItems)
	if n == 0 || c.err != nil {
		return
	}
	l := make([]T, 0, min(n, 64))
	for range n {
		var t T
		item(c, &t)
		if c.err != nil {
			return
		}
		l = append(l, t)
	}
	*v = l
}

// Opt walks a pointer that may be nil: a boolean, then the value if it is there.
func Opt[T any](c *Coder, v **T, item func(*Coder, *T)) {
	there := *v != nil
	c.Bool(&there)
	if !there || c.err != nil {
		return
	}
	if c.decode {
		*v = new(T)
	}
	item(c, *v)
}

func (c *Coder) length(n int) {
	if n > MaxPayload {
		c.Fail(ErrTooLarge)
		return
	}
	c.buf = binary.LittleEndian.AppendUint32(c.buf, uint32(n))
}

func (c *Coder) count(limit int) int {
	var n uint32
	c.U32(&n)
	if c.err == nil && n > uint32(limit) {
		c.err = fmt.Errorf("decoding length %d: %w", n, ErrTooLarge)
	}
	if c.err != nil {
		return 0
	}
	return int(n)
}
