package dockerapi

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/moby/moby/api/types"
)

// begin sends the header of a 200 whose body comes later, in pieces. Clients rely on having it at once: it tells
// them that a wait is registered or a stream attached.
func (c *call) begin(contentType string) {
	c.w.Header().Set("Content-Type", contentType)
	c.began = true
	c.w.WriteHeader(http.StatusOK)
	c.flush()
}

func (c *call) flush() {
	if f, ok := c.w.(http.Flusher); ok {
		f.Flush()
	}
}

// send writes one piece of a stream and passes it on at once.
func (c *call) send(b []byte) error {
	if _, err := c.w.Write(b); err != nil {
		return err
	}
	c.flush()
	return nil
}

// copy sends everything that comes from r, each piece as it comes. r is closed, also when the client hangs up, so
// that a read that waits for more ends.
func (c *call) copy(r io.ReadCloser) error {
	stop := context.AfterFunc(c.ctx, func() { r.Close() })
	defer func() {
		if stop() {
			r.Close()
		}
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := c.send(buf[:n]); err != nil {
				return nil // the client is gone
			}
		}
		switch {
		case err == io.EOF || err != nil && c.ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("reading the stream: %w: %w", err, errCut)
		}
	}
}

// streamType is the content type of stdout and stderr: framed by stream unless they come from a terminal. Before
// API 1.42 both had the name of the raw one.
func (c *call) streamType(tty bool) string {
	if !tty && c.version >= 42 {
		return types.MediaTypeMultiplexedStream
	}
	return types.MediaTypeRawStream
}

// takeOver is the engine.StreamOpener of this request: it answers with the header of a stream, then hands over the
// connection. A client that asks for an upgrade gets 101, which lets proxies know; an old one 200.
func (c *call) takeOver(tty bool) (net.Conn, []byte, error) {
	hj, ok := c.w.(http.Hijacker)
	if !ok {
		return nil, nil, fmt.Errorf("this connection cannot be taken over")
	}
	var head strings.Builder
	if _, upgrade := c.r.Header["Upgrade"]; upgrade {
		fmt.Fprintf(&head, "HTTP/1.1 101 UPGRADED\r\nContent-Type: %s\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n", c.streamType(tty))
	} else {
		fmt.Fprintf(&head, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\n", types.MediaTypeRawStream)
	}
	c.w.Header().WriteSubset(&head, nil)
	head.WriteString("\r\n")
	conn, rw, err := hj.Hijack()
	if err != nil {
		return nil, nil, fmt.Errorf("taking the connection over: %w", err)
	}
	c.conn, c.began = conn, true
	if _, err := io.WriteString(conn, head.String()); err != nil {
		conn.Close()
		return nil, nil, fmt.Errorf("answering: %w", err)
	}
	return conn, unread(rw.Reader), nil
}

// unread returns a copy of the bytes that the HTTP server read ahead.
func unread(r *bufio.Reader) []byte {
	b, _ := r.Peek(r.Buffered())
	return append([]byte(nil), b...)
}
