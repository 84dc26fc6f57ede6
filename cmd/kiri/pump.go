package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/term"
)

// errDetached is what the pump returns when the user typed the detach keys.
var errDetached = errors.New("read escape sequence")

// A pump couples a hijacked stream with the caller's own streams; what is nil is not attached.
type pump struct {
	stream   *stream
	in       *os.File
	out, err io.Writer
	tty      bool
	keys     []byte
}

// pump copies until the container's side ends, or the user detaches. The end of input closes only the sending half. It never waits for
// input once output has ended: that read may not return before a key is pressed.
func (c *cli) pump(p *pump) error {
	if p.in != nil && p.tty && isTerminal(p.in) {
		state, err := term.MakeRaw(int(p.in.Fd()))
		if err != nil {
			return fmt.Errorf("putting the terminal into raw mode: %w", err)
		}
		defer term.Restore(int(p.in.Fd()), state)
	}
	input := make(chan error, 1)
	if p.in != nil {
		go func() { input <- p.send() }()
	}
	output := make(chan error, 1)
	if p.out != nil || p.err != nil {
		if p.in == nil {
			return p.receive()
		}
		go func() { output <- p.receive() }()
		select {
		case err := <-output:
			return err
		case err := <-input:
			if errors.Is(err, errDetached) {
				return err
			}
			return <-output // a container that closed its input may still print
		}
	}
	if p.in != nil {
		return <-input
	}
	return nil
}

func (p *pump) send() error {
	var r io.Reader = p.in
	if p.tty {
		r = &escapeReader{r: r, keys: p.keys}
	}
	_, err := io.CopyBuffer(struct{ io.Writer }{p.stream.conn}, r, make([]byte, 32<<10))
	if errors.Is(err, errDetached) {
		return err
	}
	p.stream.CloseWrite()
	return nil // that the container does not read its input is its own affair
}

func (p *pump) receive() error {
	out, errw := p.out, p.err
	if p.tty {
		if out == nil {
			out = errw
		}
		_, err := io.Copy(out, p.stream.r)
		return err
	}
	if out == nil {
		out = io.Discard
	}
	if errw == nil {
		errw = io.Discard
	}
	return demux(out, errw, p.stream.r)
}

// demux splits a multiplexed stream: frames of stream byte, three zero bytes, big-endian length, payload. It holds no more than a buffer
// however long a frame says it is, where stdcopy.StdCopy of moby/api holds the whole frame.
func demux(out, errw io.Writer, r io.Reader) error {
	var header [8]byte
	buf := make([]byte, 32<<10)
	for {
		if _, err := io.ReadFull(r, header[:]); err != nil {
			if err == io.EOF {
				return nil
			}
			return fmt.Errorf("reading the output of the container: %w", err)
		}
		n := int64(binary.BigEndian.Uint32(header[4:]))
		dst := out
		switch header[0] {
		case 0, 1:
		case 2:
			dst = errw
		case 3:
			msg, err := io.ReadAll(io.LimitReader(r, min(n, maxErrorBytes)))
			if err != nil {
				return fmt.Errorf("reading the output of the container: %w", err)
			}
			return errors.New("error from daemon in stream: " + string(msg))
		default:
			return fmt.Errorf("unrecognized stream: %d", header[0])
		}
		// The wrapper hides ReadFrom and WriteTo, which would make a buffer of their own.
		copied, err := io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{io.LimitReader(r, n)}, buf)
		if err == nil && copied < n {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return fmt.Errorf("copying the output of the container: %w", err)
		}
	}
}

// defaultDetachKeys is ctrl-p ctrl-q.
var defaultDetachKeys = []byte{16, 17}

// detachKeys gives the sequence of --detach-keys, of docker's config, or the default one. A bad one falls back to the default: the engine
// has been given it too and refuses it with words.
func (c *cli) detachKeys(flag string) []byte {
	if flag == "" && c.config != nil {
		flag = c.config.DetachKeys
	}
	if flag == "" {
		return defaultDetachKeys
	}
	keys, err := parseKeys(flag)
	if err != nil {
		return defaultDetachKeys
	}
	return keys
}

// parseKeys reads "ctrl-p,ctrl-q" or "a,b": letters, and ctrl- with a to z or @ [ \ ] ^ _.
func parseKeys(s string) ([]byte, error) {
	var out []byte
	for _, key := range strings.Split(s, ",") {
		if len(key) == 1 {
			out = append(out, key[0])
			continue
		}
		ctrl, ok := strings.CutPrefix(strings.ToLower(key), "ctrl-")
		if !ok || len(ctrl) != 1 {
			return nil, fmt.Errorf("unknown character: '%s'", key)
		}
		switch b := ctrl[0]; {
		case b >= 'a' && b <= 'z':
			out = append(out, b-'a'+1)
		case b == '@':
			out = append(out, 0)
		case b >= '[' && b <= '_':
			out = append(out, b-'['+27)
		default:
			return nil, fmt.Errorf("unknown character: '%s'", key)
		}
	}
	return out, nil
}

// escapeReader passes keys on and ends with errDetached when the sequence was typed. A sequence that breaks off is passed on whole.
type escapeReader struct {
	r       io.Reader
	keys    []byte
	matched int
	held    []byte // read and not yet passed on
	end     error  // after what is held
	buf     [4096]byte
}

func (e *escapeReader) Read(p []byte) (int, error) {
	for len(e.held) == 0 {
		if e.end != nil {
			return 0, e.end
		}
		n, err := e.r.Read(e.buf[:])
		for _, b := range e.buf[:n] {
			if b == e.keys[e.matched] {
				if e.matched++; e.matched == len(e.keys) {
					e.end = errDetached
					break
				}
				continue
			}
			// The matched keys were ordinary ones; this one may begin the sequence anew.
			e.held = append(e.held, e.keys[:e.matched]...)
			e.matched = 0
			if b == e.keys[0] {
				e.matched = 1
				continue
			}
			e.held = append(e.held, b)
		}
		if err != nil && e.end == nil {
			e.held = append(e.held, e.keys[:e.matched]...)
			e.end = err
		}
	}
	n := copy(p, e.held)
	e.held = e.held[n:]
	return n, nil
}
