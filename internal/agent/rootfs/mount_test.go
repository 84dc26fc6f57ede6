package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// both runs a test with fsconfig's lowerdir+ and with mount(2), the way of kernels before 6.5.
func both(t *testing.T, test func(t *testing.T)) {
	for _, classic := range []bool{false, true} {
		t.Run(map[bool]string{false: "lowerdir+", true: "mount(2)"}[classic], func(t *testing.T) {
			was := noLowerAdd.Load()
			noLowerAdd.Store(classic)
			defer noLowerAdd.Store(was)
			test(t)
		})
	}
}

// An image may have more layers than fit Docker's way of naming them.
func TestManyLayers(t *testing.T) {
	s := newStore(t)
	var layers []string
	for i := range 300 {
		layers = append(layers, unpackUnsynced(t, s, file(fmt.Sprintf("f%03d", i), "x"), file("last", fmt.Sprint(i))))
	}
	both(t, func(t *testing.T) {
		mnt, p := mounted(t, s, "c", layers...)
		entries, err := os.ReadDir(p)
		if err != nil || len(entries) != 301 {
			t.Errorf("%d entries, %v", len(entries), err)
		}
		wantContent(t, p+"/last", "299")
		mnt.Close()
	})
}

// unpackUnsynced makes a layer as Unpack does, without the disk.
func unpackUnsynced(t *testing.T, s *Store, entries ...entry) string {
	t.Helper()
	plain := pack(t, entries...)
	name := s.newName()
	p := filepath.Join(s.root, "layers", name, "fs")
	if err := os.MkdirAll(p, 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(p, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	a := newApplier(fd)
	defer a.close()
	if err := a.apply(strings.NewReader(string(plain))); err != nil {
		t.Fatal(err)
	}
	a.info.name, a.info.DiffID = name, diffID(plain)
	s.layers[a.info.DiffID] = a.info
	return a.info.DiffID
}

func TestMount(t *testing.T) {
	both(t, func(t *testing.T) {
		s := newStore(t)
		a := unpack(t, s, nil, dir("etc", 0o755), file("etc/a", "a"))
		b := unpack(t, s, []string{a}, file("etc/b", "b"))
		for n, layers := range [][]string{nil, {a}, {a, b}} { // from scratch with nothing, too
			id := fmt.Sprint("c", n)
			mnt, p := mounted(t, s, id, layers...)
			var fs unix.Statfs_t
			if err := unix.Fstatfs(fdOf(mnt), &fs); err != nil || fs.Type != unix.OVERLAYFS_SUPER_MAGIC {
				t.Errorf("file system %x, %v", fs.Type, err)
			}
			if err := os.WriteFile(p+"/written", []byte("w"), 0o644); err != nil {
				t.Error(err)
			}
			wantContent(t, s.ContainerDir(id)+"/upper/written", "w")
			mnt.Close()
			ro, err := s.Mount(id, layers, true) // the same container again
			if err != nil {
				t.Fatal(err)
			}
			p = fmt.Sprintf("/proc/self/fd/%d", fdOf(ro))
			wantContent(t, p+"/written", "w")
			if err := os.WriteFile(p+"/more", nil, 0o644); !errors.Is(err, unix.EROFS) {
				t.Errorf("writing to a read-only root: %v", err)
			}
			ro.Close()
			if err := s.RemoveContainer(id); err != nil {
				t.Error(err)
			}
			if err := s.RemoveContainer(id); err != nil {
				t.Errorf("removing twice: %v", err)
			}
			wantMissing(t, s.ContainerDir(id))
		}
	})
}

func TestReadOnlyAfterTargets(t *testing.T) {
	s := newStore(t)
	mnt, p := mounted(t, s, "c")
	target, err := CreateTarget(mnt, "/new/target", true)
	if err != nil {
		t.Fatal(err)
	}
	defer target.Close()
	if err := ReadOnly(mnt); err != nil {
		t.Fatal(err)
	}
	if _, err := CreateTarget(mnt, "/another", true); !errors.Is(err, unix.EROFS) {
		t.Errorf("creating a target on a read-only root: %v", err)
	}
	if st := lstat(t, p+"/new/target"); st.Mode != unix.S_IFDIR|0o755 {
		t.Errorf("target has mode %o", st.Mode)
	}
}

// A volatile mount that was not ended well can be mounted again.
func TestVolatile(t *testing.T) {
	both(t, func(t *testing.T) {
		s := newStore(t)
		for range 2 {
			mnt, err := s.MountWith("c", nil, MountOptions{Volatile: true})
			if err != nil {
				t.Fatal(err)
			}
			mnt.Close() // leaves the mark
		}
		if _, err := os.Stat(s.ContainerDir("c") + "/work/work/incompat/volatile"); err != nil {
			t.Errorf("the mount was not volatile: %v", err)
		}
		mounted(t, s, "c")
	})
}

// A data root whose name does not fit the kernel's options still works.
func TestOddDataRoot(t *testing.T) {
	needRoot(t)
	for _, name := range []string{strings.Repeat("long/", 60), `back\slash`, "col:on", "com,ma", "spa ce"} {
		s, err := OpenStore(filepath.Join(t.TempDir(), name))
		if err != nil {
			t.Fatal(err)
		}
		id := unpack(t, s, nil, file("f", "x"))
		mnt, err := s.Mount("c", []string{id}, false)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else {
			wantContent(t, fmt.Sprintf("/proc/self/fd/%d/f", fdOf(mnt)), "x")
			mnt.Close()
		}
		s.Close()
	}
}

// What the kernel says about a mount that fails is in the error, with its number.
func TestMountErrors(t *testing.T) {
	s := newStore(t)
	id := unpack(t, s, nil, file("f", "x"))
	if err := os.RemoveAll(layerPath(t, s, id)); err != nil {
		t.Fatal(err)
	}
	_, err := s.Mount("c", []string{id}, false)
	if !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), "lowerdir+=") || !strings.Contains(err.Error(), "container c") {
		t.Errorf("missing directory: %v", err)
	}
	for _, bad := range []string{"", "..", ".", "a/b", "../x", "a\x00b", strings.Repeat("x", 200)} {
		if _, err := s.Mount(bad, nil, false); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("id %q: %v", bad, err)
		}
		if err := s.RemoveContainer(bad); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("removing id %q: %v", bad, err)
		}
	}
}

// A root prepared ahead becomes a container's, once; what nobody claimed is gone, also after a crash.
func TestPrepare(t *testing.T) {
	s := newStore(t)
	id := unpack(t, s, nil, dir("etc", 0o755), file("etc/hosts", "the image's"))
	prepare := func() *Prepared {
		t.Helper()
		p, err := s.Prepare([]string{id}, MountOptions{Volatile: true, MountPoints: true})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := prepare()
	at := fmt.Sprintf("/proc/self/fd/%d", fdOf(p.Mount))
	wantNames(t, at, ".dockerenv", "dev", "etc", "proc", "sys")
	wantContent(t, at+"/etc/hosts", "the image's")
	if err := p.Claim("../c"); wire.ClassOf(err) != wire.Invalid {
		t.Errorf("claimed for a path: %v", err)
	}
	if err := p.Claim("c"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(at+"/written", []byte("w"), 0o644); err != nil {
		t.Error(err)
	}
	wantContent(t, s.ContainerDir("c")+"/upper/written", "w")
	second := prepare()
	if err := second.Claim("c"); !errors.Is(err, ErrTaken) {
		t.Errorf("claimed twice: %v", err)
	}
	if err := second.Discard(); err != nil {
		t.Error(err)
	}
	wantNames(t, filepath.Join(s.root, "containers"), "c")
	prepare().Mount.Close() // an agent that crashed
	next, err := OpenStore(s.root)
	if err != nil {
		t.Fatal(err)
	}
	next.Close()
	wantNames(t, filepath.Join(s.root, "containers"), "c")
	p.Mount.Close()
	if err := s.RemoveContainer("c"); err != nil {
		t.Error(err)
	}
	wantNames(t, filepath.Join(s.root, "containers"))
}
