// Package registrytest gives tests a real registry server (Debian's docker-registry) with images made on the spot, and a
// front for it that misbehaves as told.
package registrytest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

// Start runs a registry server on a loopback port of its own for the length of the test, and returns its host:port.
// Without the program the test is skipped, or fails if KIRI_MUST=1.
func Start(t testing.TB) string {
	t.Helper()
	bin, err := exec.LookPath("docker-registry")
	if err != nil {
		if os.Getenv("KIRI_MUST") == "1" {
			t.Fatal("needs docker-registry: apt-get install docker-registry")
		}
		t.Skip("needs docker-registry: apt-get install docker-registry")
	}
	dir := t.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	config := filepath.Join(dir, "config.yml")
	text := fmt.Sprintf("version: 0.1\nlog:\n  level: error\n  accesslog:\n    disabled: true\nstorage:\n  filesystem:\n    rootdirectory: %s\n  delete:\n    enabled: true\nhttp:\n  addr: %s\n",
		filepath.Join(dir, "data"), addr)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "serve", config)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		log.Close()
	})
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		resp, err := http.Get("http://" + addr + "/v2/")
		if err == nil {
			resp.Body.Close()
			return addr
		}
		if time.Now().After(deadline) {
			b, _ := os.ReadFile(log.Name())
			t.Fatalf("docker-registry does not answer: %v\n%s", err, b)
		}
	}
}

// File is an entry of a layer; Body nil makes it a directory.
type File struct {
	Name string
	Body []byte
}

// Tar makes an archive.
func Tar(files ...File) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.Name, Mode: 0o755, Typeflag: tar.TypeDir, ModTime: time.Unix(1e9, 0)}
		if f.Body != nil {
			h.Typeflag, h.Size = tar.TypeReg, int64(len(f.Body))
		}
		if err := w.WriteHeader(h); err != nil {
			panic(err)
		}
		if _, err := w.Write(f.Body); err != nil {
			panic(err)
		}
	}
	w.Close()
	return b.Bytes()
}

// Gzip compresses.
func Gzip(p []byte) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write(p)
	w.Close()
	return b.Bytes()
}

// Zstd compresses.
func Zstd(p []byte) []byte {
	var b bytes.Buffer
	w, err := zstd.NewWriter(&b)
	if err != nil {
		panic(err)
	}
	w.Write(p)
	w.Close()
	return b.Bytes()
}

// Layer is a layer with a blob of its own making.
type Layer struct {
	v1.Layer
	diffID v1.Hash
}

// DiffID implements v1.Layer.
func (l Layer) DiffID() (v1.Hash, error) { return l.diffID, nil }

// NewLayer makes a layer of a blob and the archive that it is said to hold.
func NewLayer(blob, archive []byte, mediaType types.MediaType) Layer {
	h, _, err := v1.SHA256(bytes.NewReader(archive))
	if err != nil {
		panic(err)
	}
	return Layer{static.NewLayer(blob, mediaType), h}
}

// GzipLayer is the usual case.
func GzipLayer(files ...File) Layer {
	t := Tar(files...)
	return NewLayer(Gzip(t), t, types.DockerLayer)
}

// Image makes an image of layers. oci chooses the form of its manifest.
func Image(t testing.TB, oci bool, edit func(*v1.ConfigFile), layers ...Layer) v1.Image {
	t.Helper()
	img := v1.Image(empty.Image)
	if oci {
		img = mutate.MediaType(img, types.OCIManifestSchema1)
		img = mutate.ConfigMediaType(img, types.OCIConfigJSON)
	}
	for i, l := range layers {
		var err error
		img, err = mutate.Append(img, mutate.Addendum{Layer: l, History: v1.History{CreatedBy: fmt.Sprintf("step %d", i), Created: v1.Time{Time: time.Unix(1e9, 0)}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cfg = cfg.DeepCopy()
	cfg.Architecture, cfg.OS = "amd64", "linux"
	cfg.Created = v1.Time{Time: time.Unix(1e9, 0)}
	if edit != nil {
		edit(cfg)
	}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		t.Fatal(err)
	}
	return img
}

// Push pushes an image or an index under host/repo:tag.
func Push(t testing.TB, ref string, what any) {
	t.Helper()
	r, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	switch v := what.(type) {
	case v1.Image:
		err = remote.Write(r, v)
	case v1.ImageIndex:
		err = remote.WriteIndex(r, v)
	default:
		t.Fatalf("cannot push %T", what)
	}
	if err != nil {
		t.Fatalf("pushing %s: %v", ref, err)
	}
}

// Digest is the digest of an image or an index.
func Digest(t testing.TB, what interface{ Digest() (v1.Hash, error) }) string {
	t.Helper()
	h, err := what.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return h.String()
}

// Random is n bytes that do not compress, the same for the same seed.
func Random(seed uint64, n int) []byte {
	b := make([]byte, n)
	x := seed*2685821657736338717 + 88172645463325252
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
	return b
}

// HardLinkTar is an archive of one hard link, to a file that it does not hold itself.
func HardLinkTar(name, target string) []byte {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Linkname: target, Typeflag: tar.TypeLink, Mode: 0o755}); err != nil {
		panic(err)
	}
	w.Close()
	return b.Bytes()
}
