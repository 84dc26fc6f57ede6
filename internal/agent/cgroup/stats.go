//go:build linux

package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Stats fills in all but Interfaces. Times are ns, sizes bytes; a limit that is not set is the largest number (v1's
// memory: a multiple of the page size just below 2^63).
func (c *Cgroup) Stats(s *wire.StatsReply) error {
	for _, f := range []func(*wire.StatsReply) error{c.statCPU, c.statMemory, c.statPIDs, c.statIO, statSystem} {
		if err := f(s); err != nil {
			return fmt.Errorf("reading counters of cgroup %s: %w", c.Path(), err)
		}
	}
	s.At = time.Now().UnixNano()
	return nil
}

// statCPU takes time from the v2 tree, which counts it in every cgroup, controller or not; throttling from where the
// controller is: the units differ.
func (c *Cgroup) statCPU(s *wire.StatsReply) error {
	text, err := read(c.fd, "cpu.stat")
	if err != nil {
		return err
	}
	us := func(text, key string) uint64 {
		n, _ := field(text, key)
		return n * 1000
	}
	s.CPUTotal, s.CPUUser, s.CPUSystem = us(text, "usage_usec"), us(text, "user_usec"), us(text, "system_usec")
	if dir, ok := c.dirV1("cpu"); ok {
		if text, err = read(dir, c.name+"/cpu.stat"); err != nil {
			return err
		}
		s.ThrottledTime, _ = field(text, "throttled_time")
	} else {
		s.ThrottledTime = us(text, "throttled_usec")
	}
	s.CPUPeriods, _ = field(text, "nr_periods")
	s.CPUThrottled, _ = field(text, "nr_throttled")
	return nil
}

func (c *Cgroup) statMemory(s *wire.StatsReply) error {
	dir, prefix, v1, ok := c.files("memory")
	if !ok {
		return nil
	}
	type counter struct {
		file string
		to   *uint64
	}
	counters := []counter{{"memory.current", &s.Memory}, {"memory.max", &s.MemoryLimit}}
	if v1 {
		counters = []counter{
			{"memory.usage_in_bytes", &s.Memory}, {"memory.limit_in_bytes", &s.MemoryLimit},
			{"memory.max_usage_in_bytes", &s.MemoryMax}, {"memory.failcnt", &s.MemoryFailcnt},
		}
	}
	for _, n := range counters {
		var err error
		if *n.to, err = number(dir, prefix+n.file); err != nil {
			return err
		}
	}
	text, err := read(dir, prefix+"memory.stat")
	if err != nil {
		return err
	}
	s.MemoryStat = make(map[string]string, 64)
	for line := range strings.SplitSeq(text, "\n") {
		if k, v, ok := strings.Cut(line, " "); ok {
			s.MemoryStat[k] = v
		}
	}
	return nil
}

func (c *Cgroup) statPIDs(s *wire.StatsReply) error {
	dir, prefix, _, ok := c.files("pids")
	if !ok {
		return nil
	}
	var err error
	if s.PIDs, err = number(dir, prefix+"pids.current"); err != nil {
		return err
	}
	s.PIDsLimit, err = number(dir, prefix+"pids.max")
	return err
}

func (c *Cgroup) statIO(s *wire.StatsReply) error {
	dir, prefix, v1, ok := c.files("blkio")
	if !ok {
		return nil
	}
	s.BlkioBytes, s.BlkioOps = nil, nil
	if !v1 {
		text, err := read(dir, "io.stat")
		if err == nil {
			s.BlkioBytes = ioStat(text, "rbytes", "wbytes")
			s.BlkioOps = ioStat(text, "rios", "wios")
		}
		return err
	}
	for file, to := range map[string]*[]wire.BlkioEntry{
		"blkio.throttle.io_service_bytes_recursive": &s.BlkioBytes,
		"blkio.throttle.io_serviced_recursive":      &s.BlkioOps,
	} {
		text, err := read(dir, prefix+file)
		if errors.Is(err, unix.ENOENT) {
			continue // a kernel without throttling
		}
		if err != nil {
			return err
		}
		*to = blkioStat(text)
	}
	return nil
}

// blkioStat reads lines such as "8:0 Read 4096"; the last, a sum over devices, is left out.
func blkioStat(text string) []wire.BlkioEntry {
	var out []wire.BlkioEntry
	for line := range strings.SplitSeq(text, "\n") {
		f := strings.Fields(line)
		if len(f) != 3 {
			continue
		}
		major, minor, ok := device(f[0])
		n, err := parse(f[2])
		if ok && err == nil {
			out = append(out, wire.BlkioEntry{Major: major, Minor: minor, Op: f[1], Value: n})
		}
	}
	return out
}

// ioStat reads lines such as "8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0".
func ioStat(text, readKey, writeKey string) []wire.BlkioEntry {
	var out []wire.BlkioEntry
	for line := range strings.SplitSeq(text, "\n") {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		major, minor, ok := device(f[0])
		if !ok {
			continue
		}
		for _, kv := range f[1:] {
			k, v, _ := strings.Cut(kv, "=")
			op := map[string]string{readKey: "read", writeKey: "write"}[k]
			if n, err := parse(v); op != "" && err == nil {
				out = append(out, wire.BlkioEntry{Major: major, Minor: minor, Op: op, Value: n})
			}
		}
	}
	return out
}

func device(s string) (major, minor uint64, ok bool) {
	a, b, ok := strings.Cut(s, ":")
	if !ok {
		return 0, 0, false
	}
	major, err1 := strconv.ParseUint(a, 10, 32)
	minor, err2 := strconv.ParseUint(b, 10, 32)
	return major, minor, err1 == nil && err2 == nil
}

// userHZ is the unit of /proc/stat, fixed in the kernel's interface to user space on all architectures Go runs on.
const userHZ = 100

// statSystem reads the host's time: the first seven columns of /proc/stat, as Docker sums them (what guests used is in
// user time already). The rest of the file, a long line of interrupts, is not read.
func statSystem(s *wire.StatsReply) error {
	f, err := os.Open("/proc/stat")
	if err != nil {
		return err
	}
	defer f.Close()
	var text []byte
	buf := make([]byte, 4096)
	for !bytes.Contains(text, []byte("\nintr ")) && len(text) < maxFile {
		n, err := f.Read(buf)
		text = append(text, buf[:n]...)
		if err != nil || n == 0 {
			break
		}
	}
	return parseSystem(s, string(text))
}

func parseSystem(s *wire.StatsReply, text string) error {
	s.SystemCPU, s.OnlineCPUs = 0, 0
	for line := range strings.SplitSeq(text, "\n") {
		f := strings.Fields(line)
		switch {
		case len(f) < 8 || !strings.HasPrefix(f[0], "cpu"):
			continue
		case f[0] != "cpu":
			s.OnlineCPUs++
			continue
		}
		var ticks uint64
		for _, v := range f[1:8] {
			n, err := strconv.ParseUint(v, 10, 64)
			if err != nil {
				return fmt.Errorf("parsing /proc/stat: %w", err)
			}
			ticks += n
		}
		s.SystemCPU = ticks * (uint64(time.Second) / userHZ)
	}
	return nil
}
