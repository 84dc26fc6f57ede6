package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// apiVersion is the version of the Engine API that the CLI speaks. The daemon answers each version in that version's own form, so a CLI
// and a daemon of different builds understand each other. 1.51 is what Docker CLI 28.3 and later speak.
const apiVersion = "1.51"

// Bounds on what an answer may make the CLI hold. A socket is only as trustworthy as whoever answers on it.
const (
	maxHeaderBytes = 64 << 10
	maxErrorBytes  = 1 << 20
)

// An apiError is an answer of status 400 or above.
type apiError struct {
	Status  int
	Message string
}

func (e *apiError) Error() string { return "Error response from daemon: " + e.Message }

// A connectError says that nothing answers at the socket.
type connectError struct {
	host string
	err  error
}

func (e *connectError) Error() string {
	if isPermission(e.err) {
		return "permission denied while trying to connect to the kiri daemon at " + e.host + ": run as root or join the group that owns the socket"
	}
	return "Cannot connect to the kiri daemon at " + e.host + ". Is the kiri daemon running?"
}

func (e *connectError) Unwrap() error { return e.err }

// client is an HTTP/1.1 client for one host that keeps its connections. net/http's Transport would do the same at three times the cost
// for the first request of a process, and the first is the only one that most commands make.
type client struct {
	host    string // as the user wrote it, for messages
	network string // unix or tcp
	addr    string
	name    string // value of the Host header
	tls     *tls.Config
	prefix  string // "/v1.51"
	headers map[string]string

	mu   sync.Mutex
	idle []*clientConn
}

type clientConn struct {
	net.Conn
	r *bufio.Reader
}

// dial makes a new connection, or takes one whose last answer has been read to its end.
func (c *client) dial() (*clientConn, error) {
	c.mu.Lock()
	if n := len(c.idle); n > 0 {
		cc := c.idle[n-1]
		c.idle = c.idle[:n-1]
		c.mu.Unlock()
		return cc, nil
	}
	c.mu.Unlock()
	conn, err := net.DialTimeout(c.network, c.addr, 30*time.Second)
	if err != nil {
		return nil, &connectError{c.host, err}
	}
	if c.tls != nil {
		conn = tls.Client(conn, c.tls)
	}
	return &clientConn{conn, bufio.NewReaderSize(conn, 4096)}, nil
}

// A request is one call of the API.
type request struct {
	method string
	path   string // below the version prefix, or from the root when it starts with /kiri/ or is /_ping
	query  url.Values
	body   []byte
	stream io.Reader // a body of unknown length, sent chunked; body is ignored then
	header [][2]string
	hijack bool // ask for an upgrade to a raw stream
}

func (c *client) target(r *request) string {
	path := r.path
	if !strings.HasPrefix(path, "/kiri/") && path != "/_ping" {
		path = c.prefix + path
	}
	if len(r.query) > 0 {
		path += "?" + r.query.Encode()
	}
	return path
}

// A pending call has been written and not yet read.
type pending struct {
	c   *client
	cc  *clientConn
	r   *request
	err error
}

// send writes a request. The answer is read by the returned value, so that several calls can be under way at once.
func (c *client) send(r *request) *pending {
	cc, err := c.dial()
	if err != nil {
		return &pending{err: err}
	}
	b := make([]byte, 0, 512+len(r.body))
	b = append(b, r.method...)
	b = append(b, ' ')
	b = append(b, c.target(r)...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	b = append(b, c.name...)
	b = append(b, "\r\nUser-Agent: kiri/"...)
	b = append(b, version...)
	for k, v := range c.headers {
		b = append(append(append(append(b, "\r\n"...), k...), ": "...), v...)
	}
	for _, h := range r.header {
		b = append(append(append(append(b, "\r\n"...), h[0]...), ": "...), h[1]...)
	}
	if r.hijack {
		b = append(b, "\r\nConnection: Upgrade\r\nUpgrade: tcp"...)
	}
	switch {
	case r.stream != nil:
		b = append(b, "\r\nTransfer-Encoding: chunked\r\n\r\n"...)
	case r.body != nil:
		b = append(b, "\r\nContent-Type: application/json\r\nContent-Length: "...)
		b = strconv.AppendInt(b, int64(len(r.body)), 10)
		b = append(append(b, "\r\n\r\n"...), r.body...)
	case r.method != "GET" && r.method != "HEAD":
		b = append(b, "\r\nContent-Length: 0\r\n\r\n"...)
	default:
		b = append(b, "\r\n\r\n"...)
	}
	if _, err = cc.Write(b); err == nil && r.stream != nil {
		err = sendChunks(cc, r.stream)
	}
	p := &pending{c: c, cc: cc, r: r}
	// A server that refuses a long body early answers and closes; its answer is worth more than the broken pipe.
	if err != nil && r.stream == nil {
		cc.Close()
		p.err = fmt.Errorf("sending to the kiri daemon at %s: %w", c.host, err)
	}
	return p
}

func sendChunks(w io.Writer, r io.Reader) error {
	cw := httputil.NewChunkedWriter(w)
	if _, err := io.CopyBuffer(cw, r, make([]byte, 64<<10)); err != nil {
		return err
	}
	if err := cw.Close(); err != nil {
		return err
	}
	_, err := io.WriteString(w, "\r\n")
	return err
}

// A response is an answer whose body is still on the wire. Close reads what is left and keeps the connection.
type response struct {
	Status int
	Type   string // Content-Type
	header [][2]string
	body   io.Reader
	c      *client
	cc     *clientConn
	close  bool
	ended  bool
}

func (r *response) Read(p []byte) (int, error) {
	// The end is remembered: a reader that met it together with the last bytes asks again, and the connection has no second end to give.
	if r.ended {
		return 0, io.EOF
	}
	n, err := r.body.Read(p)
	if err == io.EOF {
		r.ended = true
	}
	return n, err
}

// Close gives the connection back if the body was read to its end, and closes it otherwise.
func (r *response) Close() {
	if r.cc == nil {
		return
	}
	if !r.ended && !r.close {
		// One more read tells whether this was the end: a decoder stops at the end of its value, before the end of the body.
		var b [64]byte
		for range 8 {
			if _, err := r.Read(b[:]); err != nil {
				break
			}
		}
	}
	if r.ended && !r.close {
		r.c.mu.Lock()
		r.c.idle = append(r.c.idle, r.cc)
		r.c.mu.Unlock()
	} else {
		r.cc.Close()
	}
	r.cc = nil
}

// Header gives the first value of a header, by its lower-case name.
func (r *response) Header(name string) string {
	for _, h := range r.header {
		if h[0] == name {
			return h[1]
		}
	}
	return ""
}

// answer reads status and headers. A status of 400 or above is an *apiError.
func (p *pending) answer() (*response, error) {
	if p.err != nil {
		return nil, p.err
	}
	r, err := readResponse(p.cc.r, p.r.method)
	if err != nil {
		p.cc.Close()
		return nil, fmt.Errorf("reading the answer of the kiri daemon at %s: %w", p.c.host, err)
	}
	r.c, r.cc = p.c, p.cc
	if r.Status >= 400 {
		defer r.Close()
		return nil, errorOf(r)
	}
	return r, nil
}

func readLine(br *bufio.Reader, left *int) (string, error) {
	var line []byte
	for {
		b, err := br.ReadSlice('\n')
		*left -= len(b)
		if *left < 0 {
			return "", errors.New("header too long")
		}
		line = append(line, b...)
		if err == nil {
			return string(bytes.TrimRight(line, "\r\n")), nil
		}
		if err != bufio.ErrBufferFull {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return "", err
		}
	}
}

func readResponse(br *bufio.Reader, method string) (*response, error) {
	left := maxHeaderBytes
	r := &response{}
	for {
		line, err := readLine(br, &left)
		if err != nil {
			return nil, err
		}
		proto, rest, _ := strings.Cut(line, " ")
		code, _, _ := strings.Cut(rest, " ")
		status, err := strconv.Atoi(code)
		if err != nil || status < 100 || status > 599 || !strings.HasPrefix(proto, "HTTP/1.") {
			return nil, fmt.Errorf("not an HTTP answer: %.40q", line)
		}
		r.Status, r.header = status, r.header[:0]
		r.close = proto == "HTTP/1.0"
		for {
			line, err := readLine(br, &left)
			if err != nil {
				return nil, err
			}
			if line == "" {
				break
			}
			k, v, ok := strings.Cut(line, ":")
			if !ok {
				return nil, fmt.Errorf("not an HTTP header: %.40q", line)
			}
			r.header = append(r.header, [2]string{strings.ToLower(k), strings.TrimSpace(v)})
		}
		// 1xx answers come before the real one, but for 101 which is the real one.
		if status >= 200 || status == 101 {
			break
		}
	}
	r.Type = r.Header("content-type")
	if strings.EqualFold(r.Header("connection"), "close") {
		r.close = true
	}
	switch {
	case r.Status == 101 || r.Status == 204 || r.Status == 304 || method == "HEAD":
		r.body, r.ended = bytes.NewReader(nil), true
	case strings.EqualFold(r.Header("transfer-encoding"), "chunked"):
		r.body = &chunked{br: br, r: httputil.NewChunkedReader(br)}
	case r.Header("content-length") != "":
		n, err := strconv.ParseInt(r.Header("content-length"), 10, 64)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("content length %.20q is not a number", r.Header("content-length"))
		}
		r.body, r.ended = &counted{br, n}, n == 0
	default:
		r.body, r.close = br, true
	}
	return r, nil
}

// counted reads a body of known length and tells a cut one from a whole one.
type counted struct {
	r    io.Reader
	left int64
}

func (l *counted) Read(p []byte) (int, error) {
	if l.left == 0 {
		return 0, io.EOF
	}
	if int64(len(p)) > l.left {
		p = p[:l.left]
	}
	n, err := l.r.Read(p)
	l.left -= int64(n)
	switch {
	case l.left == 0:
		err = io.EOF
	case err == io.EOF:
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// chunked reads a chunked body and the empty line behind it, which httputil leaves on the connection.
type chunked struct {
	br *bufio.Reader
	r  io.Reader
}

func (c *chunked) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	if err == io.EOF {
		left := maxHeaderBytes
		for {
			line, lerr := readLine(c.br, &left)
			if lerr != nil {
				return n, lerr
			}
			if line == "" {
				return n, io.EOF
			}
		}
	}
	return n, err
}

func errorOf(r *response) error {
	b, _ := io.ReadAll(io.LimitReader(r, maxErrorBytes))
	var m struct {
		Message string `json:"message"`
	}
	if err := json.Unmarshal(b, &m); err != nil || m.Message == "" {
		m.Message = strings.TrimSpace(string(b))
		if m.Message == "" {
			m.Message = "request returned status " + strconv.Itoa(r.Status)
		}
	}
	return &apiError{r.Status, strings.TrimSpace(m.Message)}
}

// do makes a call and leaves the body to the caller, who closes it.
func (c *client) do(r *request) (*response, error) { return c.send(r).answer() }

// call makes a call and decodes a JSON answer into out, unless out is nil.
func (c *client) call(method, path string, query url.Values, body []byte, out any) error {
	return decode(c.do(&request{method: method, path: path, query: query, body: body}))(out)
}

func decode(res *response, err error) func(out any) error {
	return func(out any) error {
		if err != nil {
			return err
		}
		defer res.Close()
		if out == nil {
			_, err := io.Copy(io.Discard, res)
			return err
		}
		if err := json.NewDecoder(res).Decode(out); err != nil {
			return fmt.Errorf("decoding the answer of the kiri daemon: %w", err)
		}
		return nil
	}
}

// raw makes a call and gives the whole body.
func (c *client) raw(method, path string, query url.Values) ([]byte, error) {
	res, err := c.do(&request{method: method, path: path, query: query})
	if err != nil {
		return nil, err
	}
	defer res.Close()
	return io.ReadAll(res)
}

// A stream is a hijacked connection: what is read comes from r, which may hold bytes that came with the answer.
type stream struct {
	conn net.Conn
	r    io.Reader
	typ  string
}

// CloseWrite tells the other end that no more input comes, and leaves the output open.
func (s *stream) CloseWrite() {
	if cw, ok := s.conn.(interface{ CloseWrite() error }); ok {
		_ = cw.CloseWrite() // the other end may be gone, which the reader will find out
	}
}

func (p *pending) upgrade() (*stream, error) {
	r, err := p.answer()
	if err != nil {
		return nil, err
	}
	if r.Status != 101 && r.Status != 200 {
		r.Close()
		return nil, fmt.Errorf("unable to upgrade to tcp, received %d", r.Status)
	}
	return &stream{p.cc.Conn, p.cc.r, r.Type}, nil
}

// idPath puts a name that the user gave into a path. A name with a slash or a question mark must not become another path.
func idPath(prefix, name, suffix string) string { return prefix + url.PathEscape(name) + suffix }
