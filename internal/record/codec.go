package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"sync"
)

// A record file is two lines of JSON, so that `jq` reads it too:
//
//	{"kiri":1,"length":<bytes of the second line without its end>,"crc32c":"<8 hex digits of the same bytes>"}
//	<the object>
//
// The first line has a fixed length, with the numbers padded, so that it can be filled in after the object is encoded.

const (
	headLen = len(`{"kiri":1,"length":0000000000,"crc32c":"00000000"}` + "\n")
	version = 1
)

// errDamaged is the cause of all decoding errors.
var errDamaged = errors.New("damaged")

// castagnoli is made at the first record: making it costs 0.2 ms, which every kiri command would pay before main.
var castagnoli = sync.OnceValue(func() *crc32.Table { return crc32.MakeTable(crc32.Castagnoli) })

type buffer struct {
	b []byte
	w bytes.Buffer
}

var buffers = sync.Pool{New: func() any { return new(buffer) }}

// free gives the buffer back; a large one is left to the collector.
func (b *buffer) free() {
	if cap(b.b)+b.w.Cap() <= 64<<10 {
		buffers.Put(b)
	}
}

// encode makes b.b the whole file of v.
func (b *buffer) encode(v any) error {
	b.w.Reset()
	b.w.Write(make([]byte, headLen))
	enc := json.NewEncoder(&b.w)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // ends in a newline
		return err
	}
	b.b = b.w.Bytes()
	body := b.b[headLen : len(b.b)-1]
	head := fmt.Appendf(b.b[:0], "{\"kiri\":%d,\"length\":%10d,\"crc32c\":\"%08x\"}\n", version, len(body), crc32.Checksum(body, castagnoli()))
	if len(head) != headLen {
		return fmt.Errorf("a record of %d bytes is too large", len(body))
	}
	return nil
}

// decode reads a whole file into v.
func decode(b []byte, v any) error {
	if len(b) < headLen {
		return fmt.Errorf("%w: %d bytes", errDamaged, len(b))
	}
	var head struct {
		Kiri   int    `json:"kiri"`
		Length int    `json:"length"`
		CRC    string `json:"crc32c"`
	}
	if err := json.Unmarshal(b[:headLen], &head); err != nil {
		return fmt.Errorf("%w: first line: %w", errDamaged, err)
	}
	if head.Kiri != version {
		return fmt.Errorf("%w: version %d of the format", errDamaged, head.Kiri)
	}
	body := b[headLen:]
	if len(body) != head.Length+1 || body[head.Length] != '\n' {
		return fmt.Errorf("%w: %d bytes instead of %d", errDamaged, len(body), head.Length+1)
	}
	body = body[:head.Length]
	want, err := strconv.ParseUint(head.CRC, 16, 32)
	if err != nil || crc32.Checksum(body, castagnoli()) != uint32(want) {
		return fmt.Errorf("%w: the checksum does not match", errDamaged)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("%w: %w", errDamaged, err)
	}
	return nil
}
