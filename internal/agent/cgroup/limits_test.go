//go:build linux

package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

const mib = 1 << 20

func ptr(n int64) *int64 { return &n }

// limits reads the files of a cgroup by the names of v1 or v2, whichever are there: "pids.max=5".
func limits(t *testing.T, c *Cgroup, files ...string) string {
	t.Helper()
	var out []string
	for _, f := range files {
		controller, _, _ := strings.Cut(f, ".")
		if controller == "io" {
			controller = "blkio"
		}
		dir, prefix, _, ok := c.files(controller)
		if !ok {
			continue
		}
		text, err := read(dir, prefix+f)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, f+"="+strings.ReplaceAll(text, "\n", ";"))
	}
	return strings.Join(out, " ")
}

// The steps of BR-74 on the kernel: each Apply names some limits, the others must stay, and what is refused changes
// nothing.
func TestApplyInSteps(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	if m.h.tree("memory") == nil || m.h.tree("cpu") == nil || m.h.tree("cpuset") == nil || m.h.tree("pids") == nil {
		t.Skip("this table is for v1; TestApplyInStepsV2 has the other")
	}
	swap := exists(m.h.tree("memory").root, "memory.memsw.limit_in_bytes")
	if !swap {
		need(t, "no swap accounting")
	}
	files := []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us", "cpuset.cpus", "pids.max"}
	text := func(memory, sum int64, shares, period, quota int, cpus, pids string) string {
		return fmt.Sprintf("memory.limit_in_bytes=%d memory.memsw.limit_in_bytes=%d cpu.shares=%d cpu.cfs_period_us=%d cpu.cfs_quota_us=%d cpuset.cpus=%s pids.max=%s",
			memory, sum, shares, period, quota, cpus, pids)
	}
	all, err := read(m.def.v1[1], "cpuset.cpus")
	if err != nil {
		if all, err = read(m.h.tree("cpuset").root, "cpuset.cpus"); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []struct {
		what string
		r    wire.Resources
		want string // "" if it is refused with text
		text string
	}{
		{"at start", wire.Resources{Memory: 100 * mib, MemorySwap: 200 * mib, CPUShares: 512, PidsLimit: ptr(40)}, text(100*mib, 200*mib, 512, 100000, -1, all, "40"), ""},
		{"raise beyond the sum", wire.Resources{Memory: 400 * mib}, "", textSwapInTheWay},
		{"raise both", wire.Resources{Memory: 400 * mib, MemorySwap: 800 * mib}, text(400*mib, 800*mib, 512, 100000, -1, all, "40"), ""},
		{"quota alone", wire.Resources{CPUQuota: 50000}, text(400*mib, 800*mib, 512, 100000, 50000, all, "40"), ""},
		{"pids alone", wire.Resources{PidsLimit: ptr(50)}, text(400*mib, 800*mib, 512, 100000, 50000, all, "50"), ""},
		{"one cpu", wire.Resources{CpusetCpus: "0"}, text(400*mib, 800*mib, 512, 100000, 50000, "0", "50"), ""},
		{"all cpus", wire.Resources{CpusetCpus: all}, text(400*mib, 800*mib, 512, 100000, 50000, all, "50"), ""},
		{"a cpu that is not there, after others", wire.Resources{CPUShares: 77, CpusetCpus: "0,4095"}, "", "Requested CPUs are not available - requested 0,4095, available: " + all},
		{"not a list", wire.Resources{CpusetCpus: "0-"}, "", "Invalid value 0- for cpuset cpus"},
		{"cpus 1.5", wire.Resources{CPUQuota: 75000, CPUPeriod: 50000}, text(400*mib, 800*mib, 512, 50000, 75000, all, "50"), ""},
		{"a period the kernel refuses, after a limit it takes", wire.Resources{Memory: 300 * mib, CPUPeriod: 10}, "", "setting cpu period 10"},
		{"sum below memory", wire.Resources{MemorySwap: 300 * mib}, "", textSwapBelowMemory},
		{"both, sum below memory", wire.Resources{Memory: 10 * mib, MemorySwap: 5 * mib}, "", textSwapBelowMemory},
		{"lower both", wire.Resources{Memory: 50 * mib, MemorySwap: 60 * mib}, text(50*mib, 60*mib, 512, 50000, 75000, all, "50"), ""},
		{"no limits", wire.Resources{Memory: -1, MemorySwap: -1, CPUQuota: -1, PidsLimit: ptr(-1)}, text(9223372036854771712, 9223372036854771712, 512, 50000, -1, all, "max"), ""},
		{"sum without memory", wire.Resources{MemorySwap: 300 * mib}, "", textSwapAlone},
		{"nothing", wire.Resources{}, text(9223372036854771712, 9223372036854771712, 512, 50000, -1, all, "max"), ""},
	} {
		before := limits(t, c, files...)
		err := c.Apply(&s.r)
		got := limits(t, c, files...)
		if s.want == "" {
			if wire.ClassOf(err) != wire.Invalid || !strings.Contains(err.Error(), s.text) {
				t.Errorf("%s: %v, want Invalid with %q", s.what, err, s.text)
			}
			if got != before {
				t.Errorf("%s: was refused and changed\n%s\nto\n%s", s.what, before, got)
			}
			continue
		}
		if err != nil || got != s.want {
			t.Errorf("%s: %v\n%s\nwant\n%s", s.what, err, got, s.want)
		}
	}
}

// The same on a pure v2 kernel.
func TestApplyInStepsV2(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	if m.h.Version() != 2 {
		t.Skip("controllers are in v1 here")
	}
	files := []string{"memory.max", "memory.swap.max", "cpu.weight", "cpu.max", "cpuset.cpus", "pids.max"}
	text := func(memory, swap string, weight int, max, cpus, pids string) string {
		return fmt.Sprintf("memory.max=%s memory.swap.max=%s cpu.weight=%d cpu.max=%s cpuset.cpus=%s pids.max=%s", memory, swap, weight, max, cpus, pids)
	}
	m100, m400, m800 := fmt.Sprint(100*mib), fmt.Sprint(400*mib), fmt.Sprint(800*mib)
	for _, s := range []struct {
		what string
		r    wire.Resources
		want string // "" if it is refused with text
		text string
	}{
		{"at start", wire.Resources{Memory: 100 * mib, MemorySwap: 200 * mib, CPUShares: 1024, PidsLimit: ptr(40)}, text(m100, m100, 100, "max 100000", "", "40"), ""},
		{"raise beyond the sum", wire.Resources{Memory: 400 * mib}, "", textSwapInTheWay},
		{"raise both", wire.Resources{Memory: 400 * mib, MemorySwap: 1200 * mib}, text(m400, m800, 100, "max 100000", "", "40"), ""},
		{"quota alone", wire.Resources{CPUQuota: 50000}, text(m400, m800, 100, "50000 100000", "", "40"), ""},
		{"one cpu", wire.Resources{CpusetCpus: "0"}, text(m400, m800, 100, "50000 100000", "0", "40"), ""},
		{"a cpu that is not there", wire.Resources{CPUShares: 77, CpusetCpus: "0,4095"}, "", "Requested CPUs are not available"},
		{"a period the kernel refuses, after a limit it takes", wire.Resources{Memory: 300 * mib, CPUPeriod: 10}, "", "setting cpu quota 0 and period 10"},
		{"memory alone keeps the sum", wire.Resources{Memory: 800 * mib}, text(m800, m400, 100, "50000 100000", "0", "40"), ""},
		{"no limits", wire.Resources{Memory: -1, CPUQuota: -1, PidsLimit: ptr(0)}, text("max", "max", 100, "max 100000", "0", "max"), ""},
	} {
		before := limits(t, c, files...)
		err := c.Apply(&s.r)
		got := limits(t, c, files...)
		if s.want == "" {
			if wire.ClassOf(err) != wire.Invalid || !strings.Contains(err.Error(), s.text) {
				t.Errorf("%s: %v, want Invalid with %q", s.what, err, s.text)
			}
			if got != before {
				t.Errorf("%s: was refused and changed\n%s\nto\n%s", s.what, before, got)
			}
			continue
		}
		if err != nil || got != s.want {
			t.Errorf("%s: %v\n%s\nwant\n%s", s.what, err, got, s.want)
		}
	}
}

func TestApplyBlkio(t *testing.T) {
	m := manager(t)
	c := make1(t, m)
	disk := blockDevice(t)
	if m.h.tree("blkio") == nil || !exists(c.v1[0], c.Name()+"/blkio.throttle.read_bps_device") {
		t.Skip("no v1 throttling on this host")
	}
	num, err := deviceNumber(disk)
	if err != nil {
		t.Fatal(err)
	}
	lim := func(n uint64) []wire.BlkioLimit { return []wire.BlkioLimit{{Path: disk, Rate: n}} }
	if err := c.Apply(&wire.Resources{ReadBps: lim(1 << 20), WriteIOps: lim(99), BlkioWeight: 300}); err != nil {
		t.Fatal(err)
	}
	files := []string{"blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device", "blkio.throttle.write_iops_device"}
	want := fmt.Sprintf("blkio.throttle.read_bps_device=%s 1048576 blkio.throttle.write_bps_device= blkio.throttle.write_iops_device=%s 99", num, num)
	if got := limits(t, c, files...); got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
	// The last of these is refused; the others must be undone, each in its own file's way.
	err = c.Apply(&wire.Resources{ReadBps: lim(2 << 20), WriteBps: lim(7), WriteIOps: []wire.BlkioLimit{{Path: disk, Rate: 5}, {Path: "/dev/null", Rate: 5}}})
	if wire.ClassOf(err) != wire.Invalid || !strings.Contains(err.Error(), "/dev/null") {
		t.Errorf("a device that is none: %v", err)
	}
	ghost := filepath.Join(t.TempDir(), "ghost") // a node of a disk that the kernel does not have
	if err := unix.Mknod(ghost, unix.S_IFBLK|0o600, int(unix.Mkdev(259, 1<<19))); err != nil {
		t.Fatal(err)
	}
	err = c.Apply(&wire.Resources{ReadBps: lim(2 << 20), WriteBps: lim(7), WriteIOps: []wire.BlkioLimit{{Path: disk, Rate: 5}, {Path: ghost, Rate: 5}}})
	if wire.ClassOf(err) != wire.Invalid || !strings.Contains(err.Error(), ghost) {
		t.Errorf("a disk that is not there: %v", err)
	}
	if got := limits(t, c, files...); got != want {
		t.Errorf("after a refusal %s\nwant %s", got, want)
	}
}

// blockDevice is a whole disk of this host.
func blockDevice(t *testing.T) string {
	t.Helper()
	entries, _ := os.ReadDir("/sys/block")
	for _, e := range entries {
		var st unix.Stat_t
		path := "/dev/" + e.Name()
		if unix.Stat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
			return path
		}
	}
	need(t, "no disk here")
	return ""
}

func TestMemoryLimitKills(t *testing.T) {
	m := manager(t)
	if !m.h.has("memory") {
		need(t, "no memory controller")
	}
	c := make1(t, m)
	if err := c.Apply(&wire.Resources{Memory: 16 * mib, MemorySwap: 16 * mib}); err != nil {
		t.Fatal(err)
	}
	if n, err := c.OOMKills(); err != nil || n != 0 {
		t.Errorf("OOM kills before: %d, %v", n, err)
	}
	cmd := start(t, c, "/bin/dd", "if=/dev/zero", "of=/dev/null", "bs=64M", "count=1")
	if err := cmd.Wait(); err == nil {
		t.Error("64 MiB went into 16")
	}
	if n, err := c.OOMKills(); err != nil || n != 1 {
		t.Errorf("OOM kills: %d, %v; want 1", n, err)
	}
	// A kill from outside is none of memory's.
	d := make1(t, m)
	victim := start(t, d, "/bin/sleep", "1000")
	if err := d.Kill(); err != nil {
		t.Fatal(err)
	}
	victim.Wait()
	if n, err := d.OOMKills(); err != nil || n != 0 {
		t.Errorf("OOM kills after SIGKILL: %d, %v; want 0", n, err)
	}
}

func TestPidsLimitHolds(t *testing.T) {
	m := manager(t)
	if !m.h.has("pids") {
		need(t, "no pids controller")
	}
	c := make1(t, m)
	if err := c.Apply(&wire.Resources{PidsLimit: ptr(3)}); err != nil {
		t.Fatal(err)
	}
	cmd := start(t, c, "/bin/sh", "-c", "sleep 1000 & sleep 1000 & sleep 1000 & sleep 1000 & wait")
	err := cmd.Wait() // dash gives up when it cannot fork
	pids, perr := c.Procs()
	if err == nil || perr != nil || len(pids) > 3 {
		t.Errorf("%v with processes %v, %v; want at most 3", err, pids, perr)
	}
	if err := c.Kill(); err != nil {
		t.Error(err)
	}
}

// fakeV2 is a cgroup whose files are ordinary ones: what would be written on a pure v2 host, byte for byte.
func fakeV2(t *testing.T, files map[string]string) *Cgroup {
	t.Helper()
	parent := t.TempDir()
	dir := filepath.Join(parent, "c")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		at := dir
		if strings.HasSuffix(name, ".effective") {
			at = parent
		}
		if err := os.WriteFile(filepath.Join(at, name), []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	fd, err := openDir(unix.AT_FDCWD, dir)
	if err != nil {
		t.Fatal(err)
	}
	up, err := openDir(unix.AT_FDCWD, parent)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd); unix.Close(up) })
	h := &Host{inV2: map[string]bool{"cpu": true, "memory": true, "pids": true, "io": true, "cpuset": true}}
	return &Cgroup{m: &Manager{h: h}, name: "c", at: &place{v2: up}, fd: fd}
}

// v2Files are what a fresh cgroup has on Linux 6.12.
func v2Files() map[string]string {
	return map[string]string{
		"cpu.weight": "100", "cpu.max": "max 100000", "memory.max": "max", "memory.swap.max": "max", "memory.low": "0",
		"pids.max": "max", "io.max": "", "io.weight": "default 100", "cpuset.cpus": "", "cpuset.mems": "",
		"cpuset.cpus.effective": "0-3", "cpuset.mems.effective": "0",
	}
}

func TestApplyV2(t *testing.T) {
	disk := blockDevice(t)
	num, err := deviceNumber(disk)
	if err != nil {
		t.Fatal(err)
	}
	lim := []wire.BlkioLimit{{Path: disk, Rate: 4096}}
	for _, s := range []struct {
		what string
		have map[string]string // other than v2Files
		r    wire.Resources
		want map[string]string
		text string // of a refusal
	}{
		{"shares", nil, wire.Resources{CPUShares: 1024}, map[string]string{"cpu.weight": "100"}, ""},
		{"quota", nil, wire.Resources{CPUQuota: 50000}, map[string]string{"cpu.max": "50000 100000"}, ""},
		{"period alone", map[string]string{"cpu.max": "50000 100000"}, wire.Resources{CPUPeriod: 20000}, map[string]string{"cpu.max": "50000 20000"}, ""},
		{"no quota", map[string]string{"cpu.max": "50000 20000"}, wire.Resources{CPUQuota: -1}, map[string]string{"cpu.max": "max 20000"}, ""},
		{"memory and swap", nil, wire.Resources{Memory: 100, MemorySwap: 250}, map[string]string{"memory.max": "100", "memory.swap.max": "150"}, ""},
		{"no swap at all", nil, wire.Resources{Memory: 100, MemorySwap: 100}, map[string]string{"memory.max": "100", "memory.swap.max": "0"}, ""},
		{"unlimited swap", nil, wire.Resources{Memory: 100, MemorySwap: -1}, map[string]string{"memory.max": "100", "memory.swap.max": "max"}, ""},
		{"memory alone, at start", nil, wire.Resources{Memory: 100}, map[string]string{"memory.max": "100", "memory.swap.max": "max"}, ""},
		{"memory alone keeps the sum", map[string]string{"memory.max": "100", "memory.swap.max": "150"}, wire.Resources{Memory: 200}, map[string]string{"memory.max": "200", "memory.swap.max": "50"}, ""},
		{"memory alone above the sum", map[string]string{"memory.max": "100", "memory.swap.max": "100"}, wire.Resources{Memory: 400}, nil, textSwapInTheWay},
		{"sum alone", map[string]string{"memory.max": "100"}, wire.Resources{MemorySwap: 120}, map[string]string{"memory.max": "100", "memory.swap.max": "20"}, ""},
		{"sum without memory", nil, wire.Resources{MemorySwap: 120}, nil, textSwapAlone},
		{"sum below memory", map[string]string{"memory.max": "100"}, wire.Resources{MemorySwap: 50}, nil, textSwapBelowMemory},
		{"all unlimited", map[string]string{"memory.max": "100", "memory.swap.max": "100"}, wire.Resources{Memory: -1}, map[string]string{"memory.max": "max", "memory.swap.max": "max"}, ""},
		{"reservation", nil, wire.Resources{MemoryReservation: 77, MemorySwappiness: ptr(10), OOMKillDisable: true}, map[string]string{"memory.low": "77"}, ""},
		{"pids", nil, wire.Resources{PidsLimit: ptr(12)}, map[string]string{"pids.max": "12"}, ""},
		{"pids 0", map[string]string{"pids.max": "12"}, wire.Resources{PidsLimit: ptr(0)}, map[string]string{"pids.max": "max"}, ""},
		{"cpuset", nil, wire.Resources{CpusetCpus: "1,3", CpusetMems: "0"}, map[string]string{"cpuset.cpus": "1,3", "cpuset.mems": "0"}, ""},
		{"cpuset not there", nil, wire.Resources{CpusetCpus: "3-4"}, nil, "Requested CPUs are not available - requested 3-4, available: 0-3"},
		{"mems not there", nil, wire.Resources{CpusetMems: "1"}, nil, "Requested memory nodes are not available - requested 1, available: 0"},
		{"io", nil, wire.Resources{ReadBps: lim}, map[string]string{"io.max": num + " rbps=4096"}, ""},
		{"io off", nil, wire.Resources{WriteIOps: []wire.BlkioLimit{{Path: disk}}}, map[string]string{"io.max": num + " wiops=max"}, ""},
		{"io weight", nil, wire.Resources{BlkioWeight: 500}, map[string]string{"io.weight": "default 4950"}, ""},
		{"bfq weight", map[string]string{"io.bfq.weight": "default 100"}, wire.Resources{BlkioWeight: 500}, map[string]string{"io.bfq.weight": "500"}, ""},
		{"io weight of a disk", nil, wire.Resources{BlkioWeightDevice: []wire.BlkioLimit{{Path: disk, Rate: 10}}}, map[string]string{"io.weight": num + " 1"}, ""},
		{"no such disk", nil, wire.Resources{ReadBps: []wire.BlkioLimit{{Path: "/dev/nope", Rate: 1}}}, nil, "/dev/nope"},
	} {
		files := v2Files()
		for k, v := range s.have {
			files[k] = v
		}
		c := fakeV2(t, files)
		c.fresh = s.have == nil
		err := c.Apply(&s.r)
		if s.text != "" {
			if wire.ClassOf(err) != wire.Invalid || !strings.Contains(err.Error(), s.text) {
				t.Errorf("%s: %v, want Invalid with %q", s.what, err, s.text)
			}
		} else if err != nil {
			t.Errorf("%s: %v", s.what, err)
		}
		for name, want := range s.want {
			// An ordinary file keeps the tail of a longer text; the kernel's do not.
			if got, err := read(c.fd, name); err != nil || !strings.HasPrefix(got, want) {
				t.Errorf("%s: %s is %q, %v; want %q", s.what, name, got, err, want)
			}
		}
	}
}

func TestConversions(t *testing.T) {
	for shares, want := range map[uint64]uint64{0: 1, 2: 1, 1024: 100, 262144: 10000, 1 << 40: 10000, 512: 59, 2048: 174} {
		if got := cpuWeight(shares); got != want {
			t.Errorf("cpuWeight(%d) = %d, want %d", shares, got, want)
		}
	}
	for w, want := range map[uint64]uint64{0: 1, 10: 1, 500: 4950, 1000: 10000} {
		if got := ioWeight(w); got != want {
			t.Errorf("ioWeight(%d) = %d, want %d", w, got, want)
		}
	}
}

func TestParseList(t *testing.T) {
	for text, want := range map[string]string{"0-3,8": "[0 1 2 3 8]", "": "[]", "3,1,1-2": "[1 2 3]", " 0\n": "[0]"} {
		if got, err := parseList(text); err != nil || fmt.Sprint(got) != want {
			t.Errorf("parseList(%q): %v, %v; want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"x", "1-", "-1", "3-1", "0-99999999", "1--2", "9999999999999999999"} {
		if got, err := parseList(text); err == nil {
			t.Errorf("parseList(%q): %v", text, got)
		}
	}
}

func TestParseMounts(t *testing.T) {
	m, ok := parseMount(`36 25 0:30 /docker/x /sys/fs/cgroup/my\040cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct`)
	if !ok || m.root != "/docker/x" || m.point != "/sys/fs/cgroup/my cpu" || m.kind != "cgroup" || m.options[1] != "cpu" {
		t.Errorf("%+v, %v", m, ok)
	}
	for _, bad := range []string{"", "x - y", "36 25 0:30 / /x"} {
		if m, ok := parseMount(bad); ok {
			t.Errorf("parseMount(%q): %+v", bad, m)
		}
	}
	for _, c := range [][3]string{{"/a/b", "/", "/a/b"}, {"/a/b", "/a", "/b"}, {"/a", "/a", "/"}, {"/ab", "/a", "/"}, {"/../x", "/", "/"}, {"", "/", "/"}} {
		if got := within(c[0], c[1]); got != c[2] {
			t.Errorf("within(%q, %q) = %q, want %q", c[0], c[1], got, c[2])
		}
	}
}

func TestParseCounters(t *testing.T) {
	var s wire.StatsReply
	err := parseSystem(&s, "cpu  10 20 30 40 50 60 70 80 90 100\ncpu0 1 2 3 4 5 6 7 8 9 10\ncpu1 1 2 3 4 5 6 7 8 9 10\nintr 1 2 3\n")
	if err != nil || s.SystemCPU != 280*10_000_000 || s.OnlineCPUs != 2 {
		t.Errorf("%d, %d cpus, %v", s.SystemCPU, s.OnlineCPUs, err)
	}
	got := fmt.Sprint(ioStat("8:0 rbytes=1 wbytes=2 rios=3 wios=4 dbytes=5 dios=6\n8:16 rbytes=7 wbytes=8\nx rbytes=1\n", "rbytes", "wbytes"))
	if got != "[{8 0 read 1} {8 0 write 2} {8 16 read 7} {8 16 write 8}]" {
		t.Error(got)
	}
	got = fmt.Sprint(blkioStat("8:0 Read 1\n8:0 Write 2\n8:0 Total 3\nTotal 3\n"))
	if got != "[{8 0 Read 1} {8 0 Write 2} {8 0 Total 3}]" {
		t.Error(got)
	}
	if n, ok := field("oom_kill_disable 0\nunder_oom 0\noom_kill 3", "oom_kill"); !ok || n != 3 {
		t.Errorf("oom_kill %d, %v", n, ok)
	}
}
