package engine

import (
	"fmt"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"

	"runkiri.com/kiri/internal/wire"
)

const (
	minMemory   = 6 << 20 // bytes: less does not start a process reliably (Docker's limit)
	maxHostname = 64      // HOST_NAME_MAX
)

// validateCreate checks what can be checked without the image and puts Docker's defaults where nothing is said.
// What Docker honours and kiri does not is refused by name, never ignored.
func (e *Engine) validateCreate(config *container.Config, host *container.HostConfig, nets *network.NetworkingConfig) (warnings []string, err error) {
	if host.RestartPolicy.Name == "" {
		host.RestartPolicy.Name = container.RestartPolicyDisabled
	}
	for _, check := range []func() error{
		func() error { return validateConfig(config) },
		func() error { return e.validateHost(config, host) },
		func() error { return notBuilt(host) },
		func() error { return validateNetworks(host, nets) },
	} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	warnings, err = e.validateResources(&host.Resources, false)
	if err != nil {
		return warnings, err
	}
	if host.NetworkMode.IsHost() && len(host.PortBindings) > 0 {
		warnings = append(warnings, "Published ports are discarded when using host network mode")
	}
	return warnings, nil
}

func validateConfig(c *container.Config) error {
	if c.WorkingDir != "" {
		if !path.IsAbs(c.WorkingDir) {
			return invalid("the working directory '%s' is invalid, it needs to be an absolute path", c.WorkingDir)
		}
		c.WorkingDir = path.Clean(c.WorkingDir)
	}
	if c.StopSignal != "" {
		if _, err := parseSignal(c.StopSignal); err != nil {
			return err
		}
	}
	for _, env := range c.Env {
		if k, _, _ := strings.Cut(env, "="); k == "" {
			return invalid("invalid environment variable: %s", env)
		}
	}
	if len(c.Hostname) > maxHostname {
		return invalid("hostname %q is too long (maximum %d bytes)", c.Hostname, maxHostname)
	}
	return validateHealth(c.Healthcheck)
}

func validateHealth(h *container.HealthConfig) error {
	if h == nil {
		return nil
	}
	for _, d := range []struct {
		name string
		d    time.Duration
	}{{"Interval", h.Interval}, {"Timeout", h.Timeout}, {"StartPeriod", h.StartPeriod}, {"StartInterval", h.StartInterval}} {
		if d.d != 0 && d.d < container.MinimumDuration {
			return invalid("%s in Healthcheck cannot be less than %s", d.name, container.MinimumDuration)
		}
	}
	if h.Retries < 0 {
		return invalid("Retries in Healthcheck cannot be negative")
	}
	return nil
}

func (e *Engine) validateHost(config *container.Config, h *container.HostConfig) error {
	if h.AutoRemove && !h.RestartPolicy.IsNone() {
		return invalid("can't create 'AutoRemove' container with restart policy")
	}
	for i := range h.Mounts {
		if _, err := parseMount(&h.Mounts[i]); err != nil {
			return err
		}
	}
	for _, host := range h.ExtraHosts {
		if err := validateExtraHost(host); err != nil {
			return err
		}
	}
	if err := validatePorts(h.PortBindings); err != nil {
		return err
	}
	if err := container.ValidateRestartPolicy(h.RestartPolicy); err != nil {
		return invalid("%w", err)
	}
	for _, l := range []struct {
		name string
		caps []string
	}{{"CapAdd", h.CapAdd}, {"CapDrop", h.CapDrop}} {
		if _, err := normalizeCaps(l.caps); err != nil {
			return invalid("invalid %s: %w", l.name, err)
		}
	}
	if !h.Isolation.IsDefault() {
		return invalid("invalid isolation '%s' on linux", h.Isolation)
	}
	if _, empty := h.Annotations[""]; empty {
		return invalid("invalid Annotations: the empty string is not permitted as an annotation key")
	}
	if _, err := parseSecurity(h.SecurityOpt); err != nil {
		return err
	}
	return validateNamespaces(config, h)
}

func validateNamespaces(config *container.Config, h *container.HostConfig) error {
	switch {
	case !h.IpcMode.Valid():
		return invalid("invalid IPC mode: %v", h.IpcMode)
	case !h.PidMode.Valid():
		return invalid("invalid PID mode: %v", h.PidMode)
	case !h.UTSMode.Valid():
		return invalid("invalid UTS mode: %v", h.UTSMode)
	case !h.CgroupnsMode.Valid():
		return invalid("invalid cgroup namespace mode: %v", h.CgroupnsMode)
	case !h.UsernsMode.Valid():
		return invalid("invalid user namespace mode: %v", h.UsernsMode)
	case h.ShmSize < 0:
		return invalid("SHM size can not be less than 0")
	case h.OomScoreAdj < -1000 || h.OomScoreAdj > 1000:
		return invalid("Invalid value %d, range for oom score adj is [-1000, 1000]", h.OomScoreAdj)
	case h.UTSMode.IsHost() && config.Hostname != "":
		return invalid("conflicting options: hostname and the UTS mode")
	}
	if h.NetworkMode.IsContainer() {
		switch {
		case h.NetworkMode.ConnectedContainer() == "":
			return invalid("Container id or name must be specified in network mode 'container:'")
		case config.Hostname != "":
			return invalid("conflicting options: hostname and the network mode")
		case len(h.Links) > 0:
			return invalid("conflicting options: container type network can't be used with links. This would result in undefined behavior")
		case len(h.DNS) > 0:
			return invalid("conflicting options: dns and the network mode")
		case len(h.ExtraHosts) > 0:
			return invalid("conflicting options: custom host-to-IP mapping and the network mode")
		case len(h.PortBindings) > 0 || h.PublishAllPorts:
			return invalid("conflicting options: port publishing and the container type network mode")
		case len(config.ExposedPorts) > 0:
			return invalid("conflicting options: port exposing and the container type network mode")
		}
	}
	return validateSysctls(h)
}

func validateExtraHost(s string) error {
	name, addr, ok := strings.Cut(s, ":")
	if !ok || name == "" {
		return invalid("bad format for add-host: %q", s)
	}
	if addr == "host-gateway" {
		return nil
	}
	if !isIP(strings.Trim(addr, "[]")) {
		return invalid("invalid IP address in add-host: %q", addr)
	}
	return nil
}

func validatePorts(ports network.PortMap) error {
	for port, bindings := range ports {
		if !port.IsValid() || port.Num() == 0 {
			return invalid("invalid port specification: %q", port.String())
		}
		switch port.Proto() {
		case network.TCP, network.UDP, network.SCTP:
		default:
			return invalid("invalid port specification: %q", port.String())
		}
		for _, b := range bindings {
			if b.HostPort == "" {
				continue
			}
			r, err := network.ParsePortRange(b.HostPort)
			if err != nil {
				return invalid("invalid port specification: %q", b.HostPort)
			}
			if r.Start() != r.End() {
				return NotBuilt("a range of host ports to choose from (" + b.HostPort + ")")
			}
		}
	}
	return nil
}

// notBuilt names a setting that Docker honours and kiri does not.
func notBuilt(h *container.HostConfig) error {
	for _, f := range []struct {
		set  bool
		what string
	}{
		{len(h.Links) > 0, "HostConfig.Links (legacy links)"},
		{h.Cgroup != "", "HostConfig.Cgroup"},
		{len(h.StorageOpt) > 0, "HostConfig.StorageOpt"},
		{h.Umask != nil, "HostConfig.Umask"},
		{h.Runtime == "microvm", "HostConfig.Runtime microvm"},
	} {
		if f.set {
			return NotBuilt(f.what)
		}
	}
	switch h.Runtime {
	case "", defaultRuntime, "io.containerd.runc.v2":
	default:
		return invalid("unknown or invalid runtime name: %s", h.Runtime)
	}
	if len(h.DeviceRequests) > 0 {
		r := h.DeviceRequests[0]
		if r.Driver == "cdi" {
			return NotBuilt("HostConfig.DeviceRequests of the driver cdi")
		}
		return invalid("could not select device driver %q with capabilities: %v", r.Driver, r.Capabilities)
	}
	return nil
}

// defaultRuntime is the name under which containers are started: Docker's, because clients ask for it by name. What
// stands behind it is kiri-init.
const defaultRuntime = "runc"

func validateNetworks(h *container.HostConfig, nets *network.NetworkingConfig) error {
	mode := h.NetworkMode
	if mode.IsUserDefined() {
		return NotBuilt("the network " + strconv.Quote(string(mode)) + ": networks other than bridge, host and none")
	}
	if nets == nil {
		return nil
	}
	for name, ep := range nets.EndpointsConfig {
		if ep == nil {
			return invalid("invalid config for network %s: EndpointsConfig is nil", name)
		}
		if container.NetworkMode(name).IsUserDefined() {
			return NotBuilt("the network " + strconv.Quote(name) + ": networks other than bridge, host and none")
		}
		if name != mode.NetworkName() && (name != network.NetworkDefault || !mode.IsBridge()) {
			if mode.IsHost() || mode.IsContainer() {
				return invalid("container sharing network namespace with another container or host cannot be connected to any other network")
			}
			return invalid("container cannot be connected to multiple networks with one of the networks in private (none) mode")
		}
		problem := ""
		switch {
		case ep.IPAMConfig != nil && (ep.IPAMConfig.IPv4Address.IsValid() || ep.IPAMConfig.IPv6Address.IsValid()):
			problem = "user-specified IP address is supported on user-defined networks only"
		case len(ep.Aliases) > 0:
			problem = "network-scoped aliases are only supported for user-defined networks"
		}
		if problem != "" {
			return invalid("invalid config for network %s: invalid endpoint settings:\n%s", name, problem)
		}
		if len(ep.Links) > 0 {
			return NotBuilt("EndpointSettings.Links")
		}
		if len(ep.DriverOpts) > 0 {
			return NotBuilt("EndpointSettings.DriverOpts")
		}
	}
	return nil
}

// validateResources checks limits and drops, with a warning, those that the agent's kernel has not.
func (e *Engine) validateResources(r *container.Resources, update bool) (warnings []string, err error) {
	hello := e.agent.greeting()
	lacks := func(feature string) bool { return !slices.Contains(hello.Features, feature) }
	warn := func(s string) { warnings = append(warnings, s) }

	if r.MemorySwappiness != nil && *r.MemorySwappiness == -1 {
		r.MemorySwappiness = nil
	}
	if r.Memory != 0 && r.Memory < minMemory {
		return warnings, invalid("Minimum memory limit allowed is 6MB")
	}
	if r.Memory > 0 && lacks("memory") {
		warn("Your kernel does not support memory limit capabilities or the cgroup is not mounted. Limitation discarded.")
		r.Memory, r.MemorySwap = 0, -1
	}
	if r.Memory > 0 && r.MemorySwap != -1 && lacks("swap") {
		warn("Your kernel does not support swap limit capabilities or the cgroup is not mounted. Memory limited without swap.")
		r.MemorySwap = -1
	}
	switch {
	case r.Memory > 0 && r.MemorySwap > 0 && r.MemorySwap < r.Memory:
		return warnings, invalid("Minimum memoryswap limit should be larger than memory limit, see usage")
	case r.Memory == 0 && r.MemorySwap > 0 && !update:
		return warnings, invalid("You should always set the Memory limit when using Memoryswap limit, see usage")
	case r.MemorySwappiness != nil && (*r.MemorySwappiness < 0 || *r.MemorySwappiness > 100):
		return warnings, invalid("Invalid value: %v, valid memory swappiness range is 0-100", *r.MemorySwappiness)
	case r.MemoryReservation > 0 && r.MemoryReservation < minMemory:
		return warnings, invalid("Minimum memory reservation allowed is 6MB")
	case r.Memory > 0 && r.MemoryReservation > 0 && r.Memory < r.MemoryReservation:
		return warnings, invalid("Minimum memory limit can not be less than memory reservation limit, see usage")
	}
	if r.MemorySwappiness != nil && lacks("swappiness") {
		warn("Your kernel does not support memory swappiness capabilities or the cgroup is not mounted. Memory swappiness discarded.")
		r.MemorySwappiness = nil
	}
	if r.OomKillDisable != nil && lacks("oom-kill-disable") {
		if *r.OomKillDisable {
			warn("Your kernel does not support OomKillDisable. OomKillDisable discarded.")
		}
		r.OomKillDisable = nil
	}
	if r.OomKillDisable != nil && *r.OomKillDisable && r.Memory == 0 {
		warn("OOM killer is disabled for the container, but no memory limit is set, this can result in the system running out of resources.")
	}
	if r.PidsLimit != nil && lacks("pids") {
		if *r.PidsLimit > 0 {
			warn("Your kernel does not support PIDs limit capabilities or the cgroup is not mounted. PIDs limit discarded.")
		}
		r.PidsLimit = nil
	}
	if r.CPUShares > 0 && lacks("cpu-shares") {
		warn("Your kernel does not support CPU shares or the cgroup is not mounted. Shares discarded.")
		r.CPUShares = 0
	}
	if r.NanoCPUs > 0 && lacks("cpu-quota") {
		return warnings, invalid("NanoCPUs can not be set, as your kernel does not support CPU CFS scheduler or the cgroup is not mounted")
	}
	if (r.CPUPeriod != 0 || r.CPUQuota != 0) && lacks("cpu-quota") {
		warn("Your kernel does not support CPU CFS scheduler. CPU period/quota discarded.")
		r.CPUPeriod, r.CPUQuota = 0, 0
	}
	if err := validateCPU(r, hello); err != nil {
		return warnings, err
	}
	if r.BlkioWeight > 0 && lacks("blkio-weight") {
		warn("Your kernel does not support Block I/O weight or the cgroup is not mounted. Weight discarded.")
		r.BlkioWeight = 0
	}
	if len(r.BlkioWeightDevice) > 0 && lacks("blkio-weight") {
		warn("Your kernel does not support Block I/O weight_device or the cgroup is not mounted. Weight-device discarded.")
		r.BlkioWeightDevice = nil
	}
	if len(r.BlkioDeviceReadBps)+len(r.BlkioDeviceWriteBps)+len(r.BlkioDeviceReadIOps)+len(r.BlkioDeviceWriteIOps) > 0 && lacks("blkio-throttle") {
		warn("Your kernel does not support Block I/O limits or the cgroup is not mounted. Block I/O limits discarded.")
		r.BlkioDeviceReadBps, r.BlkioDeviceWriteBps, r.BlkioDeviceReadIOps, r.BlkioDeviceWriteIOps = nil, nil, nil, nil
	}
	if (r.CpusetCpus != "" || r.CpusetMems != "") && lacks("cpuset") {
		warn("Your kernel does not support cpuset or the cgroup is not mounted. Cpuset discarded.")
		r.CpusetCpus, r.CpusetMems = "", ""
	}
	if r.CPUPercent > 0 {
		warn("linux does not support CPU percent. Percent discarded.")
		r.CPUPercent = 0
	}
	return warnings, validateBlkio(r)
}

func validateCPU(r *container.Resources, hello *wire.HelloReply) error {
	ncpu := hello.NCPU
	if ncpu == 0 {
		ncpu = runtime.NumCPU()
	}
	switch {
	case r.NanoCPUs > 0 && r.CPUPeriod > 0:
		return invalid("Conflicting options: Nano CPUs and CPU Period cannot both be set")
	case r.NanoCPUs > 0 && r.CPUQuota > 0:
		return invalid("Conflicting options: Nano CPUs and CPU Quota cannot both be set")
	case r.NanoCPUs < 0 || r.NanoCPUs > int64(ncpu)*1e9:
		return invalid("range of CPUs is from 0.01 to %[1]d.00, as there are only %[1]d CPUs available", ncpu)
	case r.CPUPeriod != 0 && (r.CPUPeriod < 1000 || r.CPUPeriod > 1000000):
		return invalid("CPU cfs period can not be less than 1ms (i.e. 1000) or larger than 1s (i.e. 1000000)")
	case r.CPUQuota > 0 && r.CPUQuota < 1000:
		return invalid("CPU cfs quota can not be less than 1ms (i.e. 1000)")
	case r.CPUShares < 0:
		return invalid("invalid CPU shares (%d): value must be a positive integer", r.CPUShares)
	case (r.CPURealtimePeriod != 0 || r.CPURealtimeRuntime != 0) && !slices.Contains(hello.Features, "cpu-realtime"):
		return invalid("kernel does not support CPU real-time scheduler")
	case r.CPURealtimePeriod != 0 && r.CPURealtimeRuntime > r.CPURealtimePeriod:
		return invalid("cpu real-time runtime cannot be higher than cpu real-time period")
	}
	for _, set := range []struct{ what, list, kind string }{{"CPUs", r.CpusetCpus, "cpus"}, {"memory nodes", r.CpusetMems, "mems"}} {
		highest, err := parseCPUList(set.list)
		if err != nil {
			return invalid("Invalid value %s for cpuset %s: %w", set.list, set.kind, err)
		}
		// Which memory nodes there are is the kernel's to say.
		if set.kind == "cpus" && highest >= ncpu {
			return invalid("Requested %s are not available - requested %s, available: 0-%d", set.what, set.list, ncpu-1)
		}
	}
	return nil
}

// parseCPUList reads the kernel's list format, "0-2,7", and returns the highest number, -1 for an empty list.
func parseCPUList(list string) (int, error) {
	highest := -1
	if list == "" {
		return highest, nil
	}
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		a, err := strconv.ParseUint(from, 10, 13)
		if err != nil {
			return 0, fmt.Errorf("invalid format: %s", part)
		}
		b := a
		if isRange {
			if b, err = strconv.ParseUint(to, 10, 13); err != nil || b < a {
				return 0, fmt.Errorf("invalid format: %s", part)
			}
		}
		highest = max(highest, int(b))
	}
	return highest, nil
}

func validateBlkio(r *container.Resources) error {
	if r.BlkioWeight > 0 && (r.BlkioWeight < 10 || r.BlkioWeight > 1000) {
		return invalid("Range of blkio weight is from 10 to 1000")
	}
	if r.IOMaximumBandwidth != 0 || r.IOMaximumIOps != 0 {
		return invalid("Invalid QoS settings: linux does not support Maximum IO Bandwidth or Maximum IO IOps")
	}
	for _, d := range r.BlkioWeightDevice {
		if d == nil || d.Path == "" {
			return invalid("invalid blkio weight device: it has no path")
		}
	}
	return nil
}
