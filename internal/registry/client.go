// Package registry speaks the distribution API's client side: it resolves references, authenticates, and fetches
// manifests and blobs. What comes back is hostile until its digest matches: sizes are capped before memory is taken,
// and every wait for the other end is bounded.
//
// Errors are errdefs sentinels with Docker's texts where Docker has one (Explain).
package registry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/moby/moby/api/types/registry"

	"runkiri.com/kiri/internal/reference"
)

// Options of a Client. The zero value is good.
type Options struct {
	Insecure  []string // hosts ("name[:port]") and networks (CIDR) spoken to without TLS, or with TLS unverified
	Mirrors   []string // base URLs asked before Docker Hub, for its images only
	UserAgent string
	CertsDir  string // HOST[:PORT]/*.crt are authorities for that host, *.cert and *.key a client's; "" none

	// Limits on waiting. 0 is the default.
	DialTimeout   time.Duration // 10 s: TCP connect, and again the TLS handshake
	HeaderTimeout time.Duration // 20 s: from request to the answer's header, redirects included
	StallTimeout  time.Duration // 30 s: without one byte of a body
	Retries       int           // 4: attempts in a row without progress, for failures that may pass
	RetryWait     time.Duration // 250 ms: before the second attempt; doubles
}

// Client holds what pulls share: connections and settings. It costs nothing until it is first used: neither TLS
// roots nor goroutines. Its methods are safe for concurrent use.
type Client struct {
	opts     Options
	networks []netip.Prefix
	hosts    map[string]bool

	mu         sync.Mutex
	transports map[string]*http.Transport // by kind of verification: "" the system's roots, "-" none, else a host's own
}

// New returns a client. An entry of opts.Insecure that is neither a host nor a network is an InvalidArgument.
func New(opts Options) (*Client, error) {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&opts.DialTimeout, 10*time.Second)
	def(&opts.HeaderTimeout, 20*time.Second)
	def(&opts.StallTimeout, 30*time.Second)
	def(&opts.RetryWait, 250*time.Millisecond)
	if opts.Retries == 0 {
		opts.Retries = 4
	}
	if opts.UserAgent == "" {
		opts.UserAgent = "kiri"
	}
	c := &Client{opts: opts, hosts: map[string]bool{}, transports: map[string]*http.Transport{}}
	for _, s := range opts.Insecure {
		if p, err := netip.ParsePrefix(s); err == nil {
			c.networks = append(c.networks, p.Masked())
			continue
		}
		if u, err := url.Parse("//" + s); err != nil || u.Host != s || s == "" {
			return nil, bad("insecure registry %q is not valid: it must be a host, with an optional port, or a network", s)
		}
		c.hosts[strings.ToLower(s)] = true
	}
	for _, m := range opts.Mirrors {
		u, err := url.Parse(m)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" {
			return nil, bad("registry mirror %q is not valid: it must be an http or https URL", m)
		}
	}
	return c, nil
}

// CloseIdle closes connections that are not in use, with the goroutines and buffers behind them.
func (c *Client) CloseIdle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.transports {
		t.CloseIdleConnections()
	}
}

// dockerHub is the host behind the name docker.io.
const dockerHub = "registry-1.docker.io"

// Repository is one repository as one client is allowed to see it. Its methods are safe for concurrent use.
type Repository struct {
	c         *Client
	name      reference.Named // without tag and digest
	hasCreds  bool
	endpoints []*endpoint // mirrors first
}

// Repository returns the repository of ref. Nothing is asked of the registry yet.
func (c *Client) Repository(ref reference.Named, auth registry.AuthConfig) (*Repository, error) {
	creds, err := credentialsOf(auth)
	if err != nil {
		return nil, err
	}
	r := &Repository{c: c, name: reference.TrimNamed(ref), hasCreds: !creds.empty()}
	host, path := reference.Domain(ref), reference.Path(ref)
	if host == "docker.io" {
		host = dockerHub
		for _, m := range c.opts.Mirrors {
			u, err := url.Parse(m)
			if err != nil {
				return nil, fmt.Errorf("registry mirror: %w", err)
			}
			r.endpoints = append(r.endpoints, c.endpoint(u.Host, strings.TrimSuffix(u.Path, "/"), []string{u.Scheme}, path, credentials{}))
		}
	}
	r.endpoints = append(r.endpoints, c.endpoint(host, "", nil, path, creds))
	return r, nil
}

// endpoint is one server that has the repository.
type endpoint struct {
	c       *Client
	host    string
	prefix  string   // of the path, before /v2/
	schemes []string // to try; nil: by what kind of host it is
	repo    string
	creds   credentials

	pinging sync.Mutex // guards what ping finds out
	base    string     // "https://host/prefix/v2/"; "" until pinged
	client  *http.Client
	auth    auth
}

func (c *Client) endpoint(host, prefix string, schemes []string, repo string, creds credentials) *endpoint {
	return &endpoint{c: c, host: host, prefix: prefix, schemes: schemes, repo: repo, creds: creds}
}

// ping finds out how the server is spoken to: TLS or not, and which authentication it wants. Asking /v2/ first is
// part of the protocol: there are registries that name their authentication only there.
func (e *endpoint) ping(ctx context.Context) error {
	e.pinging.Lock()
	defer e.pinging.Unlock()
	if e.base != "" {
		return nil
	}
	loose := e.c.isInsecure(ctx, e.host)
	schemes := e.schemes
	switch {
	case schemes != nil:
	case isLoopback(e.host):
		schemes = []string{"http", "https"} // what stands on loopback rarely speaks TLS, and nobody listens in between
	case loose:
		schemes = []string{"https", "http"}
	default:
		schemes = []string{"https"}
	}
	var errs []error
	for _, scheme := range schemes {
		client, err := e.c.http(e.host, scheme, loose)
		if err != nil {
			return err
		}
		base := scheme + "://" + e.host + e.prefix + "/v2/"
		resp, err := e.c.send(ctx, client, http.MethodGet, base, nil)
		if err != nil {
			errs = append(errs, err)
			if errors.Is(err, syscall.ECONNREFUSED) || ctx.Err() != nil || isTimeout(err) {
				break
			}
			continue
		}
		e.auth.begin(resp, scheme == "https" && !loose)
		rerr := responseError(resp)
		resp.Body.Close()
		if resp.StatusCode >= 500 {
			return getting(base, rerr)
		}
		// What Go's TLS servers say to a plain request.
		if resp.StatusCode == http.StatusBadRequest && strings.Contains(rerr.body, "HTTPS server") {
			errs = append(errs, rerr)
			continue
		}
		e.base, e.client = base, client
		return nil
	}
	if len(errs) == 2 {
		return fmt.Errorf("%w; %w", errs[0], errs[1])
	}
	return errs[0]
}

// pinged tells whether the server has answered at all.
func (e *endpoint) pinged() bool {
	e.pinging.Lock()
	defer e.pinging.Unlock()
	return e.base != ""
}

// do sends a request for something below the repository and answers the server's demand for authentication. The
// answer's body is the caller's; statuses from 400 are answers too.
func (e *endpoint) do(ctx context.Context, method, path string, header http.Header) (*http.Response, error) {
	if err := e.ping(ctx); err != nil {
		return nil, err
	}
	u := e.base + e.repo + "/" + path
	for again := false; ; again = true {
		h := header.Clone()
		if h == nil {
			h = http.Header{}
		}
		used, err := e.auth.authorize(ctx, e, h)
		if err != nil {
			return nil, err
		}
		resp, err := e.c.send(ctx, e.client, method, u, h)
		if err != nil {
			return nil, err
		}
		// The demand of a server that we were redirected to is not for our credentials.
		if resp.StatusCode != http.StatusUnauthorized || again || resp.Request.URL.Host != e.host {
			return resp, nil
		}
		if !e.auth.challenged(resp, used, e.creds) {
			return resp, nil
		}
		drain(resp.Body)
	}
}

// getting is an error of a GET in the form that net/http gives its own, which are Docker's texts.
func getting(u string, err error) error { return &url.Error{Op: "Get", URL: u, Err: err} }

// timeoutError tells what did not come in the time that was waited.
type timeoutError struct {
	what string
	d    time.Duration
}

func (e *timeoutError) Error() string { return fmt.Sprintf("registry %s within %s", e.what, e.d) }
func (e *timeoutError) Timeout() bool { return true }

// send sends one request and waits for the header of its answer, redirects followed, at most HeaderTimeout.
func (c *Client) send(ctx context.Context, client *http.Client, method, u string, header http.Header) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(c.opts.HeaderTimeout, func() {
		cancel(&timeoutError{"sent no answer", c.opts.HeaderTimeout})
	})
	req, err := http.NewRequestWithContext(ctx, method, u, nil)
	if err != nil {
		timer.Stop()
		cancel(nil)
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Header.Set("User-Agent", c.opts.UserAgent)
	resp, err := client.Do(req)
	timer.Stop()
	if err != nil {
		err = withCause(ctx, err)
		cancel(nil)
		return nil, err
	}
	resp.Body = &body{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, stall: c.opts.StallTimeout}
	return resp, nil
}

// withCause puts the reason of a cancellation in the place of "context canceled", keeping the request's own words.
func withCause(ctx context.Context, err error) error {
	cause := context.Cause(ctx)
	if cause == nil {
		return err
	}
	var ue *url.Error
	if errors.As(err, &ue) {
		return &url.Error{Op: ue.Op, URL: ue.URL, Err: cause}
	}
	return cause
}

// body is an answer's body whose reads are bounded in time.
type body struct {
	io.ReadCloser
	ctx    context.Context
	cancel context.CancelCauseFunc
	stall  time.Duration
	timer  *time.Timer
}

func (b *body) Read(p []byte) (int, error) {
	if b.timer == nil {
		b.timer = time.AfterFunc(b.stall, func() { b.cancel(&timeoutError{"sent no data", b.stall}) })
	} else {
		b.timer.Reset(b.stall)
	}
	n, err := b.ReadCloser.Read(p)
	b.timer.Stop()
	if err != nil && err != io.EOF {
		err = &interrupted{withCause(b.ctx, err)}
	}
	return n, err
}

func (b *body) Close() error {
	if b.timer != nil {
		b.timer.Stop()
	}
	err := b.ReadCloser.Close()
	b.cancel(nil)
	return err
}

// drain reads what little is left of an answer, so that its connection can be used again, and closes it.
func drain(r io.ReadCloser) {
	io.CopyN(io.Discard, r, 64<<10)
	r.Close()
}

// http returns the client for a host. Its redirects never lead from TLS to plain text.
func (c *Client) http(host, scheme string, loose bool) (*http.Client, error) {
	kind := ""
	if scheme == "http" || loose || isLoopback(host) {
		kind = "-"
	} else if c.opts.CertsDir != "" {
		if _, err := os.Stat(filepath.Join(c.opts.CertsDir, host)); err == nil {
			kind = host
		}
	}
	return c.client(host, scheme, loose, kind)
}

// client is http for a kind of verification that is decided.
func (c *Client) client(host, scheme string, loose bool, kind string) (*http.Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.transports[kind]
	if t == nil {
		t = &http.Transport{
			Proxy:                  http.ProxyFromEnvironment,
			DialContext:            (&net.Dialer{Timeout: c.opts.DialTimeout, KeepAlive: 30 * time.Second}).DialContext,
			TLSHandshakeTimeout:    c.opts.DialTimeout,
			ForceAttemptHTTP2:      true,
			DisableCompression:     true, // a blob's digest is that of the bytes as they are sent
			IdleConnTimeout:        15 * time.Second,
			MaxIdleConnsPerHost:    4,
			MaxResponseHeaderBytes: 256 << 10,
			ReadBufferSize:         32 << 10,
		}
		switch kind {
		case "":
		case "-":
			t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} // only hosts declared insecure, and loopback
		default:
			cfg, err := hostTLS(filepath.Join(c.opts.CertsDir, host))
			if err != nil {
				return nil, err
			}
			t.TLSClientConfig = cfg
		}
		c.transports[kind] = t
	}
	return &http.Client{Transport: t, CheckRedirect: func(req *http.Request, via []*http.Request) error {
		if len(via) >= 10 {
			return errors.New("stopped after 10 redirects")
		}
		if scheme == "https" && !loose && req.URL.Scheme != "https" {
			return fmt.Errorf("redirect from https to %s refused", req.URL.Scheme)
		}
		return nil
	}}, nil
}

// hostTLS reads a host's own authorities and client certificate, in the layout of /etc/docker/certs.d.
func hostTLS(dir string) (*tls.Config, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("reading registry certificates: %w", err)
	}
	cfg := &tls.Config{}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		switch filepath.Ext(name) {
		case ".crt":
			pem, err := os.ReadFile(name)
			if err != nil {
				return nil, fmt.Errorf("reading registry certificates: %w", err)
			}
			if cfg.RootCAs == nil {
				if cfg.RootCAs, err = x509.SystemCertPool(); err != nil {
					return nil, fmt.Errorf("reading the system's certificates: %w", err)
				}
			}
			if !cfg.RootCAs.AppendCertsFromPEM(pem) {
				return nil, fmt.Errorf("reading registry certificates: no certificate in %s", name)
			}
		case ".cert":
			pair, err := tls.LoadX509KeyPair(name, strings.TrimSuffix(name, ".cert")+".key")
			if err != nil {
				return nil, fmt.Errorf("reading registry certificates: %w", err)
			}
			cfg.Certificates = append(cfg.Certificates, pair)
		}
	}
	return cfg, nil
}

// isInsecure tells whether host may be spoken to without verified TLS: it is declared so by name, or it is an address
// of a declared network or of loopback, or a name of such an address.
func (c *Client) isInsecure(ctx context.Context, host string) bool {
	if isLoopback(host) || c.hosts[strings.ToLower(host)] {
		return true
	}
	if host == dockerHub {
		return false
	}
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	if c.hosts[strings.ToLower(name)] {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", strings.Trim(name, "[]"))
	if err != nil {
		return false // the dial will tell
	}
	for _, ip := range ips {
		ip = ip.Unmap()
		if ip.IsLoopback() {
			return true
		}
		for _, n := range c.networks {
			if n.Contains(ip) {
				return true
			}
		}
	}
	return false
}

func isLoopback(host string) bool {
	name := host
	if h, _, err := net.SplitHostPort(host); err == nil {
		name = h
	}
	if name == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(strings.Trim(name, "[]"))
	return err == nil && ip.Unmap().IsLoopback()
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}
