// Package dockerapi is the HTTP edge: it speaks the Docker Engine API for package engine. It is the only package
// that knows status codes and API versions.
//
// There is one table of routes (routes.go), one of error classes (errors.go), and one list of version differences
// for each resource (its file's changes). Handlers return errors; nothing else writes an error to a client.
package dockerapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"time"
)

// Server answers the Engine API. It is an http.Handler, safe for concurrent use.
type Server struct {
	engine Engine
	log    *slog.Logger
	routes *routeIndex

	// Header values that every answer carries. They are shared between answers, so nothing may write to them.
	server []string
}

// New makes a server for e. version is told in the Server header; log gets what clients are not told.
func New(e Engine, version string, log *slog.Logger) *Server {
	return &Server{
		engine: e,
		log:    log,
		routes: indexRoutes(routes),
		server: []string{fmt.Sprintf("Docker/%s (%s)", version, runtime.GOOS)},
	}
}

var (
	headerVersion      = []string{MaxVersion}
	headerExperimental = []string{"false"}
	headerOS           = []string{runtime.GOOS}
	headerJSON         = []string{"application/json"}
)

// call is one request on its way through a handler.
type call struct {
	s       *Server
	w       http.ResponseWriter
	r       *http.Request
	ctx     context.Context // ends when the client hangs up, unless the route says to finish
	version version
	name    string // what stands for {...} in the route's pattern
	query   url.Values
	began   bool     // the answer's header is out: an error can no longer become a status
	conn    net.Conn // taken over from the HTTP server, which does not care for it any more
}

// ServeHTTP answers one request. A panic in a handler becomes a 500 and a line in the log.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h["Api-Version"] = headerVersion
	h["Docker-Experimental"] = headerExperimental
	h["Ostype"] = headerOS
	h["Server"] = s.server

	c := &call{s: s, w: w, r: r}
	defer c.recover()
	if err := c.serve(); err != nil {
		c.fail(err)
	}
}

func (c *call) serve() error {
	text, path := splitVersion(c.r.URL.Path)
	rt, name := c.s.routes.find(c.r.Method, path)
	if rt == nil {
		return errPageNotFound
	}
	v, err := parseVersion(text)
	if err != nil {
		return err
	}
	if v < rt.since {
		return invalidf("%s %s requires minimum API version %s", c.r.Method, path, rt.since)
	}
	if rt.handle == nil {
		return notBuilt(rt.what)
	}
	if c.r.URL.RawQuery != "" {
		if c.query, err = url.ParseQuery(c.r.URL.RawQuery); err != nil {
			return invalidf("invalid query: %v", err)
		}
	}
	c.version, c.name, c.ctx = v, name, c.r.Context()
	if rt.finish {
		c.ctx = context.WithoutCancel(c.ctx)
	}
	if !c.s.log.Enabled(c.ctx, slog.LevelDebug) {
		return rt.handle(c)
	}
	start := time.Now()
	err = rt.handle(c)
	c.s.log.Debug("request", "method", c.r.Method, "path", c.r.URL.Path, "took", time.Since(start), "error", err)
	return err
}

// fail answers with err, or ends the connection if an answer has begun.
func (c *call) fail(err error) {
	code, text := status(err)
	if c.conn != nil {
		c.conn.Close()
		c.s.log.Debug("stream ended", "path", c.r.URL.Path, "error", err)
		return
	}
	if c.began {
		if c.r.Context().Err() == nil {
			c.s.log.Warn("response cut short", "path", c.r.URL.Path, "error", err)
		}
		panic(http.ErrAbortHandler) // the way to tell net/http to close the connection without a last chunk
	}
	switch {
	case code == http.StatusNotModified:
		c.empty(code)
		return
	case code == http.StatusInternalServerError && c.r.Context().Err() == nil:
		c.s.log.Error("request failed", "method", c.r.Method, "path", c.r.URL.Path, "error", err)
	}
	if err := c.json(code, struct {
		Message string `json:"message"`
	}{text}); err != nil {
		c.s.log.Debug("answering with an error", "error", err)
	}
}

// recover keeps a handler's panic from ending the daemon.
func (c *call) recover() {
	p := recover()
	if p == nil {
		return
	}
	if p == http.ErrAbortHandler {
		panic(p)
	}
	c.s.log.Error("panic in a request", "method", c.r.Method, "path", c.r.URL.Path, "panic", p, "stack", string(debug.Stack()))
	c.fail(fmt.Errorf("internal error: %v", p))
}

// empty answers with a status and no body.
func (c *call) empty(code int) error {
	c.began = true
	c.w.WriteHeader(code)
	return nil
}

var buffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// maxPooled is the largest buffer that is kept for the next answer, in bytes: one huge list must not stay in memory.
const maxPooled = 64 << 10

// json answers with v. The whole body is made first, so that an error can still be told and the length is known.
func (c *call) json(code int, v any) error {
	buf := buffers.Get().(*bytes.Buffer)
	defer func() {
		if buf.Cap() <= maxPooled {
			buffers.Put(buf)
		}
	}()
	buf.Reset()
	if err := encode(buf, v); err != nil {
		return err
	}
	h := c.w.Header()
	h["Content-Type"] = headerJSON
	h["Content-Length"] = []string{strconv.Itoa(buf.Len())}
	c.began = true
	c.w.WriteHeader(code)
	c.w.Write(buf.Bytes()) // an error means that the client is gone
	return nil
}

// encode writes v as one line of JSON. & and < stay as they are, as in Docker: commands are full of them.
func encode(buf *bytes.Buffer, v any) error {
	enc := json.NewEncoder(buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("encoding %T: %w", v, err)
	}
	return nil
}

// shaped answers with v in the form of the request's version.
func (c *call) shaped(v any, changes []change) error {
	v, err := shape(v, c.version, changes)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}

// list keeps an empty list from becoming null, which many clients do not take.
func list[T any](l []T) []T {
	if l == nil {
		return []T{}
	}
	return l
}
