package engine

import (
	"bytes"
	"context"
	"errors"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

const statsInterval = time.Second

// ContainerStats gives one sample; without oneShot it takes two a second apart so that precpu_stats is filled. For a
// container that does not run all counters are zero.
func (e *Engine) ContainerStats(ctx context.Context, ref string, oneShot bool) (*container.StatsResponse, error) {
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, err
	}
	first, err := e.sample(ctx, c)
	if err != nil || oneShot || first.Read.IsZero() {
		return first, err
	}
	select {
	case <-time.After(statsInterval):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	second, err := e.sample(ctx, c)
	if err != nil {
		return nil, err
	}
	second.PreRead, second.PreCPUStats = first.Read, first.CPUStats
	return second, nil
}

// ContainerStatsStream calls emit about once a second until ctx ends, emit fails or the container is removed.
func (e *Engine) ContainerStatsStream(ctx context.Context, ref string, emit func(*container.StatsResponse) error) error {
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	tick := time.NewTicker(statsInterval)
	defer tick.Stop()
	var last *container.StatsResponse
	for {
		s, err := e.sample(ctx, c)
		if err != nil {
			return err
		}
		if last != nil && !s.Read.IsZero() {
			s.PreRead, s.PreCPUStats = last.Read, last.CPUStats
		}
		last = s
		if err := emit(s); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		c.mu.Lock()
		removed := c.removed
		c.mu.Unlock()
		if removed {
			return nil
		}
	}
}

func (e *Engine) sample(ctx context.Context, c *ctr) (*container.StatsResponse, error) {
	rec := c.snapshot()
	s := &container.StatsResponse{ID: rec.ID, Name: "/" + rec.Name, OSType: "linux"}
	if !rec.State.Running || rec.State.Restarting {
		return s, nil
	}
	f, err := e.agent.call(ctx, &wire.Stats{ID: rec.ID})
	r, err := reply[*wire.StatsReply](f, err)
	if cerrdefs.IsNotFound(err) || cerrdefs.IsConflict(err) { // it has ended just now
		return s, nil
	}
	if err != nil {
		return nil, err
	}
	fillStats(s, r, uint64(e.agent.greeting().MemTotal))
	return s, nil
}

func fillStats(s *container.StatsResponse, r *wire.StatsReply, memTotal uint64) {
	s.Read = time.Unix(0, r.At).UTC()
	s.CPUStats = container.CPUStats{
		CPUUsage:       container.CPUUsage{TotalUsage: r.CPUTotal, UsageInKernelmode: r.CPUSystem, UsageInUsermode: r.CPUUser},
		SystemUsage:    r.SystemCPU,
		OnlineCPUs:     r.OnlineCPUs,
		ThrottlingData: container.ThrottlingData{Periods: r.CPUPeriods, ThrottledPeriods: r.CPUThrottled, ThrottledTime: r.ThrottledTime},
	}
	s.MemoryStats = container.MemoryStats{Usage: r.Memory, MaxUsage: r.MemoryMax, Failcnt: r.MemoryFailcnt, Limit: r.MemoryLimit}
	if memTotal > 0 && (r.MemoryLimit == 0 || r.MemoryLimit > memTotal) {
		s.MemoryStats.Limit = memTotal
	}
	if len(r.MemoryStat) > 0 {
		s.MemoryStats.Stats = make(map[string]uint64, len(r.MemoryStat))
		for k, v := range r.MemoryStat {
			if n, err := strconv.ParseUint(v, 10, 64); err == nil {
				s.MemoryStats.Stats[k] = n
			}
		}
	}
	s.PidsStats = container.PidsStats{Current: r.PIDs, Limit: r.PIDsLimit}
	s.BlkioStats = container.BlkioStats{IoServiceBytesRecursive: blkio(r.BlkioBytes), IoServicedRecursive: blkio(r.BlkioOps)}
	if len(r.Interfaces) > 0 {
		s.Networks = make(map[string]container.NetworkStats, len(r.Interfaces))
		for _, i := range r.Interfaces {
			s.Networks[i.Name] = container.NetworkStats{
				RxBytes: i.RxBytes, RxPackets: i.RxPackets, RxErrors: i.RxErrors, RxDropped: i.RxDropped,
				TxBytes: i.TxBytes, TxPackets: i.TxPackets, TxErrors: i.TxErrors, TxDropped: i.TxDropped,
			}
		}
	}
}

func blkio(l []wire.BlkioEntry) []container.BlkioStatEntry {
	var out []container.BlkioStatEntry
	for _, b := range l {
		out = append(out, container.BlkioStatEntry{Major: b.Major, Minor: b.Minor, Op: b.Op, Value: b.Value})
	}
	return out
}

// ContainerTop lists the container's processes as ps, run on the host with psArgs, shows them.
func (e *Engine) ContainerTop(ctx context.Context, ref, psArgs string) (*container.TopResponse, error) {
	if psArgs == "" {
		psArgs = "-ef"
	}
	args := strings.Fields(psArgs)
	for _, a := range args {
		// `-o x=PID` would put another column under the title by which the processes are found.
		if k, v, ok := strings.Cut(a, "="); ok && strings.HasPrefix(v, "PID") && k != "pid" {
			return nil, invalid(`specifying "%s=%s" is not allowed`, k, v)
		}
	}
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, err
	}
	switch s := c.snapshot().State; {
	case !s.Running:
		return nil, notRunning(c.id)
	case s.Restarting:
		return nil, restarting(c.id)
	}
	f, err := e.agent.call(ctx, &wire.Top{ID: c.id})
	r, err := reply[*wire.TopReply](f, err)
	if err != nil {
		return nil, err
	}
	// Some of ps's options (f, for one) do not go with a list of processes.
	out, err := exec.CommandContext(ctx, "ps", append(args[:len(args):len(args)], "-q"+joinInts(r.PIDs))...).Output()
	if err != nil {
		if out, err = exec.CommandContext(ctx, "ps", args...).Output(); err != nil {
			var ee *exec.ExitError
			if errors.As(err, &ee) {
				if line, _, _ := bytes.Cut(ee.Stderr, []byte("\n")); len(line) > 0 {
					err = errors.New(string(line))
				}
			}
			return nil, internal("ps: %w", err)
		}
	}
	top, err := parsePS(string(out), r.PIDs)
	if err != nil {
		return nil, err
	}
	e.containerEvent(c, events.ActionTop)
	return top, nil
}

func joinInts(l []int) string {
	s := make([]string, len(l))
	for i, n := range l {
		s[i] = strconv.Itoa(n)
	}
	return strings.Join(s, ",")
}

// parsePS keeps the lines of the processes in pids, and with them their threads', which have no PID of their own.
func parsePS(out string, pids []int) (*container.TopResponse, error) {
	ascii := func(s string) []string {
		return strings.FieldsFunc(s, func(r rune) bool { return strings.ContainsRune("\t\n\f\r ", r) })
	}
	lines := strings.Split(out, "\n")
	top := &container.TopResponse{Titles: ascii(lines[0]), Processes: [][]string{}}
	at := slices.Index(top.Titles, "PID")
	if at < 0 {
		return nil, internal("Couldn't find PID field in ps output")
	}
	ours := false
	for _, line := range lines[1:] {
		fields := ascii(line)
		if len(fields) < len(top.Titles) {
			continue
		}
		if fields[at] != "-" {
			pid, err := strconv.Atoi(fields[at])
			if err != nil {
				return nil, internal("Unexpected pid '%s': %w", fields[at], err)
			}
			ours = slices.Contains(pids, pid)
		}
		if ours {
			last := len(top.Titles) - 1
			top.Processes = append(top.Processes, append(fields[:last:last], strings.Join(fields[last:], " ")))
		}
	}
	return top, nil
}

// Plan returns the printed launch program of a running container: kiri debug plan.
func (e *Engine) Plan(ctx context.Context, ref string) (string, error) {
	c, err := e.containers.get(ref)
	if err != nil {
		return "", err
	}
	f, err := e.agent.call(ctx, &wire.Plan{ID: c.id})
	r, err := reply[*wire.PlanReply](f, err)
	if err != nil {
		return "", err
	}
	return r.Text, nil
}
