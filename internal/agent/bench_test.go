//go:build linux

package agent

import (
	"slices"
	"testing"
	"time"

	"runkiri.com/kiri/internal/wire"
)

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
				r.created = r.created[:0]
				r.mu.Unlock()
				return started, ended
			}
			for range 5 {
				one()
			}
			var starts, ends []time.Duration
			for b.Loop() {
				s, e := one()
				starts, ends = append(starts, s), append(ends, e)
			}
			slices.Sort(starts)
			slices.Sort(ends)
			us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
			b.ReportMetric(us(starts[len(starts)/2]), "start-p50-us")
			b.ReportMetric(us(ends[len(ends)/2]), "exit-p50-us")
			b.ReportMetric(us(ends[len(ends)*99/100]), "exit-p99-us")
		})
	}
}
