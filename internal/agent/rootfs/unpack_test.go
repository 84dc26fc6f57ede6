package rootfs

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

func gzipped(t testing.TB, plain []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zstded(t testing.TB, plain []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(plain, nil)
}

// BR-25, and what else a whiteout may meet: a deleted file is gone in every later layer, in sub-directories too.
func TestWhiteouts(t *testing.T) {
	s := newStore(t)
	base := unpack(t, s, nil, dir("a", 0o755), dir("a/b", 0o750), dir("a/b/c", 0o700), file("a/b/c/1", "1"), file("a/b/c/2", "2"), file("top", "t"))
	gone := unpack(t, s, []string{base}, file("a/b/c/.wh.1", ""), file(".wh.top", ""), file(".wh.never-there", ""))
	_, p := mounted(t, s, "gone", base, gone)
	wantNames(t, p, "a")
	wantNames(t, p+"/a/b/c", "2")
	for path, mode := range map[string]uint32{"/a": 0o755, "/a/b": 0o750, "/a/b/c": 0o700} {
		if st := lstat(t, p+path); st.Mode&0o7777 != mode {
			t.Errorf("%s has mode %o: a directory without an entry must look as below, %o", path, st.Mode&0o7777, mode)
		}
	}
	back := unpack(t, s, []string{base, gone}, file("a/b/c/1", "again"))
	_, p = mounted(t, s, "back", base, gone, back)
	wantContent(t, p+"/a/b/c/1", "again")
	wantMissing(t, p+"/top")
}

// BR-26: what a layer replaces is replaced, whatever kind the old and the new are, with any order of the entries.
func TestReplacedDirectories(t *testing.T) {
	s := newStore(t)
	base := unpack(t, s, nil, dir("bar", 0o755), file("bar/foo", "old"), dir("opq", 0o755), file("opq/old", "old"),
		dir("tofile", 0o755), file("tofile/x", "x"), file("todir", "f"), dir("tolink", 0o755), file("tolink/x", "x"), symlink("link", "bar"))
	top := unpack(t, s, []string{base},
		file(".wh.bar", ""), dir("bar", 0o700), file("bar/new", "new"), // whiteout first
		dir("opq", 0o755), file("opq/new", "new"), file("opq/.wh..wh..opq", ""), // mark last
		file("tofile", "now a file"),
		dir("todir", 0o755), file("todir/x", "x"),
		symlink("tolink", "todir"),
		dir("link", 0o755), file("link/y", "y"))
	_, p := mounted(t, s, "c", base, top)
	wantNames(t, p+"/bar", "new")
	wantNames(t, p+"/opq", "new")
	wantContent(t, p+"/tofile", "now a file")
	wantNames(t, p+"/todir", "x")
	wantContent(t, p+"/tolink/x", "x")
	wantNames(t, p+"/link", "y")
	wantNames(t, p, "bar", "link", "opq", "todir", "tofile", "tolink")

	// And once more, one layer up, back to what they were; the whiteout comes after the directory this time.
	again := unpack(t, s, []string{base, top},
		dir("bar", 0o755), file("bar/third", "3"), file(".wh.bar", ""),
		dir("tofile", 0o755), file("todir", "f"), file(".wh.opq", ""), file("opq", "f"))
	_, p = mounted(t, s, "d", base, top, again)
	wantNames(t, p+"/bar", "third")
	wantNames(t, p+"/tofile")
	wantContent(t, p+"/todir", "f")
	wantContent(t, p+"/opq", "f")
}

// The same within one layer: the last entry of a name stands.
func TestReplacedWithinALayer(t *testing.T) {
	s := newStore(t)
	sticky := dir("d/sub", 0o1777)
	sticky.ModTime = time.Unix(1, 0)
	id := unpack(t, s, nil,
		dir("d", 0o755), sticky, file("d/sub/x", "x"), file("d", "file now"),
		file("f", "f"), dir("f", 0o755), file("f/x", "x"),
		dir("e", 0o755), file("e/x", "x"), symlink("e", "f"), file("e/y", "through the link"),
		file("twice", "first and longer"), file("twice", "second"),
		dir("r", 0o2755), dir("r", 0o755),
		dir("old", 0o755), dir("new", 0o755), symlink("l", "old"), file("l/1", "1"), symlink("l", "new"), file("l/2", "2"),
		dir("g", 0o755), dir("g/sub", 0o1777), dir("h", 0o755), dir("h/sub", 0o755), symlink("g", "h"))
	_, p := mounted(t, s, "c", id)
	wantNames(t, p+"/old", "1")
	wantNames(t, p+"/new", "2")
	if st := lstat(t, p+"/h/sub"); st.Mode&0o7777 != 0o755 {
		t.Errorf("what was said of a removed directory was done to another: mode %o", st.Mode&0o7777)
	}
	wantContent(t, p+"/d", "file now")
	wantNames(t, p+"/f", "x", "y")
	wantContent(t, p+"/twice", "second")
	if st := lstat(t, p+"/r"); st.Mode&0o7777 != 0o755 {
		t.Errorf("mode of r is %o", st.Mode&0o7777)
	}
}

// BR-29: one name of a pair deleted above; a hard link to a file of a layer below.
func TestHardLinksAcrossLayers(t *testing.T) {
	s := newStore(t)
	big := strings.Repeat("0123456789abcdef", 1<<16)
	a := file("LINK-A", big)
	a.Mode, a.Uid, a.Gid = 0o4755, 1000, 1001
	a.PAXRecords = map[string]string{paxXattr + "user.note": "kept"}
	base := unpack(t, s, nil, a, hardlink("LINK-Z", "LINK-A"), symlink("sym", "LINK-A"), dir("dir", 0o755))
	top := unpack(t, s, []string{base}, file(".wh.LINK-A", ""))
	_, p := mounted(t, s, "c", base, top)
	wantContent(t, p+"/LINK-Z", big)
	wantMissing(t, p+"/LINK-A")

	cross := unpack(t, s, []string{base, top}, hardlink("dir/NEW", "LINK-Z"), hardlink("sym2", "sym"))
	_, p = mounted(t, s, "d", base, top, cross)
	wantContent(t, p+"/dir/NEW", big)
	st, old := lstat(t, p+"/dir/NEW"), lstat(t, p+"/LINK-Z")
	if st.Mode != old.Mode || st.Uid != 1000 || st.Gid != 1001 || st.Mtim != old.Mtim {
		t.Errorf("the copy has mode %o owner %d:%d time %v", st.Mode, st.Uid, st.Gid, st.Mtim)
	}
	buf := make([]byte, 10)
	if n, err := unix.Getxattr(p+"/dir/NEW", "user.note", buf); err != nil || string(buf[:n]) != "kept" {
		t.Errorf("the copy's attribute is %q, %v", buf[:max(n, 0)], err)
	}
	if text, err := os.Readlink(p + "/sym2"); err != nil || text != "LINK-A" {
		t.Errorf("link to a link below is %q, %v", text, err)
	}
	// Deleted below counts as not there, and says so.
	plain := pack(t, hardlink("n", "LINK-A"))
	_, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(plain), Below: []string{base, top}}, stream(t, plain))
	if wire.ClassOf(err) != wire.Invalid || !strings.Contains(err.Error(), `invalid hardlink "n" -> "LINK-A"`) {
		t.Errorf("link to a deleted file: %v", err)
	}
}

// BR-30: a change that leaves time and length as they were is a change.
func TestSameTimeAndSize(t *testing.T) {
	s := newStore(t)
	mode := file("mode", "x")
	owner := file("owner", "x")
	attr := file("attr", "x")
	base := unpack(t, s, nil, symlink("l", "a.one"), file("f", "one"), mode, owner, attr)
	mode.Mode = 0o600
	owner.Uid = 7
	attr.PAXRecords = map[string]string{paxXattr + "user.a": "b"}
	top := unpack(t, s, []string{base}, symlink("l", "a.two"), file("f", "two"), mode, owner, attr)
	_, p := mounted(t, s, "c", base, top)
	if text, _ := os.Readlink(p + "/l"); text != "a.two" {
		t.Errorf("link leads to %s", text)
	}
	wantContent(t, p+"/f", "two")
	if st := lstat(t, p+"/mode"); st.Mode&0o777 != 0o600 {
		t.Errorf("mode %o", st.Mode)
	}
	if st := lstat(t, p+"/owner"); st.Uid != 7 {
		t.Errorf("owner %d", st.Uid)
	}
	if n, err := unix.Getxattr(p+"/attr", "user.a", make([]byte, 8)); n != 1 || err != nil {
		t.Errorf("attribute: %d, %v", n, err)
	}
}

// BR-31: file capabilities and set-ID bits survive the chown that takes them away in the kernel.
func TestCapabilitiesAndSetID(t *testing.T) {
	s := newStore(t)
	ping := file("ping", "a program")
	ping.Mode, ping.Uid, ping.Gid = 0o755, 1000, 1000
	capability := string([]byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}) // v2, cap_net_raw+ep
	ping.PAXRecords = map[string]string{paxXattr + "security.capability": capability}
	var entries []entry
	for i, m := range []int64{0o4755, 0o2755, 0o6711, 0o1644, 0o7777} {
		for j, uid := range []int{0, 1000} {
			e := file(fmt.Sprintf("f%d%d", i, j), "x")
			e.Mode, e.Uid, e.Gid = m, uid, uid
			d := dir(fmt.Sprintf("d%d%d", i, j), m)
			d.Uid, d.Gid = uid, uid
			inside := file(d.Name+"/inside", "x")
			sub := dir(d.Name+"/sub", 0o755)
			entries = append(entries, e, d, inside, sub)
		}
	}
	id := unpack(t, s, nil, append(entries, ping)...)
	_, p := mounted(t, s, "c", id)
	for _, e := range entries {
		st := lstat(t, filepath.Join(p, e.Name))
		if int64(st.Mode&0o7777) != e.Mode || int(st.Uid) != e.Uid || int(st.Gid) != e.Gid {
			t.Errorf("%s has mode %o owner %d:%d, want %o %d:%d", e.Name, st.Mode&0o7777, st.Uid, st.Gid, e.Mode, e.Uid, e.Gid)
		}
	}
	buf := make([]byte, 64)
	n, err := unix.Getxattr(p+"/ping", "security.capability", buf)
	if err != nil || string(buf[:n]) != capability {
		t.Errorf("capability is %x, %v", buf[:max(n, 0)], err)
	}
}

// Device nodes, FIFOs, large owners, long names and times to the nanosecond.
func TestOddEntries(t *testing.T) {
	s := newStore(t)
	at := time.Unix(1234567890, 123456789)
	name := strings.Repeat("d", 200) + "/" + strings.Repeat("ünï", 50) + "/" + strings.Repeat("f", 255)
	long := file(name, "long")
	long.ModTime, long.Format = at, tar.FormatPAX
	d := dir(filepath.Dir(name), 0o755)
	d.ModTime, d.Format = at.Add(1), tar.FormatPAX
	owner := file("owner", "x")
	owner.Uid, owner.Gid = 3000000, 4000000000
	link := symlink("link", strings.Repeat("t/", 150))
	link.ModTime, link.Format, link.Uid = at, tar.FormatPAX, 5
	old := file("old", "x")
	old.ModTime, old.Format = time.Unix(-1000000, 0), tar.FormatPAX
	id := unpack(t, s, nil, d, long, owner, link, old,
		entry{Header: tar.Header{Typeflag: tar.TypeChar, Name: "char", Mode: 0o666, Devmajor: 10, Devminor: 300, Gid: 6}},
		entry{Header: tar.Header{Typeflag: tar.TypeBlock, Name: "block", Mode: 0o4660, Devmajor: 259, Devminor: 70000, Uid: 1}},
		entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: "fifo", Mode: 0o600}})
	p := layerPath(t, s, id)
	if st := lstat(t, filepath.Join(p, name)); st.Mtim.Nano() != at.UnixNano() {
		t.Errorf("file's time is %d", st.Mtim.Nano())
	}
	if st := lstat(t, filepath.Join(p, filepath.Dir(name))); st.Mtim.Nano() != at.UnixNano()+1 {
		t.Errorf("directory's time is %d", st.Mtim.Nano())
	}
	if st := lstat(t, p+"/owner"); st.Uid != 3000000 || st.Gid != 4000000000 {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
	if st := lstat(t, p+"/link"); st.Mtim.Nano() != at.UnixNano() || st.Uid != 5 {
		t.Errorf("link's time is %d, owner %d", st.Mtim.Nano(), st.Uid)
	}
	if st := lstat(t, p+"/old"); st.Mtim.Sec != -1000000 {
		t.Errorf("old file's time is %d", st.Mtim.Sec)
	}
	for path, want := range map[string][2]uint64{"/char": {unix.S_IFCHR | 0o666, unix.Mkdev(10, 300)}, "/block": {unix.S_IFBLK | 0o4660, unix.Mkdev(259, 70000)}, "/fifo": {unix.S_IFIFO | 0o600, 0}} {
		if st := lstat(t, p+path); uint64(st.Mode) != want[0] || st.Rdev != want[1] {
			t.Errorf("%s has mode %o device %x", path, st.Mode, st.Rdev)
		}
	}
}

// An import is a plain tree: names that mean something in a layer do not, and its digest is learnt.
func TestImport(t *testing.T) {
	s := newStore(t)
	plain := pack(t, dir("d", 0o755), file("d/.wh.x", "data"), file("d/.wh..wh..opq", "data"), file("x", "x"))
	r, err := s.Unpack(context.Background(), &wire.Unpack{Import: true}, stream(t, gzipped(t, plain)))
	if err != nil {
		t.Fatal(err)
	}
	if r.DiffID != diffID(plain) || r.Size != 9 {
		t.Errorf("got %+v", r)
	}
	_, p := mounted(t, s, "c", r.DiffID)
	wantNames(t, p+"/d", ".wh..wh..opq", ".wh.x")
	again, err := s.Unpack(context.Background(), &wire.Unpack{Import: true}, stream(t, plain))
	if err != nil || *again != *r {
		t.Errorf("the same again: %+v, %v", again, err)
	}
}

// Every form of compression gives the same layer; bytes behind the archive's end are part of the digest.
func TestCompressions(t *testing.T) {
	plain := append(pack(t, file("f", strings.Repeat("data ", 100000))), make([]byte, 3<<20)...)
	half := len(plain) / 2
	bz := exec.Command("bzip2", "-c")
	bz.Stdin = bytes.NewReader(plain)
	bzipped, bzErr := bz.Output()
	for name, data := range map[string][]byte{
		"plain": plain, "gzip": gzipped(t, plain), "zstd": zstded(t, plain), "bzip2": bzipped,
		"two gzip members": append(gzipped(t, plain[:half]), gzipped(t, plain[half:])...),
		"two zstd frames":  append(zstded(t, plain[:half]), zstded(t, plain[half:])...),
		"skippable frame":  append([]byte{0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3}, zstded(t, plain)...),
	} {
		t.Run(name, func(t *testing.T) {
			if name == "bzip2" && bzErr != nil {
				t.Skip("no bzip2 here:", bzErr)
			}
			s := newStore(t)
			r, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(plain)}, stream(t, data))
			if err != nil || r.Size != 500000 {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	t.Run("empty", func(t *testing.T) {
		s := newStore(t)
		if _, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(nil)}, stream(t, nil)); err != nil {
			t.Error(err)
		}
	})
	t.Run("xz", func(t *testing.T) {
		s := newStore(t)
		_, err := s.Unpack(context.Background(), &wire.Unpack{}, stream(t, []byte("\xfd7zXZ\x00rest")))
		if wire.ClassOf(err) != wire.Unsupported {
			t.Error(err)
		}
	})
}

// A stream that is cut or changed anywhere is refused and leaves nothing.
func TestDamagedStreams(t *testing.T) {
	s := newStore(t)
	data := make([]byte, 300000)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	plain := pack(t, dir("d", 0o755), file("d/random", string(data)), file("d/text", strings.Repeat("text ", 1000)))
	id := diffID(plain)
	try := func(name string, b []byte) {
		t.Helper()
		_, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: id}, stream(t, b))
		if wire.ClassOf(err) != wire.Invalid {
			t.Errorf("%s: error %v, want one of class Invalid", name, err)
		}
		if l, _ := s.Layers(); len(l) != 0 {
			t.Fatalf("%s: kept", name)
		}
		wantNames(t, filepath.Join(s.root, "layers"), "empty")
	}
	for form, b := range map[string][]byte{"plain": plain, "gzip": gzipped(t, plain), "zstd": zstded(t, plain)} {
		for _, cut := range []int{1, 5, 100, len(b) / 3, len(b) / 2, len(b) - 600, len(b) - 9, len(b) - 1} {
			try(fmt.Sprintf("%s cut at %d", form, cut), b[:cut])
		}
		for range 6 {
			at := rand.IntN(len(b)-20) + 10
			if form == "gzip" && at < 10 {
				continue
			}
			bad := bytes.Clone(b)
			bad[at] ^= 0x55
			try(fmt.Sprintf("%s changed at %d", form, at), bad)
		}
	}
	try("no archive at all", []byte(strings.Repeat("this is not a tar ", 1000)))
	try("another archive", pack(t, file("other", "x")))
	_, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: id}, stream(t, pack(t, file("other", "x"))))
	if err == nil || !strings.Contains(err.Error(), "wrong diff id calculated on extraction") {
		t.Errorf("wrong digest: %v", err)
	}
	if _, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: "sha256:../../x"}, stream(t, plain)); wire.ClassOf(err) != wire.Invalid {
		t.Errorf("odd DiffID: %v", err)
	}
}

// slowStream gives data up to hold and then waits for release.
func slowStream(t *testing.T, data []byte, hold int) (r *os.File, release func()) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	gate, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		w.Write(data[:hold])
		<-gate
		w.Write(data[hold:])
		w.Close()
	}()
	release = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(func() { release(); r.Close(); <-done })
	return r, release
}

// Of several calls for one layer one works; if it fails another goes on with its own stream.
func TestConcurrentUnpack(t *testing.T) {
	s := newStore(t)
	plain := pack(t, file("f", strings.Repeat("x", 200000)))
	id := diffID(plain)
	first, release := slowStream(t, plain[:150000], 100000) // will be cut short
	errs := make(chan error, 9)
	go func() {
		_, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: id}, first)
		errs <- err
	}()
	waitFlight(s, id)
	var wg sync.WaitGroup
	for range 8 {
		in := stream(t, plain)
		wg.Go(func() {
			r, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: id}, in)
			if err != nil || r.Size != 200000 {
				t.Errorf("%+v, %v", r, err)
			}
			if rest, err := io.ReadAll(in); err != nil || len(rest) != 0 {
				t.Errorf("%d bytes of the stream are left, %v", len(rest), err)
			}
		})
	}
	release()
	if err := <-errs; wire.ClassOf(err) != wire.Invalid {
		t.Errorf("the one that was cut: %v", err)
	}
	wg.Wait()
	wantNames(t, filepath.Join(s.root, "layers"), filepath.Base(filepath.Dir(layerPath(t, s, id))), "empty")
}

// waitFlight waits until a layer is being unpacked.
func waitFlight(s *Store, id string) {
	for {
		s.mu.Lock()
		there, changed := s.flights[id] != nil, s.changed
		s.mu.Unlock()
		if there {
			return
		}
		<-changed
	}
}

// An upper layer that needs one below waits for it, even if that is asked for later.
func TestWaitsForBelow(t *testing.T) {
	s := newStore(t)
	base := pack(t, dir("d", 0o700), file("d/old", "old"))
	top := pack(t, file("d/new", "new"), hardlink("d/link", "d/old"))
	done := make(chan error, 1)
	go func() {
		_, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(top), Below: []string{diffID(base)}}, stream(t, top))
		done <- err
	}()
	waitFlight(s, diffID(top))
	if _, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(base)}, stream(t, base)); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	_, p := mounted(t, s, "c", diffID(base), diffID(top))
	wantNames(t, p+"/d", "link", "new", "old")
	wantContent(t, p+"/d/link", "old")
	if st := lstat(t, p+"/d"); st.Mode&0o777 != 0o700 {
		t.Errorf("mode of d is %o", st.Mode)
	}
}

// Cancelling ends the child and leaves nothing, in whatever state it is.
func TestCancel(t *testing.T) {
	s := newStore(t)
	plain := pack(t, file("f", strings.Repeat("x", 200000)))
	want := errors.New("the client went away")
	for _, below := range [][]string{nil, {diffID([]byte("never comes"))}} {
		ctx, cancel := context.WithCancelCause(context.Background())
		data := plain
		hold := 100000
		if below != nil {
			data = pack(t, hardlink("a", "b"))
			hold = len(data)
		}
		in, _ := slowStream(t, data, hold)
		done := make(chan error, 1)
		id := diffID(data)
		go func() {
			_, err := s.Unpack(ctx, &wire.Unpack{DiffID: id, Below: below}, in)
			done <- err
		}()
		waitFlight(s, id)
		second := make(chan error, 1)
		go func() {
			_, err := s.Unpack(ctx, &wire.Unpack{DiffID: id}, in)
			second <- err
		}()
		cancel(want)
		if err := <-done; !errors.Is(err, want) {
			t.Errorf("cancelled: %v", err)
		}
		if err := <-second; !errors.Is(err, want) {
			t.Errorf("cancelled while it waits: %v", err)
		}
	}
	// And while it drains a layer that is there.
	id := unpack(t, s, nil, file("f", strings.Repeat("x", 200000)))
	ctx, cancel := context.WithCancelCause(context.Background())
	in, _ := slowStream(t, plain, 1000)
	done := make(chan error, 1)
	go func() {
		_, err := s.Unpack(ctx, &wire.Unpack{DiffID: id}, in)
		done <- err
	}()
	cancel(want)
	if err := <-done; !errors.Is(err, want) {
		t.Errorf("cancelled while draining: %v", err)
	}
}

// A child that is killed is an error that says so, and leaves nothing.
func TestChildKilled(t *testing.T) {
	s := newStore(t)
	plain := pack(t, file("f", strings.Repeat("x", 200000)))
	in, _ := slowStream(t, plain, 100000)
	done := make(chan error, 1)
	go func() {
		_, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(plain)}, in)
		done <- err
	}()
	waitFlight(s, diffID(plain))
	pid := 0
	for pid == 0 { // it is made a little later
		for _, p := range children(t, os.Getpid()) {
			if cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", p)); strings.Contains(string(cmd), diffID(plain)) {
				pid = p
			}
		}
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err == nil || !strings.Contains(err.Error(), "ended without an answer") {
		t.Errorf("killed: %v", err)
	}
	wantNames(t, filepath.Join(s.root, "layers"), "empty")
}

// children lists the child processes of pid.
func children(t testing.TB, pid int) []int {
	t.Helper()
	lists, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		t.Fatal(err)
	}
	var out []int
	for _, l := range lists {
		b, _ := os.ReadFile(l) // a thread may end meanwhile
		for _, f := range strings.Fields(string(b)) {
			var p int
			if _, err := fmt.Sscan(f, &p); err == nil {
				out = append(out, p)
			}
		}
	}
	return out
}
