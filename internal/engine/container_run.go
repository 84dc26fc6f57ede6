package engine

import (
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/blkiodev"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"

	"runkiri.com/kiri/internal/wire"
)

// runSpec makes the one frame that starts a container. Nothing is copied that the record can share.
func (e *Engine) runSpec(rec *containerRecord) (*wire.Run, error) {
	c, h := rec.Config, rec.Host
	sec, err := parseSecurity(h.SecurityOpt)
	if err != nil {
		return nil, err
	}
	r := &wire.Run{
		ID: rec.ID, Name: rec.Name, Run: rec.Run,
		Layers: rec.Layers, ReadOnly: h.ReadonlyRootfs,
		Args: append([]string{rec.Path}, rec.Args...), Env: environment(c), Cwd: c.WorkingDir, User: c.User, Groups: h.GroupAdd,
		TTY: c.Tty, Height: uint32(h.ConsoleSize[0]), Width: uint32(h.ConsoleSize[1]),
		OpenStdin: c.OpenStdin, StdinOnce: c.StdinOnce, Init: e.wantsInit(h),
		Hostname: c.Hostname, Domainname: c.Domainname,
		Log:         logConfigOf(c, h),
		Remove:      h.AutoRemove,
		ShmSize:     h.ShmSize,
		MaskedPaths: h.MaskedPaths, ReadonlyPaths: h.ReadonlyPaths,
		Privileged: h.Privileged, Caps: capsOf(h), NoNewPrivs: e.cfg.NoNewPrivileges, Seccomp: e.cfg.SeccompProfile,
		DeviceRules: h.DeviceCgroupRules, Sysctls: h.Sysctls, OOMScoreAdj: h.OomScoreAdj,
		UTS: string(h.UTSMode), CgroupParent: h.CgroupParent, Resources: wireResources(&h.Resources),
	}
	if h.CgroupnsMode.IsHost() {
		r.Cgroup = "host"
	}
	if r.CgroupParent == "" {
		r.CgroupParent = e.cfg.CgroupParent
	}
	if sec.noNewPrivs != nil {
		r.NoNewPrivs = *sec.noNewPrivs
	}
	if sec.seccomp != nil {
		r.Seccomp = *sec.seccomp
	} else if h.Privileged {
		r.Seccomp = "unconfined"
	}
	if sec.apparmor != "unconfined" {
		r.AppArmor = sec.apparmor
	}
	for i := range rec.Mounts {
		r.Mounts = append(r.Mounts, rec.Mounts[i].wire())
	}
	for target, opts := range h.Tmpfs {
		r.Mounts = append(r.Mounts, wire.Mount{Type: "tmpfs", Target: path.Clean(target), Options: opts})
	}
	if len(h.Tmpfs) > 0 {
		slices.SortStableFunc(r.Mounts, func(a, b wire.Mount) int {
			return strings.Count(a.Target, "/") - strings.Count(b.Target, "/")
		})
	}
	for _, d := range h.Devices {
		access := d.CgroupPermissions
		if access == "" {
			access = "rwm"
		}
		target := d.PathInContainer
		if target == "" {
			target = d.PathOnHost
		}
		r.Devices = append(r.Devices, wire.Device{Source: d.PathOnHost, Target: target, Access: access})
	}
	r.Rlimits = e.rlimits(h)
	if err := e.joins(rec, r); err != nil {
		return nil, err
	}
	return r, nil
}

func (e *Engine) wantsInit(h *container.HostConfig) bool {
	if h.Init != nil {
		return *h.Init
	}
	return e.cfg.Init
}

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// environment returns what a container's processes get: Docker's own variables, with the container's over them. A
// variable without a value takes one of them away. HOME is added by the agent, which knows the user.
func environment(c *container.Config) []string {
	env := make([]string, 0, len(c.Env)+3)
	env = append(env, "PATH="+defaultPath, "HOSTNAME="+c.Hostname)
	if c.Tty {
		env = append(env, "TERM=xterm")
	}
	return overlayEnv(env, c.Env)
}

func overlayEnv(env, over []string) []string {
	for _, v := range over {
		key, _, valued := strings.Cut(v, "=")
		i := slices.IndexFunc(env, func(s string) bool { return len(s) > len(key) && s[len(key)] == '=' && s[:len(key)] == key })
		switch {
		case i >= 0 && valued:
			env[i] = v
		case i >= 0:
			env = slices.Delete(env, i, i+1)
		case valued:
			env = append(env, v)
		}
	}
	return env
}

// logConfigOf adds the labels and variables that the log options ask to keep with each line.
func logConfigOf(c *container.Config, h *container.HostConfig) wire.LogConfig {
	l := wire.LogConfig{Driver: h.LogConfig.Type, Options: h.LogConfig.Config}
	if len(l.Options) == 0 {
		return l
	}
	attrs := map[string]string{}
	for name := range strings.SplitSeq(l.Options["labels"], ",") {
		if v, ok := c.Labels[name]; ok && name != "" {
			attrs[name] = v
		}
	}
	if names := l.Options["env"]; names != "" {
		for name := range strings.SplitSeq(names, ",") {
			for _, env := range c.Env {
				if k, v, ok := strings.Cut(env, "="); ok && k == name {
					attrs[k] = v
				}
			}
		}
	}
	if len(attrs) > 0 {
		l.Attrs = attrs
	}
	return l
}

func wireResources(r *container.Resources) wire.Resources {
	w := wire.Resources{
		Memory: r.Memory, MemorySwap: r.MemorySwap, MemoryReservation: r.MemoryReservation, MemorySwappiness: r.MemorySwappiness,
		OOMKillDisable: r.OomKillDisable != nil && *r.OomKillDisable,
		CPUShares:      uint64(r.CPUShares), CPUPeriod: uint64(r.CPUPeriod), CPUQuota: r.CPUQuota,
		CPURealtimePeriod: r.CPURealtimePeriod, CPURealtimeRuntime: r.CPURealtimeRuntime,
		CpusetCpus: r.CpusetCpus, CpusetMems: r.CpusetMems, PidsLimit: r.PidsLimit, BlkioWeight: r.BlkioWeight,
		ReadBps: throttles(r.BlkioDeviceReadBps), WriteBps: throttles(r.BlkioDeviceWriteBps),
		ReadIOps: throttles(r.BlkioDeviceReadIOps), WriteIOps: throttles(r.BlkioDeviceWriteIOps),
	}
	if r.NanoCPUs > 0 {
		w.CPUPeriod = 100_000 // us
		w.CPUQuota = r.NanoCPUs * 100_000 / 1e9
	}
	for _, d := range r.BlkioWeightDevice {
		w.BlkioWeightDevice = append(w.BlkioWeightDevice, wire.BlkioLimit{Path: d.Path, Rate: uint64(d.Weight)})
	}
	return w
}

func throttles(l []*blkiodev.ThrottleDevice) []wire.BlkioLimit {
	var out []wire.BlkioLimit
	for _, d := range l {
		if d != nil {
			out = append(out, wire.BlkioLimit{Path: d.Path, Rate: d.Rate})
		}
	}
	return out
}

// rlimits are the container's over the daemon's own defaults.
func (e *Engine) rlimits(h *container.HostConfig) []wire.Rlimit {
	if len(h.Ulimits) == 0 && len(e.cfg.DefaultUlimits) == 0 {
		return nil
	}
	var l []wire.Rlimit
	for _, u := range e.ulimits(h) {
		l = append(l, wire.Rlimit{Name: u.Name, Soft: uint64(u.Soft), Hard: uint64(u.Hard)})
	}
	return l
}

func (e *Engine) ulimits(h *container.HostConfig) []*container.Ulimit {
	l := h.Ulimits
	for _, u := range e.cfg.DefaultUlimits {
		if !slices.ContainsFunc(h.Ulimits, func(o *container.Ulimit) bool { return o.Name == u.Name }) {
			l = append(l[:len(l):len(l)], u)
		}
	}
	return l
}

// joins fills the namespaces that are shared with other containers or the host; those containers must run.
func (e *Engine) joins(rec *containerRecord, r *wire.Run) error {
	h := rec.Host
	switch {
	case rec.Config.NetworkDisabled || h.NetworkMode.IsNone():
		r.Net.Mode = "none"
	case h.NetworkMode.IsHost():
		r.Net.Mode = "host"
	case h.NetworkMode.IsContainer():
		id, err := e.joined(rec, h.NetworkMode.ConnectedContainer())
		if err != nil {
			return netJoinError(err)
		}
		r.Net.Mode, r.Net.Container = "container", id
	default:
		r.Net.Mode = "bridge"
		if ep := rec.Networks[network.NetworkBridge]; ep != nil {
			if len(ep.MacAddress) > 0 {
				r.Net.MAC = ep.MacAddress.String()
			}
		}
		r.Net.Ports = wirePorts(rec)
	}
	r.Net.DNS = e.cfg.DNS
	if len(h.DNS) > 0 {
		r.Net.DNS = addrs(h.DNS)
	}
	r.Net.DNSSearch, r.Net.DNSOptions, r.Net.ExtraHosts = e.cfg.DNSSearch, e.cfg.DNSOptions, e.extraHosts(h.ExtraHosts)
	if len(h.DNSSearch) > 0 {
		r.Net.DNSSearch = h.DNSSearch
	}
	if len(h.DNSOptions) > 0 {
		r.Net.DNSOptions = h.DNSOptions
	}
	r.IPC = string(h.IpcMode)
	if r.IPC == string(container.IPCModePrivate) {
		r.IPC = ""
	}
	if h.IpcMode.IsContainer() {
		id, err := e.joined(rec, h.IpcMode.Container())
		if err != nil {
			return errf(cerrdefs.ErrInvalidArgument, "failed to join IPC namespace: %w", err)
		}
		other, _ := e.containers.get(id)
		if snap := other.snapshot(); !snap.Host.IpcMode.IsShareable() && !snap.Host.IpcMode.IsHost() {
			return invalid("failed to join IPC namespace: container %s: non-shareable IPC (hint: use IpcMode:shareable for the donor container)", id)
		}
		r.IPC = id
	}
	r.PID = string(h.PidMode)
	if h.PidMode.IsContainer() {
		id, err := e.joined(rec, h.PidMode.Container())
		if err != nil {
			return errf(cerrdefs.ErrInvalidArgument, "failed to join PID namespace: %w", err)
		}
		r.PID = id
	}
	return nil
}

// joined returns the id of the container ref if it runs.
func (e *Engine) joined(rec *containerRecord, ref string) (string, error) {
	other, err := e.containers.get(ref)
	if err != nil {
		return "", err
	}
	if other.id == rec.ID {
		return "", invalid("cannot join own network namespace")
	}
	snap := other.snapshot()
	switch {
	case snap.State.Restarting:
		return "", conflict("Container %s is restarting, wait until the container is running", other.id)
	case !snap.State.Running:
		return "", conflict("container %s is not running", other.id)
	}
	return other.id, nil
}

func netJoinError(err error) error {
	if cerrdefs.IsConflict(err) {
		return conflict("cannot join network namespace of a non running container: %w", err)
	}
	return invalid("joining network namespace of container: %w", err)
}

func addrs(l []netip.Addr) []string {
	out := make([]string, len(l))
	for i, a := range l {
		out[i] = a.String()
	}
	return out
}

// extraHosts puts the bridge's gateway for the word host-gateway.
func (e *Engine) extraHosts(l []string) []string {
	out := l
	for i, h := range l {
		if name, addr, _ := strings.Cut(h, ":"); addr == "host-gateway" {
			if &out[0] == &l[0] {
				out = slices.Clone(l)
			}
			out[i] = name + ":" + e.agent.greeting().Bridge.Gateway
		}
	}
	return out
}

// wirePorts lists the ports to publish: the bindings, and with PublishAllPorts every exposed port without one.
func wirePorts(rec *containerRecord) []wire.Port {
	var l []wire.Port
	for port, bindings := range rec.Host.PortBindings {
		if len(bindings) == 0 {
			bindings = []network.PortBinding{{}}
		}
		for _, b := range bindings {
			p := wire.Port{Proto: string(port.Proto()), ContainerPort: int(port.Num())}
			if b.HostIP.IsValid() {
				p.HostIP = b.HostIP.String()
			}
			p.HostPort, _ = strconv.Atoi(b.HostPort)
			l = append(l, p)
		}
	}
	if rec.Host.PublishAllPorts {
		for port := range rec.Config.ExposedPorts {
			if _, bound := rec.Host.PortBindings[port]; !bound {
				l = append(l, wire.Port{Proto: string(port.Proto()), ContainerPort: int(port.Num())})
			}
		}
	}
	slices.SortFunc(l, func(a, b wire.Port) int {
		if a.Proto != b.Proto {
			return strings.Compare(a.Proto, b.Proto)
		}
		if a.ContainerPort != b.ContainerPort {
			return a.ContainerPort - b.ContainerPort
		}
		return strings.Compare(a.HostIP, b.HostIP)
	})
	return l
}
