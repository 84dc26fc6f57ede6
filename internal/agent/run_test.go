//go:build linux

package agent

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"runkiri.com/kiri/internal/wire"
)

// TestRun starts small containers and looks at what they say and how they end.
func TestRun(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	t.Run("output and code", func(t *testing.T) {
		out, errs, code := r.output(r.spec("sh", "-c", "echo out; echo err >&2; exit 42"))
		if out != "out\n" || errs != "err\n" || code != 42 {
			t.Errorf("got %q, %q, %d", out, errs, code)
		}
	})
	t.Run("signals", func(t *testing.T) {
		for _, c := range []struct {
			script string
			want   int
		}{{"kill -9 $$", 137}, {"kill -TERM $$; sleep 5", 143}} {
			m := r.spec("sh", "-c", "sh -c '"+c.script+"'; exit $?")
			if _, _, code := r.output(m); code != c.want {
				t.Errorf("%s: code %d, want %d", c.script, code, c.want)
			}
		}
		m := r.spec("sleep", "100")
		r.run(m)
		if _, err := r.conn.Call(r.ctx(), &wire.Signal{ID: m.ID, Signal: 9}); err != nil {
			t.Fatal(err)
		}
		if e := r.wait(m.ID); e.Code != 137 || e.OOMKilled {
			t.Errorf("after SIGKILL: %+v", e)
		}
	})
	t.Run("no command", func(t *testing.T) {
		for _, c := range []struct {
			arg   string
			class wire.Class
			text  string
		}{
			{"nope", wire.NoCommand, "executable file not found in $PATH"},
			{"/bin/nope", wire.NoCommand, "no such file or directory"},
			{"/etc/noexec", wire.NotExecutable, "permission denied"},
			{"/etc", wire.NotExecutable, "is a directory"},
		} {
			_, err := r.tryRun(r.spec(c.arg))
			if wire.ClassOf(err) != c.class || !strings.Contains(fmt.Sprint(err), c.text) {
				t.Errorf("%s: class %d: %v", c.arg, wire.ClassOf(err), err)
			}
		}
	})
	t.Run("user", func(t *testing.T) {
		m := r.spec("id")
		m.User, m.Groups = "web", []string{"4321"}
		out, _, _ := r.output(m)
		if !strings.Contains(out, "uid=1000(web) gid=1000(web)") || !strings.Contains(out, "4321") || !strings.Contains(out, "1234") {
			t.Errorf("id says %q", out)
		}
	})
	t.Run("environment and directory", func(t *testing.T) {
		m := r.spec("sh", "-c", "pwd; echo $HOME; hostname; cat /etc/hostname; umask; cat /proc/sys/kernel/hostname")
		m.Cwd = "/made/for/it"
		out, _, _ := r.output(m)
		if out != "/made/for/it\n/root\nbox\nbox\n0022\nbox\n" {
			t.Errorf("got %q", out)
		}
	})
	t.Run("bridge", func(t *testing.T) {
		m := r.spec("sh", "-c", "ip -4 addr show eth0; ip route; cat /etc/hosts")
		m.Net.Mode = "bridge"
		out, _, _ := r.output(m)
		if !strings.Contains(out, "inet ") || !strings.Contains(out, "default via") || !strings.Contains(out, "box") {
			t.Errorf("got %q", out)
		}
	})
	t.Run("init", func(t *testing.T) {
		m := r.spec("sh", "-c", "cat /proc/1/cmdline | tr '\\0' ' '; exit 7")
		m.Init = true
		out, _, code := r.output(m)
		if !strings.HasPrefix(out, "/sbin/docker-init") || code != 7 {
			t.Errorf("got %q, %d", out, code)
		}
	})
	t.Run("same id", func(t *testing.T) {
		m := r.spec("sleep", "100")
		r.run(m)
		if _, err := r.tryRun(m); wire.ClassOf(err) != wire.Conflict {
			t.Errorf("a second run: %v", err)
		}
		r.conn.Call(r.ctx(), &wire.Signal{ID: m.ID, Signal: 9})
		r.wait(m.ID)
		again := *m
		again.Run, again.Args = 2, []string{"true"}
		r.mu.Lock()
		delete(r.exits, m.ID)
		r.mu.Unlock()
		r.run(&again)
		if e := r.wait(m.ID); e.Code != 0 || e.Run != 2 {
			t.Errorf("second run ended with %+v", e)
		}
	})
}

// TestBurst starts many at once: each is its own, and all end.
func TestBurst(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	const n = 100
	var wg sync.WaitGroup
	for i := range n {
		wg.Add(1)
		go func() {
			defer wg.Done()
			m := r.spec("sh", "-c", fmt.Sprintf("echo %d; exit %d", i, i))
			m.Remove = i%2 == 0
			if i%3 == 0 {
				m.Net.Mode = "bridge"
			}
			c, file := socketpair(t)
			defer file.Close()
			if _, err := r.conn.Call(r.ctx(), &wire.Attach{ID: m.ID, Stdout: true, Stream: true}, file); err != nil {
				t.Error(err)
				return
			}
			if _, err := r.tryRun(m); err != nil {
				t.Errorf("run %d: %v", i, err)
				return
			}
			out, _ := c.readAll(false)
			if e := r.wait(m.ID); e.Code != i || out != fmt.Sprintln(i) {
				t.Errorf("run %d: %q, %+v", i, out, e)
			}
		}()
	}
	wg.Wait()
}

// TestFailedStarts leaves nothing of starts that fail at any step: the check is the rig's own.
func TestFailedStarts(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	long := strings.Repeat("x", 200000)
	for name, change := range map[string]func(*wire.Run){
		"id":          func(m *wire.Run) { m.ID = "../../etc" },
		"no args":     func(m *wire.Run) { m.Args = nil },
		"layer":       func(m *wire.Run) { m.Layers = []string{"sha256:" + newID()} },
		"network":     func(m *wire.Run) { m.Net.Mode = "sideways" },
		"log driver":  func(m *wire.Run) { m.Log.Driver = "splunk" },
		"command":     func(m *wire.Run) { m.Args = []string{"/nope"} },
		"user":        func(m *wire.Run) { m.User = "nobody-here" },
		"directory":   func(m *wire.Run) { m.Cwd = "/etc/passwd" },
		"mount":       func(m *wire.Run) { m.Mounts = []wire.Mount{{Type: "bind", Source: "/nope", Target: "/x"}} },
		"capability":  func(m *wire.Run) { m.Caps = []string{"CAP_FLY"} },
		"seccomp":     func(m *wire.Run) { m.Seccomp = "{" },
		"rlimit":      func(m *wire.Run) { m.Rlimits = []wire.Rlimit{{Name: "patience", Soft: 1, Hard: 1}} },
		"sysctl":      func(m *wire.Run) { m.Sysctls = map[string]string{"kernel.nothing": "1"} },
		"memory":      func(m *wire.Run) { m.Resources.Memory = 1 << 20; m.Resources.MemorySwap = 1 },
		"cpuset":      func(m *wire.Run) { m.Resources.CpusetCpus = "4000" },
		"argument":    func(m *wire.Run) { m.Args = []string{"echo", long} },
		"device":      func(m *wire.Run) { m.Devices = []wire.Device{{Source: "/etc/passwd", Target: "/dev/x", Access: "r"}} },
		"ipc":         func(m *wire.Run) { m.IPC = newID() },
		"not a group": func(m *wire.Run) { m.Groups = []string{"nobody-here"} },
	} {
		m := r.spec("true")
		change(m)
		started := time.Now()
		_, err := r.conn.Call(r.ctx(), m)
		if err == nil {
			t.Errorf("%s: it started", name)
			r.created = append(r.created, m.ID)
		}
		if d := time.Since(started); d > 5*time.Second {
			t.Errorf("%s: the error took %v", name, d)
		}
		t.Logf("%s: %v", name, err)
		r.conn.Call(r.ctx(), &wire.Remove{ID: m.ID})
	}
}
