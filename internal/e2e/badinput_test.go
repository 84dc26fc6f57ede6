package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// raw sends one request over the daemon's socket and returns the status and the message of the answer.
func (d *daemon) raw(method, path, body string) (int, string) {
	d.t.Helper()
	c := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", d.Socket)
	}, DisableKeepAlives: true}, Timeout: 30 * time.Second}
	req, err := http.NewRequest(method, "http://d"+path, strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.Do(req)
	if err != nil {
		d.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	var m struct{ Message string }
	if err := json.Unmarshal(b, &m); err != nil || m.Message == "" {
		return resp.StatusCode, string(b)
	}
	return resp.StatusCode, m.Message
}

func TestBadInput(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	d.must("create", "--name", "taken", ref, "true")
	for _, c := range []struct {
		name, method, path, body string
		status                   int
		says                     string
	}{
		{"malformed JSON", "POST", "/containers/create", `{"Image":`, 400, ""},
		{"two values", "POST", "/containers/create", `{"Image":"x"}{"Image":"y"}`, 400, ""},
		{"wrong type", "POST", "/containers/create", `{"Image":7}`, 400, "cannot unmarshal number"},
		{"no image there", "POST", "/containers/create", `{"Image":"nosuch:1"}`, 404, "No such image: nosuch:1"},
		{"bad reference", "POST", "/containers/create", `{"Image":"UPPER"}`, 400, "invalid reference format"},
		{"no command", "POST", "/containers/create", `{"Image":"` + ref + `","Cmd":[],"Entrypoint":[""]}`, 400, "no command specified"},
		{"name in use", "POST", "/containers/create?name=taken", `{"Image":"` + ref + `"}`, 409, `Conflict. The container name "/taken" is already in use by container`},
		{"bad name", "POST", "/containers/create?name=a/b", `{"Image":"` + ref + `"}`, 400, "Invalid container name (a/b), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed"},
		{"mount source missing", "POST", "/containers/create", `{"Image":"` + ref + `","HostConfig":{"Mounts":[{"Type":"bind","Source":"/no/such/dir","Target":"/x"}]}}`, 400, "bind source path does not exist: /no/such/dir"},
		{"relative target", "POST", "/containers/create", `{"Image":"` + ref + `","HostConfig":{"Binds":["/tmp:x"]}}`, 400, ""},
		{"no container", "POST", "/containers/nosuch/start", "", 404, "No such container: nosuch"},
		{"no exec", "POST", "/exec/nosuch/start", "{}", 404, "No such exec instance: nosuch"},
		{"bad signal", "POST", "/containers/taken/kill?signal=NOSUCH", "", 400, "invalid signal: NOSUCH"},
		{"not running", "POST", "/containers/taken/kill", "", 409, "is not running"},
		{"unknown route", "GET", "/nosuch", "", 404, "page not found"},
		{"version too old", "GET", "/v1.23/info", "", 400, "too old"},
		{"version too new", "GET", "/v9.99/info", "", 400, "too new"},
		{"not built", "GET", "/swarm", "", 501, "not supported by kiri yet"},
		{"pull bad reference", "POST", "/images/create?fromImage=UPPER", "", 400, "invalid reference format"},
		{"memory too small", "POST", "/containers/create", `{"Image":"` + ref + `","HostConfig":{"Memory":1024}}`, 400, "Minimum memory limit allowed is 6MB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			start := time.Now()
			status, says := d.raw(c.method, c.path, c.body)
			if status != c.status || !strings.Contains(says, c.says) {
				t.Errorf("%d %q, want %d %q", status, says, c.status, c.says)
			}
			if took := time.Since(start); took > 5*time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
	d.must("rm", "taken")
	if out := d.must("ps", "-aq"); out != "" {
		t.Errorf("records left by refused requests: %q", out)
	}
}

// TestBadRegistry pulls from servers that lie, hang or break: a clear error each, quickly, and nothing kept.
func TestBadRegistry(t *testing.T) {
	var layer bytes.Buffer
	z := gzip.NewWriter(&layer)
	z.Write(tarOf(t, file{Name: "f", Mode: 0o644, Body: bytes.Repeat([]byte("x"), 1<<16)}))
	z.Close()
	digest := func(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }
	config := []byte(`{"architecture":"amd64","os":"linux","config":{},"rootfs":{"type":"layers","diff_ids":["sha256:` + strings.Repeat("0", 64) + `"]}}`)
	manifest, _ := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": map[string]any{"mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest(config), "size": len(config)},
		"layers": []any{map[string]any{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest(layer.Bytes()), "size": layer.Len()}},
	})
	serve := func(blob func(w http.ResponseWriter)) *httptest.Server {
		return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case strings.Contains(r.URL.Path, "/manifests/"):
				w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
				w.Header().Set("Docker-Content-Digest", digest(manifest))
				w.Write(manifest)
			case strings.HasSuffix(r.URL.Path, digest(config)):
				w.Write(config)
			case strings.Contains(r.URL.Path, "/blobs/"):
				blob(w)
			}
		}))
	}
	d := startDaemon(t)
	for _, c := range []struct {
		name string
		blob func(w http.ResponseWriter)
	}{
		{"wrong diff id", func(w http.ResponseWriter) { w.Write(layer.Bytes()) }},
		{"corrupt blob", func(w http.ResponseWriter) {
			b := bytes.Clone(layer.Bytes())
			b[len(b)/2] ^= 0xff
			w.Write(b)
		}},
		{"cut short", func(w http.ResponseWriter) {
			w.Header().Set("Content-Length", fmt.Sprint(layer.Len()))
			w.Write(layer.Bytes()[:layer.Len()/2])
		}},
		{"not there", func(w http.ResponseWriter) { w.WriteHeader(404) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(c.blob)
			defer s.Close()
			r := d.docker("pull", strings.TrimPrefix(s.URL, "http://")+"/bad:1")
			if r.Code == 0 || r.Err == "" {
				t.Errorf("pull: %+v", r)
			}
			t.Logf("%s", strings.TrimSpace(r.Err))
			if out := d.must("images", "-aq"); out != "" {
				t.Errorf("an image was kept: %s", out)
			}
		})
	}
	t.Run("connection refused", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		addr := l.Addr().String()
		l.Close()
		if r := d.docker("pull", addr+"/x"); r.Code == 0 || !strings.Contains(r.Err, "connection refused") {
			t.Errorf("pull: %+v", r)
		}
	})
	t.Run("no such image", func(t *testing.T) {
		r := d.docker("pull", startRegistry(t)+"/no/such:tag")
		if r.Code == 0 || !strings.Contains(r.Err, "not found") && !strings.Contains(r.Err, "manifest unknown") {
			t.Errorf("pull: %+v", r)
		}
	})
	// A pull that failed is answered at once; the agent takes the half layer away right after.
	half := filepath.Join(d.Home, "data", "layers", "+*")
	eventually(t, 5*time.Second, "half layers gone", func() bool {
		left, err := filepath.Glob(half)
		return err == nil && len(left) == 0
	})
	whole, err := filepath.Glob(filepath.Join(d.Home, "data", "layers", "[0-9]*"))
	if err != nil || len(whole) > 0 {
		t.Errorf("layers of refused images were kept: %v, %v", whole, err)
	}
}
