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
//	{"kiri":1,"put":<which Put of this record it was>,"length":<bytes of the second line without its end>,"crc32c":"<8 hex digits>"}
//	<the object>
//
// The checksum is over the number of the Put, as it stands there, and the second line. The first line has a fixed
// length, with the numbers padded, so that it can be filled in after the object is encoded.

const (
	headLen = len(`{"kiri":1,"put":0000000000,"length":0000000000,"crc32c":"00000000"}` + "\n")
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

// encode makes b.b the whole file of v, but for its first line.
func (b *buffer) encode(v any) error {
	b.w.Reset()
	b.w.Write(make([]byte, headLen))
	enc := json.NewEncoder(&b.w)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil { // ends in a newline
		return err
	}
	b.b = b.w.Bytes()
	return nil
}

// seal fills in the first line.
func (b *buffer) seal(gen uint64) error {
	body := b.b[headLen : len(b.b)-1]
	head := fmt.Appendf(b.b[:0], "{\"kiri\":%d,\"put\":%10d,\"length\":%10d,\"crc32c\":\"%08x\"}\n", version, gen, len(body), checksum(gen, body))
	if len(head) != headLen {
		return fmt.Errorf("a record of %d bytes, put %d times, is too large", len(body), gen)
	}
	return nil
}

func checksum(gen uint64, body []byte) uint32 {
	var n [20]byte
	return crc32.Update(crc32.Checksum(strconv.AppendUint(n[:0], gen, 10), castagnoli()), castagnoli(), body)
}

// decode reads a whole file into v. gen is the number of the Put.
func decode(b []byte, v any) (gen uint64, err error) {
	if len(b) < headLen {
		return 0, fmt.Errorf("%w: %d bytes", errDamaged, len(b))
	}
	var head struct {
		Kiri   int    `json:"kiri"`
		Put    uint64 `json:"put"`
		Length int    `json:"length"`
		CRC    string `json:"crc32c"`
	}
	if err := json.Unmarshal(b[:headLen], &head); err != nil {
		return 0, fmt.Errorf("%w: first line: %w", errDamaged, err)
	}
	if head.Kiri != version {
		return 0, fmt.Errorf("%w: version %d of the format", errDamaged, head.Kiri)
	}
	body := b[headLen:]
	if head.Length < 0 || len(body) != head.Length+1 || body[head.Length] != '\n' {
		return 0, fmt.Errorf("%w: %d bytes instead of %d", errDamaged, len(body), head.Length+1)
	}
	body = body[:head.Length]
	want, err := strconv.ParseUint(head.CRC, 16, 32)
	if err != nil || checksum(head.Put, body) != uint32(want) {
		return 0, fmt.Errorf("%w: the checksum does not match", errDamaged)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return 0, fmt.Errorf("%w: %w", errDamaged, err)
	}
	return head.Put, nil
}
