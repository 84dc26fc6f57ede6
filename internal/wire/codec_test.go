package wire

import (
	"errors"
	"io"
	"math"
	"reflect"
	"strings"
	"syscall"
	"testing"
)

// kinds lists every kind there is, found by asking New.
func kinds() []Kind {
	var l []Kind
	for k := range 1 << 16 {
		if _, err := New(Kind(k)); err == nil {
			l = append(l, Kind(k))
		}
	}
	return l
}

// fillMessage sets every field to something that is not its zero value, different from field to field.
func fillMessage(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fillMessage(v.Elem(), n)
	case reflect.Struct:
		for i := range v.NumField() {
			fillMessage(v.Field(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fillMessage(v.Index(i), n)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 2 {
			key, val := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fillMessage(key, n)
			fillMessage(val, n)
			v.SetMapIndex(key, val)
		}
	case reflect.String:
		v.SetString("text " + strings.Repeat("x", *n%7) + string(rune('a'+*n%26)))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(int64(-*n))
	case reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(uint64(*n%200 + 1))
	default:
		panic("a field of kind " + v.Kind().String() + ": teach fillMessage")
	}
}

func filled(t *testing.T, k Kind) Message {
	t.Helper()
	m, err := New(k)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	fillMessage(reflect.ValueOf(m).Elem(), &n)
	return m
}

// TestRoundTrip walks every field of every message out and in again. A field that Fields forgets comes back empty.
func TestRoundTrip(t *testing.T) {
	for _, k := range kinds() {
		m := filled(t, k)
		if m.Kind() != k {
			t.Errorf("%T says it is kind %d, New says %d", m, m.Kind(), k)
		}
		b, err := Encode(m)
		if err != nil {
			t.Errorf("%T: %v", m, err)
			continue
		}
		got, _ := New(k)
		if err := Decode(b, got); err != nil {
			t.Errorf("%T: %v", m, err)
		} else if !reflect.DeepEqual(m, got) {
			t.Errorf("%T came back as another:\n%+v\n%+v", m, m, got)
		}
		// The zero message too: empty lists come back nil.
		zero, _ := New(k)
		b, err = Encode(zero)
		if err != nil {
			t.Errorf("empty %T: %v", m, err)
			continue
		}
		got, _ = New(k)
		if err := Decode(b, got); err != nil || !reflect.DeepEqual(zero, got) {
			t.Errorf("empty %T came back as %+v, %v", m, got, err)
		}
	}
}

// TestCut cuts each message at every length.
func TestCut(t *testing.T) {
	for _, k := range kinds() {
		b, err := Encode(filled(t, k))
		if err != nil {
			t.Fatal(err)
		}
		for i := range b {
			m, _ := New(k)
			if err := Decode(b[:i], m); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("%T cut at %d of %d: %v", m, i, len(b), err)
			}
		}
		m, _ := New(k)
		if err := Decode(append(b, 0), m); err == nil || errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%T with a byte too many: %v", m, err)
		}
	}
}

func TestLengths(t *testing.T) {
	var s string
	var b []byte
	var l []string
	var m map[string]string
	for name, walk := range map[string]func(*Coder){
		"string": func(c *Coder) { c.Str(&s) },
		"bytes":  func(c *Coder) { c.Bytes(&b) },
		"list":   func(c *Coder) { c.Strs(&l) },
		"map":    func(c *Coder) { c.StrMap(&m) },
	} {
		for _, n := range []uint32{MaxPayload + 1, math.MaxUint32} {
			c := Coder{decode: true}
			e := Coder{}
			e.U32(&n)
			c.buf = e.buf
			walk(&c)
			if !errors.Is(c.err, ErrTooLarge) {
				t.Errorf("%s of announced length %d: %v", name, n, c.err)
			}
		}
	}
	// A length within the limit takes no memory that is not there.
	n := uint32(maxItems)
	e := Coder{}
	e.U32(&n)
	if got := testing.AllocsPerRun(10, func() {
		c := Coder{decode: true, buf: e.buf}
		var l []string
		c.Strs(&l)
		if !errors.Is(c.err, io.ErrUnexpectedEOF) {
			t.Fatal(c.err)
		}
	}); got > 4 {
		t.Errorf("a list that is not there took %v allocations", got)
	}
	if _, err := Encode(&Logs{ID: strings.Repeat("x", MaxPayload+1)}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("encoding a string over the limit: %v", err)
	}
	half := strings.Repeat("x", MaxPayload/2)
	if _, err := Encode(&Unpack{DiffID: half, Below: []string{half}}); !errors.Is(err, ErrTooLarge) {
		t.Errorf("encoding a payload over the limit: %v", err)
	}
}

func TestBadValues(t *testing.T) {
	m := &Freeze{}
	b, _ := Encode(m)
	b[len(b)-1] = 2
	if err := Decode(b, m); err == nil {
		t.Error("a boolean of 2 was taken")
	}
	if _, err := New(0x7fff); err == nil {
		t.Error("an unknown kind was made")
	}
}

func TestErrors(t *testing.T) {
	for _, c := range []struct {
		err   error
		class Class
		errno syscall.Errno
	}{
		{Errorf(NotFound, "no %s", "x"), NotFound, 0},
		{Errorf(Invalid, "opening x: %w", syscall.ENOENT), Invalid, syscall.ENOENT},
		{syscall.EBUSY, Internal, syscall.EBUSY},
		{errors.Join(errors.New("first"), Errorf(Conflict, "second: %w", syscall.EEXIST)), Conflict, syscall.EEXIST},
	} {
		e := AsError(c.err)
		if e.Class != c.class || syscall.Errno(e.Errno) != c.errno || e.Text != c.err.Error() {
			t.Errorf("%v became %+v", c.err, e)
		}
		b, err := Encode(e)
		if err != nil {
			t.Fatal(err)
		}
		got := &Error{}
		if err := Decode(b, got); err != nil {
			t.Fatal(err)
		}
		if ClassOf(got) != c.class || c.errno != 0 && !errors.Is(got, c.errno) {
			t.Errorf("%v crossed the wire as %+v", c.err, got)
		}
	}
}

// FuzzDecode feeds every message whatever bytes come. What decodes must encode, and to something that decodes the same.
func FuzzDecode(f *testing.F) {
	for _, k := range kinds() {
		m, _ := New(k)
		n := 0
		fillMessage(reflect.ValueOf(m).Elem(), &n)
		b, err := Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(uint16(k), b)
	}
	f.Fuzz(func(t *testing.T, k uint16, b []byte) {
		m, err := New(Kind(k))
		if err != nil {
			return
		}
		if Decode(b, m) != nil {
			return
		}
		again, err := Encode(m)
		if err != nil {
			t.Fatalf("%T decoded and does not encode: %v", m, err)
		}
		second, _ := New(Kind(k))
		if err := Decode(again, second); err != nil || !reflect.DeepEqual(m, second) {
			t.Fatalf("%T changed on its second way: %v", m, err)
		}
	})
}
