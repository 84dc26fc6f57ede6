package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// write makes a file on the host.
func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil {
		t.Error(err)
	} else if string(got) != want {
		t.Errorf("%s holds %.100q, want %.100q", path, got, want)
	}
}

// pipeline runs docker with its input and output as bytes.
func (d *daemon) pipeline(stdin []byte, args ...string) ([]byte, error) {
	d.t.Helper()
	c := exec.Command("docker", args...)
	c.Env = d.env()
	c.Stdin = bytes.NewReader(stdin)
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		return out, errors.New(errs.String())
	}
	return out, nil
}

// TestCopyLinks has links that cross between a volume and the root (BR-22), of a running container and of a stopped one.
func TestCopyLinks(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	d.must("run", "-d", "--name", "c0", "--init", "-v", "vol:/vol", "--tmpfs", "/mem", ref, "sh", "-c",
		`mkdir -p /d/sub; echo root > /f; echo volume > /vol/f; echo up > /d/up
		ln -s /f /root-root; ln -s f /vol/vol-vol; ln -s /f /vol/vol-root; ln -s /vol/f /root-vol; ln -s ../up /d/sub/dots
		ln -s ../../../../../../etc/shadow /out; echo mem > /mem/f; touch /ready; exec sleep 1000`)
	eventually(t, 10*time.Second, "the container has made its files", func() bool { return d.docker("exec", "c0", "test", "-e", "/ready").Code == 0 })
	for _, state := range []string{"running", "paused", "stopped"} {
		t.Run(state, func(t *testing.T) {
			switch state {
			case "paused":
				d.must("pause", "c0")
			case "stopped":
				d.must("unpause", "c0")
				d.must("stop", "-t", "1", "c0")
			}
			dir := t.TempDir()
			for _, l := range []struct{ path, text, content, target string }{
				{"/root-root", "/f", "root\n", "/f"}, {"/vol/vol-vol", "f", "volume\n", "/vol/f"}, {"/vol/vol-root", "/f", "root\n", "/f"},
				{"/root-vol", "/vol/f", "volume\n", "/vol/f"}, {"/d/sub/dots", "../up", "up\n", "/d/up"},
			} {
				plain, followed := filepath.Join(dir, filepath.Base(l.path)), filepath.Join(dir, filepath.Base(l.path)+"-L")
				out, err := d.pipeline(nil, "cp", "c0:"+l.path, "-")
				if err != nil {
					t.Fatal(err)
				}
				h, err := tar.NewReader(bytes.NewReader(out)).Next()
				if err != nil || h.Typeflag != tar.TypeSymlink || h.Linkname != l.text || h.Name != filepath.Base(l.path) {
					t.Errorf("the archive of %s holds %+v, %v; want a link to %q", l.path, h, err, l.text)
				}
				if !strings.HasPrefix(l.text, "..") { // the client makes no link that leads out of the directory it writes to
					d.must("cp", "c0:"+l.path, plain)
					if text, err := os.Readlink(plain); err != nil || text != l.text {
						t.Errorf("cp %s is a link to %q, %v; want %q", l.path, text, err, l.text)
					}
				}
				d.must("cp", "-L", "c0:"+l.path, followed)
				wantFile(t, followed, l.content)
				if got := d.pathStat("c0", l.path).LinkTarget; got != l.target {
					t.Errorf("HEAD %s: linkTarget %q, want %q", l.path, got, l.target)
				}
			}
			d.must("cp", "c0:/d", filepath.Join(dir, "d"))
			if text, err := os.Readlink(dir + "/d/sub/dots"); err != nil || text != "../up" {
				t.Errorf("in a directory: link to %q, %v", text, err)
			}
			wantFile(t, dir+"/d/up", "up\n")
			if r := d.docker("cp", "-L", "c0:/out", filepath.Join(dir, "shadow")); r.Code == 0 {
				t.Errorf("a link out of the root was followed: %v", r)
			}
			if r := d.docker("cp", "c0:/nope", dir); r.Code == 0 || !strings.Contains(r.Err, "Could not find the file /nope in container c0") {
				t.Errorf("a file that is not there: exit %d, %s", r.Code, r.Err)
			}
			// Into the container, through a link from the root to the volume.
			write(t, dir+"/new", "for "+state)
			d.must("cp", dir+"/new", "c0:/root-vol")
			d.must("cp", dir+"/new", "c0:/vol/"+state)
			wantFile(t, d.Home+"/data/volumes/vol/_data/f", "for "+state)
			wantFile(t, d.Home+"/data/volumes/vol/_data/"+state, "for "+state)
			write(t, dir+"/new", "volume\n")
			d.must("cp", dir+"/new", "c0:/vol/f")
			if state != "stopped" {
				d.must("cp", "c0:/mem/f", dir+"/mem")
				wantFile(t, dir+"/mem", "mem\n")
			}
		})
	}
	d.must("start", "c0")
	if out := d.must("exec", "c0", "cat", "/vol/stopped", "/vol/running"); out != "for stoppedfor running" {
		t.Errorf("the container sees %q", out)
	}
}

type pathStat struct {
	Name       string      `json:"name"`
	Size       int64       `json:"size"`
	Mode       os.FileMode `json:"mode"`
	LinkTarget string      `json:"linkTarget"`
}

func (d *daemon) pathStat(c, path string) pathStat {
	d.t.Helper()
	r := d.command("", "curl", "-sI", "--unix-socket", d.Socket, "http://d/containers/"+c+"/archive?path="+path)
	var s pathStat
	for l := range strings.Lines(r.Out) {
		if v, ok := strings.CutPrefix(l, "X-Docker-Container-Path-Stat: "); ok {
			b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(v))
			if err == nil {
				err = json.Unmarshal(b, &s)
			}
			if err != nil {
				d.t.Fatal(err)
			}
			return s
		}
	}
	d.t.Fatalf("HEAD of %s: no description:\n%s", path, r.Out)
	return s
}

// TestCopyNames has names and attributes that old tar headers cannot hold (BR-24), both ways and back.
func TestCopyNames(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	src := t.TempDir() + "/src"
	if err := os.Mkdir(src, 0o751); err != nil {
		t.Fatal(err)
	}
	deep := src
	for i := 0; len(deep)-len(src) < 3000; i++ {
		deep = filepath.Join(deep, fmt.Sprintf("%0100d", i))
	}
	if err := os.MkdirAll(deep, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, deep+"/leaf", "deep")
	for _, n := range []int{100, 101, 255} {
		write(t, src+"/"+strings.Repeat("n", n), fmt.Sprint(n))
	}
	write(t, src+"/ünïcödé ☃", "snow")
	write(t, src+"/hard1", "linked")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.Link(src+"/hard1", src+"/hard2"))
	must(os.Symlink(strings.Repeat("t", 300), src+"/long-link"))
	write(t, src+"/setuid", "s")
	must(os.Chown(src+"/setuid", 3000000, 3000001))
	must(os.Chmod(src+"/setuid", 0o755|os.ModeSetuid))
	at := time.Unix(1234567890, 123456789)
	must(os.Chtimes(src+"/hard1", at, at))
	must(unix.Setxattr(src+"/hard1", "user.x", []byte("kept"), 0))
	sparse, err := os.Create(src + "/sparse")
	must(err)
	must(sparse.Truncate(64 << 20))
	must(sparse.Close())

	d.must("run", "-d", "--name", "r0", "--init", ref, "sleep", "1000")
	d.must("create", "--name", "s0", ref, "true")
	for _, c := range []string{"r0", "s0"} {
		t.Run(c, func(t *testing.T) {
			// The client's own archives round times and it gives what it makes to who runs it; so tar is at the ends
			// where those count.
			tarball := exec.Command("tar", "--format=pax", "--xattrs", "-C", filepath.Dir(src), "-c", "src")
			in, err := tarball.Output()
			must(err)
			_, err = d.pipeline(in, "cp", "-a", "-", c+":/home/")
			must(err)
			out, err := d.pipeline(nil, "cp", "-a", c+":/home/src", "-")
			must(err)
			back := t.TempDir()
			x := exec.Command("tar", "--xattrs", "-C", back, "-xp", "--same-owner")
			x.Stdin = bytes.NewReader(out)
			if text, err := x.CombinedOutput(); err != nil {
				t.Errorf("tar cannot read what came back: %v\n%s", err, text)
			}
			d.must("cp", src, c+":/tmp/by-client")
			d.must("cp", c+":/tmp/by-client", back)
			for _, copied := range []string{"/src", "/by-client"} {
				diff := exec.Command("diff", "-r", "--no-dereference", src, back+copied)
				if out, err := diff.CombinedOutput(); err != nil {
					t.Errorf("what came back in %s is another: %v\n%.2000s", copied, err, out)
				}
			}
			var a, b, st unix.Stat_t
			must(unix.Lstat(back+"/src/hard1", &a))
			must(unix.Lstat(back+"/src/hard2", &b))
			if a.Ino != b.Ino || a.Mtim != (unix.Timespec{Sec: 1234567890, Nsec: 123456789}) {
				t.Errorf("hard links: inodes %d %d, time %+v", a.Ino, b.Ino, a.Mtim)
			}
			must(unix.Lstat(back+"/src/setuid", &st))
			if st.Uid != 3000000 || st.Gid != 3000001 || st.Mode&0o7777 != 0o4755 {
				t.Errorf("owner %d:%d mode %o", st.Uid, st.Gid, st.Mode)
			}
			value := make([]byte, 10)
			if n, err := unix.Getxattr(back+"/src/hard2", "user.x", value); err != nil || string(value[:n]) != "kept" {
				t.Errorf("extended attribute %q, %v", value[:max(n, 0)], err)
			}
			id := d.must("inspect", "-f", "{{.Id}}", c)
			must(unix.Lstat(d.Home+"/data/containers/"+id+"/upper/home/src/sparse", &st))
			if st.Size != 64<<20 || st.Blocks > 1<<11 {
				t.Errorf("the sparse file has %d bytes in %d blocks", st.Size, st.Blocks)
			}
		})
	}
}

// TestCopyRules goes through what `docker cp` refuses and how it names what it makes.
func TestCopyRules(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	dir := t.TempDir()
	write(t, dir+"/f", "f")
	d.must("run", "-d", "--init", "--name", "ro", "--read-only", "-v", "data:/rw", "-v", "data:/ro:ro", ref, "sleep", "1000")
	d.must("create", "--name", "ro2", "--read-only", "-v", "data:/rw", "-v", "data:/ro:ro", ref, "true")
	for _, c := range []string{"ro", "ro2"} {
		if r := d.docker("cp", dir+"/f", c+":/etc/f"); r.Code == 0 || !strings.Contains(r.Err, "container rootfs is marked read-only") {
			t.Errorf("%s: into a read-only root: exit %d, %s", c, r.Code, r.Err)
		}
		if r := d.docker("cp", dir+"/f", c+":/ro/f"); r.Code == 0 || !strings.Contains(r.Err, "mounted volume is marked read-only") {
			t.Errorf("%s: into a read-only volume: exit %d, %s", c, r.Code, r.Err)
		}
		d.must("cp", dir+"/f", c+":/rw/"+c)
		wantFile(t, d.Home+"/data/volumes/data/_data/"+c, "f")
	}
	d.must("create", "--name", "c0", "--user", "app", "-v", "data:/home/nested/vol", ref, "cat", "/tmp/f")
	if r := d.docker("cp", dir+"/f", "c0:/no/such/dir/f"); r.Code == 0 || !strings.Contains(r.Err, "Could not find the file /no/such/dir in container c0") {
		t.Errorf("into a directory that is not there: exit %d, %s", r.Code, r.Err)
	}
	if r := d.docker("cp", dir, "c0:/etc/passwd"); r.Code == 0 {
		t.Error("a directory was copied over a file")
	}
	d.must("cp", "-a", dir+"/f", "c0:/tmp/f") // -a with a user: it belongs to that user
	out, err := d.pipeline(nil, "cp", "c0:/tmp/f", "-")
	if err != nil {
		t.Fatal(err)
	}
	h, err := tar.NewReader(bytes.NewReader(out)).Next()
	if err != nil || h.Name != "f" || h.Uid != 1000 || h.Gid != 1000 {
		t.Errorf("%+v, %v", h, err)
	}
	if out := d.must("start", "-a", "c0"); out != "f" {
		t.Errorf("the container reads %q", out)
	}
	var tarball bytes.Buffer
	w := tar.NewWriter(&tarball)
	w.WriteHeader(&tar.Header{Name: "../../escaped", Mode: 0o644, Size: 1})
	w.Write([]byte("x"))
	w.Close()
	if _, err := d.pipeline(tarball.Bytes(), "cp", "-", "c0:/tmp"); err == nil || !strings.Contains(err.Error(), "outside of the archive's root") {
		t.Errorf("a tar that climbs: %v", err)
	}
	if r := d.docker("cp", "nobody:/f", dir); r.Code == 0 || !strings.Contains(r.Err, "No such container: nobody") {
		t.Errorf("%+v", r)
	}
}

// TestDiffExport looks at what a container changed, and at all of it.
func TestDiffExport(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	d.must("run", "--name", "c0", "-v", "vol:/data", ref, "sh", "-c", "echo x > /etc/new; rm /bin/notexec; chmod 600 /etc/group; mkdir -p /a/b; echo v > /data/secret")
	want := "C /bin\nD /bin/notexec\nC /etc\nC /etc/group\nA /etc/new\nA /a\nA /a/b"
	got := d.must("diff", "c0")
	if sorted(got) != sorted(want) {
		t.Errorf("diff says\n%s\nwant\n%s", got, want)
	}
	d.must("run", "-d", "--init", "--name", "r0", "-v", "vol:/data", ref, "sh", "-c", "echo r > /etc/new; rm -rf /home; mkdir -p /home; touch /ready; exec sleep 1000")
	eventually(t, 10*time.Second, "the container has made its files", func() bool { return d.docker("exec", "r0", "test", "-e", "/ready").Code == 0 })
	if got := d.must("diff", "r0"); sorted(got) != sorted("C /etc\nA /etc/new\nA /ready\nC /home") && sorted(got) != sorted("C /etc\nA /etc/new\nA /ready") {
		t.Errorf("diff of a running one says\n%s", got)
	}
	for c, text := range map[string]string{"c0": "x\n", "r0": "r\n"} {
		out, err := d.pipeline(nil, "export", c)
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]string{}
		for tr := tar.NewReader(bytes.NewReader(out)); ; {
			h, err := tr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(io.LimitReader(tr, 100))
			if err != nil {
				t.Fatal(err)
			}
			found[h.Name] = string(b)
		}
		if found["etc/new"] != text || !strings.HasPrefix(found["bin/busybox"], "\x7fELF") {
			t.Errorf("%s: exported %d files, etc/new is %q", c, len(found), found["etc/new"])
		}
		if _, ok := found["data/"]; !ok {
			t.Errorf("%s: the volume's place is missing", c)
		}
		if _, ok := found["data/secret"]; ok {
			t.Errorf("%s: what is in the volume was exported", c)
		}
	}
	// Sizes: of what it wrote, and with its image.
	var sizes []struct{ SizeRw, SizeRootFs int64 }
	if err := json.Unmarshal([]byte(d.must("inspect", "--size", "c0")), &sizes); err != nil {
		t.Fatal(err)
	}
	if s := sizes[0]; s.SizeRw < 2 || s.SizeRw > 1000 || s.SizeRootFs < 1<<20 {
		t.Errorf("sizes are %+v", s)
	}
	if out := d.must("ps", "-as", "--filter", "name=^c0$", "--format", "{{.Size}}"); !strings.Contains(out, "virtual") {
		t.Errorf("ps --size: %q", out)
	}
}

func sorted(s string) string {
	l := strings.Split(s, "\n")
	for i := range l {
		l[i] = l[i][2:] + l[i][:1]
	}
	slices.Sort(l)
	return strings.Join(l, "\n")
}

// TestCommit makes images of containers and runs them.
func TestCommit(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	d.must("run", "-d", "--init", "--name", "c0", "-e", "FROM=container", "-l", "made=here", "-w", "/home", "-v", "vol:/data", ref, "sh", "-c",
		"echo hello > /etc/new; rm /bin/notexec; mkdir -p /home/x/y; chown -R app:app /home/x; ln /etc/new /etc/hard; ln -s new /etc/soft; rm -rf /root; mkdir /root; echo s > /data/secret; touch /ready; exec sleep 1000")
	eventually(t, 10*time.Second, "the container has made its files", func() bool { return d.docker("exec", "c0", "test", "-e", "/ready").Code == 0 })
	id := d.must("commit", "-m", "the comment", "-a", "an author", "-c", `CMD ["sh","-c","cat /etc/new; echo $FROM $ADDED"]`, "-c", "ENV ADDED=by-change", "-c", "LABEL more=yes", "c0", "made:1")
	if got := d.must("image", "inspect", "-f", "{{.Id}}", "made:1"); !strings.HasPrefix(id, "sha256:") || got != id {
		t.Errorf("commit says %s, made:1 is %s", id, got)
	}
	if s := d.must("inspect", "-f", "{{.State.Status}}", "c0"); s != "running" {
		t.Errorf("the container is %s after the commit", s)
	}
	if out := d.must("run", "--rm", "made:1"); out != "hello\ncontainer by-change" {
		t.Errorf("the image's command prints %q", out)
	}
	check := `test ! -e /bin/notexec && test ! -e /data/secret && test "$(stat -c %u:%g /home/x/y)" = 1000:1000 && test "$(readlink /etc/soft)" = new && test "$(stat -c %h /etc/new)" = 2 && pwd && ls -A /root`
	if out := d.must("run", "--rm", "made:1", "sh", "-c", check); out != "/home" {
		t.Errorf("in the image: %q", out)
	}
	var img []struct {
		Author, Comment, Architecture, Os string
		Config                            struct{ Labels map[string]string }
		RootFS                            struct{ Layers []string }
	}
	if err := json.Unmarshal([]byte(d.must("image", "inspect", "made:1", ref)), &img); err != nil {
		t.Fatal(err)
	}
	if i := img[0]; i.Author != "an author" || i.Comment != "the comment" || i.Config.Labels["made"] != "here" || i.Config.Labels["more"] != "yes" ||
		len(i.RootFS.Layers) != len(img[1].RootFS.Layers)+1 || i.Architecture != img[1].Architecture || i.Os != "linux" {
		t.Errorf("the image is %+v", i)
	}
	if out := d.must("history", "--no-trunc", "--format", "{{.Comment}}|{{.CreatedBy}}", "made:1"); !strings.HasPrefix(out, "the comment|sh -c echo hello") {
		t.Errorf("history: %s", out)
	}

	// A commit of a container of a commit; one that changed nothing; one without a name.
	d.must("run", "--name", "c2", "made:1", "sh", "-c", "rm -r /home/x; echo second > /etc/new")
	d.must("commit", "c2", "made:2")
	if out := d.must("run", "--rm", "made:2", "sh", "-c", "cat /etc/new /etc/hard; ls /home"); out != "second\nhello" { // overlayfs parts hard links when it copies one up
		t.Errorf("the second image: %q", out)
	}
	d.must("create", "--name", "same", "made:2")
	d.must("commit", "same", "made:3")
	layers := func(ref string) string { return d.must("image", "inspect", "-f", "{{json .RootFS.Layers}}", ref) }
	if layers("made:3") != layers("made:2") {
		t.Errorf("a container that changed nothing: %s, want %s", layers("made:3"), layers("made:2"))
	}
	nameless := d.must("commit", "--pause=false", "c0")
	if out := d.must("run", "--rm", nameless, "cat", "/etc/new"); out != "hello" {
		t.Errorf("an image without a name: %q", out)
	}

	// It goes on when its container and the engine have ended, and goes when it is removed.
	d.must("rm", "-f", "c0", "c2", "same")
	d.kill()
	d.start()
	if out := d.must("run", "--rm", "made:3", "cat", "/etc/new"); out != "second" {
		t.Errorf("after a restart of the daemon: %q", out)
	}
	for _, c := range []struct {
		says string
		args []string
	}{
		{"No such container: nobody", []string{"commit", "nobody", "x"}},
		{"invalid reference format", []string{"commit", "--pause=false", "gone", "UPPER"}},
		{"is not a valid change command", []string{"commit", "-c", "RUN true", "gone", "x"}},
	} {
		d.docker("create", "--name", "gone", "made:3")
		if r := d.docker(c.args...); r.Code == 0 || !strings.Contains(r.Err, c.says) {
			t.Errorf("%v: exit %d, %s", c.args, r.Code, r.Err)
		}
	}
	d.must("rm", "gone")
	d.must("rmi", nameless, "made:3", "made:2", "made:1", ref)
	if entries, err := os.ReadDir(d.Home + "/data/content/blobs/sha256"); err != nil || len(entries) != 0 {
		t.Errorf("%d blobs are left, %v", len(entries), err)
	}
	if l := layerDirs(t, d); len(l) != 0 {
		t.Errorf("layers are left: %q", l)
	}
}

func layerDirs(t *testing.T, d *daemon) []string {
	t.Helper()
	entries, err := os.ReadDir(d.Home + "/data/layers")
	if err != nil {
		t.Fatal(err)
	}
	var l []string
	for _, e := range entries {
		if e.Name() != "empty" {
			l = append(l, e.Name())
		}
	}
	return l
}
