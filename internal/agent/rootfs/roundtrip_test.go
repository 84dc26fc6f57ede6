package rootfs

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// A tree like Debian's, packed by GNU tar in each of its forms, is unpacked as it was.
func TestRoundTrip(t *testing.T) {
	s := newStore(t)
	src := debianTree(t)
	for _, c := range []struct {
		name  string
		args  []string
		nanos bool
	}{
		{"pax", []string{"--format=posix", "--xattrs", "--xattrs-include=*", "--sparse"}, true},
		{"pax sparse 0.0", []string{"--format=posix", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=0.0"}, true},
		{"pax sparse 0.1", []string{"--format=posix", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=0.1"}, true},
		{"gnu", []string{"--format=gnu", "--sparse"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			cmd := exec.Command("tar", append([]string{"-C", src, "--numeric-owner", "-cf", "-"}, append(c.args, ".")...)...)
			r, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			cmd.Stderr = os.Stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			reply, err := s.Unpack(context.Background(), &wire.Unpack{Import: true}, r.(*os.File))
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Fatal(err)
			}
			compareTrees(t, src, layerPath(t, s, reply.DiffID), c.nanos)
			mnt, _ := mounted(t, s, "c", reply.DiffID)
			var have, want unix.Stat_t
			if err := unix.Fstat(fdOf(mnt), &have); err != nil {
				t.Fatal(err)
			}
			want = lstat(t, src)
			if have.Mode != want.Mode || have.Uid != want.Uid || have.Gid != want.Gid {
				t.Errorf("the mounted root has mode %o owner %d:%d, want %o %d:%d", have.Mode, have.Uid, have.Gid, want.Mode, want.Uid, want.Gid)
			}
			if err := s.RemoveContainer("c"); err != nil {
				t.Error(err)
			}
			if err := s.RemoveLayer(reply.DiffID); err != nil {
				t.Error(err)
			}
		})
	}
}

// debianTree copies parts of this machine's system and adds one of each kind that they lack.
func debianTree(t testing.TB) string {
	t.Helper()
	src := filepath.Join(t.TempDir(), "src")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Mkdir(src, 0o755))
	for _, d := range []string{"/etc", "/usr/share/zoneinfo", "/var/lib/dpkg/info", "/usr/lib/locale"} {
		if _, err := os.Stat(d); err != nil {
			continue
		}
		must(os.MkdirAll(src+filepath.Dir(d), 0o755))
		out, err := exec.Command("cp", "-a", "--sparse=always", d, src+filepath.Dir(d)).CombinedOutput()
		if err != nil {
			t.Logf("copying %s: %v: %s", d, err, out) // another program may be changing it
		}
	}
	write := func(name, data string, mode os.FileMode) string {
		t.Helper()
		p := filepath.Join(src, name)
		must(os.MkdirAll(filepath.Dir(p), 0o755))
		must(os.WriteFile(p, []byte(data), 0o600))
		must(os.Chmod(p, mode))
		return p
	}
	suid := write("odd/suid", "x", 0o644)
	must(os.Chown(suid, 1000, 1000))
	must(os.Chmod(suid, 0o755|fs.ModeSetuid|fs.ModeSetgid))
	capable := write("odd/capable", "x", 0o755)
	must(unix.Setxattr(capable, "security.capability", []byte{1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 0))
	must(unix.Setxattr(capable, "user.note", []byte("binary \x00\x01\n="), 0))
	must(unix.Setxattr(capable, "trusted.note", []byte("t"), 0))
	must(os.Symlink("../../../../../etc/passwd", src+"/odd/climbing"))
	must(os.Symlink("/etc/passwd", src+"/odd/absolute"))
	must(os.Lchown(src+"/odd/absolute", 7, 8))
	must(unix.Lsetxattr(src+"/odd/absolute", "trusted.link", []byte("l"), 0))
	must(os.Link(capable, src+"/odd/hard1"))
	must(os.Link(capable, src+"/etc/hard2"))
	must(os.Link(src+"/odd/absolute", src+"/odd/hard-to-link"))
	must(unix.Mkfifo(src+"/odd/fifo", 0o640))
	must(unix.Mknod(src+"/odd/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(unix.Mknod(src+"/odd/loop", unix.S_IFBLK|0o660, int(unix.Mkdev(7, 0))))
	write(strings.Repeat("long/", 60)+strings.Repeat("n", 255), "deep", 0o400)
	write("odd/\x80bad utf8", "x", 0o644)
	write("odd/new\nline", "x", 0o644)
	must(os.MkdirAll(src+"/odd/tmp", 0o755))
	must(unix.Setxattr(src+"/odd/tmp", "user.dir", []byte("d"), 0))
	must(os.Chown(src+"/odd/tmp", 3000000, 3000001))
	must(os.Chmod(src+"/odd/tmp", 0o777|fs.ModeSticky|fs.ModeSetgid))
	write("odd/tmp/inherits", "nothing", 0o644)
	sparse, err := os.Create(src + "/odd/sparse")
	must(err)
	for _, at := range []int64{1 << 20, 1<<20 + 5000, 5 << 20, 9 << 30} {
		_, err := sparse.WriteAt([]byte("data in a sea of nothing"), at)
		must(err)
	}
	must(sparse.Truncate(9<<30 + 12345))
	must(sparse.Close())
	at := time.Unix(1111111111, 987654321)
	must(filepath.WalkDir(src+"/odd", func(p string, _ fs.DirEntry, err error) error {
		must(err)
		return unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{timespec(at), timespec(at)}, unix.AT_SYMLINK_NOFOLLOW)
	}))
	must(os.Chmod(src, 0o751))
	must(os.Chown(src, 12, 34))
	return src
}

// compareTrees fails the test for each path that differs.
func compareTrees(t testing.TB, want, got string, nanos bool) {
	t.Helper()
	a, b := describe(t, want, nanos), describe(t, got, nanos)
	differ := 0
	for _, p := range sortedKeys(a, b) {
		if a[p] != b[p] {
			if differ++; differ < 20 {
				t.Errorf("%q\nis   %s\nwant %s", p, b[p], a[p])
			}
		}
	}
	if len(a) < 500 {
		t.Errorf("only %d paths compared", len(a))
	}
	t.Logf("%d paths compared, %d differ", len(a), differ)
}

func sortedKeys(maps ...map[string]string) []string {
	seen := map[string]bool{}
	for _, m := range maps {
		for k := range m {
			seen[k] = true
		}
	}
	var out []string
	for k := range seen {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}

// describe tells all there is to know about each path of a tree. Names of one inode are told by the first of them.
func describe(t testing.TB, root string, nanos bool) map[string]string {
	t.Helper()
	out := map[string]string{}
	first := map[uint64]string{}
	err := filepath.WalkDir(root, func(p string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel := strings.TrimPrefix(p, root)
		st := lstat(t, p)
		kind := st.Mode & unix.S_IFMT
		mtime := st.Mtim.Sec
		if nanos {
			mtime = st.Mtim.Nano()
		}
		d := fmt.Sprintf("mode %o owner %d:%d mtime %d", st.Mode, st.Uid, st.Gid, mtime)
		if kind != unix.S_IFDIR {
			d += fmt.Sprintf(" links %d size %d", st.Nlink, st.Size)
			if f, ok := first[st.Ino]; ok {
				out[rel] = d + " same as " + f
				return nil
			}
			first[st.Ino] = rel
		}
		switch kind {
		case unix.S_IFLNK:
			text, err := os.Readlink(p)
			if err != nil {
				return err
			}
			d += " -> " + text
			if n, err := unix.Lgetxattr(p, "trusted.link", make([]byte, 10)); err == nil && nanos {
				d += fmt.Sprintf(" link attribute of %d bytes", n)
			}
		case unix.S_IFCHR, unix.S_IFBLK:
			d += fmt.Sprintf(" device %x", st.Rdev)
		case unix.S_IFREG, unix.S_IFDIR:
			fd, err := unix.Open(p, unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			f := os.NewFile(uintptr(fd), p)
			defer f.Close()
			attrs, err := readXattrs(fd)
			if err != nil {
				return err
			}
			if nanos {
				d += fmt.Sprintf(" %q", attrs)
			}
			if kind == unix.S_IFREG && st.Size < 1<<30 {
				sum := sha256.New()
				if _, err := io.Copy(sum, f); err != nil {
					return err
				}
				d += fmt.Sprintf(" %x", sum.Sum(nil)[:8])
			} else if kind == unix.S_IFREG {
				d += sparseContent(t, f, st.Size)
			}
		}
		out[rel] = d
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// sparseContent describes what is not zero in a large file, and that it does not fill the disk.
func sparseContent(t testing.TB, f *os.File, size int64) string {
	t.Helper()
	d := ""
	buf := make([]byte, 4096)
	for off := int64(0); off < size; {
		data, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		hole, err := unix.Seek(int(f.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			t.Fatal(err)
		}
		if hole-data > 1<<20 {
			return " is not sparse"
		}
		for off = data; off < hole; off += int64(len(buf)) {
			n, err := f.ReadAt(buf, off)
			if err != nil && err != io.EOF {
				t.Fatal(err)
			}
			if s := strings.Trim(string(buf[:n]), "\x00"); s != "" {
				d += fmt.Sprintf(" %d:%q", off, s)
			}
		}
	}
	return d
}
