package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// The test binary is its own unpacking child.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == unpackArg {
		os.Exit(UnpackMain())
	}
	os.Exit(m.Run())
}

// needRoot skips what takes root and overlayfs, loudly; with KIRI_MUST=1 it fails.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if os.Getenv("KIRI_MUST") == "1" {
		t.Fatal("needs root")
	}
	t.Skip("needs root")
}

// newStore opens a store in a fresh directory, which must hold no mount and no half layer when the test ends.
func newStore(t testing.TB) *Store {
	t.Helper()
	needRoot(t)
	dir := t.TempDir()
	s, err := OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		entries, err := os.ReadDir(filepath.Join(dir, "layers"))
		if err != nil {
			t.Error(err)
		}
		for _, e := range entries {
			if strings.ContainsAny(e.Name()[:1], "+-") {
				t.Errorf("left behind: layers/%s", e.Name())
			}
		}
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Error(err)
		}
		if strings.Contains(string(mounts), dir) {
			t.Errorf("left mounted:\n%s", mounts)
		}
		s.Close()
	})
	return s
}

// entry is one member of a test's archive.
type entry struct {
	tar.Header
	data string
}

func dir(name string, mode int64) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeDir, Name: name, Mode: mode}}
}

func file(name, data string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644}, data: data}
}

func symlink(name, to string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to, Mode: 0o777}}
}

func hardlink(name, to string) entry {
	return entry{Header: tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to, Mode: 0o644}}
}

var testTime = time.Unix(1500000000, 0)

// pack makes a tar.
func pack(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.data))
		if h.ModTime.IsZero() {
			h.ModTime = testTime
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func diffID(plain []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(plain)) }

// stream gives data through a pipe, as the daemon does.
func stream(t testing.TB, data []byte) *os.File {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		w.Write(data)
		w.Close()
	}()
	t.Cleanup(func() { r.Close(); <-done })
	return r
}

// unpack makes a layer and returns its DiffID.
func unpack(t testing.TB, s *Store, below []string, entries ...entry) string {
	t.Helper()
	plain := pack(t, entries...)
	id := diffID(plain)
	r, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: id, Below: below}, stream(t, plain))
	if err != nil {
		t.Fatal(err)
	}
	if r.DiffID != id {
		t.Fatalf("got layer %s, want %s", r.DiffID, id)
	}
	return id
}

// layerPath returns where the files of a layer are.
func layerPath(t testing.TB, s *Store, id string) string {
	t.Helper()
	l, err := s.lookup([]string{id})
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(s.root, "layers", l[0].name, "fs")
}

// mounted mounts layers for a container and returns the mount and a path to reach it by.
func mounted(t testing.TB, s *Store, id string, layers ...string) (*os.File, string) {
	t.Helper()
	mnt, err := s.Mount(id, layers, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mnt.Close() })
	return mnt, fmt.Sprintf("/proc/self/fd/%d", fdOf(mnt))
}

func lstat(t testing.TB, p string) unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(p, &st); err != nil {
		t.Fatalf("%s: %v", p, err)
	}
	return st
}

func wantContent(t testing.TB, p, want string) {
	t.Helper()
	got, err := os.ReadFile(p)
	if err != nil {
		t.Error(err)
	} else if string(got) != want {
		t.Errorf("%s holds %q, want %q", p, got, want)
	}
}

func wantMissing(t testing.TB, p string) {
	t.Helper()
	if _, err := os.Lstat(p); !os.IsNotExist(err) {
		t.Errorf("%s: %v, want it missing", p, err)
	}
}

func wantNames(t testing.TB, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Error(err)
		return
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("%s holds %q, want %q", dir, got, want)
	}
}
