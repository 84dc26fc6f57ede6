//go:build linux

package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/wire"
)

var pause, _ = time.ParseDuration(os.Getenv("KIRI_PAUSE"))

// BenchmarkRun is the agent's part of `run --rm true`: from the Run frame to the Exited frame, over a real socket.
func BenchmarkRun(b *testing.B) {
	for _, mode := range []string{"none", "bridge"} {
		b.Run(mode, func(b *testing.B) {
			r := newRig(b)
			r.start()
			r.image()
			one := func() (started, ended time.Duration) {
				m := r.spec("/bin/true")
				m.Net.Mode, m.Remove = mode, true
				t := time.Now()
				r.run(m)
				started = time.Since(t)
				r.wait(m.ID)
				ended = time.Since(t)
				r.conn.Notify(&wire.Ack{ID: m.ID, Run: m.Run})
				r.mu.Lock()
				closeAll(r.held[m.ID])
				delete(r.held, m.ID)
				r.created = []string{m.ID} // those before it go by themselves
				r.mu.Unlock()
				return started, ended
			}
			for range 5 {
				one()
			}
			var starts, ends []time.Duration
			cpu := r.cpuTime()
			for b.Loop() {
				// With KIRI_PAUSE the agent has the time between two runs to tidy up and prepare.
				time.Sleep(pause)
				s, e := one()
				starts, ends = append(starts, s), append(ends, e)
			}
			slices.Sort(starts)
			slices.Sort(ends)
			us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
			cpu = r.cpuTime() - cpu
			b.ReportMetric(float64(cpu.Microseconds())/float64(len(starts)), "agent-cpu-us/op")
			// On a machine that is busy with other things the quickest tenth says more than the middle.
			b.ReportMetric(us(starts[len(starts)/10]), "start-p10-us")
			b.ReportMetric(us(ends[len(ends)/10]), "exit-p10-us")
			b.ReportMetric(us(starts[len(starts)/2]), "start-p50-us")
			b.ReportMetric(us(ends[len(ends)/2]), "exit-p50-us")
			b.ReportMetric(us(ends[len(ends)*99/100]), "exit-p99-us")
		})
	}
}

// cpuTime is what the agent's process has used so far, its ended threads among it.
func (r *rig) cpuTime() time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
	if err != nil {
		r.t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	var user, system time.Duration
	fmt.Sscan(f[11], &user)
	fmt.Sscan(f[12], &system)
	return (user + system) * 10 * time.Millisecond
}

// BenchmarkFloor is what the kernel alone takes for the same, in this process.
func BenchmarkFloor(b *testing.B) {
	for _, netns := range []bool{false, true} {
		b.Run(fmt.Sprintf("netns=%v", netns), func(b *testing.B) {
			root := b.TempDir()
			for _, d := range []string{"bin", "proc", "dev"} {
				if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil {
					b.Fatal(err)
				}
			}
			bb, err := os.ReadFile("/bin/busybox")
			if err != nil {
				b.Skip(err)
			}
			if err := os.WriteFile(filepath.Join(root, "bin/true"), bb, 0o755); err != nil {
				b.Fatal(err)
			}
			var all []time.Duration
			for b.Loop() {
				l, err := launch.Floor(root, netns, 1)
				if err != nil {
					b.Fatal(err)
				}
				all = append(all, l...)
			}
			slices.Sort(all)
			b.ReportMetric(float64(all[len(all)/10].Nanoseconds())/1e3, "p10-us")
			b.ReportMetric(float64(all[len(all)/2].Nanoseconds())/1e3, "p50-us")
		})
	}
}
