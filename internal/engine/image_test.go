package engine

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/registry"
	rt "runkiri.com/kiri/internal/registry/registrytest"
	"runkiri.com/kiri/internal/wire"
)

// The test binary is the agent's unpacking child too.
func init() {
	if len(os.Args) > 1 && os.Args[0] == "kiri-init" && os.Args[1] == "unpack" {
		os.Exit(rootfs.UnpackMain())
	}
}

// localLayers is the agent's own store of layers, without the wire.
type localLayers struct {
	*rootfs.Store
	mu      sync.Mutex
	unpacks []string // DiffIDs, as they were asked for
}

func (l *localLayers) Unpack(ctx context.Context, m *wire.Unpack, stream *os.File) (*wire.UnpackReply, error) {
	l.mu.Lock()
	l.unpacks = append(l.unpacks, m.DiffID)
	l.mu.Unlock()
	r, err := l.Store.Unpack(ctx, m, stream)
	if err != nil {
		return nil, wire.AsError(err) // as it arrives over the wire
	}
	return r, nil
}
func (l *localLayers) Layers(context.Context) ([]wire.UnpackReply, error) { return l.Store.Layers() }
func (l *localLayers) RemoveLayer(_ context.Context, id string) error     { return l.Store.RemoveLayer(id) }

type bench struct {
	t      testing.TB
	dir    string
	layers *localLayers
	s      *images
	hurry  time.Duration // limits on waiting for a registry; 0 the usual ones

	mu      sync.Mutex
	events  []string
	running map[string]bool
}

// newImages opens a store of images in a fresh directory, with the agent's real layers under it.
func newImages(t testing.TB) *bench {
	t.Helper()
	if os.Geteuid() != 0 {
		if os.Getenv("KIRI_MUST") == "1" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	b := &bench{t: t, dir: t.TempDir(), running: map[string]bool{}}
	b.open()
	t.Cleanup(func() {
		b.close()
		b.noHalves()
	})
	return b
}

func (b *bench) open() {
	b.t.Helper()
	store, err := rootfs.OpenStore(b.dir)
	if err != nil {
		b.t.Fatal(err)
	}
	b.layers = &localLayers{Store: store}
	b.s, err = openImages(context.Background(), imagesConfig{
		DataRoot: b.dir, Layers: b.layers, Log: slog.New(slog.NewTextHandler(b.t.Output(), nil)), Version: "test", Architecture: "amd64",
		Event: func(action, actor, name string, labels map[string]string) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.events = append(b.events, action+" "+name)
		},
		Running: func(c string) bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return b.running[c]
		},
		registry: registry.Options{HeaderTimeout: b.hurry, StallTimeout: b.hurry, RetryWait: 5 * time.Millisecond},
	})
	if err != nil {
		b.t.Fatal(err)
	}
	if err := b.s.sweep(context.Background()); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bench) close() {
	if b.s == nil {
		return
	}
	if err := b.s.close(); err != nil {
		b.t.Error(err)
	}
	b.layers.Store.Close()
	b.s = nil
}

func (b *bench) reopen() {
	b.t.Helper()
	b.close()
	b.open()
}

// noHalves checks that no half layer stands on the disk.
func (b *bench) noHalves() {
	entries, err := os.ReadDir(filepath.Join(b.dir, "layers"))
	if err != nil {
		b.t.Error(err)
	}
	for _, e := range entries {
		if strings.ContainsAny(e.Name()[:1], "+-") {
			b.t.Errorf("left behind: layers/%s", e.Name())
		}
	}
}

// files lists what the store of images has on the disk, directories aside.
func (b *bench) files() []string {
	var list []string
	for _, d := range []string{"content", "records"} {
		filepath.WalkDir(filepath.Join(b.dir, d), func(p string, e fs.DirEntry, err error) error {
			if err == nil && !e.IsDir() {
				rel, _ := filepath.Rel(b.dir, p)
				list = append(list, rel)
			}
			return nil
		})
	}
	layers, err := b.layers.Store.Layers()
	if err != nil {
		b.t.Fatal(err)
	}
	for _, l := range layers {
		list = append(list, "layer "+l.DiffID)
	}
	return list
}

func (b *bench) wantNothing() {
	b.t.Helper()
	if f := b.files(); len(f) > 0 {
		b.t.Errorf("left behind:\n%s", strings.Join(f, "\n"))
	}
}

// pull pulls and returns the messages in their order.
func (b *bench) pull(ref string, opts PullOptions) ([]jsonstream.Message, error) {
	return b.pullCtx(context.Background(), ref, opts)
}

func (b *bench) pullCtx(ctx context.Context, ref string, opts PullOptions) ([]jsonstream.Message, error) {
	var list []jsonstream.Message
	err := b.s.pull(ctx, ref, opts, func(m jsonstream.Message) { list = append(list, m) })
	return list, err
}

func (b *bench) mustPull(ref string) []jsonstream.Message {
	b.t.Helper()
	m, err := b.pull(ref, PullOptions{})
	if err != nil {
		b.t.Fatalf("pulling %s: %v", ref, err)
	}
	return m
}

func (b *bench) resolve(ref string) *resolved {
	b.t.Helper()
	r, err := b.s.resolve(ref, "")
	if err != nil {
		b.t.Fatal(err)
	}
	return r
}

// read returns a file of an image's top layers through a real mount of them.
func (b *bench) read(ref, name string) string {
	b.t.Helper()
	r := b.resolve(ref)
	mnt, err := b.layers.Store.Mount("c"+strings.Repeat("0", 63), r.Layers, true)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() {
		mnt.Close()
		b.layers.Store.RemoveContainer("c" + strings.Repeat("0", 63))
	}()
	f, err := os.OpenInRoot("/proc/self/fd/"+itoa(int(mnt.Fd())), name)
	if err != nil {
		b.t.Fatal(err)
	}
	defer f.Close()
	buf := make([]byte, 1<<16)
	n, _ := f.Read(buf)
	return string(buf[:n])
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func statuses(list []jsonstream.Message, id string) []string {
	var s []string
	for _, m := range list {
		if m.ID == id && (len(s) == 0 || s[len(s)-1] != m.Status) {
			s = append(s, m.Status)
		}
	}
	return s
}

func TestPullForms(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	base := rt.File{Name: "etc/base", Body: []byte("base\n")}
	top := rt.File{Name: "etc/top", Body: []byte("top\n")}
	plainTar, zstdTar := rt.Tar(base), rt.Tar(top)
	for _, c := range []struct {
		name   string
		oci    bool
		layers []rt.Layer
	}{
		{"docker", false, []rt.Layer{rt.GzipLayer(base), rt.GzipLayer(top)}},
		{"oci", true, []rt.Layer{
			rt.NewLayer(rt.Gzip(plainTar), plainTar, types.OCILayer), rt.NewLayer(rt.Zstd(zstdTar), zstdTar, types.OCILayerZStd)}},
		{"plain", true, []rt.Layer{rt.NewLayer(plainTar, plainTar, types.OCIUncompressedLayer), rt.GzipLayer(top)}},
		// The first bytes tell, not the media type; gzip may have several members, zstd several frames.
		{"mislabelled", false, []rt.Layer{
			rt.NewLayer(rt.Zstd(plainTar), plainTar, types.DockerLayer),
			rt.NewLayer(append(rt.Gzip(zstdTar[:700]), rt.Gzip(zstdTar[700:])...), zstdTar, types.OCILayerZStd)}},
		{"frames", true, []rt.Layer{
			rt.NewLayer(append(rt.Zstd(plainTar[:512]), rt.Zstd(plainTar[512:])...), plainTar, types.OCILayerZStd), rt.GzipLayer(top)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b.t = t
			img := rt.Image(t, c.oci, func(cfg *v1.ConfigFile) { cfg.Config.Cmd = []string{c.name} }, c.layers...)
			ref := addr + "/forms:" + c.name
			rt.Push(t, ref, img)
			msgs := b.mustPull(ref)
			r := b.resolve(ref)
			if r.ID != rt.Digest(t, img) || r.Manifest != r.ID || len(r.Layers) != 2 || r.Config.Config.Cmd[0] != c.name {
				t.Errorf("resolved to %+v, want id %s", r, rt.Digest(t, img))
			}
			if got := b.read(ref, "etc/base") + b.read(ref, "etc/top"); got != "base\ntop\n" {
				t.Errorf("the image holds %q", got)
			}
			if got := msgs[len(msgs)-1].Status; got != "Status: Downloaded newer image for "+ref {
				t.Errorf("last message: %q", got)
			}
			b.t = t
		})
	}
	b.t = t
	// Each DiffID was unpacked once, whatever its blobs.
	if u := slices.Sorted(slices.Values(b.layers.unpacks)); len(slices.Compact(u)) != len(b.layers.unpacks) {
		t.Errorf("layers were unpacked more than once: %v", b.layers.unpacks)
	}
	b.reopen()
	if got := b.resolve(addr + "/forms:oci"); got.Config.Config.Cmd[0] != "oci" {
		t.Errorf("after a restart: %+v", got)
	}
}

func TestPullProgress(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	l1, l2 := rt.GzipLayer(rt.File{Name: "a", Body: rt.Random(1, 300<<10)}), rt.GzipLayer(rt.File{Name: "b", Body: []byte("b")})
	img := rt.Image(t, false, nil, l1, l2)
	ref := addr + "/lib/app:v1"
	rt.Push(t, ref, img)
	msgs := b.mustPull(ref)
	if m := msgs[0]; m.ID != "v1" || m.Status != "Pulling from lib/app" {
		t.Errorf("first message: %+v", m)
	}
	d, _ := l1.Digest()
	got := statuses(msgs, d.Hex[:12])
	if got[0] != "Pulling fs layer" || got[len(got)-1] != "Pull complete" || !slices.Contains(got, "Download complete") || !slices.Contains(got, "Verifying Checksum") {
		t.Errorf("messages of a layer: %q", got)
	}
	if m := msgs[len(msgs)-2]; m.Status != "Digest: "+rt.Digest(t, img) {
		t.Errorf("message before the last: %+v", m)
	}

	msgs = b.mustPull(ref)
	if len(msgs) != 3 || msgs[2].Status != "Status: Image is up to date for "+ref {
		t.Errorf("second pull: %+v", msgs)
	}

	// A new image on a layer that is here.
	img2 := rt.Image(t, false, nil, l1, rt.GzipLayer(rt.File{Name: "c", Body: []byte("c")}))
	rt.Push(t, ref, img2)
	msgs = b.mustPull(ref)
	if got := statuses(msgs, d.Hex[:12]); !slices.Equal(got, []string{"Pulling fs layer", "Already exists"}) {
		t.Errorf("messages of a layer that is here: %q", got)
	}
	if got := msgs[len(msgs)-1].Status; got != "Status: Downloaded newer image for "+ref {
		t.Errorf("last message: %q", got)
	}
	// The old image stays, without a name.
	list, err := b.s.list(ImageListOptions{Filters: Filters{"dangling": {"true": true}}})
	if err != nil || len(list) != 1 || list[0].ID != rt.Digest(t, img) || len(list[0].RepoTags) != 0 {
		t.Errorf("dangling images: %+v, %v", list, err)
	}
	b.reopen()
	if list, err := b.s.list(ImageListOptions{}); err != nil || len(list) != 2 {
		t.Errorf("images after a restart: %+v, %v", list, err)
	}
}

func TestPullIndex(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	arch := func(name string, add ...rt.Layer) v1.Image {
		return rt.Image(t, true, func(c *v1.ConfigFile) {
			c.Architecture = name
			if name == "arm" {
				c.Variant = "v7"
			}
		}, append(add, rt.GzipLayer(rt.File{Name: "arch", Body: []byte(name)}))...)
	}
	amd, arm64, arm := arch("amd64"), arch("arm64"), arch("arm")
	attest := mutate.MediaType(mutate.ConfigMediaType(rt.Image(t, true, nil,
		rt.NewLayer([]byte("{}"), []byte("{}"), "application/vnd.in-toto+json")), types.OCIConfigJSON), types.OCIManifestSchema1)
	entry := func(img v1.Image, p *v1.Platform) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: p}}
	}
	index := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex),
		mutate.IndexAddendum{Add: attest, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "unknown", Architecture: "unknown"},
			Annotations: map[string]string{"vnd.docker.reference.type": "attestation-manifest", "vnd.docker.reference.digest": rt.Digest(t, amd)}}},
		entry(arm64, &v1.Platform{OS: "linux", Architecture: "arm64", Variant: "v8"}),
		entry(arm, &v1.Platform{OS: "linux", Architecture: "arm", Variant: "v7"}),
		entry(amd, &v1.Platform{OS: "linux", Architecture: "amd64"}),
	)
	ref := addr + "/index:1"
	rt.Push(t, ref, index)
	b.mustPull(ref)
	r := b.resolve(ref)
	if r.ID != rt.Digest(t, index) || r.Manifest != rt.Digest(t, amd) || b.read(ref, "arch") != "amd64" {
		t.Errorf("resolved to %+v", r)
	}
	if _, err := b.s.resolve(ref, "linux/arm64"); !cerrdefs.IsNotFound(err) || !strings.Contains(err.Error(), "does not provide the specified platform (linux/arm64)") {
		t.Errorf("a platform that was not pulled: %v", err)
	}
	// Another platform of the same index joins it.
	if _, err := b.pull(ref, PullOptions{Platform: "linux/arm64"}); err != nil {
		t.Fatal(err)
	}
	if r, err := b.s.resolve(ref, "linux/arm64/v8"); err != nil || r.ID != rt.Digest(t, index) || r.Manifest != rt.Digest(t, arm64) {
		t.Errorf("second platform: %+v, %v", r, err)
	}
	if r := b.resolve(ref); r.Manifest != rt.Digest(t, amd) {
		t.Errorf("default platform after the second: %+v", r)
	}
	if _, err := b.pull(ref, PullOptions{Platform: "linux/s390x"}); !cerrdefs.IsNotFound(err) || err.Error() != "no matching manifest for linux/s390x in the manifest list entries" {
		t.Errorf("a platform that is not there: %v", err)
	}
	if _, err := b.pull(ref, PullOptions{Platform: "a/b/c/d"}); !cerrdefs.IsInvalidArgument(err) {
		t.Errorf("a platform that is none: %v", err)
	}
	in, err := b.s.inspect(ref, ImageInspectOptions{Manifests: true})
	if err != nil || len(in.Manifests) != 4 || in.Manifests[0].Kind != "attestation" || in.Manifests[2].Available || !in.Manifests[3].Available {
		t.Errorf("inspect: %+v, %v", in, err)
	}

	// An entry without a platform is judged by its configuration; a nested index is walked.
	inner := mutate.AppendManifests(empty.Index, entry(arm64, nil), entry(amd, nil))
	outer := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.DockerManifestList), mutate.IndexAddendum{Add: inner})
	rt.Push(t, addr+"/index:nested", outer)
	b.mustPull(addr + "/index:nested")
	if r := b.resolve(addr + "/index:nested"); r.Manifest != rt.Digest(t, amd) {
		t.Errorf("nested: %+v", r)
	}

	// One platform can be removed, and gives back what only it had. Not while another image has it too.
	platform := ImageRemoveOptions{Platforms: []ocispec.Platform{{OS: "linux", Architecture: "arm64"}}}
	if _, err := b.s.remove(context.Background(), ref, platform); !cerrdefs.IsConflict(err) {
		t.Errorf("removing a shared platform: %v", err)
	}
	if _, err := b.s.remove(context.Background(), addr+"/index:nested", ImageRemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	gone, err := b.s.remove(context.Background(), ref, platform)
	if err != nil || len(gone) != 1 || gone[0].Deleted != rt.Digest(t, arm64) {
		t.Fatalf("removing a platform: %+v, %v", gone, err)
	}
	if _, err := b.s.resolve(ref, "linux/arm64"); !cerrdefs.IsNotFound(err) {
		t.Errorf("a platform that was removed: %v", err)
	}
	if _, err := b.s.remove(context.Background(), ref, ImageRemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	b.wantNothing()

	// An image for another platform alone is not taken, unless asked for.
	rt.Push(t, addr+"/single:arm", arm)
	if _, err := b.pull(addr+"/single:arm", PullOptions{}); !cerrdefs.IsNotFound(err) {
		t.Errorf("a single image of another platform: %v", err)
	}
	if _, err := b.pull(addr+"/single:arm", PullOptions{Platform: "linux/arm/v7"}); err != nil {
		t.Error(err)
	}
}

func TestPullByDigestAndAllTags(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	one := rt.Image(t, false, nil, rt.GzipLayer(rt.File{Name: "a", Body: []byte("1")}))
	two := rt.Image(t, false, nil, rt.GzipLayer(rt.File{Name: "a", Body: []byte("2")}))
	rt.Push(t, addr+"/many:one", one)
	rt.Push(t, addr+"/many:two", two)
	ref := addr + "/many@" + rt.Digest(t, one)
	if msgs := b.mustPull(addr + "/many:nonsense@" + rt.Digest(t, one)); msgs[0].ID != rt.Digest(t, one) {
		t.Errorf("first message: %+v", msgs[0])
	}
	in, err := b.s.inspect(ref, ImageInspectOptions{})
	if err != nil || len(in.RepoTags) != 0 || !slices.Equal(in.RepoDigests, []string{ref}) {
		t.Errorf("inspect: %+v, %v", in, err)
	}
	if _, err := b.s.resolve("other@"+rt.Digest(t, one), ""); !cerrdefs.IsNotFound(err) {
		t.Errorf("the digest under another repository: %v", err)
	}
	if _, err := b.pull(addr+"/many", PullOptions{AllTags: true}); err != nil {
		t.Fatal(err)
	}
	if in, err = b.s.inspect(addr+"/many:two", ImageInspectOptions{}); err != nil || in.ID != rt.Digest(t, two) {
		t.Errorf("all tags: %+v, %v", in, err)
	}
	if in.Identity == nil || in.Identity.Pull[0].Repository != addr+"/many" {
		t.Errorf("identity: %+v", in.Identity)
	}
}

func TestPullErrors(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	img := rt.Image(t, false, nil, rt.GzipLayer(rt.File{Name: "a", Body: []byte("1")}))
	rt.Push(t, addr+"/x:1", img)
	for _, c := range []struct {
		ref   string
		is    func(error) bool
		words string
	}{
		{"UPPER", cerrdefs.IsInvalidArgument, "invalid reference format: repository name (library/UPPER) must be lowercase"},
		{"a b", cerrdefs.IsInvalidArgument, "invalid reference format"},
		{addr + "/x:nope", cerrdefs.IsNotFound, "manifest for " + addr + "/x:nope not found: manifest unknown"},
		{"127.0.0.1:1/x", func(err error) bool { return !cerrdefs.IsNotFound(err) }, "connection refused"},
	} {
		msgs, err := b.pull(c.ref, PullOptions{})
		if err == nil || !c.is(err) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v", c.ref, err)
		}
		if len(msgs) > 0 {
			t.Errorf("%s: told of progress before it failed: %+v", c.ref, msgs)
		}
	}
	b.wantNothing()
}

func TestResolveForms(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	img := rt.Image(t, false, nil, rt.GzipLayer(rt.File{Name: "a", Body: []byte("1")}))
	rt.Push(t, addr+"/x:1", img)
	b.mustPull(addr + "/x:1")
	if err := b.s.tag(context.Background(), addr+"/x:1", "hello"); err != nil {
		t.Fatal(err)
	}
	id := rt.Digest(t, img)
	for _, ref := range []string{"hello", "hello:latest", "docker.io/library/hello", addr + "/x:1", id, id[7:], id[7:19], id[:19], "hello@" + id, addr + "/x@" + id} {
		if r, err := b.s.resolve(ref, ""); err != nil || r.ID != id || !slices.Equal(r.Names, []string{addr + "/x:1", "hello:latest"}) {
			t.Errorf("%s: %+v, %v", ref, r, err)
		}
	}
	for ref, words := range map[string]string{
		"hell": "No such image: hell:latest", "hello:2": "No such image: hello:2", "nope@" + id: "No such image: nope@" + id,
		strings.Repeat("0", 64): "No such image: sha256:" + strings.Repeat("0", 64),
	} {
		if _, err := b.s.resolve(ref, ""); !cerrdefs.IsNotFound(err) || err.Error() != words {
			t.Errorf("%s: %v", ref, err)
		}
	}
	if _, err := b.s.resolve("UP", ""); !cerrdefs.IsInvalidArgument(err) {
		t.Errorf("a bad reference: %v", err)
	}
	if _, err := b.s.resolve("", ""); !cerrdefs.IsInvalidArgument(err) {
		t.Errorf("an empty reference: %v", err)
	}
}

// TestPullCancelled ends a pull in the middle: nothing waits, what is finished is kept, and the next pull needs only the rest.
func TestPullCancelled(t *testing.T) {
	addr := rt.Start(t)
	b := newImages(t)
	front := rt.NewFront(t, addr)
	small, big := rt.GzipLayer(rt.File{Name: "s", Body: []byte("s")}), rt.GzipLayer(rt.File{Name: "b", Body: rt.Random(2, 4<<20)})
	img := rt.Image(t, false, nil, small, big)
	rt.Push(t, addr+"/x:1", img)
	bd, _ := big.Digest()
	ctx, cancel := context.WithCancel(context.Background())
	sd, _ := small.Digest()
	front.Fault = func(f *rt.Front, w http.ResponseWriter, r *http.Request) bool {
		if strings.HasSuffix(r.URL.Path, bd.String()) { // so that there is something finished to be kept
			until(t, "the other layer", func() bool { return b.s.content.has(digest.Digest(sd.String())) })
		}
		return false
	}
	front.Cut = func(r *http.Request) int64 {
		if strings.HasSuffix(r.URL.Path, bd.String()) {
			defer cancel()
			return 1 << 20
		}
		return -1
	}
	_, err := b.pullCtx(ctx, front.Addr+"/x:1", PullOptions{})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("a cancelled pull: %v", err)
	}
	if _, err := b.s.resolve(front.Addr+"/x:1", ""); !cerrdefs.IsNotFound(err) {
		t.Errorf("an image that was not pulled to its end: %v", err)
	}
	front.Cut, front.Fault = nil, nil
	b.reopen()
	front.Reset()
	b.mustPull(front.Addr + "/x:1")
	if n := front.Sent(sd.String()); n > 0 {
		t.Errorf("%d bytes of a finished layer were fetched again", n)
	}
	if got := b.read(front.Addr+"/x:1", "s"); got != "s" {
		t.Errorf("the image holds %q", got)
	}
	if n := len(b.s.pulling); n != 0 {
		t.Errorf("%d pulls are still recorded as unfinished", n)
	}
}

// damage changes a byte in the middle of a file.
func damage(t testing.TB, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// until waits for ok, at most ten seconds.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}
