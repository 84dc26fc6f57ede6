package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// cage is a directory to unpack in with a canary beside it, which no archive may touch or read.
type cage struct {
	t    testing.TB
	top  string
	root int
	was  string
}

const canaryText = "the canary sings"

func newCage(t testing.TB) *cage {
	t.Helper()
	needRoot(t)
	c := &cage{t: t, top: t.TempDir()}
	for _, d := range []string{"root", "canary.d"} {
		if err := os.Mkdir(filepath.Join(c.top, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{"canary", "canary.d/canary"} {
		if err := os.WriteFile(filepath.Join(c.top, f), []byte(canaryText), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := unix.Open(filepath.Join(c.top, "root"), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	c.root = fd
	c.was = c.outside()
	return c
}

// outside describes everything but the root.
func (c *cage) outside() string {
	var b strings.Builder
	for _, p := range []string{".", "canary", "canary.d", "canary.d/canary"} {
		st := lstat(c.t, filepath.Join(c.top, p))
		fmt.Fprintf(&b, "%s %o %d:%d %d %d", p, st.Mode, st.Uid, st.Gid, st.Nlink, st.Ino)
		if st.Mode&unix.S_IFMT == unix.S_IFREG {
			text, _ := os.ReadFile(filepath.Join(c.top, p))
			fmt.Fprintf(&b, " %q", text)
		}
		fd, err := unix.Open(filepath.Join(c.top, p), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			attrs, _ := readXattrs(fd)
			fmt.Fprintf(&b, " %v", attrs)
			unix.Close(fd)
		}
		b.WriteByte('\n')
	}
	entries, _ := os.ReadDir(c.top)
	fmt.Fprintln(&b, entries)
	entries, _ = os.ReadDir(filepath.Join(c.top, "canary.d"))
	fmt.Fprintln(&b, entries)
	return b.String()
}

// check fails the test if something outside has changed, or if the canary's text got in.
func (c *cage) check() {
	c.t.Helper()
	if now := c.outside(); now != c.was {
		c.t.Errorf("the outside was\n%sand is\n%s", c.was, now)
	}
	filepath.WalkDir(filepath.Join(c.top, "root"), func(p string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if text, _ := os.ReadFile(p); bytes.Contains(text, []byte(canaryText)) {
				c.t.Errorf("%s holds the canary", p)
			}
		}
		return nil
	})
}

func TestHostileArchives(t *testing.T) {
	long := strings.Repeat("n", 256)
	withXattr := func(e entry, name, value string) entry {
		e.PAXRecords = map[string]string{paxXattr + name: value}
		return e
	}
	many := file("many", "")
	many.PAXRecords = map[string]string{}
	for i := range maxXattrs + 1 {
		many.PAXRecords[fmt.Sprintf("%suser.%d", paxXattr, i)] = "x"
	}
	negative := file("negative", "")
	negative.PAXRecords = map[string]string{"uid": "-5"}
	negative.Uid = -5
	for _, c := range []struct {
		name    string
		refused bool
		entries []entry
	}{
		{"parent", true, []entry{file("../canary", "x")}},
		{"absolute parent", true, []entry{file("/../canary", "x")}},
		{"climbing in the middle", true, []entry{dir("a", 0o755), file("a/../../canary", "x")}},
		{"climbing directory", true, []entry{dir("..", 0o777)}},
		{"climbing directory by slash", true, []entry{dir("a/../../", 0o777)}},
		{"climbing link", true, []entry{symlink("../l", "x")}},
		{"climbing hard link", true, []entry{file("f", "x"), hardlink("../l", "f")}},
		{"climbing fifo", true, []entry{{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "../fifo"}}}},
		{"absolute name", false, []entry{file("/canary", "x"), file("//canary.d/canary", "x")}},
		{"file through a climbing link", false, []entry{symlink("a", ".."), file("a/canary", "x")}},
		{"file through a long climbing link", false, []entry{symlink("a", strings.Repeat("../", 100)), file("a/canary", "x")}},
		{"file through two links", false, []entry{symlink("a", ".."), symlink("b", "a/.."), file("b/canary", "x")}},
		{"file over a link", false, []entry{symlink("a", "../canary"), file("a", "x")}},
		{"directory over a link", false, []entry{symlink("a", "../canary.d"), dir("a", 0o777), file("a/canary", "x")}},
		{"directory replaced by a link", true, []entry{dir("d", 0o755), file("d/x", "x"), symlink("d", "../canary.d"), file("d/canary", "x")}},
		{"link replaced by a link", false, []entry{dir("in", 0o755), symlink("l", "in"), file("l/x", "1"), symlink("l", ".."), file("l/canary", "2")}},
		{"link loop", true, []entry{symlink("a", "b"), symlink("b", "a"), file("a/x", "x")}},
		{"hard link out", true, []entry{hardlink("h", "../canary")}},
		{"hard link through a link", true, []entry{symlink("a", ".."), hardlink("h", "a/canary.d/canary")}},
		{"hard link to a link out", false, []entry{symlink("a", "../canary"), hardlink("h", "a")}},
		{"writing through a hard link to a link", false, []entry{symlink("a", "../canary"), hardlink("h", "a"), file("h", "x")}},
		{"hard link to itself", true, []entry{file("h", "x"), hardlink("h", "h")}},
		{"hard link to a directory", true, []entry{dir("d", 0o755), hardlink("h", "d")}},
		{"hard link to the root", true, []entry{hardlink("h", "/")}},
		{"hard link to nothing", true, []entry{hardlink("h", "nothing")}},
		{"hard link to a whiteout", true, []entry{file(".wh.gone", ""), hardlink("h", "gone")}},
		{"whiteout of the parent", true, []entry{file("../.wh.canary", "")}},
		{"whiteout of ..", true, []entry{file(".wh...", "")}},
		{"whiteout of .", true, []entry{file("a/.wh..", "")}},
		{"whiteout of nothing", true, []entry{file(".wh.", "")}},
		{"whiteout through a link", false, []entry{symlink("a", "../canary.d"), dir("canary.d", 0o755), file("a/.wh.canary", "")}},
		{"opaque mark through a link", false, []entry{symlink("a", ".."), file("a/.wh..wh..opq", "")}},
		{"attributes through a link", false, []entry{withXattr(symlink("a", "../canary"), "trusted.x", "1")}},
		{"root is a link", true, []entry{symlink("./", "..")}},
		{"root is a file", true, []entry{file(".", "x")}},
		{"root is a hard link", true, []entry{file("f", "x"), hardlink("/", "f")}},
		{"file under a file", true, []entry{file("f", "x"), file("f/g", "x")}},
		{"name too long", true, []entry{file(long, "x")}},
		{"path too long", true, []entry{file(strings.Repeat("n/", 2100)+"x", "x")}},
		{"link text too long", true, []entry{symlink("l", strings.Repeat("n/", 2100))}},
		{"empty link text", true, []entry{symlink("l", "")}},
		{"too many attributes", true, []entry{many}},
		{"attribute name too long", true, []entry{withXattr(file("f", ""), "user."+long, "x")}},
		{"attribute value too long", true, []entry{withXattr(file("f", ""), "user.x", strings.Repeat("x", maxXattrValue+1))}},
		{"bad file capability", true, []entry{withXattr(file("f", ""), "security.capability", "nonsense")}},
		{"negative owner", true, []entry{negative}},
		{"owner without a number", true, []entry{{Header: tar.Header{Typeflag: tar.TypeReg, Name: "f", Uid: 1<<32 - 1}}}},
		{"device number out of range", true, []entry{{Header: tar.Header{Typeflag: tar.TypeChar, Name: "c", Devmajor: 1 << 20, Devminor: 1}}}},
		{"unknown type", true, []entry{{Header: tar.Header{Typeflag: 'V', Name: "volume"}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			plain := pack(t, c.entries...)
			t.Run("bare", func(t *testing.T) { // the applier by itself, with nothing around it to hold it back
				g := newCage(t)
				a := newApplier(g.root)
				a.whiteouts = true
				err := a.apply(bytes.NewReader(plain))
				a.close()
				g.check()
				checkRefused(t, err, c.refused)
			})
			t.Run("child", func(t *testing.T) {
				s := newStore(t)
				_, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(plain)}, stream(t, plain))
				checkRefused(t, err, c.refused)
				if layers, _ := s.Layers(); c.refused && len(layers) != 0 {
					t.Errorf("kept: %v", layers)
				}
			})
		})
	}
}

func checkRefused(t *testing.T, err error, refused bool) {
	t.Helper()
	if !refused {
		if err != nil {
			t.Errorf("refused: %v", err)
		}
		return
	}
	var e *wire.Error
	if !errors.As(err, &e) || e.Class != wire.Invalid {
		t.Errorf("error %v, want one of class Invalid", err)
	}
}

// What is not refused ends up inside the root, where a chroot would have put it.
func TestContained(t *testing.T) {
	g := newCage(t)
	a := newApplier(g.root)
	defer a.close()
	err := a.apply(bytes.NewReader(pack(t,
		symlink("up", ".."), file("up/a", "1"),
		symlink("abs", "/etc"), dir("etc", 0o755), file("abs/b", "2"),
		symlink("deep", "etc/../../../../etc"), file("deep/c", "3"),
		file("/d", "4"))))
	if err != nil {
		t.Fatal(err)
	}
	g.check()
	root := filepath.Join(g.top, "root")
	wantContent(t, root+"/a", "1")
	wantContent(t, root+"/etc/b", "2")
	wantContent(t, root+"/etc/c", "3")
	wantContent(t, root+"/d", "4")
	if text, err := os.Readlink(root + "/deep"); err != nil || text != "etc/../../../../etc" {
		t.Errorf("link text is %q, %v: it must be kept as it was", text, err)
	}
}

// overlayfs' own attributes in an archive would speak to the mount.
func TestOverlayAttributesAreDropped(t *testing.T) {
	s := newStore(t)
	evil := file("f", "content")
	evil.PAXRecords = map[string]string{
		paxXattr + "trusted.overlay.metacopy": "", paxXattr + "trusted.overlay.redirect": "/etc/shadow",
		paxXattr + "user.kept": "yes", paxXattr + "trusted.kept": "yes"}
	evilDir := dir("d", 0o755)
	evilDir.PAXRecords = map[string]string{paxXattr + "trusted.overlay.opaque": "y"}
	id := unpack(t, s, nil, evil, evilDir)
	p := layerPath(t, s, id)
	for path, want := range map[string]string{"/f": "map[trusted.kept:yes user.kept:yes]", "/d": "map[]"} {
		fd, err := unix.Open(p+path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		attrs, err := readXattrs(fd)
		if err != nil || fmt.Sprint(attrs) != want {
			t.Errorf("%s has attributes %v, %v, want %s", path, attrs, err, want)
		}
		if n, _ := unix.Fgetxattr(fd, opaqueXattr, make([]byte, 10)); n > 0 {
			t.Errorf("%s is opaque", path)
		}
		unix.Close(fd)
	}
}
