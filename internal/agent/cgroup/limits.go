//go:build linux

package cgroup

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// setting is one value for one file. They are made first, all of them, and written after, so that a request that cannot
// be is refused before anything has changed.
type setting struct {
	dir   int
	file  string // below dir
	value string
	what  string // for messages, in the user's words
	// undo turns the file's text into what to write to have it so again; nil: the text itself.
	undo func(text string) string
}

// Apply sets the limits that r names and leaves the others. Values that the kernel refuses are errors of class Invalid,
// and then a cgroup that had limits before has them still; a fresh one is to be thrown away. Limits this host has no controller for are left out (see Features).
func (c *Cgroup) Apply(r *wire.Resources) error {
	if r.IsZero() {
		return nil
	}
	var all []setting
	for _, f := range []func(*wire.Resources) ([]setting, error){c.memory, c.cpu, c.cpuset, c.pids, c.blkio} {
		s, err := f(r)
		if err != nil {
			return err
		}
		all = append(all, s...)
	}
	undo := make([]setting, 0, len(all))
	for _, s := range all {
		if !c.fresh {
			old, err := read(s.dir, s.file)
			if err != nil {
				return errors.Join(err, rollBack(undo))
			}
			if s.undo != nil {
				old = s.undo(old)
			}
			undo = append(undo, setting{dir: s.dir, file: s.file, value: old})
		}
		if err := write(s.dir, s.file, s.value); err != nil {
			if n := len(undo); n > 0 {
				undo = undo[:n-1] // this one has not changed
			}
			return errors.Join(invalid(err, "setting %s", s.what), rollBack(undo))
		}
	}
	c.fresh = false
	return nil
}

func rollBack(undo []setting) error {
	var failed error
	for _, s := range slices.Backward(undo) {
		if err := write(s.dir, s.file, s.value); err != nil {
			failed = errors.Join(failed, fmt.Errorf("restoring a limit: %w", err))
		}
	}
	return failed
}

// files finds where a controller's files are: the v1 directory's parent and a prefix, or the v2 directory; ok is false if the
// host has neither.
func (c *Cgroup) files(controller string) (dir int, prefix string, v1, ok bool) {
	if dir, ok := c.dirV1(controller); ok {
		return dir, c.name + "/", true, true
	}
	return c.fd, "", false, c.m.h.inV2[v2Name(controller)]
}

func (c *Cgroup) cpu(r *wire.Resources) ([]setting, error) {
	dir, prefix, v1, ok := c.files("cpu")
	if !ok {
		return nil, nil
	}
	var s []setting
	add := func(file, value, what string) {
		s = append(s, setting{dir: dir, file: prefix + file, value: value, what: what})
	}
	if !v1 {
		if r.CPUShares != 0 {
			add("cpu.weight", strconv.FormatUint(cpuWeight(r.CPUShares), 10), fmt.Sprintf("cpu shares %d", r.CPUShares))
		}
		if r.CPUQuota != 0 || r.CPUPeriod != 0 {
			value, err := c.cpuMax(r.CPUQuota, r.CPUPeriod)
			if err != nil {
				return nil, err
			}
			add("cpu.max", value, fmt.Sprintf("cpu quota %d and period %d", r.CPUQuota, r.CPUPeriod))
		}
		return s, nil
	}
	if r.CPUShares != 0 {
		add("cpu.shares", strconv.FormatUint(r.CPUShares, 10), fmt.Sprintf("cpu shares %d", r.CPUShares))
	}
	if r.CPUPeriod != 0 {
		add("cpu.cfs_period_us", strconv.FormatUint(r.CPUPeriod, 10), fmt.Sprintf("cpu period %d", r.CPUPeriod))
	}
	if r.CPUQuota != 0 {
		add("cpu.cfs_quota_us", strconv.FormatInt(max(r.CPUQuota, -1), 10), fmt.Sprintf("cpu quota %d", r.CPUQuota))
	}
	if exists(dir, prefix+"cpu.rt_runtime_us") {
		if r.CPURealtimePeriod != 0 {
			add("cpu.rt_period_us", strconv.FormatInt(r.CPURealtimePeriod, 10), fmt.Sprintf("cpu real-time period %d", r.CPURealtimePeriod))
		}
		if r.CPURealtimeRuntime != 0 {
			add("cpu.rt_runtime_us", strconv.FormatInt(r.CPURealtimeRuntime, 10), fmt.Sprintf("cpu real-time runtime %d", r.CPURealtimeRuntime))
		}
	}
	return s, nil
}

// cpuMax makes the two words of cpu.max; the one not given keeps its value.
func (c *Cgroup) cpuMax(quota int64, period uint64) (string, error) {
	words := []string{"max", "100000"}
	if !c.fresh {
		text, err := read(c.fd, "cpu.max")
		if err != nil {
			return "", err
		}
		if f := strings.Fields(text); len(f) == 2 {
			words = f
		}
	}
	switch {
	case quota < 0:
		words[0] = "max"
	case quota > 0:
		words[0] = strconv.FormatInt(quota, 10)
	}
	if period != 0 {
		words[1] = strconv.FormatUint(period, 10)
	}
	return words[0] + " " + words[1], nil
}

func (c *Cgroup) cpuset(r *wire.Resources) ([]setting, error) {
	dir, prefix, v1, ok := c.files("cpuset")
	if !ok {
		return nil, nil
	}
	suffix := ".effective"
	if v1 {
		suffix = ""
	}
	var s []setting
	for _, v := range []struct{ value, file, word, docker string }{
		{r.CpusetCpus, "cpuset.cpus", "CPUs", "cpus"},
		{r.CpusetMems, "cpuset.mems", "memory nodes", "mems"},
	} {
		if v.value == "" {
			continue
		}
		// What the parent has is asked of the kernel and compared here: v2 would take a CPU that is not there in silence.
		parent := c.at.v2
		if v1 {
			parent = dir
		}
		text, err := read(parent, v.file+suffix)
		if err != nil {
			return nil, err
		}
		have, err := parseList(text)
		if err != nil {
			return nil, fmt.Errorf("parsing %s: %w", v.file, err)
		}
		want, err := parseList(v.value)
		if err != nil {
			return nil, wire.Errorf(wire.Invalid, "Invalid value %s for cpuset %s", v.value, v.docker)
		}
		for _, n := range want {
			if _, ok := slices.BinarySearch(have, n); !ok {
				return nil, wire.Errorf(wire.Invalid, "Requested %s are not available - requested %s, available: %s", v.word, v.value, text)
			}
		}
		s = append(s, setting{dir: dir, file: prefix + v.file, value: v.value, what: "cpuset " + v.docker + " " + v.value})
	}
	return s, nil
}

// maxList bounds the numbers in a list: the kernel has at most 8192 CPUs and 1024 memory nodes.
const maxList = 1 << 13

// parseList reads the kernel's list format, "0-3,8", into sorted numbers.
func parseList(text string) ([]int, error) {
	var out []int
	for part := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		if part == "" {
			continue
		}
		first, last, ranged := strings.Cut(part, "-")
		a, err := strconv.ParseUint(strings.TrimSpace(first), 10, 32)
		if err != nil {
			return nil, err
		}
		b := a
		if ranged {
			if b, err = strconv.ParseUint(strings.TrimSpace(last), 10, 32); err != nil {
				return nil, err
			}
		}
		if b < a || b >= maxList {
			return nil, strconv.ErrRange
		}
		for n := a; n <= b; n++ {
			out = append(out, int(n))
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func (c *Cgroup) pids(r *wire.Resources) ([]setting, error) {
	dir, prefix, _, ok := c.files("pids")
	if !ok || r.PidsLimit == nil {
		return nil, nil
	}
	value := "max"
	if *r.PidsLimit > 0 {
		value = strconv.FormatInt(*r.PidsLimit, 10)
	}
	return []setting{{dir: dir, file: prefix + "pids.max", value: value, what: "pids limit " + value}}, nil
}

func (c *Cgroup) blkio(r *wire.Resources) ([]setting, error) {
	dir, prefix, v1, ok := c.files("blkio")
	if !ok {
		return nil, nil
	}
	var s []setting
	add := func(file, value, what string, undo func(string) string) {
		s = append(s, setting{dir: dir, file: prefix + file, value: value, what: what, undo: undo})
	}
	// Two schedulers have weights, in files of their own; where neither is there, weights are left out.
	weight, conv := "", func(w uint64) string { return strconv.FormatUint(w, 10) }
	names := []string{"blkio.weight", "blkio.bfq.weight"}
	if !v1 {
		names = []string{"io.bfq.weight", "io.weight"}
	}
	for _, n := range names {
		if exists(dir, prefix+n) {
			weight = n
			break
		}
	}
	if weight == "io.weight" {
		conv = func(w uint64) string { return strconv.FormatUint(ioWeight(w), 10) }
	}
	device := ""
	if weight != "" {
		if device = weight; v1 {
			device += "_device"
		}
	}
	if r.BlkioWeight != 0 && weight != "" {
		value := conv(uint64(r.BlkioWeight))
		if weight == "io.weight" {
			value = "default " + value
		}
		add(weight, value, fmt.Sprintf("blkio weight %d", r.BlkioWeight), firstLine)
	}
	if device != "" && exists(dir, prefix+device) {
		for _, l := range r.BlkioWeightDevice {
			dev, err := deviceNumber(l.Path)
			if err != nil {
				return nil, err
			}
			add(device, dev+" "+conv(l.Rate), fmt.Sprintf("blkio weight %d of %s", l.Rate, l.Path), lineOf(dev, "default"))
		}
	}
	for _, t := range []struct {
		limits         []wire.BlkioLimit
		v1, v2, docker string
	}{
		{r.ReadBps, "read_bps", "rbps", "read rate"},
		{r.WriteBps, "write_bps", "wbps", "write rate"},
		{r.ReadIOps, "read_iops", "riops", "read operations"},
		{r.WriteIOps, "write_iops", "wiops", "write operations"},
	} {
		for _, l := range t.limits {
			dev, err := deviceNumber(l.Path)
			if err != nil {
				return nil, err
			}
			what := fmt.Sprintf("%s %d of %s", t.docker, l.Rate, l.Path)
			rate := strconv.FormatUint(l.Rate, 10)
			if v1 {
				add("blkio.throttle."+t.v1+"_device", dev+" "+rate, what, lineOf(dev, "0"))
				continue
			}
			if l.Rate == 0 {
				rate = "max"
			}
			add("io.max", dev+" "+t.v2+"="+rate, what, lineOf(dev, "rbps=max wbps=max riops=max wiops=max"))
		}
	}
	return s, nil
}

// deviceNumber is how the kernel's files name the block device at a host's path.
func deviceNumber(path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", wire.Errorf(wire.Invalid, "finding block device %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return "", wire.Errorf(wire.Invalid, "finding block device %s: %w", path, unix.ENOTBLK)
	}
	return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), nil
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

// lineOf finds the line of a device among a file's, or makes the one that means "not set".
func lineOf(dev, unset string) func(string) string {
	return func(text string) string {
		for line := range strings.SplitSeq(text, "\n") {
			if strings.HasPrefix(line, dev+" ") {
				return line
			}
		}
		return dev + " " + unset
	}
}
