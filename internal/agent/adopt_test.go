//go:build linux

package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// counter prints numbers for ever, in batches, and ends with a code when stop is called.
func (r *rig) counter(code int) *wire.Run {
	m := r.spec("sh", "-c", fmt.Sprintf(
		"i=1; while [ ! -e /ctl/stop ]; do j=0; while [ $j -lt 20 ]; do echo line $i; i=$((i+1)); j=$((j+1)); done; usleep 10000; done; exit %d", code))
	return r.withControl(m)
}

// withControl gives a container a directory that the test can write to.
func (r *rig) withControl(m *wire.Run) *wire.Run {
	r.t.Helper()
	dir := filepath.Join(r.dir, "ctl", m.ID)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		r.t.Fatal(err)
	}
	m.Mounts = []wire.Mount{{Type: "bind", Source: dir, Target: "/ctl", ReadOnly: true}}
	return m
}

func (r *rig) stop(id string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, "ctl", id, "stop"), nil, 0o644); err != nil {
		r.t.Fatal(err)
	}
}

// adopt hands the next agent what the test, as the daemon, holds.
func (r *rig) adopt(id string, hold bool) {
	r.t.Helper()
	m := r.runs[id]
	files := r.held[id]
	if !hold {
		files = nil
	}
	_, err := r.conn.Call(r.ctx(), &wire.Adopt{ID: id, Run: m.Run, Stdin: m.OpenStdin && !m.StdinOnce && !m.TTY}, files...)
	if err != nil {
		r.t.Errorf("adopt: %v", err)
	}
}

// checkCounter reads the log and expects an unbroken count.
func (r *rig) checkCounter(id string) {
	r.t.Helper()
	out, _ := r.logs(allLogs(id))
	lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
	for i, l := range lines {
		if l != "line "+strconv.Itoa(i+1) {
			r.t.Errorf("container %s: line %d of the log is %q, after %q", short(id), i+1, l, lines[max(0, i-1)])
			return
		}
	}
	if len(lines) < 20 {
		r.t.Errorf("container %s: only %d lines", short(id), len(lines))
	}
}

// TestKillAgent kills the agent again and again while twenty containers count.
func TestKillAgent(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	const n = 20
	var list []string
	pids := map[string]int{}
	for i := range n {
		m := r.counter(i)
		if i%4 == 0 {
			m.Log.Options = map[string]string{"max-size": "200k", "max-file": "5000"}
		}
		pids[m.ID] = r.run(m).PID
		list = append(list, m.ID)
	}
	for round := range 6 {
		time.Sleep(150 * time.Millisecond) // let them count; how far does not matter
		r.kill()
		if round == 3 {
			// Some end while there is no agent.
			for _, id := range list[:5] {
				r.stop(id)
			}
			waitFor(t, "five containers to end without an agent", func() bool {
				for _, id := range list[:5] {
					if alive(pids[id]) {
						return false
					}
				}
				return true
			})
		}
		r.start()
		if len(r.hello.Containers) != n {
			t.Fatalf("round %d: the next agent knows of %d containers", round, len(r.hello.Containers))
		}
		for _, c := range r.hello.Containers {
			if c.Reply.PID != pids[c.ID] {
				t.Errorf("container %s: pid %d, was %d", short(c.ID), c.Reply.PID, pids[c.ID])
			}
			if c.Exited != nil { // told by this agent or an earlier one that died before we heard it
				r.Event(&wire.Frame{Msg: c.Exited})
				continue
			}
			r.adopt(c.ID, true)
		}
	}
	for _, id := range list[5:] {
		r.stop(id)
	}
	for i, id := range list {
		if e := r.wait(id); e.Code != i || e.CodeLost {
			t.Errorf("container %d ended with %+v", i, e)
		}
		r.checkCounter(id)
	}
}

// TestKillBoth lets nobody hold anything.
func TestKillBoth(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	running, dead := r.counter(3), r.counter(4)
	r.run(running)
	pid := r.run(dead).PID
	time.Sleep(50 * time.Millisecond) // some lines
	r.kill()
	for _, id := range []string{running.ID, dead.ID} {
		closeAll(r.held[id])
		delete(r.held, id)
	}
	r.stop(dead.ID)
	waitFor(t, "the container to end and be reaped by init", func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
		return err != nil
	})
	r.start()
	for _, c := range r.hello.Containers {
		if c.StdioLost != (c.ID == dead.ID) && c.ID == running.ID {
			t.Errorf("container %s: %+v", short(c.ID), c)
		}
	}
	if e := r.wait(dead.ID); !e.CodeLost {
		t.Errorf("the dead one: %+v", e)
	}
	r.stop(running.ID)
	if e := r.wait(running.ID); e.Code != 3 || e.CodeLost {
		t.Errorf("the running one: %+v", e)
	}
	r.checkCounter(running.ID)
}

// TestFaults kills the agent at every step of a line's way, by count.
func TestFaults(t *testing.T) {
	for _, point := range []string{"spooled", "log-written", "log-committed", "log-renamed", "log-rotated", "exit-recorded", "started"} {
		t.Run(point, func(t *testing.T) {
			r := newRig(t)
			r.start()
			r.image()
			r.kill()
			for _, nth := range []int{1, 7} {
				if nth == 7 && (point == "exit-recorded" || point == "started") {
					continue
				}
				r.env = []string{fmt.Sprintf("KIRI_FAULT=%s:%d", point, nth)}
				r.start()
				r.env = nil
				m := r.withControl(r.spec("sh", "-c", "while [ ! -e /ctl/stop ]; do usleep 1000; done; i=1; while [ $i -le 3000 ]; do echo line $i; i=$((i+1)); [ $((i%100)) = 0 ] && usleep 3000; done; exit 9"))
				m.Log.Options = map[string]string{"max-size": "8k", "max-file": "100"}
				_, err := r.tryRun(m)
				r.stop(m.ID) // go
				for dead := false; !dead; {
					select {
					case <-r.gone:
						dead = true
					case <-time.After(10 * time.Millisecond):
						r.mu.Lock()
						over := r.exits[m.ID] != nil
						r.mu.Unlock()
						if over && point != "exit-recorded" {
							// Read in few large pieces, it did not pass the point so often.
							t.Logf("%s:%d was not reached", point, nth)
							r.cmd.Process.Kill()
						}
					}
				}
				r.conn.Close()
				r.mu.Lock()
				delete(r.exits, m.ID)
				r.mu.Unlock()
				r.start()
				if point == "started" {
					if err == nil {
						t.Error("run was answered by an agent that had died")
					}
					// The start was recorded, so the daemon learns of it now.
					if len(r.hello.Containers) != 1 {
						t.Fatalf("agent knows of %d containers", len(r.hello.Containers))
					}
				} else if err != nil {
					t.Fatal(err)
				}
				if c := r.hello.Containers[0]; c.Exited != nil {
					r.Event(&wire.Frame{Msg: c.Exited})
				} else {
					r.adopt(m.ID, true)
				}
				if e := r.wait(m.ID); e.Code != 9 && !(point == "started" && e.CodeLost) {
					t.Errorf("ended with %+v", e)
				}
				if point != "started" {
					out, _ := r.logs(allLogs(m.ID))
					if want := lines(1, 3000); out != want {
						t.Errorf("after %s:%d the log has %d bytes of %d: %s", point, nth, len(out), len(want), firstDifference(out, want))
					}
				}
				r.conn.Call(r.ctx(), &wire.Ack{ID: m.ID, Run: m.Run})
				r.kill()
			}
		})
	}
}

func lines(from, to int) string {
	var b strings.Builder
	for i := from; i <= to; i++ {
		fmt.Fprintf(&b, "line %d\n", i)
	}
	return b.String()
}

func firstDifference(a, b string) string {
	for i := 0; i < len(a) && i < len(b); i++ {
		if a[i] != b[i] {
			return fmt.Sprintf("byte %d: %q, want %q", i, a[max(0, i-20):min(len(a), i+20)], b[max(0, i-20):min(len(b), i+20)])
		}
	}
	return "one is longer"
}

// TestOneAgent refuses a second agent for the same exec root, and a second daemon for the same agent.
func TestOneAgent(t *testing.T) {
	r := newRig(t)
	r.start()
	second := &rig{t: t, dir: r.dir, bridge: r.bridge, log: &lockedBuffer{}, args: r.args}
	second.startAgent()
	<-second.gone
	if second.cmd.ProcessState.ExitCode() == 0 || !strings.Contains(second.log.String(), "another agent holds") {
		t.Errorf("a second agent: %v\n%s", second.cmd.ProcessState, second.log)
	}
	c := r.conn
	other, err := dialRaw(r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Call(r.ctx(), &wire.Hello{Version: wire.Version, Daemon: "other"}); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("a second daemon: %v", err)
	}
	if _, err := other.Call(r.ctx(), &wire.Layers{}); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("a request before Hello: %v", err)
	}
	c.Close()
	if _, err := other.Call(r.ctx(), &wire.Hello{Version: wire.Version, Daemon: "other"}); err != nil {
		t.Errorf("after the first has gone: %v", err)
	}
	other.Close()
	r.connect()
	// It runs from a sealed memfd.
	link, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", r.cmd.Process.Pid))
	if err != nil || !strings.HasPrefix(link, "/memfd:kiri-init") {
		t.Errorf("the agent runs from %q, %v", link, err)
	}
	// Containers with an init run it too: their root must not take the right to execute it away.
	if err := unix.Chmod(fmt.Sprintf("/proc/%d/exe", r.cmd.Process.Pid), 0); err != unix.EPERM {
		t.Errorf("taking the right to execute the agent away: %v", err)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(r.execRoot(), SocketName), &st); err != nil || st.Mode&0o777 != 0o600 {
		t.Errorf("socket has mode %o, %v", st.Mode, err)
	}
}
