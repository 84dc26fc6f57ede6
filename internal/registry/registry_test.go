package registry

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/reference"
	rt "runkiri.com/kiri/internal/registry/registrytest"
)

func named(t testing.TB, s string) reference.Named {
	t.Helper()
	ref, err := reference.ParseNormalizedNamed(s)
	if err != nil {
		t.Fatal(err)
	}
	return reference.TagNameOnly(ref)
}

func TestChallenges(t *testing.T) {
	type m = map[string]string
	for _, c := range []struct {
		in   []string
		want []challenge
	}{
		{[]string{`Basic realm="x"`}, []challenge{{"basic", m{"realm": "x"}}}},
		{[]string{`Bearer realm="https://a/t?x=1,2",service="s", scope="repository:a/b:pull,push"`}, []challenge{{"bearer", m{"realm": "https://a/t?x=1,2", "service": "s", "scope": "repository:a/b:pull,push"}}}},
		{[]string{`Negotiate, Basic realm=x, Bearer realm = "y"`}, []challenge{{"negotiate", m{}}, {"basic", m{"realm": "x"}}, {"bearer", m{"realm": "y"}}}},
		{[]string{`Basic`, `bearer realm="a\"b"`}, []challenge{{"basic", m{}}, {"bearer", m{"realm": `a"b`}}}},
		{[]string{`Bearer realm="open`}, []challenge{{"bearer", m{"realm": "open"}}}},
		{[]string{`= , "" x`, ``}, nil},
	} {
		if got := challenges(c.in); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%q: %v, want %v", c.in, got, c.want)
		}
	}
}

func FuzzChallenges(f *testing.F) {
	f.Add(`Bearer realm="https://a/t",service="s", Basic x=`)
	f.Fuzz(func(t *testing.T, s string) {
		for _, c := range challenges([]string{s}) {
			if c.scheme == "" || c.params == nil {
				t.Errorf("%q: %v", s, c)
			}
		}
	})
}

func TestPlatforms(t *testing.T) {
	for in, want := range map[string]string{
		"linux": "linux/amd64", "linux/x86_64": "linux/amd64", "aarch64": "linux/arm64", "linux/arm64/v8": "linux/arm64", "arm": "linux/arm/v7",
		"linux/arm/6": "linux/arm/v6", "Linux/AMD64": "linux/amd64", "windows/amd64": "windows/amd64", "386": "linux/386",
	} {
		p, err := ParsePlatform(in, "amd64")
		if err != nil || FormatPlatform(p) != want {
			t.Errorf("%s: %s, %v, want %s", in, FormatPlatform(p), err, want)
		}
	}
	for _, in := range []string{"", "/", "a/b/c/d", "li nux", "linux/", "nosuch", "linux/amd64\n"} {
		if p, err := ParsePlatform(in, "amd64"); !cerrdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v, %v", in, p, err)
		}
	}
	for _, c := range []struct {
		want, have string
		rank       int
	}{
		{"linux/amd64", "linux/amd64", 0}, {"linux/amd64", "linux/386", 1}, {"linux/amd64", "linux/amd64/v3", -1}, {"linux/amd64/v3", "linux/amd64/v2", 1},
		{"linux/arm64", "linux/arm64/v8", 0}, {"linux/arm64", "linux/arm/v7", 2}, {"linux/arm/v6", "linux/arm/v7", -1}, {"linux/arm/v7", "linux/arm/v6", 1},
		{"linux/amd64", "windows/amd64", -1}, {"linux/386", "linux/amd64", -1},
	} {
		want, err1 := ParsePlatform(c.want, "amd64")
		have, err2 := ParsePlatform(c.have, "amd64")
		if err1 != nil || err2 != nil || Rank(want, have) != c.rank {
			t.Errorf("%s on %s: %d, want %d", c.have, c.want, Rank(want, have), c.rank)
		}
	}
}

func FuzzParseManifest(f *testing.F) {
	d := `"digest":"sha256:` + strings.Repeat("a", 64) + `","size":3`
	f.Add(ocispec.MediaTypeImageManifest, []byte(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.image.config.v1+json",`+d+`},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar",`+d+`}]}`))
	f.Add("", []byte(`{"schemaVersion":2,"manifests":[{"mediaType":"application/vnd.oci.image.manifest.v1+json",`+d+`,"platform":{"os":"linux","architecture":"amd64"}}]}`))
	f.Add(mediaTypeSchema1, []byte(`{"schemaVersion":1,"fsLayers":[]}`))
	f.Fuzz(func(t *testing.T, kind string, raw []byte) {
		m, err := ParseManifest(kind, raw)
		if err != nil {
			if !cerrdefs.IsInvalidArgument(err) {
				t.Errorf("not called invalid: %v", err)
			}
			return
		}
		if (m.Image == nil) == (m.Index == nil) {
			t.Fatalf("neither or both: %s", raw)
		}
		if m.Index != nil {
			for _, d := range Candidates(m.Index, DefaultPlatform("amd64")) {
				if d.Digest.Validate() != nil || d.Size < 0 {
					t.Errorf("bad descriptor passed: %+v", d)
				}
			}
			return
		}
		for _, d := range append(m.Image.Layers, m.Image.Config) {
			if d.Digest.Validate() != nil || strings.ContainsAny(d.Digest.Encoded(), "/.") || d.Size < 0 {
				t.Errorf("bad descriptor passed: %+v", d)
			}
		}
	})
}

// FuzzAnswers feeds a client what a hostile server may send: header and body of every answer.
func FuzzAnswers(f *testing.F) {
	f.Add(200, "Docker-Content-Digest", "sha256:x", []byte("{}"))
	f.Add(401, "WWW-Authenticate", `Bearer realm="x"`, []byte(`{"errors":[{"code":"A","message":"b"}]}`))
	f.Add(206, "Content-Range", "bytes 5-", []byte("abc"))
	f.Add(302, "Location", "://", []byte(""))
	f.Fuzz(func(t *testing.T, status int, key, val string, body []byte) {
		if status < 200 || status > 599 {
			return
		}
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set(key, val)
			w.WriteHeader(status)
			w.Write(body)
		}))
		defer s.Close()
		c, err := New(Options{Retries: 1, HeaderTimeout: time.Second, StallTimeout: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer c.CloseIdle()
		ref := named(t, strings.TrimPrefix(s.URL, "http://")+"/x:1")
		r, err := c.Repository(ref, registry.AuthConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if d, err := r.Resolve(context.Background(), ref); err == nil {
			r.Manifest(context.Background(), d)
		}
		r.Tags(context.Background())
		n := 0
		want := ocispec.Descriptor{Digest: ocispec.DescriptorEmptyJSON.Digest, Size: 10}
		err = r.Blob(context.Background(), want, 3, func(p []byte) error { n += len(p); return nil })
		if err == nil && n != 7 || n > 7 {
			t.Errorf("%d bytes were given on, %v", n, err)
		}
	})
}

// TestTLS speaks to registries with certificates that are known, unknown, and not asked for.
func TestTLS(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "redirect") {
			http.Redirect(w, r, "http://example.invalid/", http.StatusFound)
			return
		}
		if r.URL.Path != "/v2/" {
			w.Write([]byte(`{"tags":["one"]}`))
		}
	}))
	defer s.Close()
	port := s.URL[strings.LastIndex(s.URL, ":"):]
	// Loopback is not verified; to test verification the endpoint is set up as for a host elsewhere.
	ask := func(o Options, host, repo string) error {
		o.Retries = 1
		c, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		defer c.CloseIdle()
		r, err := c.Repository(named(t, host+"/"+repo), registry.AuthConfig{})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range r.endpoints {
			if o.CertsDir != "" {
				client, err := c.client(e.host, "https", false, e.host)
				if err != nil {
					return err
				}
				e.base, e.client = "https://"+e.host+"/v2/", client
			}
		}
		tags, err := r.Tags(context.Background())
		if err == nil && !slices.Equal(tags, []string{"one"}) {
			t.Errorf("tags %v", tags)
		}
		return err
	}
	if err := ask(Options{}, "127.0.0.1"+port, "x"); err != nil {
		t.Errorf("loopback with TLS: %v", err)
	}
	certs := t.TempDir()
	dir := filepath.Join(certs, "127.0.0.1"+port)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := ask(Options{CertsDir: certs}, "127.0.0.1"+port, "x"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an unknown authority: %v", err)
	}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), ca, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ask(Options{CertsDir: certs}, "127.0.0.1"+port, "x"); err != nil {
		t.Errorf("a known authority: %v", err)
	}
	if err := ask(Options{CertsDir: certs}, "127.0.0.1"+port, "redirect"); err == nil || !strings.Contains(err.Error(), "redirect from https to http refused") {
		t.Errorf("a redirect out of TLS: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := ask(Options{CertsDir: certs}, "127.0.0.1"+port, "x"); err == nil || !strings.Contains(err.Error(), "no certificate in") {
		t.Errorf("a broken authority: %v", err)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{Insecure: []string{"http://x"}}, {Insecure: []string{""}}, {Insecure: []string{"a b"}}, {Mirrors: []string{"x"}}, {Mirrors: []string{"ftp://x"}}, {Mirrors: []string{"http://u:p@x"}}} {
		if _, err := New(o); !cerrdefs.IsInvalidArgument(err) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	c, err := New(Options{Insecure: []string{"10.0.0.0/8", "My.Registry:5000", "plain"}})
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"localhost:5000": true, "127.0.0.9": true, "[::1]:80": true, "10.1.2.3:5000": true, "my.registry:5000": true, "plain:77": true,
		"11.1.2.3": false, "registry-1.docker.io": false, "my.registry.invalid:5001": false,
	} {
		if got := c.isInsecure(context.Background(), host); got != want {
			t.Errorf("%s: insecure %t, want %t", host, got, want)
		}
	}
}

// TestMirrors asks mirrors first, without credentials, and falls back.
func TestMirrors(t *testing.T) {
	addr := rt.Start(t)
	img := rt.Image(t, false, nil, rt.GzipLayer(rt.File{Name: "a", Body: []byte("1")}))
	rt.Push(t, addr+"/library/x:1", img)
	front := rt.NewFront(t, addr)
	dead := rt.NewFront(t, addr)
	var asked string
	dead.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
		asked += r.Header.Get("Authorization")
		w.WriteHeader(http.StatusNotFound)
		return true
	}
	c, err := New(Options{Mirrors: []string{"http://" + dead.Addr, "http://" + front.Addr + "/"}, Retries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdle()
	ref := named(t, "x:1")
	r, err := c.Repository(ref, registry.AuthConfig{Username: "me", Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	d, err := r.Resolve(context.Background(), ref)
	if err != nil || d.Digest.String() != rt.Digest(t, img) {
		t.Errorf("resolved to %+v, %v", d, err)
	}
	if dead.Asked("manifests") == 0 || front.Asked("manifests") == 0 || asked != "" {
		t.Errorf("mirrors were asked %d and %d times, with %q", dead.Asked(""), front.Asked(""), asked)
	}
}

func TestLogin(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); u != "me" || p != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(401)
		}
	}))
	defer s.Close()
	c, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdle()
	if status, err := c.Login(context.Background(), registry.AuthConfig{Username: "me", Password: "secret", ServerAddress: s.URL + "/v1/"}); err != nil || status != "Login Succeeded" {
		t.Errorf("%q, %v", status, err)
	}
	_, err = c.Login(context.Background(), registry.AuthConfig{Username: "me", Password: "guess", ServerAddress: s.URL})
	if !cerrdefs.IsUnauthorized(err) || !strings.HasSuffix(err.Error(), "unauthorized: incorrect username or password") {
		t.Errorf("a wrong password: %v", err)
	}
}

// TestTransient sorts failures: which are tried again.
func TestTransient(t *testing.T) {
	get := func(err error) error { return fmt.Errorf("fetching: %w", getting("http://x/", err)) }
	for _, c := range []struct {
		err  error
		want bool
	}{
		{get(errNoCredentials), false},
		{get(&tls.CertificateVerificationError{Err: errors.New("unknown")}), false},
		{get(errors.New("stopped after 10 redirects")), false},
		{get(context.Canceled), false},
		{get(&net.DNSError{IsNotFound: true}), false},
		{get(&net.DNSError{IsTemporary: true}), true},
		{get(&net.OpError{Op: "read", Err: syscall.ECONNRESET}), true},
		{get(errors.New("http2: client connection lost")), true},
		{get(errors.New("stream error: stream ID 3; INTERNAL_ERROR")), true},
		{get(io.EOF), true},
		{get(&timeoutError{"sent no answer", time.Second}), true},
		{fmt.Errorf("reading: %w", &interrupted{errors.New("stream error")}), true},
		{&ResponseError{Status: 503}, true}, {&ResponseError{Status: 404}, false}, {&ResponseError{Status: 429}, false},
		{&ResponseError{Status: 429, RetryAfter: time.Second}, true}, {&ResponseError{Status: 429, RetryAfter: time.Hour}, false},
	} {
		if got := transient(c.err); got != c.want {
			t.Errorf("%v: %t, want %t", c.err, got, c.want)
		}
	}
}

func TestCredentials(t *testing.T) {
	for _, a := range []registry.AuthConfig{{Auth: "%%"}, {Auth: "bm9jb2xvbg=="}} {
		if _, err := credentialsOf(a); !cerrdefs.IsInvalidArgument(err) {
			t.Errorf("%+v: %v", a, err)
		}
	}
}

// TestTagsPages follows a list of tags over its pages, and not off the server.
func TestTagsPages(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.RawQuery {
		case "":
			if strings.HasSuffix(r.URL.Path, "/tags/list") {
				w.Header().Set("Link", `<http://elsewhere.invalid/v2/y/tags/list?last=a&n=1>; rel="next"`)
				w.Write([]byte(`{"tags":["a"]}`))
			}
		case "last=a&n=1":
			w.Write([]byte(`{"tags":["b"]}`))
		}
	}))
	defer s.Close()
	c, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdle()
	r, err := c.Repository(named(t, strings.TrimPrefix(s.URL, "http://")+"/x"), registry.AuthConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if tags, err := r.Tags(context.Background()); err != nil || !slices.Equal(tags, []string{"a", "b"}) {
		t.Errorf("tags %v, %v", tags, err)
	}
}
