package e2e

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// registry is the real registry server that all tests of this package share.
var registry struct {
	once sync.Once
	err  error
	addr string // host:port on loopback
	cmd  *exec.Cmd
	dir  string
}

// startRegistry returns the address of a real registry server (Debian's docker-registry) on loopback.
func startRegistry(t *testing.T) string {
	t.Helper()
	registry.once.Do(func() { registry.err = runRegistry() })
	if registry.err != nil {
		if os.Getenv("KIRI_MUST") != "" {
			t.Fatal(registry.err)
		}
		t.Skip(registry.err)
	}
	return registry.addr
}

func runRegistry() error {
	program, err := exec.LookPath("docker-registry")
	if err != nil {
		return fmt.Errorf("no registry server: %w (Debian package docker-registry)", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	registry.addr = l.Addr().String()
	l.Close()
	if registry.dir, err = os.MkdirTemp("", "kiri-registry-"); err != nil {
		return err
	}
	config := filepath.Join(registry.dir, "config.yml")
	text := fmt.Sprintf("version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n    rootdirectory: %s\nhttp:\n  addr: %s\n",
		registry.dir, registry.addr)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return err
	}
	registry.cmd = exec.Command(program, "serve", config)
	if err := registry.cmd.Start(); err != nil {
		return err
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		c, err := net.Dial("tcp", registry.addr)
		if err == nil {
			c.Close()
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("registry server does not answer: %w", err)
		}
	}
}

func stopRegistry() {
	if registry.cmd != nil {
		registry.cmd.Process.Kill()
		registry.cmd.Wait()
	}
	if registry.dir != "" {
		os.RemoveAll(registry.dir)
	}
}

// file is one entry of a layer made for a test.
type file struct {
	Name string
	Mode int64
	Body []byte
	Link string // symlink target
	Dir  bool
}

func layerOf(t *testing.T, files ...file) v1.Layer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range files {
		h := &tar.Header{Name: f.Name, Mode: f.Mode, Size: int64(len(f.Body)), Typeflag: tar.TypeReg, ModTime: time.Unix(1700000000, 0)}
		if f.Link != "" {
			h.Typeflag, h.Linkname = tar.TypeSymlink, f.Link
		}
		if f.Dir {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(f.Body); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// push puts an image of these layers into the registry as repo:tag and returns the reference to pull it by.
func push(t *testing.T, repo string, config v1.Config, layers ...v1.Layer) string {
	t.Helper()
	ref := startRegistry(t) + "/" + repo
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.Architecture, cf.OS, cf.Config = "amd64", "linux", config
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	tag, err := name.NewTag(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(tag, img); err != nil {
		t.Fatal(err)
	}
	return ref
}

// applets are the links of the busybox image.
var applets = []string{"sh", "true", "false", "echo", "cat", "sleep", "id", "ls", "env", "pwd", "stty", "wc", "head", "tail", "seq",
	"grep", "kill", "ps", "touch", "mkdir", "rm", "hostname", "ip", "ping", "nc", "wget", "stat", "mount", "umount", "dd", "yes",
	"printf", "test", "chmod", "chown", "ln", "readlink", "nproc", "awk", "sed", "tty", "date", "su", "md5sum", "df", "mknod", "vi"}

// busybox pushes the busybox image (with the probe in it) and returns its reference.
func busybox(t *testing.T) string {
	t.Helper()
	body, err := os.ReadFile("/bin/busybox")
	if err != nil {
		if os.Getenv("KIRI_MUST") != "" {
			t.Fatalf("%v (Debian package busybox-static)", err)
		}
		t.Skipf("%v (Debian package busybox-static)", err)
	}
	probe, err := os.ReadFile(filepath.Join(bin, "probe"))
	if err != nil {
		t.Fatal(err)
	}
	files := []file{
		{Name: "bin/", Mode: 0o755, Dir: true}, {Name: "etc/", Mode: 0o755, Dir: true}, {Name: "tmp/", Mode: 0o1777, Dir: true},
		{Name: "root/", Mode: 0o700, Dir: true}, {Name: "home/", Mode: 0o755, Dir: true},
		{Name: "bin/busybox", Mode: 0o755, Body: body}, {Name: "bin/probe", Mode: 0o755, Body: probe},
		{Name: "etc/passwd", Mode: 0o644, Body: []byte("root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000:app:/home:/bin/sh\n")},
		{Name: "etc/group", Mode: 0o644, Body: []byte("root:x:0:\napp:x:1000:\nextra:x:2000:app\n")},
		{Name: "bin/notexec", Mode: 0o644, Body: []byte("no program\n")},
	}
	for _, a := range applets {
		files = append(files, file{Name: "bin/" + a, Mode: 0o777, Link: "busybox"})
	}
	return push(t, "bb:latest", v1.Config{
		Cmd: []string{"sh"}, Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
	}, layerOf(t, files...))
}
