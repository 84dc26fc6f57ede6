package dockerapi

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/http"
	"runtime/debug"

	"golang.org/x/net/websocket"

	"runkiri.com/kiri/internal/engine"
)

// containerAttachWS is attach for browsers. The output of both streams comes as it is, without the frames of the
// plain attach. Before API 1.42 it was always attached to all three streams, before 1.28 it spoke in text messages.
func containerAttachWS(c *call) error {
	opts := engine.AttachOptions{
		Stdin: true, Stdout: true, Stderr: true,
		Logs:       c.flag("logs"),
		Stream:     c.flag("stream"),
		DetachKeys: c.arg("detachKeys"),
	}
	if c.version >= 42 {
		opts.Stdin, opts.Stdout, opts.Stderr = c.flag("stdin"), c.flag("stdout"), c.flag("stderr")
	}
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	served := make(chan struct{})
	close(served)
	err := c.s.engine.ContainerAttach(ctx, c.name, opts, func(tty bool) (net.Conn, []byte, error) {
		conns := make(chan *websocket.Conn)
		served = make(chan struct{})
		server := websocket.Server{Handler: func(conn *websocket.Conn) {
			if c.version >= 28 {
				conn.PayloadType = websocket.BinaryFrame
			}
			conns <- conn
			<-ctx.Done() // the connection ends when the handler returns
		}}
		c.began = true // the handshake answers for itself, also when it fails
		go func() {
			defer close(served)
			defer func() {
				if p := recover(); p != nil { // nobody above this goroutine would
					c.s.log.Error("panic in a websocket", "path", c.r.URL.Path, "panic", p, "stack", string(debug.Stack()))
				}
			}()
			server.ServeHTTP(hijacker{c.w, c}, c.r)
		}()
		select {
		case conn := <-conns:
			return &wsConn{Conn: conn, raw: tty}, nil, nil
		case <-served:
			return nil, nil, errors.New("the websocket handshake failed")
		}
	})
	cancel()
	<-served
	if err != nil && c.conn == nil && c.began {
		return nil // told by the handshake
	}
	return err
}

// hijacker notes the connection that the handshake takes over.
type hijacker struct {
	http.ResponseWriter
	c *call
}

func (h hijacker) Hijack() (conn net.Conn, rw *bufio.ReadWriter, err error) {
	conn, rw, err = h.ResponseWriter.(http.Hijacker).Hijack()
	h.c.conn = conn
	return conn, rw, err
}

// wsConn is a websocket as a plain connection. Unless raw, what is written has the frames of a multiplexed stream,
// which are taken off.
type wsConn struct {
	*websocket.Conn
	raw    bool
	header [8]byte // of the frame being read: stream, three zeros, length
	have   int     // bytes of the header that are there
	left   uint32  // bytes of the payload that are to come
}

func (w *wsConn) Write(b []byte) (int, error) {
	if w.raw {
		return w.Conn.Write(b)
	}
	for done := 0; done < len(b); {
		if w.left == 0 {
			n := copy(w.header[w.have:], b[done:])
			w.have += n
			done += n
			if w.have == len(w.header) {
				w.left, w.have = binary.BigEndian.Uint32(w.header[4:]), 0
			}
			continue
		}
		piece := b[done:min(len(b), done+int(w.left))]
		if _, err := w.Conn.Write(piece); err != nil {
			return done, err
		}
		w.left -= uint32(len(piece))
		done += len(piece)
	}
	return len(b), nil
}
