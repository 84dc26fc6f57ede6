package e2e

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
)

// printers starts n containers that print a counter and returns their ids.
func printers(t *testing.T, d *daemon, ref string, n int) []string {
	t.Helper()
	c := d.client()
	var ids []string
	for range n {
		r, err := c.ContainerCreate(context.Background(), client.ContainerCreateOptions{
			Config: &container.Config{Image: ref, Cmd: []string{"probe", "count", "5"}},
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.ContainerStart(context.Background(), r.ID, client.ContainerStartOptions{}); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, r.ID)
	}
	return ids
}

// checkCounters checks that a container's log holds 0, 1, 2 ... with none missing and none twice, and returns how many.
func checkCounters(t *testing.T, d *daemon, id string) int {
	t.Helper()
	c := d.client()
	r, err := c.ContainerLogs(context.Background(), id, client.ContainerLogsOptions{ShowStdout: true})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	n := 0
	s := bufio.NewScanner(r)
	for s.Scan() {
		line := s.Text()
		if len(line) > 8 { // the multiplexing header
			line = line[8:]
		}
		got, err := strconv.Atoi(line)
		if err != nil || got != n {
			t.Fatalf("container %.12s: line %d of the log is %q", id, n, line)
		}
		n++
	}
	return n
}

func pidOf(t *testing.T, d *daemon, id string) int {
	t.Helper()
	r, err := d.client().ContainerInspect(context.Background(), id, client.ContainerInspectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if r.Container.State == nil || !r.Container.State.Running {
		t.Fatalf("container %.12s does not run: %+v", id, r.Container.State)
	}
	return r.Container.State.Pid
}

// TestKilled kills the daemon, the agent or both while 50 containers run and print, starts what does not come back
// by itself, and looks: every process goes on under its old pid, no line is lost or doubled, an exit that happened
// meanwhile is told with its code, a new exit too, and exec works.
func TestKilled(t *testing.T) {
	ref := busybox(t)
	for _, who := range []string{"daemon", "agent", "both"} {
		t.Run(who, func(t *testing.T) {
			d := startDaemon(t)
			d.must("pull", ref)
			ids := printers(t, d, ref, 50)
			d.must("run", "-d", "--name", "ends", ref, "sh", "-c", "trap 'exit 23' TERM; while :; do sleep 0.05; done")
			d.must("run", "-d", "--name", "later", ref, "sh", "-c", "trap 'exit 24' TERM; while :; do sleep 0.05; done")
			pids := map[string]int{}
			for _, id := range ids {
				pids[id] = pidOf(t, d, id)
			}
			ends, later := pidOf(t, d, "ends"), pidOf(t, d, "later")
			time.Sleep(100 * time.Millisecond) // let the counters run; nothing is asserted on how far they come

			agents := d.agents()
			if len(agents) == 0 {
				t.Fatal("no agent found")
			}
			if who != "agent" {
				d.kill()
			}
			if who != "daemon" {
				for _, pid := range agents {
					syscall.Kill(pid, syscall.SIGKILL)
				}
				for _, pid := range agents {
					if err := waitGone(pid, 10*time.Second); err != nil {
						t.Fatal(err)
					}
				}
			}
			syscall.Kill(ends, syscall.SIGTERM)
			if err := waitGone(ends, 10*time.Second); err != nil {
				t.Fatal(err)
			}
			if who != "agent" {
				d.start()
			}
			wantEnd := "exited 23"
			if who == "both" {
				wantEnd = "exited" // whether the kernel still knows the code depends on who was left to ask in time
			}
			eventually(t, 20*time.Second, "exit of the container that ended meanwhile", func() bool {
				return strings.HasPrefix(d.must("inspect", "-f", "{{.State.Status}} {{.State.ExitCode}}", "ends"), wantEnd)
			})
			for _, id := range ids {
				if got := pidOf(t, d, id); got != pids[id] {
					t.Errorf("container %.12s has pid %d, had %d", id, got, pids[id])
				}
			}
			before := checkCounters(t, d, ids[0])
			eventually(t, 10*time.Second, "more output", func() bool { return checkCounters(t, d, ids[0]) > before })
			if out := d.must("exec", ids[1], "echo", "still"); out != "still" {
				t.Errorf("exec afterwards: %q", out)
			}
			syscall.Kill(later, syscall.SIGTERM)
			if got := d.must("wait", "later"); got != "24" {
				t.Errorf("exit code of a container that ended afterwards: %s, want 24", got)
			}
			for _, id := range ids {
				checkCounters(t, d, id)
			}
			if out := d.must("run", "--rm", ref, "echo", "new"); out != "new" {
				t.Errorf("a new container: %q", out)
			}
		})
	}
}

// TestAgentKilledManyTimes kills the agent again and again under output: no line is lost or doubled.
func TestAgentKilledManyTimes(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	ids := printers(t, d, ref, 5)
	for range 20 {
		for _, pid := range d.agents() {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		eventually(t, 20*time.Second, "a new agent", func() bool {
			return d.docker("exec", ids[0], "true").Code == 0
		})
	}
	for _, id := range ids {
		if n := checkCounters(t, d, id); n == 0 {
			t.Errorf("container %.12s: nothing in its log", id)
		}
	}
}

// TestSecondDaemon wants a clear refusal on a data root that is in use.
func TestSecondDaemon(t *testing.T) {
	d := startDaemon(t)
	r := d.command("", filepath.Join(bin, "kiri"), "daemon", "--data-root", filepath.Join(d.Home, "data"),
		"--exec-root", filepath.Join(d.Home, "run2"), "-H", "unix://"+filepath.Join(d.Home, "run2", "s.sock"), "--bridge", d.Bridge+"b",
		"--pidfile", filepath.Join(d.Home, "run2.pid"))
	if r.Code == 0 || !strings.Contains(r.Err, fmt.Sprint(d.cmd.Process.Pid)) {
		t.Errorf("second daemon: exit %d, %q; want a refusal that names pid %d", r.Code, r.Err, d.cmd.Process.Pid)
	}
	if _, err := os.Stat(filepath.Join(d.Home, "run2", "s.sock")); err == nil {
		t.Error("the refused daemon left a socket")
	}
}
