//go:build linux && (amd64 || arm64)

package launch

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// cgroups makes a cgroup in v2 and, on a hybrid host, in the pids controller of v1, gone at the test's end.
func cgroups(t *testing.T) (v2, v1 string) {
	t.Helper()
	needRoot(t)
	name := fmt.Sprintf("launch-test-%d", os.Getpid())
	for _, dir := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC {
			v2 = filepath.Join(dir, name)
			break
		}
	}
	if v2 == "" {
		if os.Getenv("KIRI_MUST") == "1" {
			t.Fatal("no cgroup v2")
		}
		t.Skip("SKIPPED: no cgroup v2")
	}
	must(t, os.Mkdir(v2, 0o755))
	t.Cleanup(func() { must(t, os.Remove(v2)) })
	if _, err := os.Stat("/sys/fs/cgroup/pids/tasks"); err == nil {
		v1 = filepath.Join("/sys/fs/cgroup/pids", name)
		must(t, os.Mkdir(v1, 0o755))
		t.Cleanup(func() { must(t, os.Remove(v1)) })
	}
	return v2, v1
}

// TestCgroups starts a container in cgroups of both kinds by a thread, and another process in it by the template.
func TestCgroups(t *testing.T) {
	v2, v1 := cgroups(t)
	dir, err := os.Open(v2)
	must(t, err)
	defer dir.Close()
	inside := func(p *started) {
		t.Helper()
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.PID))
		must(t, err)
		for line := range strings.Lines(string(b)) {
			f := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if (f[0] == "0" || v1 != "" && f[1] == "pids") && f[2] != "/"+filepath.Base(v2) {
				t.Errorf("process %d: %s", p.PID, line)
			}
		}
	}
	s := container(t, "wait", "/proc/self/cgroup", "/proc/self/mountinfo")
	s.CgroupFD = fdOf(dir)
	dirs := []CgroupDir{{Dir: fdOf(dir)}}
	if v1 != "" {
		d, err := os.Open(v1)
		must(t, err)
		defer d.Close()
		dirs = []CgroupDir{{Name: "unified", Dir: fdOf(dir)}, {Name: "pids", Dir: fdOf(d)}}
	}
	view, err := CgroupView(openIn(t, s.Mounts[1].Mount, "fs/cgroup"), dirs, false)
	must(t, err)
	s.Mounts = append(s.Mounts, view...)
	c := &started{t: t}
	closeChild := c.pipes(s)
	th, err := NewThread(func() error {
		if v1 == "" {
			return nil
		}
		return os.WriteFile(v1+"/tasks", fmt.Append(nil, unix.Gettid()), 0)
	})
	must(t, err)
	c.Proc, err = th.Start(mustCompile(t, s))
	must(t, err)
	closeChild()
	th.Close()
	seen := 0
	for l := c.line(); l != "ready"; l = c.line() {
		if f := strings.SplitN(l, ":", 3); len(f) == 3 && (f[0] == "0" || f[1] == "pids") && f[2] != "/" {
			t.Errorf("the container sees its cgroup as %s", l)
		}
		if f := strings.Fields(l); len(f) > 5 && strings.HasPrefix(f[4], "/sys/fs/cgroup") {
			seen++
			if f[3] != "/" || !strings.HasPrefix(f[5], "ro,nosuid,nodev,noexec") {
				t.Errorf("cgroup mount %s", l)
			}
		}
	}
	if want := len(view); seen != want {
		t.Errorf("the container sees %d cgroup mounts, want %d", seen, want)
	}
	inside(c)

	tm := template(t)
	x := execIn(c, "wait")
	x.CgroupFD = fdOf(dir)
	if v1 != "" {
		f, err := os.OpenFile(v1+"/cgroup.procs", os.O_WRONLY, 0)
		must(t, err)
		defer f.Close()
		x.CgroupProcs = []*os.File{f}
	}
	p := start(t, tm, x)
	p.line()
	inside(p)
	p.finish()

	if v1 != "" {
		// One is the container, two more are needed: the limit is told as such.
		must(t, os.WriteFile(v1+"/pids.max", []byte("2"), 0))
		x := execIn(c, "true")
		x.CgroupFD, x.CgroupProcs = fdOf(dir), nil
		f, err := os.OpenFile(v1+"/cgroup.procs", os.O_WRONLY, 0)
		must(t, err)
		defer f.Close()
		x.CgroupProcs = []*os.File{f}
		if _, err := tryStart(t, tm, x); !errors.Is(err, unix.EAGAIN) {
			t.Errorf("at the limit of processes: %v", err)
		}
	}
	c.finish()
	settle(t, tm)
	for _, m := range view {
		m.Mount.Close()
		m.Target.Close()
	}
	// Empty, so that they can be removed; the thread ends on its own time.
	for _, d := range []string{v2, v1} {
		for d != "" {
			b, err := os.ReadFile(d + "/cgroup.procs")
			must(t, err)
			if len(bytes.TrimSpace(b)) == 0 {
				break
			}
		}
	}
}
