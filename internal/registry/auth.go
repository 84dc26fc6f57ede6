package registry

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/registry"
)

// maxToken is the largest answer of a token server in bytes; tokens of some clouds have tens of KiB.
const maxToken = 1 << 20

// errNoCredentials has Docker's text.
var errNoCredentials = errors.New("no basic auth credentials")

type credentials struct{ username, password, identity, token string }

func (c credentials) empty() bool { return c == credentials{} }

// credentialsOf reads the X-Registry-Auth header's value, in all the forms that clients send.
func credentialsOf(a registry.AuthConfig) (credentials, error) {
	c := credentials{username: a.Username, password: a.Password, identity: a.IdentityToken, token: a.RegistryToken}
	if c.username == "" && a.Auth != "" {
		b, err := base64.StdEncoding.DecodeString(a.Auth)
		if err != nil {
			return c, bad("credentials: field auth is not base64")
		}
		user, pass, ok := strings.Cut(string(b), ":")
		if !ok {
			return c, bad("credentials: field auth is not user:password")
		}
		c.username, c.password = user, strings.TrimRight(pass, "\x00")
	}
	return c, nil
}

// auth is the state of the authentication with one endpoint.
type auth struct {
	mu    sync.Mutex
	kind  string // "", "basic" or "bearer"
	realm string
	param url.Values // service, and scope if the server named one
	safe  bool       // credentials may only be sent over TLS

	token   string
	expires time.Time
}

// begin reads the demand in the answer to a ping.
func (a *auth) begin(resp *http.Response, safe bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.safe = safe
	if resp.StatusCode == http.StatusUnauthorized {
		a.take(resp.Header)
	}
}

// take takes over the demand of a header; a bearer token is preferred to the password itself.
func (a *auth) take(h http.Header) bool {
	var found bool
	for _, c := range challenges(h.Values("WWW-Authenticate")) {
		switch {
		case c.scheme == "bearer" && c.params["realm"] != "":
			a.kind, a.realm = "bearer", c.params["realm"]
			a.param = url.Values{}
			for _, k := range []string{"service", "scope"} {
				if c.params[k] != "" {
					a.param.Set(k, c.params[k])
				}
			}
			return true
		case c.scheme == "basic" && !found:
			a.kind, found = "basic", true
		}
	}
	return found
}

// authorize sets the header of a request. used is what was sent, to tell a refused token from one that another
// request has replaced meanwhile.
func (a *auth) authorize(ctx context.Context, e *endpoint, h http.Header) (used string, err error) {
	if e.creds.token != "" {
		h.Set("Authorization", "Bearer "+e.creds.token)
		return e.creds.token, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch a.kind {
	case "basic":
		if e.creds.username == "" {
			return "", getting(e.base, errNoCredentials)
		}
		h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(e.creds.username+":"+e.creds.password)))
	case "bearer":
		if a.token == "" || time.Now().After(a.expires) {
			if err := a.fetch(ctx, e); err != nil {
				return "", err
			}
		}
		h.Set("Authorization", "Bearer "+a.token)
		return a.token, nil
	}
	return "", nil
}

// challenged takes a 401 in: true if another try has a chance.
func (a *auth) challenged(resp *http.Response, used string, creds credentials) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if creds.token != "" {
		return false
	}
	if used != "" && used != a.token {
		return true // replaced meanwhile
	}
	was := a.kind
	if !a.take(resp.Header) {
		return false
	}
	a.token = ""
	// A password that was refused is refused again; a token may have run out, or lacked the scope named now.
	return was == "" || a.kind == "bearer"
}

// fetch gets a token. a.mu is held.
func (a *auth) fetch(ctx context.Context, e *endpoint) error {
	realm, err := url.Parse(a.realm)
	if err != nil || realm.Scheme != "http" && realm.Scheme != "https" || realm.Host == "" {
		return fmt.Errorf("registry names %q as its token server, which is no URL", a.realm)
	}
	if realm.Scheme == "http" && a.safe && !e.creds.empty() {
		return fmt.Errorf("credentials are not sent to %s: the token server of a registry with TLS must have TLS too", realm.Host)
	}
	client, err := e.c.http(realm.Host, realm.Scheme, e.c.isInsecure(ctx, realm.Host))
	if err != nil {
		return err
	}
	q := realm.Query()
	for k, v := range a.param {
		q[k] = v
	}
	if e.repo != "" {
		q.Set("scope", "repository:"+e.repo+":pull")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, e.c.opts.HeaderTimeout, &timeoutError{"sent no token", e.c.opts.HeaderTimeout})
	defer cancel()
	var req *http.Request
	if e.creds.identity != "" {
		q.Set("grant_type", "refresh_token")
		q.Set("refresh_token", e.creds.identity)
		q.Set("client_id", e.c.opts.UserAgent)
		req, err = http.NewRequestWithContext(ctx, http.MethodPost, realm.String(), strings.NewReader(q.Encode()))
		if err == nil {
			req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		}
	} else {
		if e.creds.username != "" {
			q.Set("account", e.creds.username)
		}
		realm.RawQuery = q.Encode()
		req, err = http.NewRequestWithContext(ctx, http.MethodGet, realm.String(), nil)
		if err == nil && e.creds.username != "" {
			req.SetBasicAuth(e.creds.username, e.creds.password)
		}
	}
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", e.c.opts.UserAgent)
	resp, err := client.Do(req)
	if err != nil {
		return withCause(ctx, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		rerr := responseError(resp)
		if rerr.Code == "" && (resp.StatusCode == http.StatusUnauthorized || resp.StatusCode == http.StatusForbidden) {
			rerr.Code, rerr.Message = "UNAUTHORIZED", "incorrect username or password"
			if e.creds.empty() {
				rerr.Message = "authentication required"
			}
		}
		return &url.Error{Op: req.Method[:1] + strings.ToLower(req.Method[1:]), URL: resp.Request.URL.Redacted(), Err: rerr}
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxToken+1))
	if err != nil {
		return fmt.Errorf("reading the token of %s: %w", realm.Host, withCause(ctx, err))
	}
	var t struct {
		Token       string `json:"token"`
		AccessToken string `json:"access_token"` // the name in OAuth 2
		ExpiresIn   int    `json:"expires_in"`
	}
	if len(b) > maxToken || json.Unmarshal(b, &t) != nil {
		return fmt.Errorf("reading the token of %s: not the answer of a token server", realm.Host)
	}
	if t.Token == "" {
		t.Token = t.AccessToken
	}
	if t.Token == "" || strings.ContainsAny(t.Token, "\r\n") {
		return fmt.Errorf("reading the token of %s: authorization server did not include a token in the response", realm.Host)
	}
	life := time.Duration(t.ExpiresIn) * time.Second
	if t.ExpiresIn <= 0 || t.ExpiresIn > 86400 { // 60 s is the specification's default
		life = time.Minute
	}
	a.token, a.expires = t.Token, time.Now().Add(life*9/10)
	return nil
}

// Login checks credentials against a registry, as `docker login` asks. The status is Docker's.
func (c *Client) Login(ctx context.Context, a registry.AuthConfig) (status string, err error) {
	creds, err := credentialsOf(a)
	if err != nil {
		return "", err
	}
	host := a.ServerAddress
	if _, rest, ok := strings.Cut(host, "://"); ok {
		host = rest
	}
	host, _, _ = strings.Cut(host, "/")
	if host == "" || host == "docker.io" || host == "index.docker.io" {
		host = dockerHub
	}
	e := c.endpoint(host, "", nil, "", creds)
	if err := e.ping(ctx); err != nil {
		return "", err
	}
	h := http.Header{}
	if _, err = e.auth.authorize(ctx, e, h); err == nil {
		var resp *http.Response
		if resp, err = c.send(ctx, e.client, http.MethodGet, e.base, h); err == nil {
			defer resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return "Login Succeeded", nil
			}
			rerr := responseError(resp)
			if rerr.Status == http.StatusUnauthorized {
				rerr.Code, rerr.Message = "UNAUTHORIZED", "incorrect username or password"
			}
			err = getting(e.base, rerr)
		}
	}
	var rerr *ResponseError
	if errors.As(err, &rerr) && rerr.Status == http.StatusUnauthorized {
		return "", cerrdefs.ErrUnauthenticated.WithMessage(err.Error())
	}
	return "", err
}

type challenge struct {
	scheme string // lower case
	params map[string]string
}

// challenges reads WWW-Authenticate headers (RFC 9110, 11.6.1): one value may hold several challenges.
func challenges(values []string) []challenge {
	var list []challenge
	for _, v := range values {
		for v = strings.TrimLeft(v, " \t,"); v != ""; v = strings.TrimLeft(v, " \t,") {
			word, rest := token(v)
			if word == "" {
				break
			}
			if p, ok := strings.CutPrefix(strings.TrimLeft(rest, " \t"), "="); ok && len(list) > 0 {
				var val string
				val, v = value(strings.TrimLeft(p, " \t"))
				list[len(list)-1].params[strings.ToLower(word)] = val
				continue
			}
			list = append(list, challenge{strings.ToLower(word), map[string]string{}})
			v = rest
		}
	}
	return list
}

func token(s string) (word, rest string) {
	i := strings.IndexAny(s, " \t,=\"")
	if i < 0 {
		return s, ""
	}
	return s[:i], s[i:]
}

func value(s string) (val, rest string) {
	if !strings.HasPrefix(s, `"`) {
		return token(s)
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '\\':
			if i++; i < len(s) {
				b.WriteByte(s[i])
			}
		case '"':
			return b.String(), s[i+1:]
		default:
			b.WriteByte(s[i])
		}
	}
	return b.String(), ""
}
