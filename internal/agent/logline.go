//go:build linux

package agent

import (
	"bytes"
	"sort"
	"strconv"
	"time"
	"unicode/utf8"
)

// A log record is a line of JSON, byte for byte as Docker's json-file driver writes it, so that whatever reads those
// files goes on working:
//
//	{"log":"text\n","stream":"stdout","attrs":{"k":"v"},"time":"2006-01-02T15:04:05.999999999Z"}
//
// Text without a final newline is a piece of a line longer than 16 KiB, or the unfinished end of the output; what
// follows in the same stream goes on where it stopped. Bytes that are not UTF-8 have no form in JSON: byte b is
// written as the lone surrogate U+DC00+b, which other readers show as U+FFFD, as they would Docker's own records, and
// which this package reads back as the byte.

// maxLine is where a line is cut into pieces, in bytes; Docker's figure.
const maxLine = 16 << 10

const hexDigits = "0123456789abcdef"

// appendRecord appends one record. attrs is from encodeAttrs, or empty.
func appendRecord(b []byte, stream int, text, attrs []byte, at time.Time) []byte {
	b = append(b, `{"log":"`...)
	b = appendJSON(b, text)
	if stream == 0 {
		b = append(b, `","stream":"stdout"`...)
	} else {
		b = append(b, `","stream":"stderr"`...)
	}
	if len(attrs) > 0 {
		b = append(b, `,"attrs":`...)
		b = append(b, attrs...)
	}
	b = append(b, `,"time":"`...)
	b = at.UTC().AppendFormat(b, time.RFC3339Nano)
	return append(b, '"', '}', '\n')
}

// appendJSON appends s as the inside of a JSON string, with Docker's choice of escapes.
func appendJSON(b, s []byte) []byte {
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			if c >= 0x20 && c != '\\' && c != '"' && c != '<' && c != '>' && c != '&' {
				i++
				continue
			}
			b = append(b, s[start:i]...)
			switch c {
			case '\\', '"':
				b = append(b, '\\', c)
			case '\n':
				b = append(b, '\\', 'n')
			case '\r':
				b = append(b, '\\', 'r')
			default:
				b = append(b, '\\', 'u', '0', '0', hexDigits[c>>4], hexDigits[c&15])
			}
			i++
			start = i
			continue
		}
		r, n := utf8.DecodeRune(s[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			b = append(b, s[start:i]...)
			b = append(b, '\\', 'u', 'd', 'c', hexDigits[c>>4], hexDigits[c&15])
		case r == '\u2028' || r == '\u2029':
			b = append(b, s[start:i]...)
			b = append(b, '\\', 'u', '2', '0', '2', hexDigits[r&15])
		default:
			i += n
			continue
		}
		i += n
		start = i
	}
	return append(b, s[start:]...)
}

// encodeAttrs makes the JSON object of a log's attributes, sorted by name; empty for none.
func encodeAttrs(m map[string]string) []byte {
	if len(m) == 0 {
		return nil
	}
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	b := []byte{'{'}
	for i, k := range keys {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, '"')
		b = appendJSON(b, []byte(k))
		b = append(b, '"', ':', '"')
		b = appendJSON(b, []byte(m[k]))
		b = append(b, '"')
	}
	return append(b, '}')
}

// record is one record read back. Its slices are the reader's and good until the next one.
type record struct {
	stream int
	text   []byte
	attrs  []byte // the raw JSON object, empty if there is none
	at     time.Time
}

// parseRecord reads a record from line, which must be whole, using buf for its text. It takes what appendRecord and
// Docker write: the four known members, in any order; anything else is not a record.
func parseRecord(line, buf []byte, r *record) ([]byte, bool) {
	*r = record{}
	p := jsonScanner{b: bytes.TrimSpace(line)}
	if !p.take('{') {
		return buf, false
	}
	var have struct{ text, at bool }
	for !p.take('}') {
		key, ok := p.str(nil)
		if !ok || !p.take(':') {
			return buf, false
		}
		switch string(key) {
		case "log":
			buf, ok = p.str(buf[:0])
			r.text, have.text = buf, true
		case "stream":
			var s []byte
			s, ok = p.str(nil)
			if string(s) == "stderr" {
				r.stream = 1
			}
		case "attrs":
			r.attrs, ok = p.object()
		case "time":
			var s []byte
			if s, ok = p.str(nil); ok {
				var err error
				r.at, err = time.Parse(time.RFC3339Nano, string(s))
				ok, have.at = err == nil, true
			}
		default:
			ok = false
		}
		if !ok {
			return buf, false
		}
		if !p.take(',') && !p.peek('}') {
			return buf, false
		}
	}
	return buf, have.text && have.at && len(p.b) == 0
}

// jsonScanner reads the little of JSON that records are made of.
type jsonScanner struct{ b []byte }

func (p *jsonScanner) peek(c byte) bool {
	p.b = bytes.TrimLeft(p.b, " \t")
	return len(p.b) > 0 && p.b[0] == c
}

func (p *jsonScanner) take(c byte) bool {
	if !p.peek(c) {
		return false
	}
	p.b = p.b[1:]
	return true
}

// str reads a string and appends its value to out.
func (p *jsonScanner) str(out []byte) ([]byte, bool) {
	if !p.take('"') {
		return out, false
	}
	for {
		i := bytes.IndexAny(p.b, `"\`)
		if i < 0 {
			return out, false
		}
		out = append(out, p.b[:i]...)
		quote := p.b[i] == '"'
		p.b = p.b[i+1:]
		if quote {
			return out, true
		}
		if len(p.b) == 0 {
			return out, false
		}
		c := p.b[0]
		p.b = p.b[1:]
		switch c {
		case '"', '\\', '/':
			out = append(out, c)
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'u':
			var ok bool
			if out, ok = p.unicode(out); !ok {
				return out, false
			}
		default:
			return out, false
		}
	}
}

// unicode reads the four digits behind \u, and the second half of a pair if this is the first.
func (p *jsonScanner) unicode(out []byte) ([]byte, bool) {
	r, ok := p.hex4()
	if !ok {
		return out, false
	}
	switch {
	case r >= 0xdc80 && r <= 0xdcff: // a byte that is not UTF-8: see appendJSON
		return append(out, byte(r)), true
	case r >= 0xd800 && r < 0xdc00 && len(p.b) > 6 && p.b[0] == '\\' && p.b[1] == 'u':
		rest := p.b
		p.b = p.b[2:]
		low, ok := p.hex4()
		if ok && low >= 0xdc00 && low < 0xe000 {
			return utf8.AppendRune(out, 0x10000+(r-0xd800)<<10+(low-0xdc00)), true
		}
		p.b = rest
	}
	return utf8.AppendRune(out, r), true
}

func (p *jsonScanner) hex4() (rune, bool) {
	if len(p.b) < 4 {
		return 0, false
	}
	n, err := strconv.ParseUint(string(p.b[:4]), 16, 16)
	p.b = p.b[4:]
	return rune(n), err == nil
}

// object reads an object of strings and returns its bytes as they stand.
func (p *jsonScanner) object() ([]byte, bool) {
	p.peek('{')
	start := p.b
	if !p.take('{') {
		return nil, false
	}
	for !p.take('}') {
		if _, ok := p.str(nil); !ok || !p.take(':') {
			return nil, false
		}
		if _, ok := p.str(nil); !ok || (!p.take(',') && !p.peek('}')) {
			return nil, false
		}
	}
	return start[:len(start)-len(p.b)], true
}

// attrPairs appends what `logs --details` shows of attrs: k=v,k=v, with Docker's escapes for the separators.
func attrPairs(b, attrs []byte) []byte {
	p := jsonScanner{b: attrs}
	if !p.take('{') {
		return b
	}
	for i := 0; !p.take('}'); i++ {
		k, ok := p.str(nil)
		if !ok || !p.take(':') {
			return b
		}
		v, ok := p.str(nil)
		if !ok {
			return b
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = appendQueryEscaped(b, k)
		b = append(b, '=')
		b = appendQueryEscaped(b, v)
		p.take(',')
	}
	return b
}

// appendQueryEscaped escapes as a URL's query does; Docker's clients take the details apart that way.
func appendQueryEscaped(b, s []byte) []byte {
	for _, c := range s {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_', c == '.', c == '~':
			b = append(b, c)
		case c == ' ':
			b = append(b, '+')
		default:
			b = append(b, '%', "0123456789ABCDEF"[c>>4], "0123456789ABCDEF"[c&15])
		}
	}
	return b
}
