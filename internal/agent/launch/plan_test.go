//go:build linux && (amd64 || arm64)

package launch

import (
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// TestPlanText checks that a plan shows what matters, readable and in order.
func TestPlanText(t *testing.T) {
	s := container(t, "report")
	s.UID, s.GID, s.Groups, s.Cwd, s.NoNewPrivs = 1000, 1001, []uint32{7, 8}, "/work", true
	s.Caps = Caps{Bounding: DefaultCaps(), Ambient: 1 << unix.CAP_CHOWN}
	s.Sysctls = map[string]string{"net.ipv4.ip_forward": "1"}
	s.Rlimits = []wire.Rlimit{{Name: "nofile", Soft: 1024, Hard: ^uint64(0)}}
	f, err := SeccompFilter("", DefaultCaps())
	must(t, err)
	s.Seccomp = f
	p, err := Compile(s)
	must(t, err)
	defer p.Close()
	text := p.String()
	at := 0
	for _, want := range []string{
		"clone3({CLONE_NEWNS|CLONE_NEWUTS|CLONE_NEWIPC|CLONE_NEWPID|CLONE_NEWNET|CLONE_VM|CLONE_VFORK|CLONE_PIDFD|CLONE_CLEAR_SIGHAND, cgroup inherited})",
		"# child: PID 1",
		`unshare(CLONE_NEWCGROUP)`,
		`move_mount(<root>, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH)`,
		`fsopen("proc", FSOPEN_CLOEXEC) = $`,
		`# mount tmpfs on /dev`,
		`# set sysctl net.ipv4.ip_forward`,
		`# make read-only /proc/sys; ENOENT: go to`,
		`# mask /proc/interrupts; ENOENT: go to`,
		`sethostname("box", 3)`,
		`keyctl(KEYCTL_JOIN_SESSION_KEYRING, 0)`,
		`openat2(AT_FDCWD, "/work", {O_PATH|O_DIRECTORY|O_CLOEXEC, RESOLVE_IN_ROOT|RESOLVE_NO_MAGICLINKS}, 24)`,
		`getcwd(buffer, 4096)`,
		`dup3(</dev/null>, 0, 0)`,
		`setsid()`,
		`close_range(3, ~0, 0)`,
		`# set rlimit nofile to 1024:unlimited`,
		`prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN)`,
		`setgroups(2, [7, 8])`,
		`setresgid(1001, 1001, 1001)`,
		`setresuid(1000, 1000, 1000)`,
		`{effective none, permitted chown, inheritable chown}`,
		`prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_CHOWN, 0, 0)`,
		`prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)`,
		`rt_sigprocmask(SIG_SETMASK`,
		`seccomp(SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW`,
		`execve("/bin/probe", ["probe", "report"], ["PATH=/bin", "A=b"])`,
	} {
		i := strings.Index(text[at:], want)
		if i < 0 {
			t.Fatalf("no %q after\n%s\nin\n%s", want, text[:at], text)
		}
		at += i
	}
	for _, p := range []*Plan{p, mustCompile(t, &Spec{Path: "/x", Args: []string{"x"}, Into: os.Stdin, IntoFlags: allJoined})} {
		for line := range strings.Lines(p.String()) {
			if strings.Contains(line, "syscall ") || strings.Contains(line, "(data") && strings.Contains(line, "execve") {
				t.Errorf("not decoded: %s", line)
			}
		}
	}
}

func TestCaps(t *testing.T) {
	names := CapNames(DefaultCaps())
	if len(names) != 14 || !slices.Contains(names, "CAP_NET_RAW") || slices.Contains(names, "CAP_SYS_ADMIN") {
		t.Errorf("default: %v", names)
	}
	for i, n := range capNames {
		set, err := ParseCaps([]string{n})
		if err != nil || set != 1<<i || !slices.Equal(CapNames(set), []string{n}) {
			t.Errorf("%s: %#x %v", n, set, err)
		}
	}
	if lastCap() >= 0 && lastCap() < len(capNames)-1 {
		t.Logf("the kernel knows %d capabilities", lastCap()+1)
	}
	if _, err := ParseCaps([]string{"CAP_NOSUCH"}); wire.ClassOf(err) != wire.Invalid {
		t.Errorf("unknown: %v", err)
	}
	if c := CapsFor(5, 0); c != (Caps{Bounding: 5, Effective: 5, Permitted: 5}) {
		t.Errorf("root: %+v", c)
	}
	if c := CapsFor(5, 1); c != (Caps{Bounding: 5}) {
		t.Errorf("user: %+v", c)
	}
}

func TestThread(t *testing.T) {
	needRoot(t)
	th, err := NewThread(nil)
	must(t, err)
	if th.TID() == os.Getpid() {
		t.Error("the main thread has been taken: it cannot end")
	}
	for range 3 {
		must(t, th.Do(func() error {
			if unix.Gettid() != th.TID() {
				t.Errorf("on thread %d, want %d", unix.Gettid(), th.TID())
			}
			if l, err := os.ReadDir("/"); err != nil || len(l) != 0 {
				t.Errorf("its root has %v %v", l, err)
			}
			return nil
		}))
	}
	th.Close()
	th.Close()
	if err := th.Do(func() error { return nil }); err == nil {
		t.Error("a closed thread has worked")
	}
	if _, err := NewThread(func() error { return unix.EXDEV }); err != unix.EXDEV {
		t.Errorf("error of prepare: %v", err)
	}
	// Many, so that the main thread is among the candidates; each must be gone afterwards.
	var all []*Thread
	for range 20 {
		th, err := NewThread(nil)
		must(t, err)
		if th.TID() == os.Getpid() {
			t.Error("the main thread has been taken")
		}
		all = append(all, th)
	}
	tids := map[int]bool{}
	for _, th := range all {
		tids[th.TID()] = true
		th.Close()
	}
	if len(tids) != len(all) {
		t.Errorf("%d threads for %d", len(tids), len(all))
	}
	for tid := range tids {
		for {
			if err := unix.Tgkill(os.Getpid(), tid, 0); err != nil {
				break
			}
			runtime.Gosched() // it ends by itself; one that does not makes the test time out
		}
	}
	if l, err := os.ReadDir("/"); err != nil || len(l) == 0 {
		t.Errorf("this process has lost its root: %v %v", l, err)
	}
}
