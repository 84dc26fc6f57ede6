package rootfs

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// detached returns a detached bind mount of a directory or file.
func detached(t testing.TB, p string) *os.File {
	t.Helper()
	fd, err := unix.OpenTree(unix.AT_FDCWD, p, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE)
	f, err := fileOf(fd, p, err)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// pathOf returns where the file behind a descriptor is, in a tree that can be reached by path.
func sameFile(t testing.TB, f *os.File, p string) {
	t.Helper()
	var a, b unix.Stat_t
	if err := fstatPath(fdOf(f), &a); err != nil {
		t.Error(err)
		return
	}
	if err := unix.Stat(p, &b); err != nil {
		t.Error(err)
		return
	}
	if a.Ino != b.Ino || a.Dev != b.Dev {
		t.Errorf("descriptor of %s is not %s", f.Name(), p)
	}
}

// each runs a test on a plain view and on one with a mount that is in nobody's way, so that the kernel's walk and the
// one by hand are held to the same.
func each(t *testing.T, test func(t *testing.T, g *cage, v *View)) {
	for _, name := range []string{"kernel", "by hand"} {
		t.Run(name, func(t *testing.T) {
			g := newCage(t)
			root := os.NewFile(uintptr(mustDup(t, g.root)), "root")
			t.Cleanup(func() { root.Close() })
			v := NewView(root)
			if name == "by hand" {
				target, err := v.Target("/elsewhere", true)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { target.Close() })
				if err := v.Add(MountAt{Mount: detached(t, t.TempDir()), Target: target}); err != nil {
					t.Fatal(err)
				}
			}
			test(t, g, v)
			g.check()
		})
	}
}

func mustDup(t testing.TB, fd int) int {
	t.Helper()
	fd, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// plant makes a tree by hand: "name/" a directory, "name -> text" a link, else a file.
func plant(t testing.TB, root string, items ...string) {
	t.Helper()
	for _, i := range items {
		var err error
		if name, text, ok := strings.Cut(i, " -> "); ok {
			err = os.Symlink(text, filepath.Join(root, name))
		} else if strings.HasSuffix(i, "/") {
			err = os.MkdirAll(filepath.Join(root, i), 0o755)
		} else {
			err = os.WriteFile(filepath.Join(root, i), []byte(i), 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestMkdirIn(t *testing.T) {
	each(t, func(t *testing.T, g *cage, v *View) {
		root := g.top + "/root"
		plant(t, root, "there/", "up -> ../..", "abs -> /there", "dangling -> /made/by/link", "rel -> there/sub/dir", "loop1 -> loop2", "loop2 -> loop1",
			"out -> ../canary.d/new", "f")
		for p, want := range map[string]string{
			"/": "", "": "", "/there": "there", "/there/": "there", "a/b/c": "a/b/c", "/up/x": "x", "/abs/y": "there/y",
			"/dangling": "made/by/link", "/rel/z": "there/sub/dir/z", "/out/w": "canary.d/new/w", "/../../../q": "q", "/a/../r": "r",
			"/nothing/../s": "s",
		} {
			f, err := v.Mkdir(p, 0o1770, 12, 34)
			if err != nil {
				t.Errorf("%s: %v", p, err)
				continue
			}
			sameFile(t, f, filepath.Join(root, want))
			f.Close()
		}
		for _, p := range []string{"a", "a/b/c", "made/by/link", "canary.d", "canary.d/new/w"} {
			if st := lstat(t, filepath.Join(root, p)); st.Mode != unix.S_IFDIR|0o1770 || st.Uid != 12 || st.Gid != 34 {
				t.Errorf("%s has mode %o owner %d:%d", p, st.Mode, st.Uid, st.Gid)
			}
		}
		if st := lstat(t, root+"/there"); st.Mode != unix.S_IFDIR|0o755 || st.Uid != 0 {
			t.Errorf("what was there was changed: mode %o owner %d", st.Mode, st.Uid)
		}
		_, err := v.Mkdir("/f/x", 0o755, 0, 0)
		if wire.ClassOf(err) != wire.Invalid || err.Error() != "Cannot mkdir: /f/x is not a directory" {
			t.Errorf("under a file: %v", err)
		}
		for _, p := range []string{"/loop1/x", "/" + strings.Repeat("n/", 2100), "/" + strings.Repeat("n", 256), "/nul\x00/x"} {
			if _, err := v.Mkdir(p, 0o755, 0, 0); wire.ClassOf(err) != wire.Invalid {
				t.Errorf("%.20q: %v", p, err)
			}
		}
	})
}

func TestCreateTarget(t *testing.T) {
	each(t, func(t *testing.T, g *cage, v *View) {
		root := g.top + "/root"
		plant(t, root, "etc/", "etc/hosts", "run/", "var/", "var/run -> /run", "proc -> /etc", "dev/", "dev/shm -> ../etc", "sys/", "sys/fs -> /nowhere",
			"up -> ../../canary", "uplink -> ../../..", "l1 -> l2", "l2 -> etc/made", "loop -> loop")
		for p, want := range map[string]string{
			"/etc/hosts": "etc/hosts", "/etc/new": "etc/new", "/deep/er/file": "deep/er/file", "/var/run/sock": "run/sock",
			"/up": "canary", "/uplink/x": "x", "/l1": "etc/made", "/dev/own": "dev/own", "etc//./also": "etc/also", "/../y": "y",
		} {
			f, err := v.Target(p, false)
			if err != nil {
				t.Errorf("%s: %v", p, err)
				continue
			}
			sameFile(t, f, filepath.Join(root, want))
			f.Close()
		}
		wantContent(t, root+"/etc/hosts", "etc/hosts")
		if st := lstat(t, root+"/etc/new"); st.Mode != unix.S_IFREG|0o644 || st.Size != 0 {
			t.Errorf("made file has mode %o, %d bytes", st.Mode, st.Size)
		}
		f, err := v.Target("/new/dir", true)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
		if st := lstat(t, root+"/new/dir"); st.Mode != unix.S_IFDIR|0o755 {
			t.Errorf("made directory has mode %o", st.Mode)
		}
		for p, dir := range map[string]bool{
			"/proc": true, "/proc/x": true, "/dev/shm": true, "/dev/shm/x": true, "/sys/fs": true, "//dev/../proc": true, "/dev/./shm/y": false, // links there
			"/etc": false, "/etc/hosts": true, "/etc/hosts/x": false, "/loop": false, // not of the kind
		} {
			if f, err := v.Target(p, dir); wire.ClassOf(err) != wire.Invalid {
				t.Errorf("%s: %v, %v", p, f, err)
			}
		}
		_, err = v.Target("/etc/hosts", true)
		if !errors.Is(err, unix.ENOTDIR) || !strings.Contains(err.Error(), "Are you trying to mount a directory onto a file (or vice-versa)?") {
			t.Errorf("directory on a file: %v", err)
		}
		wantNames(t, root+"/etc", "also", "hosts", "made", "new")
	})
}

// Mounts that are not attached yet are seen where they will be, in each other and through links of both sides.
func TestViewWithMounts(t *testing.T) {
	g := newCage(t)
	root := os.NewFile(uintptr(mustDup(t, g.root)), "root")
	defer root.Close()
	plant(t, g.top+"/root", "app/", "app/hidden", "bin/", "bin/tool -> /app/tool", "lib/", "lib/x", "cfg", "target -> app")
	host := t.TempDir()
	plant(t, host, "tool", "sub/", "sub/deep/", "abs -> /lib/x", "up -> ../lib/x", "out -> ../../../../../etc/passwd", "nested/", "sub/dir -> deep")
	inner := t.TempDir()
	plant(t, inner, "in-inner", "back -> ../../lib/x")
	cfg := filepath.Join(t.TempDir(), "cfg")
	if err := os.WriteFile(cfg, []byte("from the host"), 0o600); err != nil {
		t.Fatal(err)
	}
	v := NewView(root)
	add := func(src, target string, dir bool) {
		t.Helper()
		at, err := v.Target(target, dir)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { at.Close() })
		if err := v.Add(MountAt{Mount: detached(t, src), Target: at}); err != nil {
			t.Fatal(err)
		}
	}
	add(host, "/target", true) // through a link, onto app
	add(inner, "/app/nested", true)
	add(cfg, "/cfg", false)
	add(inner, "/app/sub/dir/made/here", true) // the target is created inside the first mount
	add(host, "/copy", true)                   // the same tree again, without what is mounted in the first
	for p, want := range map[string]string{
		"/app/tool": host + "/tool", "/bin/tool": host + "/tool", "/app/abs": g.top + "/root/lib/x", "/app/up": g.top + "/root/lib/x",
		"/app/nested/in-inner": inner + "/in-inner", "/app/nested/back": g.top + "/root/lib/x", "/app/nested/../tool": host + "/tool",
		"/app/..": g.top + "/root", "/cfg": cfg, "/app/sub/deep/made/here/in-inner": inner + "/in-inner", "/app": host, "/app/nested/": inner,
		"/copy/nested": host + "/nested", "/copy/tool": host + "/tool",
	} {
		fd, err := v.open(p, unix.O_PATH)
		f, err := fileOf(fd, p, err)
		if err != nil {
			t.Errorf("%s: %v", p, err)
			continue
		}
		sameFile(t, f, want)
		f.Close()
	}
	for p, want := range map[string]error{"/app/hidden": unix.ENOENT, "/app/out": unix.ENOENT, "/cfg/x": unix.ENOTDIR, "/cfg/..": unix.ENOTDIR, "/app/nested/nested": unix.ENOENT} {
		if fd, err := v.open(p, unix.O_PATH); err != want {
			t.Errorf("%s: %d, %v, want %v", p, fd, err, want)
		}
	}
	if st := lstat(t, host+"/sub/deep/made/here"); st.Mode != unix.S_IFDIR|0o755 {
		t.Errorf("target in a mount has mode %o", st.Mode)
	}
	got, err := v.LookPath("/", []string{"PATH=/usr/bin:/app"}, "tool", &User{UID: 1000})
	if err != nil || got != "/app/tool" {
		t.Errorf("command in a mount: %s, %v", got, err)
	}
}
