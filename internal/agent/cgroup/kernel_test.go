//go:build linux

package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// These tests use the kernel's own hierarchies, below a parent with a name that no other run has. They need root.

var serial atomic.Int32

// manager opens a parent of its own and checks in the end that nothing of it is left in any hierarchy.
func manager(t testing.TB) *Manager { return managerWith(t, true) }

func managerWith(t testing.TB, bpf bool) *Manager {
	t.Helper()
	if os.Geteuid() != 0 {
		need(t, "not root: cgroups cannot be made")
	}
	h, err := Detect()
	if err != nil {
		t.Fatal(err)
	}
	parent := fmt.Sprintf("/kiri-test-%d-%d", os.Getpid(), serial.Add(1))
	m, err := h.open(parent, bpf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Remove(); err != nil {
			t.Error(err)
		}
		m.Close()
		for _, tree := range append([]hierarchy{h.v2}, h.v1...) {
			left, _ := filepath.Glob(tree.mount + parent + "*")
			if len(left) > 0 {
				t.Errorf("left behind: %q", left)
			}
		}
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// need skips the test for want of something, or fails it where all must be there.
func need(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("KIRI_MUST") == "1" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// start runs a program in the cgroup in the way the agent does: cloned into v2 by a thread that has joined v1.
func start(t testing.TB, c *Cgroup, arg ...string) *exec.Cmd {
	t.Helper()
	return startWith(t, c, func(*exec.Cmd) {}, arg...)
}

func startWith(t testing.TB, c *Cgroup, prepare func(*exec.Cmd), arg ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(arg[0], arg[1:]...)
	prepare(cmd)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: c.FD(), Pdeathsig: unix.SIGKILL}
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := c.JoinThread(0); err != nil {
			done <- err
			return
		}
		err := cmd.Start()
		done <- errors.Join(err, c.m.LeaveThread(0))
		<-parked // its end would kill the child
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return cmd
}

var parked = make(chan struct{})

func make1(t testing.TB, m *Manager) *Cgroup {
	t.Helper()
	c, err := m.New(fmt.Sprintf("c%d", serial.Add(1)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if c.fd >= 0 {
			c.Kill()
		}
		if err := c.Remove(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// cgroupsOf is /proc/PID/cgroup by controller.
func cgroupsOf(t testing.TB, pid int) map[string]string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for _, c := range strings.Split(f[1], ",") {
			out[c] = f[2]
		}
	}
	return out
}

func TestChildIsBornInEveryHierarchy(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	before := cgroupsOf(t, os.Getpid())
	cmd := start(t, c, "/bin/sleep", "1000")
	now := cgroupsOf(t, cmd.Process.Pid)
	if now[""] != c.Path() {
		t.Errorf("v2: child is in %s, want %s", now[""], c.Path())
	}
	for _, tree := range m.trees {
		for _, ctl := range tree.controllers {
			if want := "/" + m.def.path + "/" + c.Name(); now[ctl] != want {
				t.Errorf("%s: child is in %s, want %s", ctl, now[ctl], want)
			}
		}
	}
	if after := cgroupsOf(t, os.Getpid()); !mapsEqual(before, after) {
		t.Errorf("this process moved from %v to %v", before, after)
	}
	pids, err := c.Procs()
	if err != nil || !slices.Equal(pids, []int{cmd.Process.Pid}) {
		t.Errorf("Procs: %v, %v; want %d", pids, err, cmd.Process.Pid)
	}
	if _, err := m.New(c.Name()); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("New with a name in use: %v", err)
	}
}

func mapsEqual(a, b map[string]string) bool {
	for k, v := range a {
		if b[k] != v {
			return false
		}
	}
	return len(a) == len(b)
}

func TestThreadReturnsHome(t *testing.T) {
	m := manager(t)
	if len(m.trees) == 0 {
		t.Skip("no v1 hierarchies here: there is nothing for a thread to join")
	}
	c := make1(t, m)
	// Another thread than the caller's is moved, and then taken out by Remove alone.
	tid := make(chan int)
	go func() { runtime.LockOSThread(); tid <- unix.Gettid(); <-parked }()
	n := <-tid
	home := cgroupsOf(t, n)
	if err := c.JoinThread(n); err != nil {
		t.Fatal(err)
	}
	if got := cgroupsOf(t, n); mapsEqual(got, home) {
		t.Errorf("the thread did not move: %v", got)
	}
	if err := m.LeaveThread(n); err != nil {
		t.Fatal(err)
	}
	if got := cgroupsOf(t, n); !mapsEqual(got, home) {
		t.Errorf("the thread is in %v, want %v", got, home)
	}
	if err := c.JoinThread(n); err != nil {
		t.Fatal(err)
	}
	if err := c.Remove(); err != nil {
		t.Fatal(err)
	}
	if got := cgroupsOf(t, n); !mapsEqual(got, home) {
		t.Errorf("after Remove the thread is in %v, want %v", got, home)
	}
}

func TestFreezeAndKill(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	cmd := start(t, c, "/bin/sleep", "1000")
	if on, err := c.Populated(); err != nil || !on {
		t.Errorf("Populated: %v, %v; want true", on, err)
	}
	if err := c.Freeze(true); err != nil {
		t.Fatal(err)
	}
	if text, _ := read(c.fd, "cgroup.events"); !strings.Contains(text, "frozen 1") {
		t.Errorf("not frozen: %q", text)
	}
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.WaitEmpty(10 * time.Second); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
		t.Errorf("the process ended with %v, want SIGKILL", err)
	}
	if on, err := c.Populated(); err != nil || on {
		t.Errorf("Populated: %v, %v; want false", on, err)
	}
}

func TestKillWithoutKernelHelp(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	cmd := start(t, c, "/bin/sh", "-c", "sleep 1000 & sleep 1000 & wait")
	if err := c.killEach(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if err := c.WaitEmpty(10 * time.Second); err != nil {
		t.Error(err)
	}
}

func TestRemoveWaitsForTheLastProcess(t *testing.T) {
	m := manager(t)
	const n = 20
	done := make(chan error, n)
	for range n {
		c := make1(t, m)
		start(t, c, "/bin/sleep", "1000") // reaped at the end; what has ended does not keep a cgroup
		if err := os.Mkdir(m.h.v2.mount+c.Path()+"/inner", 0o755); err != nil {
			t.Fatal(err)
		}
		go func() { done <- errors.Join(c.Kill(), c.Remove()) }()
	}
	for range n {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if names, err := m.List(); err != nil || len(names) != 0 {
		t.Errorf("left: %q, %v", names, err)
	}
}

func TestAwaitIsBounded(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	start(t, c, "/bin/sleep", "1000")
	if err := c.WaitEmpty(50 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("WaitEmpty: %v, want a deadline", err)
	}
}

func TestLoadAfterRestart(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	d := make1(t, m)
	if err := d.SetDevices([]string{"c 10:229 rwm"}, false); err != nil {
		t.Fatal(err)
	}
	outside, err := m.NewAt(m.def.path+"-parent/deep", "x")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := outside.Remove(); err != nil {
			t.Error(err)
		}
		for _, tree := range append([]*hierarchy{&m.h.v2}, m.trees...) {
			for _, p := range []string{"-parent/deep", "-parent"} {
				if err := os.Remove(tree.mount + "/" + m.def.path + p); err != nil {
					t.Error(err)
				}
			}
		}
	})
	cmd := start(t, c, "/bin/sleep", "1000")

	again, err := m.h.Open(m.def.path)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	names, err := again.List()
	want := []string{c.Name(), d.Name()}
	slices.Sort(want)
	if err != nil || !slices.Equal(names, want) {
		t.Errorf("List: %q, %v; want %q", names, err, want)
	}
	for _, ref := range []string{c.Name(), c.Path(), d.Name(), d.Path(), outside.Path()} {
		l, err := again.Load(ref)
		if err != nil {
			t.Errorf("Load(%s): %v", ref, err)
			continue
		}
		if !strings.HasSuffix(l.Path(), ref) {
			t.Errorf("Load(%s) has path %s", ref, l.Path())
		}
		l.Close()
	}
	l, err := again.Load(c.Name())
	if err != nil {
		t.Fatal(err)
	}
	limit := int64(7)
	if err := l.Apply(&wire.Resources{PidsLimit: &limit}); err != nil {
		t.Error(err)
	}
	var s wire.StatsReply
	if err := c.Stats(&s); err != nil || s.PIDsLimit != 7 || s.PIDs != 1 {
		t.Errorf("pids %d of %d, %v; want 1 of 7", s.PIDs, s.PIDsLimit, err)
	}
	if err := l.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	if err := l.Remove(); err != nil {
		t.Error(err)
	}
	for _, ref := range []string{"nope", "/nope/nope", c.Name()} {
		if _, err := again.Load(ref); wire.ClassOf(err) != wire.NotFound {
			t.Errorf("Load(%s): %v, want NotFound", ref, err)
		}
	}
}

func TestDiscardWhatACrashLeft(t *testing.T) {
	m := manager(t)
	c, err := m.New("half")
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if len(m.trees) > 0 {
		if err := os.Remove(m.h.v2.mount + c.Path()); err != nil {
			t.Fatal(err)
		}
	}
	names, err := m.List()
	if err != nil || !slices.Equal(names, []string{"half"}) {
		t.Errorf("List: %q, %v; want half", names, err)
	}
	if err := m.Discard("half"); err != nil {
		t.Error(err)
	}
	if names, err := m.List(); err != nil || len(names) != 0 {
		t.Errorf("left: %q, %v", names, err)
	}
}

func TestParentThatWasRemovedIsMadeAgain(t *testing.T) {
	m := manager(t)
	parent := m.def.path + "-parent"
	remove := func() {
		for _, tree := range append([]*hierarchy{&m.h.v2}, m.trees...) {
			if err := os.Remove(tree.mount + "/" + parent); err != nil {
				t.Error(err)
			}
		}
	}
	for range 2 {
		c, err := m.NewAt("/"+parent, "x")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Remove(); err != nil {
			t.Fatal(err)
		}
		remove()
	}
}

func TestStatsCount(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	cmd := start(t, c, "/bin/sh", "-c", "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	var s wire.StatsReply
	if err := c.Stats(&s); err != nil {
		t.Fatal(err)
	}
	used := cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	if got := time.Duration(s.CPUTotal); got < used/2 || got > used*2+50*time.Millisecond {
		t.Errorf("CPUTotal %v, rusage says %v", got, used)
	}
	if s.CPUUser+s.CPUSystem == 0 || s.CPUUser+s.CPUSystem > s.CPUTotal+1000 {
		t.Errorf("user %d and system %d of total %d", s.CPUUser, s.CPUSystem, s.CPUTotal)
	}
	if s.OnlineCPUs != uint32(runtime.NumCPU()) || s.SystemCPU == 0 || s.At == 0 {
		t.Errorf("cpus %d, system %d, at %d", s.OnlineCPUs, s.SystemCPU, s.At)
	}
	if m.h.has("memory") && (s.MemoryStat["inactive_file"] == "" || s.MemoryLimit < 1<<60) {
		t.Errorf("memory limit %d, stat %v", s.MemoryLimit, s.MemoryStat)
	}
}

// A parked thread is ended and its cgroup removed at once: for a moment the kernel still counts it and yet does not move
// it any more.
func TestRemoveWhileThreadEnds(t *testing.T) {
	m := manager(t)
	if len(m.trees) == 0 {
		t.Skip("no v1 hierarchies here: there is nothing for a thread to join")
	}
	for range 300 {
		c := make1(t, m)
		end, joined := make(chan struct{}), make(chan error)
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
			joined <- c.JoinThread(0)
			<-end
		}()
		if err := <-joined; err != nil {
			t.Fatal(err)
		}
		close(end)
		if err := c.Remove(); err != nil {
			t.Fatal(err)
		}
	}
}

// Under a service manager that has handed over a subtree (systemd's Delegate=yes) nothing is made outside of it, and the
// processes in its top make room for controllers.
func TestDelegatedSubtree(t *testing.T) {
	if os.Geteuid() != 0 {
		need(t, "not root: cgroups cannot be made")
	}
	top, err := Detect()
	if err != nil {
		t.Fatal(err)
	}
	defer top.Close()
	given := fmt.Sprintf("kiri-test-%d-%d", os.Getpid(), serial.Add(1))
	dir := top.v2.mount + "/" + given
	for _, d := range []string{dir, dir + "/service"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Setxattr(dir, "trusted.delegate", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	home := top.v2.mount + top.v2.own
	enter := func(dir string) {
		if err := os.WriteFile(dir+"/cgroup.procs", []byte(fmt.Sprint(os.Getpid())), 0); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		enter(home)
		for _, d := range []string{"/agent", "/service", ""} {
			if err := os.Remove(dir + d); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Error(err)
			}
		}
	})
	for _, in := range []string{"", "/service"} {
		enter(dir + in)
		h, err := Detect()
		if err != nil {
			t.Fatal(err)
		}
		m, err := h.Open("/kiri-x")
		if err != nil {
			t.Fatalf("in %s: %v", in, err)
		}
		c, err := m.New("c")
		if err != nil {
			t.Fatal(err)
		}
		if want := "/" + given + "/kiri-x/c"; c.Path() != want {
			t.Errorf("in %q: path %s, want %s", in, c.Path(), want)
		}
		for _, tree := range m.trees {
			if _, err := os.Stat(tree.mount + "/kiri-x/c"); err != nil {
				t.Errorf("v1: %v", err)
			}
		}
		if m.h.Version() == 2 {
			if err := c.Apply(&wire.Resources{PidsLimit: ptr(5)}); err != nil {
				t.Errorf("in %q: %v", in, err)
			}
		}
		if l, err := m.Load(c.Path()); err != nil {
			t.Error(err)
		} else {
			l.Close()
		}
		if err := errors.Join(c.Remove(), m.Remove(), m.Close(), h.Close()); err != nil {
			t.Error(err)
		}
	}
}
