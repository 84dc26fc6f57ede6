//go:build linux && (amd64 || arm64)

package launch

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// template makes a Template that is gone, with all it left to reap, at the test's end.
func template(t testing.TB) *Template {
	t.Helper()
	needRoot(t)
	tm, err := NewTemplate()
	must(t, err)
	t.Cleanup(func() {
		tm.Close()
		reap()
	})
	return tm
}

// running starts a container that lasts until finish.
func running(t testing.TB, change func(*Spec)) *started {
	t.Helper()
	s := container(t, "wait")
	if change != nil {
		change(s)
	}
	p := start(t, nil, s)
	if l := p.line(); l != "ready" {
		t.Fatalf("container said %q", l)
	}
	return p
}

const allJoined = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// execIn is the Spec of an exec in c.
func execIn(c *started, args ...string) *Spec {
	return &Spec{
		Into: c.PIDFD, IntoFlags: allJoined,
		Path: "/bin/probe", Args: append([]string{"probe"}, args...), Env: []string{"A=c"},
		Caps: CapsFor(DefaultCaps(), 0),
	}
}

func TestExec(t *testing.T) {
	tm := template(t)
	c := running(t, nil)
	defer c.finish()
	for _, uid := range []uint32{0, 1000} {
		for _, nnp := range []bool{false, true} {
			t.Run(fmt.Sprintf("user %d, no_new_privs %v", uid, nnp), func(t *testing.T) {
				s := execIn(c, "report")
				s.UID, s.GID, s.Groups, s.NoNewPrivs, s.Cwd = uid, uid, []uint32{5}, nnp, "/work"
				s.Caps = CapsFor(DefaultCaps(), uid)
				s.Rlimits = []wire.Rlimit{{Name: "core", Soft: 1, Hard: 1}}
				adj := 33
				s.OOMScoreAdj = &adj
				f, err := SeccompFilter("", DefaultCaps())
				must(t, err)
				s.Seccomp = f
				r := see(t, tm, s)
				for _, n := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
					want, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", c.PID, n))
					must(t, err)
					if r.Namespaces[n] != want {
						t.Errorf("%s namespace %s, the container's is %s", n, r.Namespaces[n], want)
					}
				}
				caps := pad16(DefaultCaps())
				if uid != 0 {
					caps = pad16(0)
				}
				u := fmt.Sprintf("%[1]d %[1]d %[1]d %[1]d", uid)
				for k, want := range map[string]string{"CapEff": caps, "CapPrm": caps, "CapInh": pad16(0), "CapAmb": pad16(0),
					"CapBnd": pad16(DefaultCaps()), "Uid": u, "Gid": u, "Groups": "5", "Seccomp": "2", "SigBlk": pad16(0), "SigIgn": pad16(0)} {
					if r.Status[k] != want {
						t.Errorf("%s: %q, want %q", k, r.Status[k], want)
					}
				}
				if got := r.Status["NoNewPrivs"] == "1"; got != nnp {
					t.Errorf("no_new_privs %v", got)
				}
				if r.Cwd != "/work" || r.OOMAdj != "33" || r.PID != r.SID || r.PID != r.PGID || r.PID == 1 || r.Umask != 0o022 {
					t.Errorf("cwd %s, adj %s, pid %d, session %d, group %d, umask %o", r.Cwd, r.OOMAdj, r.PID, r.SID, r.PGID, r.Umask)
				}
				for fd, to := range r.FDs {
					if fd > 2 && to != fmt.Sprintf("/proc/%d/fd", r.PID) && !strings.HasPrefix(to, "anon_inode:[event") {
						t.Errorf("descriptor %d: %s", fd, to)
					}
				}
				if strings.Join(r.Env, " ") != "A=c" {
					t.Errorf("env %q", r.Env)
				}
			})
		}
	}
	t.Run("exit code", func(t *testing.T) {
		if code, _, errs := start(t, tm, execIn(c, "exit", "42")).finish(); code != 42 {
			t.Errorf("exit code %d %s", code, errs)
		}
	})
	t.Run("signal", func(t *testing.T) {
		p := start(t, tm, execIn(c, "signal"))
		if l := p.line(); l != "ready" {
			t.Fatal(l)
		}
		must(t, unix.PidfdSendSignal(fdOf(p.PIDFD), unix.SIGUSR1, nil, 0))
		if code, out, _ := p.finish(); code != 0 || strings.TrimSpace(out) != "user defined signal 1" {
			t.Errorf("code %d, %q", code, out)
		}
	})
	t.Run("large environment", func(t *testing.T) {
		s := execIn(c, "report")
		for i := range 40 {
			s.Env = append(s.Env, fmt.Sprintf("V%d=%s", i, strings.Repeat("x", 30<<10)))
		}
		p := start(t, tm, s)
		var r report
		must(t, json.NewDecoder(bufio.NewReader(p.out)).Decode(&r))
		p.finish()
		if len(r.Env) != 41 || r.Env[40] != s.Env[40] {
			t.Errorf("%d variables", len(r.Env))
		}
	})
}

func TestExecFailures(t *testing.T) {
	tm := template(t)
	c := running(t, nil)
	ended := running(t, nil)
	ended.in.Close()
	ended.wait()
	for _, tt := range []struct {
		name   string
		change func(s *Spec)
		errno  unix.Errno
		class  wire.Class
		text   string
	}{
		{"command missing", func(s *Spec) { s.Path = "/nosuch" }, unix.ENOENT, wire.NoCommand, "exec /nosuch: no such file or directory"},
		{"not executable", func(s *Spec) { s.Path = "/etc/file" }, unix.EACCES, wire.NotExecutable, "exec /etc/file: permission denied"},
		{"cwd", func(s *Spec) { s.Cwd = "/none" }, unix.ENOENT, wire.Internal, "change to working directory /none: no such file or directory"},
		{"cwd in another process", func(s *Spec) { s.Cwd = "/proc/1/root" }, unix.ELOOP, wire.Internal, ""},
		{"container ended", func(s *Spec) { s.Into = ended.PIDFD }, unix.ESRCH, wire.Internal, "join the container's namespaces: no such process (the container has stopped)"},
		{"no terminal", func(s *Spec) { s.TTY = true }, unix.ENOTTY, wire.Internal, "take the terminal: inappropriate ioctl for device"},
		{"cgroup", func(s *Spec) { s.CgroupFD = fdOf(c.in) }, unix.EBADF, wire.Internal, "clone: bad file descriptor"},
		{"too many descriptors", func(s *Spec) {
			for range maxFiles {
				f, err := os.Open("/proc/self/ns/uts")
				must(t, err)
				t.Cleanup(func() { f.Close() })
				s.Join = append(s.Join, f)
			}
		}, 0, wire.Unsupported, ""},
		{"too large", func(s *Spec) { s.Env = []string{strings.Repeat("x", maxProgram)} }, unix.E2BIG, wire.Invalid, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := execIn(c, "true")
			tt.change(s)
			_, err := tryStart(t, tm, s)
			if err == nil {
				t.Fatal("no error")
			}
			if wire.ClassOf(err) != tt.class || tt.errno != 0 && !errors.Is(err, tt.errno) {
				t.Errorf("%v: class %d, want %d and errno %v", err, wire.ClassOf(err), tt.class, tt.errno)
			}
			if tt.text != "" && err.Error() != tt.text {
				t.Errorf("%q\nwant %q", err, tt.text)
			}
		})
	}
	c.finish()
	ended.PIDFD.Close()
	// The first processes of the starts end by themselves; nothing else is left.
	settle(t, tm)
}

// settle waits until the template process is the only child.
func settle(t *testing.T, tm *Template) {
	t.Helper()
	for {
		c := children(t)
		if len(c) <= 1 {
			if len(c) == 1 && c[0] != fmt.Sprint(tm.PID()) {
				t.Errorf("child left: %v", c)
			}
			return
		}
		// Blocks until one ends; a child that stays makes the test time out.
		if _, err := unix.Wait4(-1, nil, unix.WALL, nil); err != nil && err != unix.EINTR {
			t.Fatal(err)
		}
	}
}

func TestTemplateIsSmall(t *testing.T) {
	tm := template(t)
	c := running(t, nil)
	defer c.finish()
	start(t, tm, execIn(c, "true")).finish() // it has set itself up when it has served one
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tm.PID()))
	must(t, err)
	for line := range strings.Lines(string(b)) {
		var kb int
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &kb); n == 1 && kb > 256 {
			t.Errorf("resident: %d kB", kb)
		}
		if strings.HasPrefix(line, "VmRSS") || strings.HasPrefix(line, "RssAnon") || strings.HasPrefix(line, "VmPTE") {
			t.Log(strings.TrimSpace(line))
		}
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", tm.PID()))
	must(t, err)
	if n := strings.Count(string(maps), "\n"); n > 7 {
		t.Errorf("%d mappings:\n%s", n, maps)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", tm.PID()))
	must(t, err)
	if len(fds) != 4 {
		t.Errorf("descriptors: %v", fds)
	}
}

func TestTemplateIsMadeAgain(t *testing.T) {
	tm := template(t)
	c := running(t, nil)
	defer c.finish()
	old := tm.PID()
	must(t, unix.Kill(old, unix.SIGKILL))
	// Until it is dead for sure, a start may find it alive and lose.
	must(t, ignoreInterrupt(func() error { return unix.Waitid(unix.P_PID, old, nil, unix.WEXITED|unix.WNOWAIT, nil) }))
	if code, _, errs := start(t, tm, execIn(c, "true")).finish(); code != 0 {
		t.Fatalf("%d %s", code, errs)
	}
	if tm.PID() == old || tm.PID() == 0 {
		t.Errorf("template is %d, was %d", tm.PID(), old)
	}
	must(t, tm.Close())
	if _, err := tryStart(t, tm, execIn(c, "true")); wire.ClassOf(err) != wire.Unavailable {
		t.Errorf("start after Close: %v", err)
	}
}

func ignoreInterrupt(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}

func TestManyExecsAtOnce(t *testing.T) {
	tm := template(t)
	c := running(t, nil)
	defer c.finish()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 20 {
				if i%4 == 3 {
					s := execIn(c, "true")
					s.Path = "/nosuch"
					if p, err := tm.Start(mustCompile(t, s)); wire.ClassOf(err) != wire.NoCommand {
						t.Errorf("missing command: %v %v", p, err)
					}
					continue
				}
				want := (w*20 + i) % 100
				s := execIn(c, "exit", fmt.Sprint(want))
				p, err := tm.Start(mustCompile(t, s))
				if err != nil {
					t.Error(err)
					continue
				}
				got := started{Proc: p, t: t}
				if code := got.wait(); code != want {
					t.Errorf("exit code %d, want %d", code, want)
				}
				p.PIDFD.Close()
			}
		})
	}
	wg.Wait()
}

func mustCompile(t testing.TB, s *Spec) *Plan {
	p, err := Compile(s)
	if err != nil {
		t.Error(err)
		return &Plan{}
	}
	return p
}

// TestNewcomerCannotBeRobbed runs the attack: a container with CAP_SYS_PTRACE reads the memory, the descriptors and
// the rights of a newcomer. It gets all the time it wants: the newcomer is made to stop at its very first step, when it
// has closed nothing yet. There must be nothing of the agent, no right that the container has not, no other mount
// namespace, and no descriptor but stdio and the socket for the outcome, which is worth nothing without the nonce.
func TestNewcomerCannotBeRobbed(t *testing.T) {
	// In our memory in many places, as a secret of the agent would be.
	secrets := make([][]byte, 64)
	for i := range secrets {
		secrets[i] = []byte(strings.Repeat("secret-of-the-agent", 200))
	}
	tm := template(t)
	caps := DefaultCaps() | 1<<unix.CAP_SYS_PTRACE
	c := running(t, func(s *Spec) { s.Caps = CapsFor(caps, 0) })
	defer c.finish()
	mnt, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", c.PID))
	must(t, err)
	base, err := area()
	must(t, err)
	filter, err := SeccompFilter("", caps)
	must(t, err)
	for _, uid := range []uint32{0, 1000} {
		s := execIn(c, "true")
		s.UID, s.Seccomp = uid, filter
		s.Caps = CapsFor(caps, uid)
		p := &started{t: t}
		closeChild := p.pipes(s)
		plan := mustCompile(t, s)
		first := -1
		for i := range plan.prog.steps {
			if strings.HasPrefix(plan.prog.steps[i].note, "second process") {
				first = i
			}
		}
		two := plan.prog.steps[first : first+2]
		if two[0].nr != unix.SYS_CLOSE_RANGE || two[1].nr != unix.SYS_SETSID {
			t.Fatalf("the second process begins with %s, %s", sysName(two[0].nr), sysName(two[1].nr))
		}
		two[0].nr, two[0].args = unix.SYS_WRITE, [6]word{num(1), plan.prog.str("\n"), num(1)}
		two[1].nr, two[1].args = unix.SYS_READ, [6]word{num(0), plan.prog.scratch(), num(1)}
		result := make(chan error, 1)
		go func() {
			var err error
			p.Proc, err = tm.Start(plan)
			closeChild()
			result <- err
		}()
		p.line()
		newcomer := inNamespace(t, tm)
		spy := execIn(c, "inspect", newcomer, "of-the-agent")
		spy.Caps = CapsFor(caps, 0)
		code, out, errs := start(t, tm, spy).finish()
		if code != 0 {
			t.Fatalf("spy: %d %s", code, errs)
		}
		var maps, read int
		for line := range strings.Lines(out) {
			f := strings.Fields(line)
			switch {
			case f[0] == "LEAK":
				t.Error(line)
			case f[0] == "descriptor":
				if !strings.Contains("0 1 2", f[1]) && !(f[1] == "4" && strings.HasPrefix(f[2], "socket:")) {
					t.Error(line)
				}
			case f[0] == "mnt":
				if f[1] != mnt {
					t.Errorf("mount namespace %s, the container's is %s", f[1], mnt)
				}
			case f[0] == "map":
				var from, to uint64
				var n int
				fmt.Sscanf(line, "map %x %x %d", &from, &to, &n)
				maps++
				read += n
				if from <= base+areaHeader && base+areaHeader < to {
					t.Errorf("the nonce is mapped: %s", line)
				}
			case f[0] == "status" && strings.HasPrefix(f[1], "Cap"):
				var set uint64
				fmt.Sscanf(f[2], "%x", &set)
				if set&^caps != 0 {
					t.Errorf("%s %s: more than %x", f[1], f[2], caps)
				}
			case f[0] == "status" && f[1] == "Seccomp" && f[2] != "2":
				t.Error(line)
			}
		}
		if maps == 0 || maps > 8 || read < pageSize {
			t.Errorf("the spy has read %d bytes of %d mappings", read, maps)
		}
		// The newcomer goes on with its life.
		if _, err := p.in.Write([]byte{0}); err != nil {
			t.Fatal(err)
		}
		must(t, <-result)
		p.finish()
	}
	if len(secrets) == 0 {
		t.Fatal("the secrets are gone")
	}
}

// inNamespace is the PID, in its own namespace, of the one process that is on the way into one.
func inNamespace(t *testing.T, tm *Template) string {
	t.Helper()
	for _, pid := range children(t) {
		b, err := os.ReadFile("/proc/" + pid + "/status")
		must(t, err)
		if !strings.HasPrefix(string(b), "Name:\tkiri-template\n") {
			continue
		}
		for line := range strings.Lines(string(b)) {
			if f := strings.Fields(line); f[0] == "NSpid:" && len(f) == 3 {
				return f[2]
			}
		}
	}
	t.Fatal("no newcomer")
	return ""
}

// TestForgedOutcome sends what a hostile newcomer could send on the socket for the outcome.
func TestForgedOutcome(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	must(t, err)
	report := os.NewFile(uintptr(pair[0]), "report")
	defer report.Close()
	nonce := []byte("0123456789abcdef")
	null, err := os.Open(os.DevNull)
	must(t, err)
	defer null.Close()
	rights := unix.UnixRights(fdOf(null))
	msg := make([]byte, reportSize)
	msg[nonceSize+2*8] = 1 // PID 1
	for _, m := range [][]byte{msg, msg[:3], append(msg, 1), append([]byte("0123456789abcdeF"), msg[nonceSize:]...)} {
		must(t, unix.Sendmsg(pair[1], m, rights, nil, 0))
	}
	before := openFiles(t)
	genuine := append(append([]byte{}, nonce...), make([]byte, 3*8)...)
	genuine[nonceSize] = byte(unix.EAGAIN)
	must(t, unix.Sendmsg(pair[1], genuine, nil, nil, 0))
	p := &program{}
	if _, err := p.outcome(report, nonce, 0); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("outcome: %v", err)
	}
	if n := openFiles(t); n != before {
		t.Errorf("descriptors: %d before, %d after", before, n)
	}
	// A step that does not exist, as a newcomer could write it to the status.
	if _, err := p.reported([]byte(strings.Repeat("\xff", 16)+strings.Repeat("\x00", 8)), nil, 0); err == nil {
		t.Error("an unknown step is no error")
	}
	unix.Close(pair[1])
	if _, err := p.outcome(report, nonce, 0); err == nil {
		t.Error("no outcome is no error")
	}
}

func openFiles(t testing.TB) int {
	l, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(l)
}

// TestJoinPIDNamespace starts a container with a root of its own in another's PID namespace.
func TestJoinPIDNamespace(t *testing.T) {
	tm := template(t)
	c := running(t, nil)
	defer c.finish()
	for _, host := range []bool{false, true} {
		s := container(t, "report")
		s.Cloneflags &^= unix.CLONE_NEWPID
		want := ns(t, "pid")
		pid := 0
		if !host {
			s.Into, s.IntoFlags = c.PIDFD, unix.CLONE_NEWPID
			pid = c.PID
			want, _ = os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
		}
		if _, err := Compile(s); wire.ClassOf(err) != wire.Invalid {
			t.Fatalf("without a proc: %v", err)
		}
		m, err := ProcMount(pid)
		must(t, err)
		defer m.Close()
		s.ProcMount = m
		r := see(t, tm, s)
		if r.Namespaces["pid"] != want {
			t.Errorf("host %v: pid namespace %s, want %s", host, r.Namespaces["pid"], want)
		}
		for _, n := range []string{"mnt", "net", "ipc", "uts", "cgroup"} {
			if r.Namespaces[n] == ns(t, n) || r.Namespaces[n] == "" {
				t.Errorf("host %v: %s namespace is the host's", host, n)
			}
		}
		if r.Hostname != "box" || r.Status["CapEff"] != pad16(DefaultCaps()) || r.PID == 1 {
			t.Errorf("host %v: %s, %s, pid %d", host, r.Hostname, r.Status["CapEff"], r.PID)
		}
	}
}

func TestCloneProc(t *testing.T) {
	needRoot(t)
	c := running(t, nil)
	defer c.finish()
	f, err := cloneProc(c.PID)
	must(t, err)
	defer f.Close()
	var st, want unix.Stat_t
	must(t, unix.Fstatat(fdOf(f), "1/ns/pid", &st, 0))
	must(t, unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", c.PID), &want))
	if st.Ino != want.Ino {
		t.Errorf("the clone shows PID namespace %d, want %d", st.Ino, want.Ino)
	}
	// A container that has something else at /proc.
	bad := running(t, func(s *Spec) { s.Proc, s.Masked, s.Readonly = nil, nil, nil })
	defer bad.finish()
	if _, err := cloneProc(bad.PID); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a directory at /proc: %v", err)
	}
}

func TestWrongWay(t *testing.T) {
	tm := template(t)
	th, err := NewThread(nil)
	must(t, err)
	defer th.Close()
	c := running(t, nil)
	defer c.finish()
	if _, err := th.Start(mustCompile(t, execIn(c, "true"))); err == nil {
		t.Error("a thread has started a plan for a template")
	}
	if _, err := tm.Start(mustCompile(t, container(t, "true"))); err == nil {
		t.Error("a template has started a plan for a thread")
	}
}
