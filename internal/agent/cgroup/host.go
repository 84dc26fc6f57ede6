//go:build linux

package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// controllers are those that kiri sets limits with. cpuacct is not among them: cpu.stat of the v2 tree counts the same
// in every cgroup, without a controller, and so saves a directory a container. Neither is freezer: cgroup.freeze is
// as old (5.2) as what this package needs anyway (CLONE_INTO_CGROUP, 5.7). devices is used only where no BPF program
// can be attached.
var controllers = []string{"pids", "memory", "cpu", "cpuset", "blkio"}

// hierarchy is one mounted tree.
type hierarchy struct {
	controllers []string // of a v1 tree; those used here
	root        int      // directory of the mount
	mount       string   // where it is mounted, for messages; "" if only this process has it
	own         string   // the cgroup of this process in it, "/" at the top
	base        string   // below which kiri makes its directories, "" at the top
}

// Host is what the kernel offers: which hierarchies are mounted where.
type Host struct {
	v2      hierarchy
	v1      []hierarchy     // those with a controller that is used, in a fixed order
	devices *hierarchy      // the v1 devices tree, nil if there is none
	inV2    map[string]bool // controllers that the v2 tree has, by their v2 names
}

// Detect finds the mounted hierarchies. Where no v2 tree is mounted the kernel gives one that only this process sees.
func Detect() (*Host, error) {
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("finding the cgroup hierarchies: %w", err)
	}
	defer mounts.Close()
	own, err := ownPaths()
	if err != nil {
		return nil, err
	}
	h := &Host{v2: hierarchy{root: -1}, inV2: map[string]bool{}}
	lines := bufio.NewScanner(mounts)
	for lines.Scan() {
		m, ok := parseMount(lines.Text())
		if !ok {
			continue
		}
		switch {
		case m.kind == "cgroup2" && h.v2.root < 0:
			h.v2.mount, h.v2.own = m.point, within(own[""], m.root)
			if h.v2.root, err = openDir(unix.AT_FDCWD, m.point); err != nil {
				return nil, err
			}
		case m.kind == "cgroup":
			if err := h.addV1(m, own); err != nil {
				return nil, err
			}
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading /proc/self/mountinfo: %w", err)
	}
	if h.v2.root < 0 {
		if h.v2.root, err = privateV2(); err != nil {
			return nil, err
		}
		h.v2.own = own[""]
	}
	slices.SortFunc(h.v1, func(a, b hierarchy) int { return strings.Compare(a.controllers[0], b.controllers[0]) })
	text, err := read(h.v2.root, "cgroup.controllers")
	if err != nil {
		return nil, err
	}
	for _, c := range strings.Fields(text) {
		h.inV2[c] = true
	}
	h.v2.base = h.delegated()
	return h, nil
}

func (h *Host) addV1(m mount, own map[string]string) error {
	t := hierarchy{mount: m.point, root: -1}
	dev := slices.Contains(m.options, "devices")
	for _, c := range controllers {
		if slices.Contains(m.options, c) && h.tree(c) == nil {
			t.controllers = append(t.controllers, c)
		}
	}
	if t.controllers == nil && (!dev || h.devices != nil) {
		return nil
	}
	var err error
	if t.root, err = openDir(unix.AT_FDCWD, m.point); err != nil {
		return err
	}
	for _, o := range m.options {
		if p, ok := own[o]; ok {
			t.own = within(p, m.root)
		}
	}
	if t.controllers != nil {
		h.v1 = append(h.v1, t)
	}
	if dev && h.devices == nil {
		h.devices = &t
	}
	return nil
}

// privateV2 mounts the v2 tree on no path. Only a host that was booted with v1 alone has none.
func privateV2() (int, error) {
	fs, err := unix.Fsopen("cgroup2", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("opening a cgroup2 file system: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, fmt.Errorf("creating a cgroup2 file system: %w", err)
	}
	fd, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
	if err != nil {
		return -1, fmt.Errorf("mounting a cgroup2 file system: %w", err)
	}
	return fd, nil
}

// delegated finds the nearest cgroup at or above this process's own that its manager has handed over to us: systemd
// marks what Delegate=yes gave away so, and asks that nothing be made outside of it. Without a mark the top is ours,
// as it is for Docker's cgroupfs driver.
func (h *Host) delegated() string {
	path := strings.Trim(h.v2.own, "/")
	buf := make([]byte, 8)
	for path != "" {
		for _, attr := range []string{"trusted.delegate", "user.delegate"} {
			if fd, err := openDir(h.v2.root, path); err == nil {
				n, err := unix.Fgetxattr(fd, attr, buf)
				unix.Close(fd)
				if err == nil && string(buf[:n]) == "1" {
					return path
				}
			}
		}
		i := strings.LastIndexByte(path, '/')
		path = path[:max(i, 0)]
	}
	return ""
}

// tree finds the v1 hierarchy of a controller; nil if it has none or is in v2.
func (h *Host) tree(controller string) *hierarchy {
	for i := range h.v1 {
		if slices.Contains(h.v1[i].controllers, controller) {
			return &h.v1[i]
		}
	}
	return nil
}

// Version is 2 where no controller used is in a v1 hierarchy, else 1.
func (h *Host) Version() int {
	if len(h.v1) > 0 {
		return 1
	}
	return 2
}

// has tells whether limits of this controller can be set, by its v1 name.
func (h *Host) has(controller string) bool {
	return h.tree(controller) != nil || h.inV2[v2Name(controller)]
}

func v2Name(controller string) string {
	if controller == "blkio" {
		return "io"
	}
	return controller
}

// Features lists, as words, which limits can be set: memory, swap, swappiness, oom-kill-disable, cpu-shares, cpu-quota,
// cpu-realtime, cpuset, pids, blkio-weight, blkio-throttle. What is missing is left out of Apply in silence, as
// Docker does after its warning at create.
func (h *Host) Features() []string {
	var f []string
	add := func(word string, have bool) {
		if have {
			f = append(f, word)
		}
	}
	v1has := func(controller, file string) bool {
		t := h.tree(controller)
		return t != nil && exists(t.root, file)
	}
	mem := h.inV2["memory"] && h.tree("memory") == nil
	add("memory", h.has("memory"))
	add("swap", v1has("memory", "memory.memsw.limit_in_bytes") || mem && h.swapV2())
	add("swappiness", v1has("memory", "memory.swappiness"))
	add("oom-kill-disable", v1has("memory", "memory.oom_control"))
	add("cpu-shares", h.has("cpu"))
	add("cpu-quota", v1has("cpu", "cpu.cfs_quota_us") || h.tree("cpu") == nil && h.inV2["cpu"])
	add("cpu-realtime", v1has("cpu", "cpu.rt_runtime_us"))
	add("cpuset", h.has("cpuset"))
	add("pids", h.has("pids"))
	add("blkio-weight", v1has("blkio", "blkio.weight") || v1has("blkio", "blkio.bfq.weight") || h.tree("blkio") == nil && h.inV2["io"])
	add("blkio-throttle", v1has("blkio", "blkio.throttle.read_bps_device") || h.tree("blkio") == nil && h.inV2["io"])
	return f
}

// swapV2 looks for memory.swap.max in a cgroup below the top, which itself has no limits.
func (h *Host) swapV2() bool {
	names, err := subdirs(h.v2.root, ".")
	if err != nil {
		return false
	}
	for _, n := range names {
		if exists(h.v2.root, n+"/memory.max") {
			return exists(h.v2.root, n+"/memory.swap.max")
		}
	}
	return exists(h.v2.root, "memory.swap.max")
}

// mount is a line of mountinfo.
type mount struct {
	root, point, kind string
	options           []string // of the file system
}

func parseMount(line string) (mount, bool) {
	left, right, ok := strings.Cut(line, " - ")
	l, r := strings.Fields(left), strings.Fields(right)
	if !ok || len(l) < 6 || len(r) < 3 {
		return mount{}, false
	}
	return mount{root: unescape(l[3]), point: unescape(l[4]), kind: r[0], options: strings.Split(r[2], ",")}, true
}

// unescape turns the \040 forms of mountinfo back.
func unescape(s string) string {
	for _, e := range [...][2]string{{`\040`, " "}, {`\011`, "\t"}, {`\012`, "\n"}, {`\134`, `\`}} {
		s = strings.ReplaceAll(s, e[0], e[1])
	}
	return s
}

// ownPaths are the cgroups of this process by controller; "" is the v2 tree.
func ownPaths() (map[string]string, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("finding the cgroups of this process: %w", err)
	}
	own := map[string]string{}
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			continue
		}
		for _, c := range strings.Split(f[1], ",") {
			own[c] = f[2]
		}
	}
	if len(own) == 0 {
		return nil, errors.New("finding the cgroups of this process: /proc/self/cgroup is empty")
	}
	return own, nil
}

// within turns a path below the hierarchy's root into one below a mount of a part of it. A path outside of the mount,
// which a cgroup namespace shows as /.., is the top.
func within(path, root string) string {
	if root != "/" {
		rest, ok := strings.CutPrefix(path, root)
		if !ok || rest != "" && rest[0] != '/' {
			return "/"
		}
		path = rest
	}
	if path == "" || strings.HasPrefix(path, "/..") {
		return "/"
	}
	return path
}

// Close closes the descriptors of the mounts.
func (h *Host) Close() error {
	var failed error
	trees := []hierarchy{h.v2}
	trees = append(trees, h.v1...)
	shared := false
	for _, t := range h.v1 {
		shared = shared || h.devices != nil && t.root == h.devices.root
	}
	if h.devices != nil && !shared {
		trees = append(trees, *h.devices)
	}
	for _, t := range trees {
		failed = errors.Join(failed, unix.Close(t.root))
	}
	return failed
}
