//go:build linux && (amd64 || arm64)

package launch

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// withInit gives s this test binary as init: TestMain calls InitMain. It is static, as it runs inside the container.
func withInit(t *testing.T, s *Spec) *Spec {
	t.Helper()
	self, err := os.Open("/proc/self/exe")
	must(t, err)
	t.Cleanup(func() { self.Close() })
	mem, err := unix.MemfdCreate("init", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	must(t, err)
	f := os.NewFile(uintptr(mem), "init")
	t.Cleanup(func() { f.Close() })
	_, err = f.ReadFrom(self)
	must(t, err)
	_, err = unix.FcntlInt(uintptr(mem), unix.F_ADD_SEALS, unix.F_SEAL_SEAL|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_WRITE)
	must(t, err)
	s.Init = f
	return s
}

func needStatic(t *testing.T) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	must(t, err)
	if strings.Contains(string(maps), "libc.so") {
		t.Skip("SKIPPED: the test binary is init here and must be static (CGO_ENABLED=0)")
	}
}

func TestInit(t *testing.T) {
	needStatic(t)
	run := func(args ...string) *started { return start(t, nil, withInit(t, container(t, args...))) }
	t.Run("report", func(t *testing.T) {
		r := see(t, nil, withInit(t, container(t, "report")))
		if r.PID == 1 || r.PPID != 1 || r.PGID != r.PID || r.Status["SigBlk"] != pad16(0) || r.Status["CapEff"] != pad16(DefaultCaps()) {
			t.Errorf("pid %d, parent %d, group %d, blocked %s, caps %s", r.PID, r.PPID, r.PGID, r.Status["SigBlk"], r.Status["CapEff"])
		}
		for fd, to := range r.FDs {
			if fd > 2 && to != fmt.Sprintf("/proc/%d/fd", r.PID) && !strings.HasPrefix(to, "anon_inode:[event") {
				t.Errorf("descriptor %d: %s", fd, to)
			}
		}
	})
	t.Run("command line", func(t *testing.T) {
		if _, out, errs := run("cat", "/proc/1/cmdline").finish(); out != "/sbin/docker-init\x00-x\x00/bin/probe\x00--\x00probe\x00cat\x00/proc/1/cmdline\x00" {
			t.Errorf("%q %s", out, errs)
		}
	})
	t.Run("exit code", func(t *testing.T) {
		if code, _, errs := run("exit", "42").finish(); code != 42 {
			t.Errorf("%d %s", code, errs)
		}
	})
	t.Run("killed", func(t *testing.T) {
		if code, _, _ := run("kill-self", "9").finish(); code != 137 {
			t.Errorf("%d", code)
		}
	})
	t.Run("signals", func(t *testing.T) {
		p := run("signal")
		if l := p.line(); l != "ready" {
			t.Fatal(l)
		}
		must(t, unix.PidfdSendSignal(fdOf(p.PIDFD), unix.SIGTERM, nil, 0))
		if code, out, _ := p.finish(); code != 0 || strings.TrimSpace(out) != "terminated" {
			t.Errorf("%d %q", code, out)
		}
	})
	t.Run("orphans", func(t *testing.T) {
		if code, out, errs := run("orphan").finish(); code != 0 || strings.TrimSpace(out) != "reaped" {
			t.Errorf("%d %q %s", code, out, errs)
		}
	})
	t.Run("missing", func(t *testing.T) {
		s := withInit(t, container(t, "true"))
		s.Path = "/bin/nosuch"
		if code, _, errs := start(t, nil, s).finish(); code != 127 || errs != "exec /bin/nosuch: no such file or directory\n" {
			t.Errorf("%d %q", code, errs)
		}
	})
	t.Run("not executable", func(t *testing.T) {
		s := withInit(t, container(t, "true"))
		s.Path = "/etc/file"
		if code, _, errs := start(t, nil, s).finish(); code != 126 || errs != "exec /etc/file: permission denied\n" {
			t.Errorf("%d %q", code, errs)
		}
	})
	t.Run("in another PID namespace", func(t *testing.T) {
		tm := template(t)
		c := running(t, nil)
		defer c.finish()
		s := withInit(t, container(t, "exit", "7"))
		s.Cloneflags &^= unix.CLONE_NEWPID
		s.Into, s.IntoFlags = c.PIDFD, unix.CLONE_NEWPID
		m, err := ProcMount(c.PID)
		must(t, err)
		defer m.Close()
		s.ProcMount = m
		if code, _, errs := start(t, tm, s).finish(); code != 7 {
			t.Errorf("%d %s", code, errs)
		}
	})
	if code := InitMain([]string{InitName, "x"}); code != 125 {
		t.Errorf("bad arguments: %d", code)
	}
}

// TestTerminal starts with a terminal of the container's own devpts, by each way and with init.
func TestTerminal(t *testing.T) {
	tm := template(t)
	open := func(s *Spec) (master *os.File) {
		pts := mountFS(t, "devpts", map[string]string{"ptmxmode": "0666", "mode": "0620"}, 0)
		fd, err := unix.Openat(fdOf(pts), "ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		must(t, err)
		must(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
		slave, err := unix.Openat(fdOf(pts), "0", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		must(t, err)
		f := os.NewFile(uintptr(slave), "slave")
		t.Cleanup(func() { f.Close() })
		s.Stdin, s.Stdout, s.Stderr, s.TTY = f, f, f, true
		master = os.NewFile(uintptr(fd), "master")
		t.Cleanup(func() { master.Close() })
		return master
	}
	check := func(t *testing.T, m *os.File, want string) {
		t.Helper()
		var got []byte
		b := make([]byte, 256)
		for !strings.Contains(string(got), "\n") {
			n, err := m.Read(b)
			must(t, err)
			got = append(got, b[:n]...)
		}
		if strings.TrimSpace(string(got)) != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	const noDev = "<nil>"
	t.Run("thread", func(t *testing.T) {
		s := container(t, "tty")
		must(t, unix.Mknodat(fdOf(s.Mounts[0].Mount), "tty", unix.S_IFCHR|0o666, int(unix.Mkdev(5, 0))))
		m := open(s)
		th, err := NewThread(nil)
		must(t, err)
		defer th.Close()
		p, err := th.Start(mustCompile(t, s))
		must(t, err)
		check(t, m, "true 1 "+noDev)
		waitFor(t, p)
		p.PIDFD.Close()
	})
	t.Run("init", func(t *testing.T) {
		needStatic(t)
		s := withInit(t, container(t, "tty"))
		must(t, unix.Mknodat(fdOf(s.Mounts[0].Mount), "tty", unix.S_IFCHR|0o666, int(unix.Mkdev(5, 0))))
		m := open(s)
		th, err := NewThread(nil)
		must(t, err)
		defer th.Close()
		p, err := th.Start(mustCompile(t, s))
		must(t, err)
		check(t, m, "true 1 "+noDev)
		waitFor(t, p)
		p.PIDFD.Close()
	})
	t.Run("template", func(t *testing.T) {
		c := running(t, func(s *Spec) {
			must(t, unix.Mknodat(fdOf(s.Mounts[0].Mount), "tty", unix.S_IFCHR|0o666, int(unix.Mkdev(5, 0))))
		})
		defer c.finish()
		s := execIn(c, "tty")
		m := open(s)
		p, err := tm.Start(mustCompile(t, s))
		must(t, err)
		b := make([]byte, 256)
		n, err := m.Read(b)
		must(t, err)
		if f := strings.Fields(string(b[:n])); len(f) != 3 || f[0] != "true" || f[1] == "0" || f[2] != noDev {
			t.Errorf("%q", b[:n])
		}
		waitFor(t, p)
		p.PIDFD.Close()
	})
}
