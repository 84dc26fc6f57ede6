//go:build linux

package cgroup

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// BenchmarkCgroup times the life of a cgroup step by step, over all hierarchies, and reports the median of each step in
// microseconds.
func BenchmarkCgroup(b *testing.B) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	m := manager(b)
	var c *Cgroup
	pids := int64(100)
	steps := []struct {
		name string
		do   func() error
	}{
		{"New", func() (err error) { c, err = m.New(fmt.Sprint("b", serial.Add(1))); return err }},
		{"JoinThread", func() error { return c.JoinThread(0) }},
		{"LeaveThread", func() error { return m.LeaveThread(0) }},
		{"JoinThreadByID", func() error { return c.JoinThread(unix.Gettid()) }},
		{"LeaveThreadByID", func() error { return m.LeaveThread(unix.Gettid()) }},
		{"Apply", func() error {
			return c.Apply(&wire.Resources{Memory: 64 * mib, MemorySwap: 128 * mib, CPUQuota: 50000, PidsLimit: &pids})
		}},
		{"OOMKills", func() error { _, err := c.OOMKills(); return err }},
		{"Stats", func() error { return c.Stats(new(wire.StatsReply)) }},
		{"Remove", func() error { return c.Remove() }},
	}
	took := make([][]time.Duration, len(steps))
	for b.Loop() {
		for i, s := range steps {
			begin := time.Now()
			err := s.do()
			took[i] = append(took[i], time.Since(begin))
			if err != nil {
				b.Fatalf("%s: %v", s.name, err)
			}
		}
	}
	for i, s := range steps {
		slices.Sort(took[i])
		b.ReportMetric(float64(took[i][len(took[i])/2].Nanoseconds())/1000, s.name+"-us")
	}
}
