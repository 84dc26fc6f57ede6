package engine

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/moby/moby/api/types/jsonstream"
	mobyregistry "github.com/moby/moby/api/types/registry"
	"github.com/opencontainers/go-digest"

	rt "runkiri.com/kiri/internal/registry/registrytest"
)

func blobOf(t testing.TB, l v1.Layer) string {
	t.Helper()
	d, err := l.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return d.String()
}

// TestPullResumes is BR-73: one layer breaks near its end, always; what came is never fetched again, where the server
// can send parts.
func TestPullResumes(t *testing.T) {
	addr := rt.Start(t)
	const size = 3 << 20
	layers := []rt.Layer{}
	for i := range 4 {
		layers = append(layers, rt.GzipLayer(rt.File{Name: fmt.Sprintf("f%d", i), Body: rt.Random(uint64(i+10), size)}))
	}
	img := rt.Image(t, false, nil, layers...)
	rt.Push(t, addr+"/big:1", img)
	bad := blobOf(t, layers[2])
	for _, noRange := range []bool{false, true} {
		t.Run(fmt.Sprintf("norange=%t", noRange), func(t *testing.T) {
			b := newImages(t)
			front := rt.NewFront(t, addr)
			front.NoRange = noRange
			var cut atomic.Bool
			cut.Store(true)
			var first atomic.Bool
			front.Cut = func(r *http.Request) int64 {
				if !cut.Load() || !strings.HasSuffix(r.URL.Path, bad) {
					return -1
				}
				if noRange || first.CompareAndSwap(false, true) {
					return size * 9 / 10
				}
				return 0 // the server is broken for good
			}
			// The broken one comes last, so that there is a finished one to be kept.
			finished := digest.Digest(blobOf(t, layers[0]))
			front.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
				if cut.Load() && strings.HasSuffix(r.URL.Path, bad) {
					until(t, "the first layer", func() bool { return b.s.content.has(finished) })
				}
				return false
			}
			ref := front.Addr + "/big:1"
			if _, err := b.pull(ref, PullOptions{}); err == nil || !strings.Contains(err.Error(), "unexpected EOF") && !strings.Contains(err.Error(), "connection reset") {
				t.Fatalf("a pull whose layer always breaks: %v", err)
			}
			if _, err := b.s.resolve(ref, ""); !cerrdefs.IsNotFound(err) {
				t.Errorf("the image is there: %v", err)
			}
			b.reopen() // what was brought outlives the daemon
			du, err := b.s.diskUsage(false)
			if err != nil || du.TotalSize < 2*size || du.Reclaimable != du.TotalSize {
				t.Errorf("disk usage of the kept parts: %+v, %v", du, err)
			}
			cut.Store(false)
			front.Reset()
			b.mustPull(ref)
			limit := int64(size/10 + 64<<10)
			if noRange {
				limit = size + 64<<10
			}
			if n := front.Sent("/blobs/" + bad); n > limit {
				t.Errorf("%d bytes of the broken layer were fetched again, the limit is %d", n, limit)
			}
			if n := front.Sent("/blobs/" + blobOf(t, layers[0])); n > 0 {
				t.Errorf("%d bytes of a finished layer were fetched again", n)
			}
			if got := b.read(ref, "f2"); got != string(rt.Random(12, size)[:len(got)]) || len(got) == 0 {
				t.Error("the image holds something else")
			}
		})
	}
}

// TestPullResetOnce breaks each layer's connection once: the pull goes on by itself and fetches nothing twice.
func TestPullResetOnce(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	front := rt.NewFront(t, addr)
	const size = 2 << 20
	l := rt.GzipLayer(rt.File{Name: "f", Body: rt.Random(7, size)})
	rt.Push(t, addr+"/x:1", rt.Image(t, false, nil, l))
	var n atomic.Int32
	front.Cut = func(r *http.Request) int64 {
		if strings.HasSuffix(r.URL.Path, blobOf(t, l)) && n.Add(1) <= 3 {
			return 500 << 10
		}
		return -1
	}
	b.mustPull(front.Addr + "/x:1")
	blobSize, _ := l.Size()
	// What was on its way when a connection broke may be lost: at most the socket buffers.
	if sent := front.Sent(blobOf(t, l)); sent < blobSize || sent > blobSize+3*(256<<10) {
		t.Errorf("%d bytes were sent for a blob of %d", sent, blobSize)
	}
}

// TestPullsShare runs many pulls of one image at once: each blob is asked for once, each layer unpacked once.
func TestPullsShare(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	front := rt.NewFront(t, addr)
	l1, l2 := rt.GzipLayer(rt.File{Name: "a", Body: rt.Random(3, 1<<20)}), rt.GzipLayer(rt.File{Name: "b", Body: rt.Random(4, 1<<20)})
	rt.Push(t, addr+"/x:1", rt.Image(t, false, nil, l1, l2))
	rt.Push(t, addr+"/y:1", rt.Image(t, true, func(c *v1.ConfigFile) { c.Author = "y" }, l1, l2))
	// The first answer of a layer is held back until all pulls are there.
	var wg sync.WaitGroup
	start := make(chan struct{})
	front.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, blobOf(t, l1)) {
			<-start
		}
		return false
	}
	const pulls = 6
	errs := make(chan error, pulls)
	for i := range pulls {
		wg.Go(func() {
			_, err := b.pull(front.Addr+[]string{"/x:1", "/y:1"}[i%2], PullOptions{})
			errs <- err
		})
	}
	until(t, "all pulls to want the layer", func() bool {
		b.s.mu.Lock()
		defer b.s.mu.Unlock()
		n := 0
		for key, f := range b.s.flights {
			if key[0].String() == blobOf(t, l1) {
				n += f.refs
			}
		}
		return n == pulls
	})
	close(start)
	wg.Wait()
	for range pulls {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for _, l := range []rt.Layer{l1, l2} {
		if n := front.Asked("GET /v2/x/blobs/"+blobOf(t, l)) + front.Asked("GET /v2/y/blobs/"+blobOf(t, l)); n != 1 {
			t.Errorf("a layer was asked for %d times", n)
		}
	}
	if len(b.layers.unpacks) != 2 {
		t.Errorf("unpacked: %v", b.layers.unpacks)
	}
	// One client that leaves does not end the others' pull.
	if n := len(b.s.flights); n != 0 {
		t.Errorf("%d flights are left", n)
	}
}

// TestPullShareLeave cancels the pull that began a layer while another wants it too.
func TestPullShareLeave(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	front := rt.NewFront(t, addr)
	l := rt.GzipLayer(rt.File{Name: "a", Body: rt.Random(3, 1<<20)})
	rt.Push(t, addr+"/x:1", rt.Image(t, false, nil, l))
	start := make(chan struct{})
	front.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, blobOf(t, l)) {
			<-start
		}
		return false
	}
	refs := func() int {
		b.s.mu.Lock()
		defer b.s.mu.Unlock()
		for _, f := range b.s.flights {
			return f.refs
		}
		return 0
	}
	ctx, cancel := context.WithCancel(context.Background())
	first, second := make(chan error, 1), make(chan error, 1)
	go func() { _, err := b.pullCtx(ctx, front.Addr+"/x:1", PullOptions{}); first <- err }()
	until(t, "the first pull", func() bool { return refs() == 1 })
	go func() { _, err := b.pull(front.Addr+"/x:1", PullOptions{}); second <- err }()
	until(t, "the second pull", func() bool { return refs() == 2 })
	cancel()
	if err := <-first; err == nil {
		t.Error("the cancelled pull succeeded")
	}
	close(start)
	if err := <-second; err != nil {
		t.Errorf("the other pull: %v", err)
	}
	if n := front.Asked("GET /v2/x/blobs/" + blobOf(t, l)); n != 1 {
		t.Errorf("the layer was asked for %d times", n)
	}
}

// TestPullCorrupt meets images that are not what they claim: a clear error, and nothing stays.
func TestPullCorrupt(t *testing.T) {
	addr := rt.Start(t)
	good := rt.GzipLayer(rt.File{Name: "good", Body: []byte("good")})
	tarOf := rt.Tar(rt.File{Name: "a", Body: rt.Random(5, 100<<10)})
	blob := rt.Gzip(tarOf)
	for _, c := range []struct {
		name   string
		layers []rt.Layer
		edit   func(*v1.ConfigFile)
		front  func(f *rt.Front)
		words  string
	}{
		{name: "not a tar", layers: []rt.Layer{good, rt.NewLayer([]byte("this is no archive at all"), []byte("x"), types.DockerLayer)}, words: "failed to register layer"},
		{name: "cut gzip", layers: []rt.Layer{good, rt.NewLayer(blob[:len(blob)/2], tarOf, types.DockerLayer)}, words: "failed to register layer"},
		{name: "wrong DiffID", layers: []rt.Layer{good, rt.NewLayer(blob, []byte("other"), types.DockerLayer)}, words: "failed to register layer"},
		{name: "leaves its root", layers: []rt.Layer{good, rt.GzipLayer(rt.File{Name: "../../etc/x", Body: []byte("x")})}, words: "failed to register layer"},
		{name: "other bytes", layers: []rt.Layer{good, rt.GzipLayer(rt.File{Name: "z", Body: []byte("z")})}, front: func(f *rt.Front) {
			f.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
				if r.Method != "GET" || !strings.Contains(r.URL.Path, "/blobs/") || strings.HasSuffix(r.URL.Path, blobOf(t, good)) || !strings.HasSuffix(r.URL.Path, blobOf(t, rt.GzipLayer(rt.File{Name: "z", Body: []byte("z")}))) {
					return false
				}
				n, _ := rt.GzipLayer(rt.File{Name: "z", Body: []byte("z")}).Size()
				w.Write(rt.Random(9, int(n)))
				return true
			}
		}, words: "filesystem layer verification failed"},
		{name: "too few layers named", layers: []rt.Layer{good}, edit: func(c *v1.ConfigFile) { c.RootFS.DiffIDs = nil }, words: "it names 0 layers, the manifest 1"},
		{name: "windows", layers: []rt.Layer{good}, edit: func(c *v1.ConfigFile) { c.OS = "windows" }, words: "no matching manifest for linux/amd64"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newImages(t)
			front := rt.NewFront(t, addr)
			if c.front != nil {
				c.front(front)
			}
			repo := "/bad" + strings.ReplaceAll(strings.ToLower(c.name), " ", "")
			rt.Push(t, addr+repo+":1", rt.Image(t, false, c.edit, c.layers...))
			_, err := b.pull(front.Addr+repo+":1", PullOptions{})
			if err == nil || !strings.Contains(err.Error(), c.words) {
				t.Errorf("pulled: %v", err)
			}
			b.wantNothing()
		})
	}
}

// TestPullArtifacts refuses what is no image.
func TestPullArtifacts(t *testing.T) {
	b := newImages(t)
	serve := func(contentType, manifest string) string {
		f := rt.NewFront(t, "")
		f.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				w.Header().Set("Content-Type", contentType)
				w.Write([]byte(manifest))
			}
			return true
		}
		return f.Addr + "/x:1"
	}
	const oci = "application/vnd.oci.image.manifest.v1+json"
	d := `"digest":"sha256:` + strings.Repeat("a", 64) + `","size":3`
	config := `"config":{"mediaType":"application/vnd.oci.image.config.v1+json",` + d + `}`
	for _, c := range []struct{ kind, doc, words string }{
		{oci, `{"schemaVersion":2,"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json",` + d + `},"layers":[]}`, "unsupported media type application/vnd.cncf.helm.config.v1+json"},
		{oci, `{"schemaVersion":2,` + config + `,"layers":[{"mediaType":"application/vnd.docker.image.rootfs.foreign.diff.tar.gzip",` + d + `}]}`, "foreign layers are not supported"},
		{oci, `{"schemaVersion":2,` + config + `,"layers":[{"mediaType":"application/x",` + d + `}]}`, "unsupported media type application/x"},
		{oci, `{"schemaVersion":2,` + config + `,"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":"sha256:../../../etc/passwd","size":3}]}`, "is not a supported one"},
		{oci, `{"schemaVersion":2,` + config + `,"layers":[],"manifests":[]}`, "both an index and an image"},
		{oci, `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}`, "the registry says it is"},
		{"application/vnd.docker.distribution.manifest.v1+prettyjws", `{"schemaVersion":1}`, "schema 1 are not supported"},
		{oci, `{"schemaVersion":2`, "no valid JSON"},
		{"application/vnd.oci.image.index.v1+json", `{"schemaVersion":2,"manifests":[]}`, "no matching manifest for linux/amd64"},
		{oci, strings.Repeat(" ", 5<<20), "over the limit"},
		{"text/html", "<html>hello", "no valid JSON"},
	} {
		if _, err := b.pull(serve(c.kind, c.doc), PullOptions{}); err == nil || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%.100s: %v", c.doc, err)
		}
	}
	b.wantNothing()
}

// TestPullBadServers meets servers that hang, close, lie or limit: each a clear error, and quickly.
func TestPullBadServers(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	b.hurry = 2 * time.Second
	b.reopen()
	img := rt.Image(t, false, nil, rt.GzipLayer(rt.File{Name: "a", Body: rt.Random(1, 1<<20)}))
	rt.Push(t, addr+"/x:1", img)
	hang := func(w http.ResponseWriter, r *http.Request) { w.(http.Flusher).Flush(); <-r.Context().Done() }
	answer := func(status int, body string) func(w http.ResponseWriter, r *http.Request) {
		return func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(status); fmt.Fprint(w, body) }
	}
	for _, c := range []struct {
		name, path string
		do         func(w http.ResponseWriter, r *http.Request)
		is         func(error) bool
		words      string
	}{
		{"hangs at once", "/v2/", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, nil, "registry sent no answer within 2s"},
		{"hangs at the manifest", "/manifests/", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, nil, "registry sent no answer within 2s"},
		{"hangs in a blob", "/blobs/", hang, nil, "registry sent no data within 2s"},
		{"closes", "/manifests/", func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }, nil, "EOF"},
		{"is not there", "/v2/", answer(503, "down"), nil, "503 Service Unavailable"},
		{"lies about a digest", "/manifests/sha256", answer(200, `{"schemaVersion":2}`), nil, "the registry sent other bytes than it promised"},
		{"denies", "/manifests/", answer(403, `{"errors":[{"code":"DENIED","message":"requested access to the resource is denied"}]}`), cerrdefs.IsNotFound,
			"pull access denied for HOST/x, repository does not exist or may require 'docker login': denied: requested access to the resource is denied"},
		{"knows no such name", "/manifests/", answer(404, `{"errors":[{"code":"NAME_UNKNOWN","message":"repository name not known to registry"}]}`), cerrdefs.IsNotFound,
			"repository HOST/x not found: name unknown: repository name not known to registry"},
		{"limits", "/manifests/", answer(429, `{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your pull rate limit."}]}`), cerrdefs.IsResourceExhausted,
			"toomanyrequests: You have reached your pull rate limit."},
		{"redirects for ever", "/blobs/", func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, r.URL.Path, http.StatusTemporaryRedirect)
		}, nil, "stopped after 10 redirects"},
	} {
		t.Run(c.name, func(t *testing.T) {
			front := rt.NewFront(t, addr)
			front.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
				// HEAD's answers have no body to tell an error in, as with a real registry.
				if !strings.Contains(r.URL.Path, c.path) {
					return false
				}
				c.do(w, r)
				return true
			}
			_, err := b.pull(front.Addr+"/x:1", PullOptions{})
			if err == nil || !strings.Contains(err.Error(), strings.ReplaceAll(c.words, "HOST", front.Addr)) || c.is != nil && !c.is(err) {
				t.Errorf("pulled: %v", err)
			}
		})
	}
	// What is kept for another try is only the image's own.
	if err := dropUnfinished(b.s); err != nil {
		t.Fatal(err)
	}
	b.wantNothing()
}

func dropUnfinished(s *images) error {
	_, err := s.pruneParts(time.Now().Add(time.Hour))
	if err == nil {
		_, err = s.collect(context.Background())
	}
	return err
}

// TestPullAuth pulls through the ways of authentication.
func TestPullAuth(t *testing.T) {
	addr := rt.Start(t)
	img := rt.Image(t, false, nil, rt.GzipLayer(rt.File{Name: "a", Body: rt.Random(1, 200<<10)}), rt.GzipLayer(rt.File{Name: "b", Body: rt.Random(2, 200<<10)}))
	rt.Push(t, addr+"/team/x:1", img)
	user := mobyregistry.AuthConfig{Username: "me", Password: "secret"}
	old := mobyregistry.AuthConfig{Auth: base64.StdEncoding.EncodeToString([]byte("me:secret"))}
	wrong := mobyregistry.AuthConfig{Username: "me", Password: "guess"}
	basic := func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
		if u, p, _ := r.BasicAuth(); u == "me" && p == "secret" {
			return false
		}
		if r.URL.Path == "/v2/" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(401)
		} else { // BR-39 a: to strangers there is nothing here
			w.WriteHeader(404)
		}
		return true
	}
	// bearer hands out tokens that are good for so many requests.
	bearer := func(field string, life int64, anonymous bool) func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
		var issued, left atomic.Int64
		return func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
			if r.URL.Path == "/token" {
				u, p, ok := r.BasicAuth()
				if r.Method == "POST" {
					ok = r.FormValue("refresh_token") == "identity"
					u, p = "me", "secret"
				}
				if q := r.FormValue("scope"); q != "repository:team/x:pull" || r.FormValue("service") != "svc" {
					w.WriteHeader(400)
				} else if ok && (u != "me" || p != "secret") || !ok && !anonymous {
					w.WriteHeader(401)
				} else {
					left.Store(life)
					fmt.Fprintf(w, `{%q:"t%d","expires_in":300}`, field, issued.Add(1))
				}
				return true
			}
			if r.Header.Get("Authorization") == fmt.Sprintf("Bearer t%d", issued.Load()) && left.Add(-1) >= 0 {
				return false
			}
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="svc",scope="repository:team/x:pull"`, f.Addr))
			w.WriteHeader(401)
			fmt.Fprint(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`)
			return true
		}
	}
	for _, c := range []struct {
		name  string
		fault func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool
		auth  mobyregistry.AuthConfig
		is    func(error) bool
		words string // "" it works
	}{
		{"basic", basic, user, nil, ""},
		{"basic, old form", basic, old, nil, ""},
		{"basic, none", basic, mobyregistry.AuthConfig{}, nil, "no basic auth credentials"},
		{"basic, wrong", basic, wrong, nil, "not found"},
		{"token", bearer("token", 1000, false), user, nil, ""},
		{"access_token", bearer("access_token", 1000, false), user, nil, ""},
		{"identity token", bearer("token", 1000, false), mobyregistry.AuthConfig{IdentityToken: "identity"}, nil, ""},
		{"token that runs out", bearer("token", 2, false), user, nil, ""},
		{"anonymous token", bearer("token", 1000, true), mobyregistry.AuthConfig{}, nil, ""},
		{"token, none", bearer("token", 1000, false), mobyregistry.AuthConfig{}, cerrdefs.IsNotFound, "pull access denied for HOST/team/x, repository does not exist or may require 'docker login'"},
		{"token, wrong", bearer("token", 1000, false), wrong, cerrdefs.IsUnauthorized, "incorrect username or password"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newImages(t)
			front := rt.NewFront(t, addr)
			front.Fault = c.fault
			_, err := b.pull(front.Addr+"/team/x:1", PullOptions{Auth: c.auth})
			if c.words == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), strings.ReplaceAll(c.words, "HOST", front.Addr)) || c.is != nil && !c.is(err) {
				t.Errorf("pulled: %v", err)
			}
			b.wantNothing()
		})
	}
}

// TestPullHardLinkBelow pulls a layer with a hard link into the layer below, which arrives later.
func TestPullHardLinkBelow(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	front := rt.NewFront(t, addr)
	low := rt.GzipLayer(rt.File{Name: "target", Body: rt.Random(8, 500<<10)})
	archive := rt.HardLinkTar("name", "target")
	high := rt.NewLayer(rt.Gzip(archive), archive, types.DockerLayer)
	rt.Push(t, addr+"/x:1", rt.Image(t, false, nil, low, high))
	release := make(chan struct{})
	var once sync.Once
	front.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
		switch {
		case strings.HasSuffix(r.URL.Path, blobOf(t, low)):
			<-release
		case strings.HasSuffix(r.URL.Path, blobOf(t, high)):
			defer once.Do(func() { close(release) })
		}
		return false
	}
	b.mustPull(front.Addr + "/x:1")
	if got := b.read(front.Addr+"/x:1", "name"); got != string(rt.Random(8, len(got))) || got == "" {
		t.Error("the link leads elsewhere")
	}
}

// TestPullRotten pulls again what has rotted on the disk.
func TestPullRotten(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	l := rt.GzipLayer(rt.File{Name: "a", Body: rt.Random(8, 100<<10)})
	img := rt.Image(t, false, nil, l)
	rt.Push(t, addr+"/x:1", img)
	b.mustPull(addr + "/x:1")
	for _, what := range []string{"config", "layer"} {
		t.Run(what, func(t *testing.T) {
			d := blobOf(t, l)
			if what == "config" {
				h, _ := img.ConfigName()
				d = h.String()
			} else if err := b.layers.Store.RemoveLayer(b.resolve(addr + "/x:1").Layers[0]); err != nil {
				t.Fatal(err)
			}
			damage(t, b.s.content.blobs+"/"+strings.TrimPrefix(d, "sha256:"))
			b.reopen()
			b.mustPull(addr + "/x:1")
			if got := b.read(addr+"/x:1", "a"); got != string(rt.Random(8, len(got))) || got == "" {
				t.Error("the image holds something else")
			}
		})
	}
}

func TestReporterAfterClose(t *testing.T) {
	var got []string
	r := newReporter(func(m jsonstream.Message) { got = append(got, m.Status) })
	r.message("", "one")
	r.close()
	r.message("", "two")
	if !slices.Equal(got, []string{"one"}) {
		t.Errorf("told: %v", got)
	}
}
