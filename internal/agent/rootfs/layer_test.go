package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// packedLayer returns what Layer writes, and its entries' names.
func packedLayer(t *testing.T, s *Store, id string, layers ...string) (plain []byte, names []string) {
	t.Helper()
	out, err := os.Create(t.TempDir() + "/tar")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := s.Layer(context.Background(), id, layers, []string{"/made/vol"}, out); err != nil {
		t.Fatal(err)
	}
	if plain, err = os.ReadFile(out.Name()); err != nil {
		t.Fatal(err)
	}
	for tr := tar.NewReader(bytes.NewReader(plain)); ; {
		h, err := tr.Next()
		if err == io.EOF {
			return plain, names
		}
		if err != nil {
			t.Fatal(err)
		}
		for key := range h.PAXRecords {
			if strings.Contains(key, "trusted.overlay") {
				t.Errorf("%s has overlayfs' own %s", h.Name, key)
			}
		}
		names = append(names, h.Name)
	}
}

// What a container changed becomes a layer, and the layers with that one show what the container showed.
func TestLayer(t *testing.T) {
	s := newStore(t)
	a := unpack(t, s, nil, dir("d", 0o755), dir("d/e", 0o755), file("d/e/f", "1"), file("d/g", "g"), dir("again", 0o755), dir("again/sub", 0o755),
		file("again/sub/old", "x"), file("tofile", "f"), dir("dirtofile", 0o755), file("dirtofile/y", "y"), file("gone", "x"), file("same", "s"))
	if plain, names := packedLayer(t, s, "never", a); len(names) != 0 || len(plain) != 1024 {
		t.Errorf("of a container that never was: %d bytes, %q", len(plain), names)
	}
	mnt, p := mounted(t, s, "c", a)
	target, err := CreateTarget(mnt, "/made/vol", true)
	if err != nil {
		t.Fatal(err)
	}
	target.Close()
	if _, names := packedLayer(t, s, "c", a); len(names) != 0 {
		t.Errorf("of a container that changed nothing: %q", names)
	}
	for _, err := range []error{
		os.WriteFile(p+"/d/e/f", []byte("2"), 0o644), os.Remove(p + "/d/g"), os.RemoveAll(p + "/again"), os.MkdirAll(p+"/again/sub", 0o755),
		os.WriteFile(p+"/again/sub/new", nil, 0o644), os.Remove(p + "/tofile"), os.Mkdir(p+"/tofile", 0o700), os.RemoveAll(p + "/dirtofile"),
		os.WriteFile(p+"/dirtofile", []byte("now"), 0o644), os.Remove(p + "/gone"), os.Chmod(p+"/same", 0o644), os.WriteFile(p+"/.wh.d", nil, 0o644),
		os.Symlink("d", p+"/l"), os.WriteFile(p+"/h1", []byte("h"), 0o644), os.Link(p+"/h1", p+"/h2"), unix.Mknod(p+"/pipe", unix.S_IFIFO|0o600, 0),
		os.Chmod(p, 0o711), os.Lchown(p+"/h1", 7, 8),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	plain, names := packedLayer(t, s, "c", a)
	want := "./ .wh.gone again/ again/sub/ again/sub/.wh.old again/sub/new d/ d/.wh.g d/e/ d/e/f dirtofile h1 h2 l pipe tofile/"
	if got := strings.Join(slices.Sorted(slices.Values(names)), " "); got != want {
		t.Errorf("the layer holds\n%s\nwant\n%s", got, want)
	}
	if _, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(plain), Below: []string{a}}, stream(t, plain)); err != nil {
		t.Fatal(err)
	}
	_, q := mounted(t, s, "c2", a, diffID(plain))
	if err := os.Remove(p + "/.wh.d"); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(p + "/made"); err != nil {
		t.Fatal(err)
	}
	tree := func(at string) map[string]string {
		m := map[string]string{}
		for name, text := range describe(t, at+"/.", true) {
			m[strings.TrimPrefix(name, at)] = strings.ReplaceAll(text, at, "")
		}
		return m
	}
	shown, made := tree(p), tree(q)
	if st, was := lstat(t, q+"/."), lstat(t, p+"/."); st.Mode != was.Mode {
		t.Errorf("the root has mode %o, want %o", st.Mode, was.Mode)
	}
	for _, root := range []string{"", "/", "/.", "."} { // its time is that of the last removal here
		delete(shown, root)
		delete(made, root)
	}
	for _, name := range sortedKeys(shown, made) {
		if made[name] != shown[name] {
			t.Errorf("%s\nis   %s\nwant %s", name, made[name], shown[name])
		}
	}
	if len(shown) < 10 {
		t.Errorf("only %d paths compared", len(shown))
	}
}
