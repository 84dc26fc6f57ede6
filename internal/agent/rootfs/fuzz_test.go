package rootfs

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// FuzzApply lets any bytes be an archive. Whatever they are, nothing outside the root changes and nothing of it gets in;
// every directory that is made can be removed again.
func FuzzApply(f *testing.F) {
	if os.Geteuid() != 0 {
		f.Skip("needs root")
	}
	x := file("d/x", "content")
	x.PAXRecords = map[string]string{paxXattr + "user.x": "1", paxXattr + "trusted.overlay.opaque": "y"}
	for _, entries := range [][]entry{
		{dir("d", 0o755), x, symlink("d/l", ".."), hardlink("d/h", "d/x"), file("d/.wh.gone", ""), file("d/.wh..wh..opq", "")},
		{symlink("a", ".."), file("a/canary", "x"), hardlink("h", "a/canary.d/canary"), dir("a", 0o1777), symlink("a", "/"), file("a/../canary", "x")},
		{file("../canary", "x"), symlink("l", "../canary"), file("l", "x"), dir("l", 0o4755), file("l/.wh.y", "")},
		{dir("./", 0o700), symlink("s", "../canary.d"), file("s/canary", "y"), file("s/.wh.canary", ""), hardlink("s2", "s"), file("s2", "z")},
		{{Header: tar.Header{Typeflag: tar.TypeChar, Name: "c", Devmajor: 1, Devminor: 3}}, {Header: tar.Header{Typeflag: tar.TypeFifo, Name: "c/p"}}},
	} {
		f.Add(pack(f, entries...), true)
	}
	f.Fuzz(func(t *testing.T, data []byte, layer bool) {
		if len(data) > 64<<10 {
			return
		}
		g := newCage(t)
		a := newApplier(g.root)
		a.whiteouts = layer
		a.sparse = 1 << 20
		a.apply(bytes.NewReader(data))
		a.close()
		g.check()
		top, err := unix.Open(g.top, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(top)
		if err := removeTree(top, "root"); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(filepath.Join(g.top, "root")); !os.IsNotExist(err) {
			t.Error(err)
		}
	})
}

// FuzzCleanName: what is let through stays a relative path without dots.
func FuzzCleanName(f *testing.F) {
	for _, s := range []string{"", "/", ".", "..", "a/../..", "//a//b/", "./a", "/../a", "a/./b/../c", "...", "a/..b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		c, err := cleanName(name)
		if err != nil {
			return
		}
		if c != "" && !filepath.IsLocal(c) || c != "" && filepath.Clean(c) != c || c == "." {
			t.Errorf("%q became %q", name, c)
		}
	})
}

// FuzzInfo: no metadata file makes the reader fall over, and what it takes it writes back the same.
func FuzzInfo(f *testing.F) {
	l := layerInfo{DiffID: diffID(nil), Size: 5, HasRoot: true, Mode: 0o755}
	f.Add(l.text())
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseInfo(text)
		if err != nil {
			return
		}
		again, err := parseInfo(got.text())
		if err != nil || again != got {
			t.Errorf("%+v became %+v, %v", got, again, err)
		}
	})
}
