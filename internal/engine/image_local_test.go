package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	"github.com/moby/moby/api/types/image"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/record"
	"runkiri.com/kiri/internal/registry"
	rt "runkiri.com/kiri/internal/registry/registrytest"
	"runkiri.com/kiri/internal/wire"
)

// importTar imports an archive of one file.
func (b *bench) importTar(name, body string, changes ...string) string {
	b.t.Helper()
	id, err := b.s.importTar(context.Background(), ImportOptions{Ref: name, Changes: changes}, bytes.NewReader(rt.Tar(rt.File{Name: "f", Body: []byte(body)})), nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return id
}

func (b *bench) remove(ref string, force bool) ([]image.DeleteResponse, error) {
	return b.s.remove(context.Background(), ref, ImageRemoveOptions{Force: force})
}

func TestImport(t *testing.T) {
	b := newImages(t)
	archive := rt.Tar(rt.File{Name: "dir"}, rt.File{Name: "dir/f", Body: []byte("hello")})
	diffID := digest.FromBytes(archive).String()
	for _, c := range []struct {
		name string
		in   []byte
		kind string
	}{
		{"plain", archive, ocispec.MediaTypeImageLayerGzip},
		{"gzip", rt.Gzip(archive), ocispec.MediaTypeImageLayerGzip},
		{"zstd", rt.Zstd(archive), ocispec.MediaTypeImageLayerZstd},
	} {
		var msgs []jsonstream.Message
		id, err := b.s.importTar(context.Background(), ImportOptions{Ref: "im:" + c.name, Message: "brought", Changes: []string{"CMD [\"/x\"]"}},
			bytes.NewReader(c.in), func(m jsonstream.Message) { msgs = append(msgs, m) })
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if len(msgs) != 1 || msgs[0].Status != id {
			t.Errorf("%s: told %+v", c.name, msgs)
		}
		r := b.resolve("im:" + c.name)
		if r.ID != id || !slices.Equal(r.Layers, []string{diffID}) || !slices.Equal(r.Config.Config.Cmd, []string{"/x"}) || r.Config.OS != "linux" {
			t.Errorf("%s: %+v", c.name, r)
		}
		if got := b.read("im:"+c.name, "dir/f"); got != "hello" {
			t.Errorf("%s: the image holds %q", c.name, got)
		}
		// Configuration, manifest and layer are proper blobs: a push could send them.
		raw, err := b.s.content.read(digest.Digest(id), registry.MaxManifest)
		if err != nil {
			t.Fatal(err)
		}
		m, err := registry.ParseManifest("", raw)
		if err != nil || m.Image.Layers[0].MediaType != c.kind {
			t.Fatalf("%s: manifest %s, %v", c.name, raw, err)
		}
		if err := b.s.content.verify(m.Image.Layers[0].Digest); err != nil {
			t.Error(err)
		}
		if n, _ := b.s.content.size(m.Image.Layers[0].Digest); n != m.Image.Layers[0].Size {
			t.Errorf("%s: blob of %d bytes, the manifest says %d", c.name, n, m.Image.Layers[0].Size)
		}
		if got := digest.FromBytes(c.in); c.name != "plain" && got != m.Image.Layers[0].Digest {
			t.Errorf("%s: the archive was not kept as it is", c.name)
		}
	}
	h, err := b.s.history("im:gzip", nil)
	if err != nil || len(h) != 1 || h[0].Comment != "brought" || h[0].Size != 5 || h[0].Tags[0] != "im:gzip" {
		t.Errorf("history: %+v, %v", h, err)
	}
	in, err := b.s.inspect("im:gzip", ImageInspectOptions{})
	if err != nil || in.Comment != "brought" || in.Architecture != "amd64" || in.RootFS.Type != "layers" || in.GraphDriver.Name != "overlayfs" || in.Descriptor.Digest.String() != in.ID {
		t.Errorf("inspect: %+v, %v", in, err)
	}
	// Without a name it is a dangling image, and two of the same layer share it.
	id := b.importTar("", "nameless")
	list, err := b.s.list(ImageListOptions{Filters: Filters{"dangling": {"1": true}}})
	if err != nil || len(list) != 1 || list[0].ID != id {
		t.Errorf("dangling: %+v, %v", list, err)
	}
	if err := b.s.tag(context.Background(), id[7:19], "named"); err != nil {
		t.Fatal(err)
	}
	if list, err = b.s.list(ImageListOptions{Filters: Filters{"dangling": {"1": true}}}); err != nil || len(list) != 0 {
		t.Errorf("dangling after a tag: %+v, %v", list, err)
	}
	for _, ref := range []string{"im:plain", "im:gzip", "im:zstd", "named"} {
		if _, err := b.remove(ref, false); err != nil {
			t.Error(err)
		}
	}
	b.wantNothing()
}

// failing gives some bytes, then an error.
type failing struct {
	r   io.Reader
	err error
}

func (f *failing) Read(p []byte) (int, error) {
	n, err := f.r.Read(p)
	if err == io.EOF {
		err = f.err
	}
	return n, err
}

func TestImportErrors(t *testing.T) {
	b := newImages(t)
	archive := rt.Tar(rt.File{Name: "f", Body: rt.Random(1, 300<<10)})
	for _, c := range []struct {
		name  string
		opts  ImportOptions
		in    io.Reader
		is    func(error) bool
		words string
	}{
		{"no archive", ImportOptions{}, strings.NewReader(strings.Repeat("no archive ", 100)), cerrdefs.IsInvalidArgument, "importing the archive"},
		{"cut gzip", ImportOptions{}, bytes.NewReader(rt.Gzip(archive)[:200<<10]), cerrdefs.IsInvalidArgument, "importing the archive"},
		{"client gone", ImportOptions{}, &failing{bytes.NewReader(archive[:150<<10]), io.ErrUnexpectedEOF}, cerrdefs.IsInvalidArgument, "unexpected EOF"},
		// A plain archive could end just here: still nothing may stay.
		{"client gone at a boundary", ImportOptions{}, &failing{bytes.NewReader(rt.Tar(rt.File{Name: "g", Body: []byte("g")})[:1024]), io.ErrUnexpectedEOF}, cerrdefs.IsInvalidArgument, "unexpected EOF"},
		{"bad bzip2", ImportOptions{}, strings.NewReader("BZh91AY&SY nonsense"), cerrdefs.IsInvalidArgument, "reading the archive"},
		{"xz", ImportOptions{}, strings.NewReader("\xfd7zXZ\x00 and so on"), cerrdefs.IsInvalidArgument, "xz are not supported"},
		{"bad reference", ImportOptions{Ref: "Not:A:Ref"}, bytes.NewReader(archive), cerrdefs.IsInvalidArgument, "invalid reference format"},
		{"digest reference", ImportOptions{Ref: "x@sha256:" + strings.Repeat("0", 64)}, bytes.NewReader(archive), cerrdefs.IsInvalidArgument, "digest"},
		{"bad change", ImportOptions{Changes: []string{"RUN x"}}, bytes.NewReader(archive), cerrdefs.IsInvalidArgument, "run is not a valid change command"},
		{"bad platform", ImportOptions{Platform: "/"}, bytes.NewReader(archive), cerrdefs.IsInvalidArgument, "invalid platform"},
	} {
		if _, err := b.s.importTar(context.Background(), c.opts, c.in, nil); err == nil || !c.is(err) || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%s: %v", c.name, err)
		}
		if f := b.files(); len(f) > 0 {
			t.Errorf("%s left behind:\n%s", c.name, strings.Join(f, "\n"))
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	r, w := io.Pipe()
	go func() { w.Write(archive[:100<<10]); cancel(); w.Write(archive[100<<10:]); w.Close() }()
	if _, err := b.s.importTar(ctx, ImportOptions{}, r, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	r.Close()
	b.wantNothing()
}

func TestApplyChanges(t *testing.T) {
	for _, c := range []struct {
		changes []string
		want    string // the fields that are set, or "error: " and a part of the text
	}{
		{[]string{`CMD ["a","b c"]`}, `{[a b c]}`},
		{[]string{`CMD echo $HOME`}, `{[/bin/sh -c echo $HOME]}`},
		{[]string{"ENTRYPOINT [\"/e\"]\nCMD [\"x\"]"}, "entry [/e] cmd [x]"},
		{[]string{`ENV A=1 B="two words" C=a\ b`, `ENV D $A-${B}-${Z:-none}-${A:+set}`, "ENV A=2"}, "env [B=two words C=a b D=1-two words-none-set A=2]"},
		{[]string{`ENV A='$X' B="\$X"`}, "env [A=$X B=$X]"},
		{[]string{`LABEL a=b "c d"='e f' n=`}, `labels map[a:b c d:e f n:]`},
		{[]string{"EXPOSE 80 443/tcp 53/udp 8000-8002"}, "ports [443/tcp 53/udp 80/tcp 8000/tcp 8001/tcp 8002/tcp]"},
		{[]string{`VOLUME ["/a","/b c"]`, "VOLUME /d /e"}, "volumes [/a /b c /d /e]"},
		{[]string{"WORKDIR /a", "WORKDIR b/../c"}, "workdir /a/c"},
		{[]string{"USER 1000:users", "STOPSIGNAL SIGINT"}, "user 1000:users signal SIGINT"},
		{[]string{"ONBUILD RUN x"}, "onbuild [RUN x]"},
		{[]string{"HEALTHCHECK --interval=5s --retries=3 CMD curl x"}, "health [CMD-SHELL curl x] 5s 3"},
		{[]string{`HEALTHCHECK CMD ["a"]`}, "health [CMD a] 0s 0"},
		{[]string{"HEALTHCHECK NONE"}, "health [NONE] 0s 0"},
		{[]string{"# comment", "", "CMD a \\\n b"}, "{[/bin/sh -c a b]}"},
		{[]string{"RUN x"}, "error: run is not a valid change command"},
		{[]string{"cmd"}, "error: CMD requires at least one argument"},
		{[]string{"ENV A"}, "error: must have two arguments"},
		{[]string{"ENV =x"}, "error: names can not be blank"},
		{[]string{`ENV A="x`}, "error: looking for matching double-quote"},
		{[]string{"ENV A=${x"}, "error: bad substitution"},
		{[]string{"ENV A=${x:?}"}, "error: unsupported modifier"},
		{[]string{"EXPOSE 0"}, "error: invalid containerPort: 0"},
		{[]string{"EXPOSE 70000"}, "error: invalid containerPort"},
		{[]string{"EXPOSE 1/icmp"}, "error: invalid proto: icmp"},
		{[]string{"HEALTHCHECK --what=1 CMD x"}, "error: unknown flag: what"},
		{[]string{"HEALTHCHECK RUN x"}, "error: unknown type"},
		{[]string{"STOPSIGNAL nosuch"}, "error: "},
		{[]string{"ONBUILD FROM x"}, "error: isn't allowed"},
	} {
		var cfg dockerspec.DockerOCIImageConfig
		err := applyChanges(&cfg, c.changes)
		got := describe(&cfg)
		if err != nil {
			got = "error: " + err.Error()
			if !cerrdefs.IsInvalidArgument(err) {
				t.Errorf("%q: %v is no InvalidArgument", c.changes, err)
			}
		}
		if words, ok := strings.CutPrefix(c.want, "error: "); ok && err != nil && strings.Contains(err.Error(), words) {
			continue
		}
		if got != c.want {
			t.Errorf("%q\n got %s\nwant %s", c.changes, got, c.want)
		}
	}
}

func describe(c *dockerspec.DockerOCIImageConfig) string {
	var parts []string
	add := func(ok bool, format string, args ...any) {
		if ok {
			parts = append(parts, fmt.Sprintf(format, args...))
		}
	}
	keys := func(m map[string]struct{}) []string {
		var list []string
		for k := range m {
			list = append(list, k)
		}
		slices.Sort(list)
		return list
	}
	add(len(c.Entrypoint) > 0, "entry %v cmd %v", c.Entrypoint, c.Cmd)
	add(len(c.Entrypoint) == 0 && len(c.Cmd) > 0, "{%v}", c.Cmd)
	add(len(c.Env) > 0, "env %v", c.Env)
	add(len(c.Labels) > 0, "labels %v", c.Labels)
	add(len(c.ExposedPorts) > 0, "ports %v", keys(c.ExposedPorts))
	add(len(c.Volumes) > 0, "volumes %v", keys(c.Volumes))
	add(c.WorkingDir != "", "workdir %s", c.WorkingDir)
	add(c.User != "", "user %s signal %s", c.User, c.StopSignal)
	add(len(c.OnBuild) > 0, "onbuild %v", c.OnBuild)
	if c.Healthcheck != nil {
		add(true, "health %v %v %d", c.Healthcheck.Test, c.Healthcheck.Interval, c.Healthcheck.Retries)
	}
	return strings.Join(parts, " ")
}

func TestRemoveRules(t *testing.T) {
	b := newImages(t)
	deleted := func(list []image.DeleteResponse) string {
		var s []string
		for _, d := range list {
			s = append(s, strings.TrimSuffix("-"+d.Untagged, "-")+strings.TrimSuffix("x"+shortID(strings.TrimPrefix(d.Deleted, "sha256:")), "x"))
		}
		return strings.Join(s, " ")
	}
	id := b.importTar("a:1", "one")
	short := id[7:19]
	b.s.tag(context.Background(), "a:1", "a:2")
	b.s.tag(context.Background(), "a:1", "z:1")

	if _, err := b.remove("nope", false); !cerrdefs.IsNotFound(err) || err.Error() != "No such image: nope:latest" {
		t.Errorf("a missing image: %v", err)
	}
	if _, err := b.remove(short, false); !cerrdefs.IsConflict(err) || err.Error() != "conflict: unable to delete "+short+" (must be forced) - image is referenced in multiple repositories" {
		t.Errorf("an id with several names: %v", err)
	}
	if list, err := b.remove("a:2", false); err != nil || deleted(list) != "-a:2" {
		t.Errorf("one name of several: %v, %v", list, err)
	}
	b.s.use("c1c1c1c1c1c1c1c1", id, b.resolve("a:1").Layers)
	if list, err := b.remove("z:1", false); err != nil || deleted(list) != "-z:1" {
		t.Errorf("one name of several, in use: %v, %v", list, err)
	}
	if _, err := b.remove("a:1", false); !cerrdefs.IsConflict(err) || err.Error() != "conflict: unable to delete a:1 (must be forced) - container c1c1c1c1c1c1 is using its referenced image "+short {
		t.Errorf("the last name, in use: %v", err)
	}
	if _, err := b.remove(id, false); !cerrdefs.IsConflict(err) || err.Error() != "conflict: unable to delete "+short+" (must be forced) - image is being used by stopped container c1c1c1c1c1c1" {
		t.Errorf("an id in use by a stopped container: %v", err)
	}
	b.running["c1c1c1c1c1c1c1c1"] = true
	if _, err := b.remove(id, true); !cerrdefs.IsConflict(err) || err.Error() != "conflict: unable to delete "+short+" (cannot be forced) - image is being used by running container c1c1c1c1c1c1" {
		t.Errorf("an id in use by a running container: %v", err)
	}
	if list, err := b.remove("a:1", true); err != nil || deleted(list) != "-a:1" {
		t.Errorf("the last name, forced: %v, %v", list, err)
	}
	if r, err := b.s.resolve(id, ""); err != nil || len(r.Names) != 0 {
		t.Errorf("the image without its name: %+v, %v", r, err)
	}
	delete(b.running, "c1c1c1c1c1c1c1c1")
	if list, err := b.remove(short, true); err != nil || deleted(list) != "x"+short {
		t.Errorf("the image of a stopped container, forced: %v, %v", list, err)
	}
	// The container's layers stay as long as it does.
	if f := b.files(); len(f) != 1 || !strings.HasPrefix(f[0], "layer ") {
		t.Errorf("while the container is there: %v", f)
	}
	b.s.unuse("c1c1c1c1c1c1c1c1")
	b.wantNothing()
	want := []string{"import ", "tag a:1", "tag a:2", "tag z:1", "untag a:2", "untag z:1", "untag a:1", "delete "}
	var got []string
	for i, e := range b.events {
		if i < len(want) && strings.HasSuffix(want[i], " ") {
			e, _, _ = strings.Cut(e, " ")
			e += " "
		}
		got = append(got, e)
	}
	if !slices.Equal(got, want) {
		t.Errorf("events %q\nwant   %q", got, want)
	}
}

func TestRemoveSharedLayers(t *testing.T) {
	b := newImages(t)
	b.importTar("a", "same")
	b.importTar("b", "same", "CMD b")
	if _, err := b.remove("a", false); err != nil {
		t.Fatal(err)
	}
	if got := b.read("b", "f"); got != "same" {
		t.Errorf("the other image holds %q", got)
	}
	if _, err := b.remove("b", false); err != nil {
		t.Fatal(err)
	}
	b.wantNothing()
}

func TestTagErrors(t *testing.T) {
	b := newImages(t)
	b.importTar("a", "x")
	for target, words := range map[string]string{
		"UP": "must be lowercase", "a:b:c": "invalid reference format", "sha256:x": "ambiguous tag",
		"x@sha256:" + strings.Repeat("0", 64): "refusing to create a tag with a digest reference",
	} {
		if err := b.s.tag(context.Background(), "a", target); !cerrdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", target, err)
		}
	}
	if err := b.s.tag(context.Background(), "nope", "b"); !cerrdefs.IsNotFound(err) {
		t.Errorf("a missing image: %v", err)
	}
}

func TestImageListFilters(t *testing.T) {
	b := newImages(t)
	b.importTar("app:1", "one", "LABEL team=red tier=web")
	b.importTar("app:2", "two", "LABEL team=blue")
	b.importTar("localhost:5000/other/app:2", "three")
	b.s.tag(context.Background(), "app:1", "app:stable")
	b.importTar("", "four")
	set := func(values ...string) map[string]bool {
		m := map[string]bool{}
		for _, v := range values {
			m[v] = true
		}
		return m
	}
	for _, c := range []struct {
		f    Filters
		want string // tags, images apart by |, the newest first
	}{
		{nil, "|localhost:5000/other/app:2|app:2|app:1,app:stable"},
		{Filters{"dangling": set("true")}, ""},
		{Filters{"dangling": set("false")}, "localhost:5000/other/app:2|app:2|app:1,app:stable"},
		{Filters{"label": set("team")}, "app:2|app:1,app:stable"},
		{Filters{"label": set("team=red", "tier")}, "app:1,app:stable"},
		{Filters{"label!": set("team")}, "|localhost:5000/other/app:2"},
		{Filters{"reference": set("app")}, "app:2|app:1,app:stable"},
		{Filters{"reference": set("app:1")}, "app:1"},
		{Filters{"reference": set("*/other/*")}, "localhost:5000/other/app:2"},
		{Filters{"reference": set("app:s*", "app:2")}, "app:2|app:stable"},
		{Filters{"before": set("app:2")}, "app:1,app:stable"},
		{Filters{"since": set("app:2")}, "|localhost:5000/other/app:2"},
		{Filters{"until": set("10m")}, "none"},
	} {
		list, err := b.s.list(ImageListOptions{Filters: c.f})
		var got []string
		for _, s := range list {
			got = append(got, strings.Join(s.RepoTags, ","))
		}
		text := strings.Join(got, "|")
		if len(list) == 0 {
			text = "none"
		}
		if err != nil || text != c.want {
			t.Errorf("%v: %q, %v, want %q", c.f, text, err, c.want)
		}
	}
	for _, f := range []Filters{{"what": set("x")}, {"dangling": set("maybe")}, {"reference": set("[")}, {"until": set("x")}} {
		if _, err := b.s.list(ImageListOptions{Filters: f}); !cerrdefs.IsInvalidArgument(err) {
			t.Errorf("%v: %v", f, err)
		}
	}
	if _, err := b.s.list(ImageListOptions{Filters: Filters{"before": set("nope")}}); !cerrdefs.IsNotFound(err) {
		t.Errorf("before a missing image: %v", err)
	}
	list, err := b.s.list(ImageListOptions{SharedSize: true, Manifests: true})
	if err != nil || list[0].SharedSize != 0 || list[0].Containers != -1 || len(list[0].Manifests) != 1 || !list[0].Manifests[0].Available ||
		list[0].Size != list[0].Manifests[0].Size.Total || list[0].Manifests[0].ImageData.Size.Unpacked != 4 {
		t.Errorf("list: %+v, %v", list[0], err)
	}
}

func TestPrune(t *testing.T) {
	b := newImages(t)
	b.importTar("keep", "named")
	gone := b.importTar("", "dangling")
	used := b.importTar("", "in use")
	b.s.use("c", used, b.resolve(used).Layers)
	before, err := b.s.diskUsage(true)
	if err != nil || before.TotalCount != 3 || before.ActiveCount != 1 || len(before.Items) != 3 || before.Reclaimable >= before.TotalSize {
		t.Fatalf("disk usage: %+v, %v", before, err)
	}
	if _, err := b.s.prune(context.Background(), Filters{"reference": {"x": true}}); !cerrdefs.IsInvalidArgument(err) {
		t.Errorf("an unknown filter: %v", err)
	}
	r, err := b.s.prune(context.Background(), nil)
	if err != nil || len(r.ImagesDeleted) != 1 || r.ImagesDeleted[0].Deleted != gone || r.SpaceReclaimed == 0 {
		t.Errorf("prune: %+v, %v", r, err)
	}
	after, err := b.s.diskUsage(false)
	if err != nil || before.TotalSize-after.TotalSize != int64(r.SpaceReclaimed) {
		t.Errorf("the disk gained %d bytes, prune says %d", before.TotalSize-after.TotalSize, r.SpaceReclaimed)
	}
	if r, err = b.s.prune(context.Background(), Filters{"dangling": {"false": true}, "until": {"1h": true}}); err != nil || len(r.ImagesDeleted) != 0 {
		t.Errorf("prune of old ones: %+v, %v", r, err)
	}
	if r, err = b.s.prune(context.Background(), Filters{"dangling": {"false": true}}); err != nil || len(r.ImagesDeleted) != 2 || r.ImagesDeleted[0].Untagged != "keep:latest" {
		t.Errorf("prune of all: %+v, %v", r, err)
	}
	b.s.unuse("c")
	if _, err = b.s.prune(context.Background(), nil); err != nil {
		t.Error(err)
	}
	b.wantNothing()
}

// TestSweep opens a store that a crash has left things in.
func TestSweep(t *testing.T) {
	b := newImages(t)
	b.importTar("keep", "x")
	kept := b.files()
	// Blobs and a layer that no image refers to, a blob that was being made, beginnings old and new, torn records.
	if _, err := b.s.content.put([]byte("stray")); err != nil {
		t.Fatal(err)
	}
	hold := b.s.newHold()
	if _, _, err := b.s.importLayer(context.Background(), bytes.NewReader(rt.Tar(rt.File{Name: "stray", Body: []byte("s")})), &wire.Unpack{Import: true}, hold); err != nil {
		t.Fatal(err)
	}
	parts := filepath.Join(b.dir, "content", "ingest")
	write := func(name string, age time.Duration) {
		p := filepath.Join(parts, name)
		if err := os.WriteFile(p, []byte("part"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(p, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	old, fresh := strings.Repeat("a", 64), strings.Repeat("b", 64)
	write("new-123", 0)
	write(old, 8*24*time.Hour)
	write(fresh, time.Hour)
	b.close()
	b.open()
	got := slices.DeleteFunc(b.files(), func(f string) bool { return strings.HasSuffix(f, fresh) })
	slices.Sort(got)
	// The record was .new when the list was made.
	for i := range kept {
		kept[i] = strings.TrimSuffix(kept[i], ".new")
	}
	slices.Sort(kept)
	if !slices.Equal(got, kept) {
		t.Errorf("after the sweep\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(kept, "\n"))
	}
	if _, err := os.Stat(filepath.Join(parts, fresh)); err != nil {
		t.Errorf("a fresh beginning of a blob: %v", err)
	}
}

// TestDamagedRecords opens a store whose records are damaged: those are left out, the others work.
func TestDamagedRecords(t *testing.T) {
	b := newImages(t)
	b.importTar("good", "x")
	b.importTar("bad", "y")
	if err := b.s.records.Sync(); err != nil {
		t.Fatal(err)
	}
	dir := b.s.records.Dir()
	b.close()
	damage(t, filepath.Join(dir, recordName("docker.io/library/bad:latest")+".json"))
	// A record under another's name, as a copy by hand leaves it.
	raw, err := os.ReadFile(filepath.Join(dir, recordName("docker.io/library/good:latest")+".json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, recordName("docker.io/library/else:latest")+".json"), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	b.open()
	if list, err := b.s.list(ImageListOptions{}); err != nil || len(list) != 1 || list[0].RepoTags[0] != "good:latest" {
		t.Errorf("list: %+v, %v", list, err)
	}
	if _, err := record.Open[nameRecord](dir, record.Options{Log: b.s.log}); err != nil {
		t.Error(err)
	}
	// What the damaged record referred to is not known, so nothing may be swept until somebody has looked at it.
	layers, blobs := len(b.s.layers), len(b.s.content.list())
	if err := b.s.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(b.s.layers) != layers || len(b.s.content.list()) != blobs {
		t.Errorf("beside a damaged record: %d layers and %d blobs swept to %d and %d", layers, blobs, len(b.s.layers), len(b.s.content.list()))
	}
	aside, err := filepath.Glob(filepath.Join(dir, "*.damaged"))
	if err != nil || len(aside) == 0 {
		t.Fatalf("set aside: %v, %v", aside, err)
	}
	for _, f := range aside {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.s.sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(b.s.layers) >= layers {
		t.Errorf("with the damaged record gone %d of %d layers are left, want fewer", len(b.s.layers), layers)
	}
}

// FuzzFind looks up whatever a client may send.
func FuzzFind(f *testing.F) {
	b := newImages(f)
	id := b.importTar("alpine:3", "x")
	for _, s := range []string{"alpine", id, id[7:19], "alpine@" + id, "a//b", "docker.io/library/alpine:3", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, ref string) {
		r, err := b.s.resolve(ref, "")
		if err == nil && r.ID != id || err != nil && !cerrdefs.IsNotFound(err) && !cerrdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %+v, %v", ref, r, err)
		}
	})
}

// FuzzChanges applies whatever a client may send.
func FuzzChanges(f *testing.F) {
	for _, s := range []string{`ENV A=1 B="$A"`, "HEALTHCHECK --interval=1s CMD x", "EXPOSE 1-65535", `LABEL "a b"='c'`, "ENV A=${B:-${C}}", "CMD [\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, change string) {
		var cfg dockerspec.DockerOCIImageConfig
		if err := applyChanges(&cfg, []string{change}); err != nil && !cerrdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", change, err)
		}
	})
}

func BenchmarkResolve(b *testing.B) {
	x := newImages(b)
	x.importTar("alpine:latest", "x")
	for b.Loop() {
		if _, err := x.s.resolve("alpine", ""); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkAcquire(b *testing.B) {
	x := newImages(b)
	x.importTar("alpine:latest", "x")
	for b.Loop() {
		if _, err := x.s.acquire("alpine", "", "c"); err != nil {
			b.Fatal(err)
		}
		x.s.unuse("c")
	}
}
