package rootfs

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

func TestVolume(t *testing.T) {
	s := newStore(t)
	p, err := s.Volume("data.1-x_Y")
	if err != nil || p != filepath.Join(s.root, "volumes/data.1-x_Y/_data") {
		t.Fatalf("%s, %v", p, err)
	}
	if st := lstat(t, p); st.Mode != unix.S_IFDIR|0o755 {
		t.Errorf("mode %o", st.Mode)
	}
	if err := os.WriteFile(p+"/f", make([]byte, 1000), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(p+"/d", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(p+"/f", p+"/d/g"); err != nil {
		t.Fatal(err)
	}
	if again, err := s.Volume("data.1-x_Y"); err != nil || again != p {
		t.Errorf("a second time: %s, %v", again, err)
	}
	wantNames(t, p, "d", "f")
	if n, err := s.VolumeSize("data.1-x_Y"); err != nil || n != 1000 {
		t.Errorf("size %d, %v", n, err)
	}
	for range 2 {
		if err := s.RemoveVolume("data.1-x_Y"); err != nil {
			t.Error(err)
		}
	}
	wantMissing(t, filepath.Dir(p))
	for _, bad := range []string{"", "x", "..", ".x", "-x", "a/b", "../../x", "a b", "a\nb", "ab\n", "ä", strings.Repeat("x", 256)} {
		if _, err := s.Volume(bad); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("volume %q: %v", bad, err)
		}
		if err := s.RemoveVolume(bad); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("removing volume %q: %v", bad, err)
		}
	}
}

// BR-59: content, owner and mode go into an empty volume and into no other.
func TestCopyUp(t *testing.T) {
	s := newStore(t)
	data := dir("srv/data", 0o2750)
	data.Uid, data.Gid = 1000, 1001
	data.PAXRecords = map[string]string{paxXattr + "user.d": "dir"}
	f := file("srv/data/f", "content")
	f.Uid, f.Gid, f.Mode = 1000, 1000, 0o4711
	f.PAXRecords = map[string]string{paxXattr + "user.f": "file"}
	sub := dir("srv/data/sub", 0o1700)
	id := unpack(t, s, nil, dir("srv", 0o755), data, f, sub, file("srv/data/sub/g", "g"), hardlink("srv/data/sub/h", "srv/data/f"),
		symlink("srv/data/l", "/etc/passwd"), symlink("link", "srv/data"), dir("empty", 0o711), file("plain", "x"))
	mnt, _ := mounted(t, s, "c", id)
	fill := func(name, target string) (string, error) {
		t.Helper()
		p, err := s.Volume(name)
		if err != nil {
			t.Fatal(err)
		}
		v, err := os.Open(p)
		if err != nil {
			t.Fatal(err)
		}
		defer v.Close()
		return p, s.CopyUp(mnt, target, v)
	}
	for name, target := range map[string]string{"direct": "/srv/data", "by-link": "/link/"} {
		p, err := fill(name, target)
		if err != nil {
			t.Fatal(err)
		}
		wantNames(t, p, "f", "l", "sub")
		wantContent(t, p+"/f", "content")
		st := lstat(t, p)
		if st.Mode != unix.S_IFDIR|0o2750 || st.Uid != 1000 || st.Gid != 1001 || st.Mtim.Sec != testTime.Unix() {
			t.Errorf("volume has mode %o owner %d:%d time %d", st.Mode, st.Uid, st.Gid, st.Mtim.Sec)
		}
		one, two := lstat(t, p+"/f"), lstat(t, p+"/sub/h")
		if one.Ino != two.Ino || one.Mode != unix.S_IFREG|0o4711 || one.Uid != 1000 || one.Gid != 1000 {
			t.Errorf("file has mode %o owner %d:%d, links %d", one.Mode, one.Uid, one.Gid, one.Nlink)
		}
		if st := lstat(t, p+"/sub"); st.Mode != unix.S_IFDIR|0o1700 || st.Mtim.Sec != testTime.Unix() {
			t.Errorf("directory has mode %o time %d", st.Mode, st.Mtim.Sec)
		}
		if text, err := os.Readlink(p + "/l"); text != "/etc/passwd" {
			t.Errorf("link is %q, %v", text, err)
		}
		for path, name := range map[string]string{"": "user.d", "/f": "user.f"} {
			if n, err := unix.Getxattr(p+path, name, make([]byte, 10)); n < 3 {
				t.Errorf("attribute %s: %v", name, err)
			}
		}
	}
	p, err := fill("direct", "/srv/data") // again, not empty
	if err != nil {
		t.Error(err)
	}
	if err := os.Remove(p + "/f"); err != nil {
		t.Fatal(err)
	}
	if _, err := fill("direct", "/srv/data"); err != nil {
		t.Error(err)
	}
	wantNames(t, p, "l", "sub")
	if err := os.Chmod(p, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := fill("direct", "/srv/data"); err != nil {
		t.Error(err)
	}
	if st := lstat(t, p); st.Mode != unix.S_IFDIR|0o700 {
		t.Errorf("a volume that is not empty got mode %o", st.Mode)
	}
	// A killed agent's half copy is no content.
	p, err = s.Volume("half")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(p+"/"+copyStage+"/f", 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := fill("half", "/srv/data"); err != nil {
		t.Error(err)
	}
	wantNames(t, p, "f", "l", "sub")
	// Nothing to copy: not there, or nothing in it but its owner and mode.
	if p, err := fill("missing", "/not/there"); err != nil || lstat(t, p).Mode != unix.S_IFDIR|0o755 {
		t.Errorf("missing: %v", err)
	}
	if p, err := fill("empty", "/empty"); err != nil || lstat(t, p).Mode != unix.S_IFDIR|0o711 {
		t.Errorf("empty: %v", err)
	}
	if _, err := fill("file", "/plain"); wire.ClassOf(err) != wire.Invalid || !strings.Contains(err.Error(), "cannot mount volume over existing file, file exists /plain") {
		t.Errorf("file: %v", err)
	}
}

// Many containers that start at once with one new volume: filled once, whole when the first goes on.
func TestCopyUpAtOnce(t *testing.T) {
	s := newStore(t)
	var entries []entry
	for i := range 200 {
		entries = append(entries, file(fmt.Sprintf("d/f%03d", i), "x"))
	}
	id := unpack(t, s, nil, entries...)
	mnt, _ := mounted(t, s, "c", id)
	p, err := s.Volume("shared")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			v, err := os.Open(p)
			if err == nil {
				defer v.Close()
				err = s.CopyUp(mnt, "/d", v)
			}
			names, _ := os.ReadDir(p)
			if err != nil || len(names) != 200 {
				t.Errorf("%d files, %v", len(names), err)
			}
		})
	}
	wg.Wait()
}
