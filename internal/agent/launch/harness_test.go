//go:build linux && (amd64 || arm64)

package launch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// report is the probe's; see testdata/probe.
type report struct {
	Args, Env  []string
	Cwd        string
	PID, PPID  int
	SID, PGID  int
	Status     map[string]string
	Namespaces map[string]string
	FDs        map[int]string
	Limits     string
	Hostname   string
	Domainname string
	Umask      int
	Mounts     []string
	OOMAdj     string
	Keyring    string
}

// needRoot skips a test that needs the real kernel's doors open; with KIRI_MUST=1 it fails.
func needRoot(t testing.TB) {
	t.Helper()
	const need = 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETPCAP | 1<<unix.CAP_SYS_PTRACE
	if AllCaps()&need == need {
		return
	}
	if os.Getenv("KIRI_MUST") == "1" {
		t.Fatal("needs root")
	}
	t.Skip("SKIPPED: needs root")
}

var probeDir string

// probe is the probe, built once.
var probe = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "launch-probe-")
	if err != nil {
		return "", err
	}
	probeDir = dir
	cmd := exec.Command("go", "build", "-o", filepath.Join(dir, "probe"), "./testdata/probe")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the probe: %w\n%s", err, out)
	}
	return filepath.Join(dir, "probe"), nil
})

func TestMain(m *testing.M) {
	if len(os.Args) > 0 && os.Args[0] == InitName {
		os.Exit(InitMain(os.Args))
	}
	code := m.Run()
	if probeDir != "" {
		os.RemoveAll(probeDir)
	}
	os.Exit(code)
}

// lower makes a directory for a root: the probe as bin/probe and bin/true, and what a root has.
func lower(t testing.TB) string {
	t.Helper()
	p, err := probe()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, d := range []string{"bin", "dev", "proc", "sys", "etc", "tmp", "work"} {
		must(t, os.Mkdir(filepath.Join(dir, d), 0o755))
	}
	must(t, os.Link(p, filepath.Join(dir, "bin/probe")))
	must(t, os.Link(p, filepath.Join(dir, "bin/true")))
	must(t, os.WriteFile(filepath.Join(dir, "etc/file"), []byte("text\n"), 0o644))
	must(t, os.WriteFile(filepath.Join(dir, "bin/script"), []byte("#!/no/such/interpreter\n"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "bin/junk"), []byte("junk"), 0o755))
	return dir
}

// container prepares a Spec with a root as the agent does; the test adjusts it. Its descriptors are closed at the
// test's end.
func container(t testing.TB, args ...string) *Spec {
	t.Helper()
	return containerOn(t, lower(t), args...)
}

func containerOn(t testing.TB, low string, args ...string) *Spec {
	t.Helper()
	needRoot(t)
	up := t.TempDir()
	for _, d := range []string{"upper", "work"} {
		must(t, os.Mkdir(filepath.Join(up, d), 0o755))
	}
	root := mountFS(t, "overlay", map[string]string{"lowerdir": low, "upperdir": up + "/upper", "workdir": up + "/work"}, 0)
	sys := mountFS(t, "sysfs", nil, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	dev := mountFS(t, "tmpfs", map[string]string{"mode": "755", "size": "65536k"}, unix.MOUNT_ATTR_NOSUID)
	must(t, unix.Mknodat(fdOf(dev), "null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	null, err := unix.Openat(fdOf(dev), "null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	nullFile := os.NewFile(uintptr(null), "null")
	t.Cleanup(func() { nullFile.Close() })
	s := &Spec{
		Null:       nullFile,
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWCGROUP,
		Root:       root,
		Proc:       openIn(t, root, "proc"),
		Mounts: []MountAt{
			{Mount: dev, Target: openIn(t, root, "dev"), Desc: "tmpfs on /dev"},
			{Mount: sys, Target: openIn(t, root, "sys"), Desc: "sysfs on /sys"},
		},
		Masked: []string{"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
			"/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/devices/virtual/powercap"},
		Readonly: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		Path:     "/bin/probe",
		Args:     append([]string{"probe"}, args...),
		Env:      []string{"PATH=/bin", "A=b"},
		Caps:     CapsFor(DefaultCaps(), 0),
		Hostname: "box",
	}
	return s
}

func mountFS(t testing.TB, kind string, opts map[string]string, attr int) *os.File {
	t.Helper()
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	must(t, err)
	defer unix.Close(fs)
	for k, v := range opts {
		must(t, unix.FsconfigSetString(fs, k, v))
	}
	must(t, unix.FsconfigCreate(fs))
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, attr)
	must(t, err)
	f := os.NewFile(uintptr(fd), kind)
	t.Cleanup(func() { f.Close() })
	return f
}

func openIn(t testing.TB, dir *os.File, name string) *os.File {
	t.Helper()
	fd, err := unix.Openat2(fdOf(dir), name, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	must(t, err)
	f := os.NewFile(uintptr(fd), name)
	t.Cleanup(func() { f.Close() })
	return f
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// started is a process under test with its output.
type started struct {
	Proc
	t    testing.TB
	out  *os.File
	errs *os.File
	in   *os.File
}

// pipes gives the Spec stdio of its own; the returned function closes the process's ends.
func (p *started) pipes(s *Spec) func() {
	r0, w0, err := os.Pipe()
	must(p.t, err)
	r1, w1, err := os.Pipe()
	must(p.t, err)
	r2, w2, err := os.Pipe()
	must(p.t, err)
	s.Stdin, s.Stdout, s.Stderr = r0, w1, w2
	p.in, p.out, p.errs = w0, r1, r2
	return func() { r0.Close(); w1.Close(); w2.Close() }
}

// start starts s on a thread of its own or by the template, and fails the test if that fails.
func start(t testing.TB, tm *Template, s *Spec) *started {
	t.Helper()
	p, err := tryStart(t, tm, s)
	must(t, err)
	return p
}

func tryStart(t testing.TB, tm *Template, s *Spec) (*started, error) {
	t.Helper()
	p := &started{t: t}
	closeChild := p.pipes(s)
	defer closeChild()
	plan, err := Compile(s)
	if err == nil {
		if tm != nil {
			p.Proc, err = tm.Start(plan)
		} else {
			var th *Thread
			th, err = NewThread(nil)
			must(t, err)
			p.Proc, err = th.Start(plan)
			th.Close()
		}
	}
	if err != nil {
		p.in.Close()
		p.out.Close()
		p.errs.Close()
		return nil, err
	}
	return p, nil
}

// finish ends standard input, waits, and returns the exit code (128+n for a signal) and both outputs.
func (p *started) finish() (code int, out, errs string) {
	p.t.Helper()
	p.in.Close()
	ob, err := io.ReadAll(p.out)
	must(p.t, err)
	eb, err := io.ReadAll(p.errs)
	must(p.t, err)
	p.out.Close()
	p.errs.Close()
	defer p.PIDFD.Close()
	return p.wait(), string(ob), string(eb)
}

func (p *started) wait() int {
	p.t.Helper()
	var st unix.WaitStatus
	for {
		_, err := unix.Wait4(p.PID, &st, unix.WALL, nil)
		if err == unix.EINTR {
			continue
		}
		must(p.t, err)
		break
	}
	if st.Signaled() {
		return 128 + int(st.Signal())
	}
	return st.ExitStatus()
}

// line reads up to the end of a line of the output.
func (p *started) line() string {
	p.t.Helper()
	var b []byte
	c := make([]byte, 1)
	for {
		n, err := p.out.Read(c)
		if n == 1 && c[0] == '\n' {
			return string(b)
		}
		if err != nil {
			e, _ := io.ReadAll(p.errs)
			p.t.Fatalf("output ended after %q: %v; errors: %s", b, err, e)
		}
		b = append(b, c[:n]...)
	}
}

// see runs the probe's report and decodes it.
func see(t testing.TB, tm *Template, s *Spec) report {
	t.Helper()
	code, out, errs := start(t, tm, s).finish()
	if code != 0 {
		t.Fatalf("probe: exit code %d: %s%s", code, out, errs)
	}
	var r report
	must(t, json.Unmarshal([]byte(out), &r))
	return r
}

// children lists the processes of this one, dead or alive, but for those of the Go tool.
func children(t testing.TB) []string {
	t.Helper()
	var all []string
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	must(t, err)
	for _, f := range tasks {
		b, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // the thread has ended
		}
		must(t, err)
		all = append(all, strings.Fields(string(b))...)
	}
	return all
}

// reap waits for all children that have ended, as an agent's reaper does.
func reap() {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG|unix.WALL, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
	}
}

func mountCount(t testing.TB) int {
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	return bytes.Count(b, []byte{'\n'})
}

func ns(t testing.TB, name string) string {
	l, err := os.Readlink("/proc/self/ns/" + name)
	must(t, err)
	return l
}
