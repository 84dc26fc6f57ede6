package rootfs

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// get packs a path and returns the names of the archive.
func get(t testing.TB, root *os.File, p string) (data []byte, names []string) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	done := make(chan error, 1)
	go func() {
		_, err := Get(context.Background(), root, p, w)
		w.Close()
		done <- err
	}()
	data, err = io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatalf("%s: %v", p, err)
	}
	tr := tar.NewReader(bytes.NewReader(data))
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return data, names
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
}

// A tree like Debian's goes out of a container and into another as it was (BR-24).
func TestArchiveRoundTrip(t *testing.T) {
	s := newStore(t)
	src := debianTree(t)
	if err := os.Remove(src + "/odd/sparse"); err != nil { // its own test
		t.Fatal(err)
	}
	odd := lstat(t, src+"/odd")
	from, err := os.Open(filepath.Dir(src))
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, src+"/odd", []unix.Timespec{odd.Atim, odd.Mtim}, 0); err != nil {
		t.Fatal(err)
	}
	to, p := mounted(t, s, "c")
	if err := os.Mkdir(p+"/in", 0o700); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := Get(context.Background(), from, "src/", w)
		w.Close()
		done <- err
	}()
	if err := Put(context.Background(), to, "/in", r, false, nil); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := unix.Lremovexattr(src+"/odd/absolute", "trusted.link"); err != nil { // a link's own attributes do not travel
		t.Fatal(err)
	}
	compareTrees(t, src, p+"/in/src", true)
}

// What Docker's clients see of a path: its name, kind and where a link leads, and how the archive calls it.
func TestArchivePaths(t *testing.T) {
	g := newCage(t)
	root := os.NewFile(uintptr(mustDup(t, g.root)), "root")
	defer root.Close()
	plant(t, g.top+"/root", "d/", "d/sub/", "d/sub/f", "d/l -> sub", "d/up -> ../../../canary", "abs -> /d/sub", "chain -> d/l", "f", "dangling -> nowhere/at/all", "loop -> loop")
	if err := os.Chmod(g.top+"/root/f", 0o755|fs.ModeSetuid); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		p, name, target string
		mode            fs.FileMode
		names           string
	}{
		{"/d/sub", "sub", "", fs.ModeDir | 0o755, "sub/ sub/f"},
		{"d/sub/", "sub", "", fs.ModeDir | 0o755, "sub/ sub/f"},
		{"/d/sub/.", ".", "", fs.ModeDir | 0o755, "./ f"},
		{"/d/l", "l", "/d/sub", fs.ModeSymlink | 0o777, "l"},
		{"/d/l/", "l", "", fs.ModeDir | 0o755, "l/ l/f"},
		{"/d/l/.", ".", "", fs.ModeDir | 0o755, "./ f"},
		{"/d/l/f", "f", "", 0o755, "f"},
		{"/abs", "abs", "/d/sub", fs.ModeSymlink | 0o777, "abs"},
		{"/chain", "chain", "/d/sub", fs.ModeSymlink | 0o777, "chain"},
		{"/d/up", "up", "/canary", fs.ModeSymlink | 0o777, "up"},
		{"/dangling", "dangling", "/nowhere/at/all", fs.ModeSymlink | 0o777, "dangling"},
		{"/../../f", "f", "", 0o755 | fs.ModeSetuid, "f"},
	} {
		r, err := Stat(root, c.p)
		if err != nil {
			t.Errorf("%s: %v", c.p, err)
			continue
		}
		if r.Name != c.name || r.LinkTarget != c.target || fs.FileMode(r.Mode) != c.mode || r.ModTime == 0 {
			t.Errorf("%s is %+v mode %v, want name %q target %q mode %v", c.p, r, fs.FileMode(r.Mode), c.name, c.target, c.mode)
		}
		if _, names := get(t, root, c.p); strings.Join(names, " ") != c.names {
			t.Errorf("%s packed as %q, want %q", c.p, names, c.names)
		}
	}
	if _, names := get(t, root, "/"); len(names) != 11 || names[0] != "/" {
		t.Errorf("the root is packed as %q", names)
	}
	for _, p := range []string{"/no", "/d/no", "/f/x", "/d/up/", "/dangling/"} {
		if _, err := Stat(root, p); wire.ClassOf(err) != wire.NotFound || !strings.Contains(err.Error(), "Could not find the file "+p) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if r, err := Stat(root, "/loop"); err != nil || r.LinkTarget == "" {
		t.Errorf("a link to itself: %+v, %v", r, err)
	}
	g.check()
}

func TestPut(t *testing.T) {
	g := newCage(t)
	root := os.NewFile(uintptr(mustDup(t, g.root)), "root")
	defer root.Close()
	defer unix.Umask(unix.Umask(0o077)) // the agent's own is no matter
	p := g.top + "/root"
	plant(t, p, "data/", "data/old/", "data/old/x", "data/file", "other/", "data/link -> /other", "data/out -> ../../canary.d", "canary.d/", "l -> data")
	before := lstat(t, p+"/data")
	put := func(at string, noOverwrite bool, owner *User, entries ...entry) error {
		t.Helper()
		return Put(context.Background(), root, at, stream(t, gzipped(t, pack(t, entries...))), noOverwrite, owner)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	wide := file("new", "n")
	wide.Mode, wide.Uid, wide.Gid = 0o4777, 5, 6
	must(put("/l", false, nil, dir(".", 0o700), wide, dir("nd", 0o777), file("link/via", "v"), file("old/x", "2"), file(".wh.file", "literal"),
		entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o666}}))
	wantContent(t, p+"/other/via", "v")
	wantContent(t, p+"/data/old/x", "2")
	wantContent(t, p+"/data/.wh.file", "literal")
	wantContent(t, p+"/data/file", "data/file")
	if st := lstat(t, p+"/data"); st.Mode != before.Mode {
		t.Errorf("the directory itself got mode %o", st.Mode)
	}
	for name, want := range map[string]uint32{".wh.file": unix.S_IFREG | 0o644, "new": unix.S_IFREG | 0o4777, "nd": unix.S_IFDIR | 0o777, "fifo": unix.S_IFIFO | 0o666} {
		if st := lstat(t, p+"/data/"+name); st.Mode != want {
			t.Errorf("%s has mode %o, want %o", name, st.Mode, want)
		}
	}
	if st := lstat(t, p+"/data/new"); st.Uid != 5 || st.Gid != 6 {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
	must(put("/data", false, &User{UID: 8, GID: 9}, wide))
	if st := lstat(t, p+"/data/new"); st.Uid != 8 || st.Gid != 9 {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
	for text, err := range map[string]error{
		"cannot overwrite directory":                 put("/data", true, nil, file("old", "x")),
		"cannot overwrite non-directory":             put("/data", true, nil, dir("file", 0o755)),
		"extraction point is not a directory":        put("/data/file", false, nil, file("x", "x")),
		"is outside of":                              put("/data", false, nil, file("../canary", "x")),
		"reading the archive":                        Put(context.Background(), root, "/data", stream(t, []byte(strings.Repeat("no tar", 200))), false, nil),
		"Could not find the file /nope":              nil,
		"invalid hardlink \"h\" -> \"../../canary\"": put("/data", false, nil, hardlink("h", "../../canary")),
	} {
		if strings.HasPrefix(text, "Could") {
			if err = put("/nope", false, nil, file("x", "x")); wire.ClassOf(err) != wire.NotFound {
				t.Errorf("no such directory: %v", err)
			}
			continue
		}
		if wire.ClassOf(err) != wire.Invalid || !strings.Contains(err.Error(), text) {
			t.Errorf("want %q: %v", text, err)
		}
	}
	must(put("/data", false, nil, file("old", "now a file"), dir("file", 0o755)))
	wantContent(t, p+"/data/old", "now a file")
	must(put("/data", false, nil, file("out/canary", "mine")))
	wantContent(t, p+"/canary.d/canary", "mine") // where a chroot leads
	// A client sends zeros for holes; they do not fill the disk.
	holes := file("holes", strings.Repeat("\x00", 8<<20)+"end")
	must(put("/data", false, nil, holes))
	if st := lstat(t, p+"/data/holes"); st.Size != 8<<20+3 || st.Blocks > 64 {
		t.Errorf("%d bytes in %d blocks", st.Size, st.Blocks)
	}
	ctx, cancel := context.WithCancel(context.Background())
	slow, _ := slowStream(t, pack(t, file("x", strings.Repeat("x", 100000))), 50000)
	done := make(chan error, 1)
	go func() { done <- Put(ctx, root, "/data", slow, false, nil) }()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	os.RemoveAll(p + "/canary.d")
	g.check()
}

// A container that swaps directories for links while its files are copied leads neither a read nor a write outside.
func TestArchiveRace(t *testing.T) {
	g := newCage(t)
	root := os.NewFile(uintptr(mustDup(t, g.root)), "root")
	defer root.Close()
	p := g.top + "/root"
	plant(t, p, "d/", "d/x/", "d/x/canary", "spare/", "spare/l -> "+g.top+"/canary.d", "spare/f -> "+g.top+"/canary")
	dirFD := func(name string) int { // the attacker follows no links, it would leave by itself
		fd, err := unix.Open(p+"/"+name, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	d, x, spare := dirFD("d"), dirFD("d/x"), dirFD("spare")
	stop, done := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-stop:
				done <- n
				return
			default:
			}
			unix.Renameat2(d, "x", spare, "l", unix.RENAME_EXCHANGE)
			unix.Renameat2(x, "canary", spare, "f", unix.RENAME_EXCHANGE)
			unix.Renameat2(x, "node", spare, "f", unix.RENAME_EXCHANGE)
			unix.Renameat2(x, "sub", spare, "l", unix.RENAME_EXCHANGE)
			n++
		}
	}()
	mode := file("x/canary", "from the client")
	mode.Mode, mode.Uid = 0o7777, 99
	node := entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "x/node", Mode: 0o7777, Uid: 99}}
	sub := dir("x/sub", 0o7777)
	sub.PAXRecords = map[string]string{paxXattr + "user.x": "y"}
	for until := time.Now().Add(2 * time.Second); time.Now().Before(until); {
		Put(context.Background(), root, "/d", stream(t, pack(t, mode, node, sub, hardlink("x/h", "x/canary"), hardlink("x/node", "x/h"))), false, nil)
		for _, path := range []string{"/d", "/d/x/canary", "/d/x/."} {
			var b bytes.Buffer
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				Get(context.Background(), root, path, w)
				w.Close()
			}()
			io.Copy(&b, r)
			r.Close()
			if bytes.Contains(b.Bytes(), []byte(canaryText)) {
				t.Fatalf("%s holds the canary", path)
			}
		}
	}
	close(stop)
	t.Logf("%d swaps", <-done)
	g.check()
}

func TestExport(t *testing.T) {
	s := newStore(t)
	a := unpack(t, s, nil, dir("./", 0o755), dir("d", 0o755), file("d/old", "old"), file("d/gone", "x"), file("plain", "p"), dir("mnt", 0o755), file("covered", ""))
	b := unpack(t, s, []string{a}, file("d/.wh.gone", ""), file("d/new", "new"))
	mnt, p := mounted(t, s, "c", a, b)
	if err := os.Remove(p + "/plain"); err != nil {
		t.Fatal(err)
	}
	out, err := os.Create(t.TempDir() + "/tar")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := Export(context.Background(), mnt, out); err != nil {
		t.Fatal(err)
	}
	list, err := exec.Command("tar", "-tf", out.Name()).Output()
	if err != nil || string(list) != "covered\nd/\nd/new\nd/old\nmnt/\n" {
		t.Errorf("%q, %v", list, err)
	}
	// The same with mounts in it: a process's root, say. They are left out, their places stay.
	other := t.TempDir()
	if err := os.WriteFile(other+"/secret", []byte("s"), 0o600); err != nil {
		t.Fatal(err)
	}
	inNewThread(func() {
		err = func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
				return err
			}
			at := t.TempDir()
			if err := unix.MoveMount(fdOf(mnt), "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
				return err
			}
			if err := unix.Mount(other, at+"/mnt", "", unix.MS_BIND, ""); err != nil {
				return err
			}
			if err := unix.Mount(other+"/secret", at+"/covered", "", unix.MS_BIND, ""); err != nil {
				return err
			}
			fd, err := unix.Open(at, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			root, err := fileOf(fd, at, err)
			if err != nil {
				return err
			}
			defer root.Close()
			if err := out.Truncate(0); err != nil {
				return err
			}
			if _, err := out.Seek(0, 0); err != nil {
				return err
			}
			return Export(context.Background(), root, out)
		}()
	})
	if err != nil {
		t.Fatal(err)
	}
	list, err = exec.Command("tar", "-tvf", out.Name()).Output()
	if err != nil || strings.Contains(string(list), "secret") || strings.Count(string(list), "\n") != 5 {
		t.Errorf("%s, %v", list, err)
	}
	if data, err := os.ReadFile(out.Name()); err != nil || len(data) == 0 {
		t.Error(err)
	}
}

func TestChanges(t *testing.T) {
	s := newStore(t)
	capable := file("capable", "x")
	a := unpack(t, s, nil, dir("etc", 0o755), file("etc/hosts", ""), file("etc/passwd", "p"), dir("d", 0o755), dir("d/e", 0o755), file("d/e/f", "1"), file("d/g", "g"),
		dir("replaced", 0o755), file("replaced/x", "x"), file("tofile", "f"), dir("dirtofile", 0o755), file("dirtofile/y", "y"), file("same", "same"), capable, symlink("l", "d"), dir("moded", 0o755), file("gone-below", "x"))
	b := unpack(t, s, []string{a}, file(".wh.gone-below", ""), file("second", "2"))
	layers := []string{a, b}
	if got, err := s.Changes(context.Background(), "never", layers, nil); err != nil || len(got) != 0 {
		t.Errorf("of a container that never was: %q, %v", got, err)
	}
	mnt, err := s.MountWith("c", layers, MountOptions{MountPoints: true})
	if err != nil {
		t.Fatal(err)
	}
	defer mnt.Close()
	p := fmt.Sprintf("/proc/self/fd/%d", fdOf(mnt))
	check := func(targets []string, want ...string) {
		t.Helper()
		got, err := s.Changes(context.Background(), "c", layers, targets)
		if err != nil || strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("changes are\n%s\n%v, want\n%s", strings.Join(got, "\n"), err, strings.Join(want, "\n"))
		}
	}
	check(nil)
	for target, dir := range map[string]bool{"/proc": true, "/sys": true, "/dev": true, "/etc/hosts": false, "/etc/hostname": false, "/etc/resolv.conf": false, "/a/b/volume": true, "/cfg/file": false} {
		f, err := CreateTarget(mnt, target, dir)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	check([]string{"/a/b/volume", "cfg/file"}) // what a start makes is nobody's change
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.WriteFile(p+"/d/e/f", []byte("2"), 0o644))
	must(os.Remove(p + "/d/g"))
	must(os.WriteFile(p+"/d/new", nil, 0o644))
	must(os.RemoveAll(p + "/replaced"))
	must(os.Mkdir(p+"/replaced", 0o755))
	must(os.WriteFile(p+"/replaced/n", nil, 0o644))
	must(os.Remove(p + "/tofile"))
	must(os.Mkdir(p+"/tofile", 0o755))
	must(os.WriteFile(p+"/tofile/in", nil, 0o644))
	must(os.RemoveAll(p + "/dirtofile"))
	must(os.WriteFile(p+"/dirtofile", nil, 0o644))
	must(os.Chmod(p+"/moded", 0o700))
	must(os.WriteFile(p+"/gone-below", []byte("back"), 0o644))
	must(os.Remove(p + "/second"))
	must(os.Remove(p + "/l"))
	must(os.Symlink("e", p+"/l"))
	must(os.MkdirAll(p+"/new/tree", 0o755))
	must(os.WriteFile(p+"/etc/hostname", []byte("not empty"), 0o644))
	must(unix.Setxattr(p+"/capable", "security.capability", []byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 0))
	must(os.Chmod(p+"/same", 0o644)) // copied up, and nothing else
	check([]string{"/a/b/volume", "/cfg/file"},
		"C /capable", "C /d", "C /d/e", "C /d/e/f", "D /d/g", "A /d/new", "C /dirtofile", "D /dirtofile/y", "C /etc", "C /etc/hostname",
		"A /gone-below", "C /l", "C /moded", "A /new", "A /new/tree", "C /replaced", "A /replaced/n", "D /replaced/x", "D /second", "C /tofile", "A /tofile/in")
	n, err := s.Size("c")
	if want := int64(len("2") + len("back") + len("not empty") + len("same") + len("x")); err != nil || n != want {
		t.Errorf("size %d, %v, want %d", n, err, want)
	}
	if n, err := s.Size("nobody"); n != 0 || err != nil {
		t.Errorf("size of nothing: %d, %v", n, err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(fmt.Errorf("enough"))
	if _, err := s.Changes(ctx, "c", layers, nil); err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("cancelled: %v", err)
	}
}
