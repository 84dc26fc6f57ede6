//go:build linux && (amd64 || arm64)

package launch

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

func TestMaskedPaths(t *testing.T) {
	low := lower(t)
	must(t, os.Mkdir(filepath.Join(low, "secret"), 0o755))
	must(t, os.WriteFile(filepath.Join(low, "secret/key"), []byte("secret"), 0o644))
	must(t, os.WriteFile(filepath.Join(low, "password"), []byte("secret"), 0o644))
	must(t, os.Symlink("/proc/self/root/etc", filepath.Join(low, "magic")))
	files := []string{"/password"}
	for _, f := range []string{"/proc/kcore", "/proc/timer_list", "/proc/interrupts", "/proc/keys"} {
		if _, err := os.Stat(f); err == nil {
			files = append(files, f)
		}
	}
	s := containerOn(t, low, append([]string{"cat"}, files...)...)
	s.Masked = append(s.Masked, "/secret", "/password", "/none", "/none/at/all")
	code, out, errs := start(t, nil, s).finish()
	if code != 0 || out != "" {
		t.Errorf("masked files: code %d, read %q %s", code, out, errs)
	}
	dirs := []string{"/secret"}
	for _, d := range []string{"/proc/acpi", "/proc/scsi", "/proc/asound", "/sys/firmware", "/sys/devices/virtual/powercap"} {
		if st, err := os.Stat(d); err == nil && st.IsDir() {
			dirs = append(dirs, d)
		}
	}
	for _, d := range dirs {
		s := containerOn(t, low, "ls", d)
		s.Masked = append(s.Masked, "/secret")
		if code, out, errs := start(t, nil, s).finish(); code != 0 || out != "" {
			t.Errorf("masked directory %s: code %d, %q %s", d, code, out, errs)
		}
		s = containerOn(t, low, "write", d+"/new", "text")
		s.Masked = append(s.Masked, "/secret")
		if code, _, _ := start(t, nil, s).finish(); code != 99 {
			t.Errorf("masked directory %s: written to", d)
		}
	}
	// A link out of the root is no way to mask something else: it must not be followed silently either.
	s = containerOn(t, low, "true")
	s.Masked = []string{"/magic"}
	if _, err := tryStart(t, nil, s); !errors.Is(err, unix.ELOOP) {
		t.Errorf("masking through a magic link: %v", err)
	}
}

func TestReadonlyPaths(t *testing.T) {
	low := lower(t)
	for _, f := range []string{"/proc/sys/kernel/domainname", "/proc/sysrq-trigger", "/work/f"} {
		if _, err := os.Stat(f); err != nil && f != "/work/f" {
			continue // not in this kernel
		}
		s := containerOn(t, low, "write", f, "x")
		s.Readonly = append(s.Readonly, "/work", "/none")
		code, _, errs := start(t, nil, s).finish()
		if code != 99 || !strings.Contains(errs, "read-only file system") {
			t.Errorf("%s: code %d, %s", f, code, errs)
		}
	}
	s := containerOn(t, low, "write", "/work/f", "x")
	if code, _, errs := start(t, nil, s).finish(); code != 0 {
		t.Errorf("writable without: %d %s", code, errs)
	}
}

func TestSysctlsAndLimits(t *testing.T) {
	s := container(t, "cat", "/proc/sys/net/ipv4/ip_unprivileged_port_start", "/proc/sys/kernel/msgmax")
	s.Sysctls = map[string]string{"net.ipv4.ip_unprivileged_port_start": "7", "kernel/msgmax": "12345"}
	if code, out, errs := start(t, nil, s).finish(); code != 0 || out != "7\n12345\n" {
		t.Errorf("sysctls: %d %q %s", code, out, errs)
	}
	s = container(t, "report")
	adj := 77
	s.OOMScoreAdj = &adj
	s.Rlimits = []wire.Rlimit{{Name: "nofile", Soft: 111, Hard: 222}, {Name: "core", Soft: 0, Hard: 0}}
	s.Cwd = "/tmp/../work"
	s.Keyring = "box"
	r := see(t, nil, s)
	if r.OOMAdj != "77" || r.Cwd != "/work" {
		t.Errorf("oom_score_adj %s, cwd %s", r.OOMAdj, r.Cwd)
	}
	var ok int
	for line := range strings.Lines(r.Limits) {
		f := strings.Join(strings.Fields(line), " ")
		// A Go program raises its own soft limit.
		if strings.HasPrefix(f, "Max open files ") && strings.HasSuffix(f, " 222 files") || f == "Max core file size 0 0 bytes" {
			ok++
		}
	}
	if ok != 2 {
		t.Errorf("limits:\n%s", r.Limits)
	}
}

// TestFewDescriptors starts a container that may have fewer descriptors open than this process has.
func TestFewDescriptors(t *testing.T) {
	for range 64 {
		f, err := os.Open(os.DevNull)
		must(t, err)
		defer f.Close()
	}
	tm := template(t)
	limit := []wire.Rlimit{{Name: "nofile", Soft: 12, Hard: 12}}
	s := container(t, "wait")
	s.Rlimits, s.Cwd = limit, "/work"
	c := start(t, nil, s)
	defer c.finish()
	c.line()
	x := execIn(c, "report")
	x.Rlimits, x.Cwd = limit, "/work"
	if r := see(t, tm, x); r.Cwd != "/work" {
		t.Errorf("cwd %s", r.Cwd)
	}
}

// TestFailures checks that each failing step says what it was doing, with the errno to be found, and that nothing is
// left of the attempt.
func TestFailures(t *testing.T) {
	needRoot(t)
	low := lower(t)
	must(t, os.Symlink("/proc/1/root", filepath.Join(low, "escape")))
	must(t, os.Symlink("/etc/file", filepath.Join(low, "link")))
	tests := []struct {
		name   string
		change func(s *Spec)
		errno  unix.Errno
		class  wire.Class
		text   string
	}{
		{"command missing", func(s *Spec) { s.Path = "/bin/nosuch" }, unix.ENOENT, wire.NoCommand, "exec /bin/nosuch: no such file or directory"},
		{"below a file", func(s *Spec) { s.Path = "/etc/file/x" }, unix.ENOTDIR, wire.NoCommand, "exec /etc/file/x: not a directory"},
		{"interpreter missing", func(s *Spec) { s.Path = "/bin/script" }, unix.ENOENT, wire.NoCommand, "exec /bin/script: no such file or directory"},
		{"not executable", func(s *Spec) { s.Path = "/etc/file" }, unix.EACCES, wire.NotExecutable, "exec /etc/file: permission denied"},
		{"directory", func(s *Spec) { s.Path = "/etc" }, unix.EACCES, wire.NotExecutable, "exec /etc: permission denied"},
		{"no format", func(s *Spec) { s.Path = "/bin/junk" }, unix.ENOEXEC, wire.NotExecutable, "exec /bin/junk: exec format error"},
		{"too long", func(s *Spec) { s.Args = append(s.Args, strings.Repeat("x", 200<<10)) }, unix.E2BIG, wire.Invalid, "exec /bin/probe: argument list too long"},
		{"cwd missing", func(s *Spec) { s.Cwd = "/none" }, unix.ENOENT, wire.Internal, "change to working directory /none: no such file or directory"},
		{"cwd is a file", func(s *Spec) { s.Cwd = "/link" }, unix.ENOTDIR, wire.Internal, "change to working directory /link: not a directory"},
		{"cwd leaves by a link", func(s *Spec) { s.Cwd = "/escape" }, unix.ELOOP, wire.Internal, "change to working directory /escape: too many levels of symbolic links (a link into another process, or too many links)"},
		{"cwd by descriptor", func(s *Spec) { s.Cwd = "/proc/self/fd/0" }, unix.ELOOP, wire.Internal, ""},
		{"rlimit", func(s *Spec) { s.Rlimits = []wire.Rlimit{{Name: "nofile", Soft: 3, Hard: 2}} }, unix.EINVAL, wire.Internal, "set rlimit nofile to 3:2: invalid argument"},
		{"sysctl missing", func(s *Spec) { s.Sysctls = map[string]string{"net.nosuch": "1"} }, unix.ENOENT, wire.Internal, "set sysctl net.nosuch: no such file or directory"},
		{"sysctl refused", func(s *Spec) { s.Sysctls = map[string]string{"kernel.msgmax": "many"} }, unix.EINVAL, wire.Internal, "set sysctl kernel.msgmax: invalid argument"},
		{"seccomp", func(s *Spec) { s.Seccomp = []unix.SockFilter{{Code: 0xffff}} }, unix.EINVAL, wire.Internal, "load seccomp filter: invalid argument"},
		{"mount twice", func(s *Spec) { s.Mounts = append(s.Mounts, s.Mounts[0]) }, unix.ELOOP, wire.Internal, "mount tmpfs on /dev: too many levels of symbolic links (the target is inside of the mount)"},
		{"no terminal", func(s *Spec) { s.TTY = true }, unix.ENOTTY, wire.Internal, "take the terminal: inappropriate ioctl for device"},
		{"cgroup", func(s *Spec) { s.CgroupFD = fdOf(s.Root) }, unix.EBADF, wire.Internal, "clone: bad file descriptor"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := containerOn(t, low, "true")
			tt.change(s)
			mounts := mountCount(t)
			_, err := tryStart(t, nil, s)
			if err == nil {
				t.Fatal("no error")
			}
			if !errors.Is(err, tt.errno) || wire.ClassOf(err) != tt.class {
				t.Errorf("%v: class %d, want %d, errno %v", err, wire.ClassOf(err), tt.class, tt.errno)
			}
			if tt.text != "" && err.Error() != tt.text {
				t.Errorf("%q\nwant %q", err, tt.text)
			}
			if c := children(t); len(c) != 0 {
				t.Errorf("children left: %v", c)
			}
			if n := mountCount(t); n != mounts {
				t.Errorf("mounts: %d before, %d after", mounts, n)
			}
		})
	}
}

// TestWorkdirOutside makes what the kernel would find if a descriptor of the host were open: the check by getcwd must
// catch it even where no link is followed. The root is left out, so that the working directory is one that setns or
// chroot cannot reach.
func TestWorkdirOutside(t *testing.T) {
	needRoot(t)
	p := &program{}
	p.exit(1)
	first := p.here()
	p.add("", "", unix.SYS_CHROOT, p.str("/proc"))
	p.add("check", "", unix.SYS_GETCWD, p.scratch(), num(unix.PathMax)).flags |= flagSlash
	p.exit(0)
	errno, at := walk(t, p, first)
	if errno != unix.ENOENT || at == nil || at.what != "check" {
		t.Errorf("outside of the root: %v at %v", errno, at)
	}
}

// TestRootIsAll takes the ways out of a chroot, with all rights: there is nothing but the container's root, and under
// it an empty directory that cannot be written to.
func TestRootIsAll(t *testing.T) {
	for _, tt := range []struct{ way, want string }{
		{"chroot", "bin\ndev\netc\nproc\nsys\ntmp\nwork\nwritten\n"},
		{"umount", ""},
	} {
		s := container(t, "escape", tt.way)
		s.Caps = CapsFor(AllCaps(), 0)
		if code, out, errs := start(t, nil, s).finish(); code != 0 || out != tt.want {
			t.Errorf("%s: code %d, in the root: %q %s", tt.way, code, out, errs)
		}
	}
}

func TestInvalidSpecs(t *testing.T) {
	dir, err := os.Open("/")
	must(t, err)
	defer dir.Close()
	good := func() *Spec {
		return &Spec{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Root: dir, Path: "/bin/true", Args: []string{"true"}}
	}
	if p, err := Compile(good()); err != nil {
		t.Fatal(err)
	} else {
		p.Close()
	}
	for name, change := range map[string]func(*Spec){
		"no command":           func(s *Spec) { s.Args = nil },
		"relative":             func(s *Spec) { s.Path = "true" },
		"relative cwd":         func(s *Spec) { s.Cwd = "x" },
		"NUL in an argument":   func(s *Spec) { s.Args = append(s.Args, "a\x00b") },
		"NUL in env":           func(s *Spec) { s.Env = []string{"\x00"} },
		"unknown rlimit":       func(s *Spec) { s.Rlimits = []wire.Rlimit{{Name: "nosuch"}} },
		"root without ns":      func(s *Spec) { s.Cloneflags = unix.CLONE_NEWPID },
		"no root":              func(s *Spec) { s.Root = nil },
		"host name without ns": func(s *Spec) { s.Hostname = "x" },
		"host name too long":   func(s *Spec) { s.Hostname, s.Cloneflags = strings.Repeat("x", 65), s.Cloneflags|unix.CLONE_NEWUTS },
		"other clone flags":    func(s *Spec) { s.Cloneflags |= unix.CLONE_FILES },
		"terminal, no stdin":   func(s *Spec) { s.TTY = true },
		"sysctl, no proc":      func(s *Spec) { s.Sysctls = map[string]string{"a.b": "c"} },
		"sysctl climbs":        func(s *Spec) { s.Root, s.Proc, s.Sysctls = dir, dir, map[string]string{"net/../../x": "c"} },
		"mount in a process":   func(s *Spec) { s.Root, s.Proc, s.Mounts = dir, dir, []MountAt{{Mount: dir, Proc: "self/fd"}} },
		"mount climbs":         func(s *Spec) { s.Root, s.Proc, s.Mounts = dir, dir, []MountAt{{Mount: dir, Proc: "../etc"}} },
	} {
		s := good()
		change(s)
		if _, err := Compile(s); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	s := good()
	s.Cloneflags |= unix.CLONE_NEWUSER
	if _, err := Compile(s); wire.ClassOf(err) != wire.Unsupported {
		t.Errorf("user namespace: %v", err)
	}
}

func TestMountInProc(t *testing.T) {
	s := container(t, "cat", "/proc/cpuinfo")
	fd, err := unix.OpenTree(fdOf(s.Root), "etc/file", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if errors.Is(err, unix.EINVAL) {
		t.Skip("SKIPPED: the kernel clones no detached mounts (Linux 6.15)")
	}
	must(t, err)
	f := os.NewFile(uintptr(fd), "file")
	defer f.Close()
	s.Mounts = append(s.Mounts, MountAt{Mount: f, Proc: "cpuinfo", Desc: "file on /proc/cpuinfo"})
	if code, out, errs := start(t, nil, s).finish(); code != 0 || out != "text\n" {
		t.Errorf("code %d, %q %s", code, out, errs)
	}
}
