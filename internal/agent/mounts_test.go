//go:build linux

package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// said runs a script in a container of spec m and returns what it said.
func (r *rig) said(t *testing.T, m *wire.Run) string {
	t.Helper()
	out, errs, code := r.output(m)
	if code != 0 {
		t.Errorf("code %d, stderr %q", code, errs)
	}
	return out + errs
}

func TestMounts(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	src := t.TempDir()
	if err := os.WriteFile(filepath.Join(src, "f"), []byte("host\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	sub := filepath.Join(src, "sub")
	if err := os.Mkdir(sub, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", sub, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(sub, unix.MNT_DETACH) })

	sh := func(script string, mounts ...wire.Mount) *wire.Run {
		m := r.spec("sh", "-c", script)
		m.Mounts = mounts
		return m
	}
	t.Run("standard", func(t *testing.T) {
		got := r.said(t, sh(`for p in /proc /dev /dev/pts /dev/shm /dev/mqueue /sys; do echo $p $(stat -f -c %T $p); done
			ls /dev | tr '\n' ' '; echo; for l in ptmx fd stdin core; do readlink /dev/$l; done
			stat -c '%a %t,%T' /dev/null /dev/tty; touch /sys/x 2>&1; ls /proc/1/fd | tr '\n' ' '`))
		for _, want := range []string{"/proc proc\n", "/dev tmpfs\n", "/dev/pts devpts\n", "/dev/shm tmpfs\n", "/sys sysfs\n",
			"core fd full mqueue null ptmx pts random shm stderr stdin stdout tty urandom zero", "pts/ptmx\n/proc/self/fd\n/proc/self/fd/0\n/proc/kcore",
			"666 1,3\n666 5,0\n", "Read-only file system"} {
			if !strings.Contains(got, want) {
				t.Errorf("no %q in\n%s", want, got)
			}
		}
	})
	t.Run("bind", func(t *testing.T) {
		got := r.said(t, sh("cat /b/f; echo new > /b/g; ls /b/sub; cat /one", wire.Mount{Type: "bind", Source: src, Target: "/b"},
			wire.Mount{Type: "bind", Source: src + "/f", Target: "/one"}))
		if got != "host\nhost\n" {
			t.Errorf("got %q", got)
		}
		if b, _ := os.ReadFile(src + "/g"); string(b) != "new\n" {
			t.Errorf("the host has %q", b)
		}
	})
	t.Run("read-only", func(t *testing.T) {
		for _, c := range []struct{ recursive, want string }{
			{"", "top no\nsub no\n"}, {"readonly", "top no\nsub no\n"}, {"writable", "top no\nsub yes\n"}, {"disabled", "top no\nsub no\n"},
		} {
			got := r.said(t, sh(`touch /b/x 2>/dev/null && echo top yes || echo top no; touch /b/sub/x 2>/dev/null && echo sub yes || echo sub no`,
				wire.Mount{Type: "bind", Source: src, Target: "/b", ReadOnly: true, Recursive: c.recursive}))
			if got != c.want {
				t.Errorf("recursive %q: %q", c.recursive, got)
			}
		}
	})
	t.Run("missing source", func(t *testing.T) {
		gone := filepath.Join(src, "gone")
		_, err := r.tryRun(sh("true", wire.Mount{Type: "bind", Source: gone, Target: "/b"}))
		if wire.ClassOf(err) != wire.Invalid || !strings.Contains(fmt.Sprint(err), "bind source path does not exist: "+gone) {
			t.Errorf("got %v", err)
		}
		r.said(t, sh("ls /b", wire.Mount{Type: "bind", Source: gone, Target: "/b", CreateSource: true}))
		if st, err := os.Stat(gone); err != nil || !st.IsDir() {
			t.Errorf("it was not made: %v", err)
		}
	})
	t.Run("refused targets", func(t *testing.T) {
		for _, target := range []string{"/", "/proc", "/proc/self", "/proc/sys"} {
			if _, err := r.tryRun(sh("true", wire.Mount{Type: "bind", Source: src, Target: target})); wire.ClassOf(err) != wire.Invalid {
				t.Errorf("%s: %v", target, err)
			}
		}
		if _, err := r.tryRun(sh("true", wire.Mount{Type: "bind", Source: src, Target: "/etc/passwd"})); err == nil {
			t.Error("a directory was mounted on a file")
		}
		got := r.said(t, sh("cat /proc/uptime", wire.Mount{Type: "bind", Source: src + "/f", Target: "/proc/uptime"}))
		if got != "host\n" {
			t.Errorf("/proc/uptime is %q", got)
		}
	})
	t.Run("nested", func(t *testing.T) {
		// In any order: what lies below comes after what it lies in.
		got := r.said(t, sh("ls /t; cat /t/b/f; echo ok > /t/b/sub/inner/y", wire.Mount{Type: "tmpfs", Target: "/t/b/sub/inner"},
			wire.Mount{Type: "bind", Source: src, Target: "/t/b"}, wire.Mount{Type: "tmpfs", Target: "/t"}))
		if got != "b\nhost\n" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("command in a mount", func(t *testing.T) {
		m := r.spec("/m/busybox", "echo", "from a mount")
		m.Mounts = []wire.Mount{{Type: "bind", Source: "/bin/busybox", Target: "/m/busybox"}}
		if got := r.said(t, m); got != "from a mount\n" {
			t.Errorf("got %q", got)
		}
	})
	t.Run("volume", func(t *testing.T) {
		name := "v" + short(newID())
		v := wire.Mount{Type: "volume", Source: name, Target: "/data"}
		if got := r.said(t, sh("cat /data/file; stat -c %u /data/file; echo kept > /data/more", v)); got != "from the image\n1000\n" {
			t.Errorf("first: %q", got)
		}
		if got := r.said(t, sh("ls /data", v)); got != "file\nmore\n" {
			t.Errorf("second: %q", got)
		}
		empty := wire.Mount{Type: "volume", Source: name + "e", Target: "/data", NoCopy: true}
		if got := r.said(t, sh("ls /data", empty)); got != "" {
			t.Errorf("nocopy: %q", got)
		}
		for _, n := range []string{name, name + "e"} {
			if _, err := r.conn.Call(r.ctx(), &wire.RemoveVolume{Name: n}); err != nil {
				t.Error(err)
			}
		}
	})
	t.Run("tmpfs", func(t *testing.T) {
		got := r.said(t, sh("stat -c %a /t /data; stat -f -c %T /t; grep ' /t ' /proc/mounts",
			wire.Mount{Type: "tmpfs", Target: "/t", Options: "size=64m,mode=1770"}, wire.Mount{Type: "tmpfs", Target: "/data"}))
		if !strings.HasPrefix(got, "1770\n755\ntmpfs\n") || !strings.Contains(got, "size=65536k") || !strings.Contains(got, "noexec") {
			t.Errorf("got %q", got)
		}
		if _, err := r.tryRun(sh("true", wire.Mount{Type: "tmpfs", Target: "/t", Options: "nonsense=1"})); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("nonsense: %v", err)
		}
	})
	t.Run("propagation", func(t *testing.T) {
		shared := t.TempDir()
		if err := unix.Mount("tmpfs", shared, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		defer unix.Unmount(shared, unix.MNT_DETACH)
		_, err := r.tryRun(sh("true", wire.Mount{Type: "bind", Source: shared, Target: "/b", Propagation: "rshared"}))
		unix.Mount("", shared, "", unix.MS_PRIVATE, "")
		if err == nil {
			t.Log("temporary directories are shared here")
		}
		if _, err := r.tryRun(sh("true", wire.Mount{Type: "bind", Source: shared, Target: "/b", Propagation: "rslave"})); err == nil ||
			!strings.Contains(err.Error(), "not a shared or slave mount") {
			t.Errorf("slave of a private mount: %v", err)
		}
		if err := unix.Mount("", shared, "", unix.MS_SHARED, ""); err != nil {
			t.Fatal(err)
		}
		m := r.withControl(sh("while [ ! -e /ctl/stop ]; do usleep 1000; done; ls /b/late", wire.Mount{}))
		m.Mounts = append(m.Mounts, wire.Mount{Type: "bind", Source: shared, Target: "/b", Propagation: "rslave"})
		c := r.attach(m, &wire.Attach{Stdout: true, Stderr: true, Framed: true, Stream: true})
		r.run(m)
		late := filepath.Join(shared, "late")
		if err := os.Mkdir(late, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", late, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		defer unix.Unmount(late, unix.MNT_DETACH)
		os.WriteFile(late+"/seen", nil, 0o644)
		r.stop(m.ID)
		if out, errs := c.readAll(true); out != "seen\n" {
			t.Errorf("a mount made after the start: %q, %q", out, errs)
		}
		if _, err := r.tryRun(sh("true", wire.Mount{Type: "bind", Source: shared, Target: "/b", Propagation: "sideways"})); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("an unknown word: %v", err)
		}
	})
	t.Run("read-only root", func(t *testing.T) {
		m := sh("touch /x 2>&1; touch /t/x && cat /etc/hostname", wire.Mount{Type: "tmpfs", Target: "/t"})
		m.ReadOnly = true
		if got := r.said(t, m); !strings.Contains(got, "Read-only file system") || !strings.HasSuffix(got, "box\n") {
			t.Errorf("got %q", got)
		}
	})
	t.Run("cgroup", func(t *testing.T) {
		script := `cd /sys/fs/cgroup; cat memory/memory.limit_in_bytes memory.max 2>/dev/null; cat pids/pids.max pids.max 2>/dev/null
			cat unified/cgroup.procs cgroup.procs 2>/dev/null | grep -c 1; touch x 2>&1 | grep -c Read-only; cat /proc/self/cgroup | cut -d: -f3 | sort -u`
		limit := int64(77)
		for name, change := range map[string]func(*wire.Run){
			"usual":   func(*wire.Run) {},
			"devices": func(m *wire.Run) { m.DeviceRules = []string{"c 10:229 rwm"} },
			"parent":  func(m *wire.Run) { m.CgroupParent = "/" + cgroupParent(r.execRoot())[1:] + "-p" },
			"dev":     func(m *wire.Run) { m.Mounts = []wire.Mount{{Type: "bind", Source: "/dev", Target: "/dev"}} },
		} {
			m := sh(script)
			m.Resources = wire.Resources{Memory: 40 << 20, PidsLimit: &limit}
			change(m)
			if got := r.said(t, m); !strings.HasPrefix(got, "41943040\n77\n1\n1\n/\n") {
				t.Errorf("%s: %q", name, got)
			}
			if name == "parent" {
				paths, _ := filepath.Glob("/sys/fs/cgroup/*" + m.CgroupParent)
				waitFor(t, "the cgroup to go", func() bool {
					for _, p := range append(paths, "/sys/fs/cgroup"+m.CgroupParent) {
						if err := os.Remove(p); err != nil && !os.IsNotExist(err) {
							return false
						}
					}
					return true
				})
			}
		}
	})
	t.Run("shm", func(t *testing.T) {
		m := sh("grep ' /dev/shm ' /proc/mounts")
		m.ShmSize = 32 << 20
		if got := r.said(t, m); !strings.Contains(got, "size=32768k") {
			t.Errorf("got %q", got)
		}
		m = sh("stat -f -c %T /dev/shm")
		m.IPC = "none"
		if got := r.said(t, m); got != "tmpfs\n" { // of /dev, not its own
			t.Errorf("got %q", got)
		}
		m = sh("grep -c ' /dev/shm ' /proc/mounts; true")
		m.IPC = "none"
		if got := r.said(t, m); got != "0\n" {
			t.Errorf("with ipc none: %q", got)
		}
	})
	t.Run("devices", func(t *testing.T) {
		m := sh("stat -c '%F %t,%T' /dev/mine; head -c 3 /dev/mine | od -An -tx1; mknod /tmp/k b 7 0 && (: < /tmp/k) 2>&1; true")
		m.Devices = []wire.Device{{Source: "/dev/zero", Target: "/dev/mine", Access: "rwm"}}
		got := r.said(t, m)
		if !strings.Contains(got, "character special file 1,5\n 00 00 00\n") || !strings.Contains(got, "not permitted") {
			t.Errorf("got %q", got)
		}
		m = sh("true")
		m.Devices = []wire.Device{{Source: "/dev/nope", Target: "/dev/nope", Access: "rwm"}}
		if _, err := r.tryRun(m); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("a missing device: %v", err)
		}
	})
	t.Run("privileged", func(t *testing.T) {
		m := sh("touch /sys/fs/cgroup/x 2>/dev/null; ls /dev | wc -l; mount -t tmpfs x /tmp && echo mounted; mknod /tmp/k c 1 3 && echo x > /tmp/k && echo opened")
		m.Privileged, m.MaskedPaths, m.ReadonlyPaths = true, nil, nil
		if got := r.said(t, m); !strings.HasSuffix(got, "mounted\nopened\n") {
			t.Errorf("got %q", got)
		}
	})
}

func TestNamespaces(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	donor := r.spec("sh", "-c", "echo from the donor > /dev/shm/f; echo up; sleep 1000")
	donor.IPC, donor.Net.Mode = "shareable", "bridge"
	c := r.attach(donor, &wire.Attach{Stdout: true, Stream: true})
	pid := r.run(donor).PID
	c.until("up\n")
	ns := func(pid int, name string) string {
		l, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, name))
		if err != nil {
			t.Error(err)
		}
		return l
	}
	show := "for n in net ipc uts pid; do readlink /proc/self/ns/$n; done"
	t.Run("private", func(t *testing.T) {
		got := r.said(t, r.spec("sh", "-c", show))
		for _, n := range []string{"net", "ipc", "uts", "pid"} {
			if strings.Contains(got, ns(pid, n)) || strings.Contains(got, ns(os.Getpid(), n)) {
				t.Errorf("namespace %s is not its own: %s", n, got)
			}
		}
	})
	t.Run("container", func(t *testing.T) {
		m := r.spec("sh", "-c", show+"; cat /dev/shm/f; ps | grep -c 'sleep 1000'; cat /etc/hosts | tail -n 1")
		m.IPC, m.PID, m.Net = donor.ID, donor.ID, wire.NetConfig{Mode: "container", Container: donor.ID}
		got := r.said(t, m)
		for _, n := range []string{"net", "ipc", "pid"} {
			if !strings.Contains(got, ns(pid, n)) {
				t.Errorf("namespace %s is not the donor's: %s", n, got)
			}
		}
		if !strings.Contains(got, "from the donor\n") || !strings.Contains(got, "box") {
			t.Errorf("got %s", got)
		}
	})
	t.Run("host", func(t *testing.T) {
		m := r.spec("sh", "-c", show)
		m.IPC, m.PID, m.UTS, m.Net.Mode = "host", "host", "host", "host"
		got := r.said(t, m)
		for _, n := range []string{"net", "ipc", "uts", "pid"} {
			if !strings.Contains(got, ns(os.Getpid(), n)) {
				t.Errorf("namespace %s is not the host's: %s", n, got)
			}
		}
	})
	t.Run("host processes die with the container", func(t *testing.T) {
		m := r.spec("sh", "-c", "sleep 12345 & echo $!; exec sleep 0.1")
		m.PID = "host"
		c := r.attach(m, &wire.Attach{Stdout: true, Stream: true})
		r.run(m)
		var child int
		fmt.Sscan(c.until("\n"), &child)
		r.wait(m.ID)
		if alive(child) {
			t.Errorf("process %d outlived its container", child)
		}
	})
	t.Run("not running", func(t *testing.T) {
		m := r.spec("true")
		m.Net = wire.NetConfig{Mode: "container", Container: newID()}
		if _, err := r.tryRun(m); wire.ClassOf(err) != wire.Conflict {
			t.Errorf("got %v", err)
		}
	})
}

func TestControl(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	m := r.counter(0)
	m.Net.Mode = "bridge"
	r.run(m)
	call := func(msg wire.Message) (*wire.Frame, error) { return r.conn.Call(r.ctx(), msg) }
	must := func(msg wire.Message) wire.Message {
		t.Helper()
		f, err := call(msg)
		if err != nil {
			t.Fatalf("%T: %v", msg, err)
		}
		return f.Msg
	}
	must(&wire.Freeze{ID: m.ID, On: true})
	if _, err := call(&wire.Freeze{ID: m.ID, On: true}); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("freezing twice: %v", err)
	}
	_, file := socketpair(t)
	if _, err := r.conn.Call(r.ctx(), &wire.Exec{ID: m.ID, Exec: newID(), Args: []string{"true"}}, file); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("exec in a paused container: %v", err)
	}
	file.Close()
	r.kill() // the next agent knows that it is paused
	r.start()
	if len(r.hello.Containers) != 1 || !r.hello.Containers[0].Paused {
		t.Errorf("after a kill: %+v", r.hello.Containers)
	}
	r.adopt(m.ID, true)
	must(&wire.Freeze{ID: m.ID, On: false})

	if pids := must(&wire.Top{ID: m.ID}).(*wire.TopReply).PIDs; len(pids) == 0 || pids[0] != r.hello.Containers[0].Reply.PID {
		t.Errorf("top: %v", pids)
	}
	s := must(&wire.Stats{ID: m.ID}).(*wire.StatsReply)
	if s.CPUTotal == 0 || s.PIDs == 0 || len(s.Interfaces) != 1 || s.At == 0 {
		t.Errorf("stats: %+v", s)
	}
	limit := int64(50)
	must(&wire.Update{ID: m.ID, Resources: wire.Resources{Memory: 64 << 20, MemorySwap: -1, PidsLimit: &limit}})
	if s := must(&wire.Stats{ID: m.ID}).(*wire.StatsReply); s.MemoryLimit != 64<<20 || s.PIDsLimit != 50 {
		t.Errorf("after update: limit %d, pids %d", s.MemoryLimit, s.PIDsLimit)
	}
	if _, err := call(&wire.Remove{ID: m.ID}); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("removing a running container: %v", err)
	}
	if _, err := call(&wire.Signal{ID: m.ID, Signal: 12345}); wire.ClassOf(err) != wire.Invalid {
		t.Errorf("a signal that is none: %v", err)
	}
	for _, msg := range []wire.Message{&wire.Signal{ID: newID(), Signal: 9}, &wire.Stats{ID: newID()}, &wire.Top{ID: newID()}, &wire.Plan{ID: newID()}} {
		if _, err := call(msg); wire.ClassOf(err) != wire.Conflict {
			t.Errorf("%T of a container that is not there: %v", msg, err)
		}
	}
	fresh := r.spec("sleep", "1000")
	r.run(fresh)
	if p := must(&wire.Plan{ID: fresh.ID}).(*wire.PlanReply).Text; !strings.Contains(p, "execve") || !strings.Contains(p, "chroot") {
		t.Errorf("plan: %s", p)
	}
	r.stop(m.ID)
	if e := r.wait(m.ID); e.Code != 0 {
		t.Errorf("ended with %+v", e)
	}
	must(&wire.Remove{ID: m.ID})
	must(&wire.Remove{ID: m.ID})
}

// TestOOM is BR-63.
func TestOOM(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	m := r.spec("sh", "-c", "head -c 200000000 /dev/zero | tail -c 100000000 > /dev/null")
	m.Args = []string{"tail", "-c", "100000000", "/dev/zero"}
	m.Resources = wire.Resources{Memory: 32 << 20, MemorySwap: 32 << 20}
	r.run(m)
	if e := r.wait(m.ID); e.Code != 137 || !e.OOMKilled {
		t.Errorf("ended with %+v", e)
	}
	r.mu.Lock()
	if r.ooms[m.ID] == 0 {
		t.Error("no OOM frame")
	}
	r.mu.Unlock()
	m = r.spec("sleep", "1000")
	m.Resources = wire.Resources{Memory: 32 << 20}
	r.run(m)
	if _, err := r.conn.Call(r.ctx(), &wire.Signal{ID: m.ID, Signal: 9}); err != nil {
		t.Fatal(err)
	}
	if e := r.wait(m.ID); e.Code != 137 || e.OOMKilled {
		t.Errorf("killed from outside: %+v", e)
	}
}
