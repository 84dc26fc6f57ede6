package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/moby/moby/api/types/blkiodev"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
	"github.com/spf13/pflag"
)

// containerFlags are the options of `create` that describe the container; `run` has them too.
type containerFlags struct {
	f *pflag.FlagSet // to know which were given

	attach, hosts, capAdd, capDrop, devices, deviceRules      []string
	dns, dnsOptions, dnsSearch, env, envFile, expose, groups  []string
	labels, labelFile, links, linkLocal, logOpts, publish     []string
	security, tmpfs, volumes, volumesFrom, aliases, storage   []string
	annotations, sysctls                                      map[string]string
	ulimits                                                   map[string]*container.Ulimit
	weightDevices                                             []*blkiodev.WeightDevice
	readBps, writeBps, readIOps, writeIOps                    []*blkiodev.ThrottleDevice
	mounts                                                    []mount.Mount
	nets                                                      []networkOpt
	blkioWeight                                               uint16
	cgroupParent, cgroupns, cidfile, cpusetCpus, cpusetMems   string
	cpuPeriod, cpuQuota, cpuRTPeriod, cpuRTRuntime, cpuShares int64
	nanoCPUs, memory, kernelMemory, reservation, swap         int64
	swappiness, pidsLimit, shmSize                            int64
	domainname, entrypoint, hostname, user, workdir           string
	healthCmd                                                 string
	healthInterval, healthTimeout, healthStart, healthStartIv time.Duration
	healthRetries                                             int
	init, interactive, tty, noHealth, oomKillDisable          bool
	privileged, publishAll, readOnly, rm                      bool
	ip, ip6, ipc, isolation, logDriver, mac, pid, restart     string
	runtime, stopSignal, userns, uts, volumeDriver            string
	oomScoreAdj, stopTimeout                                  int
}

func addContainerFlags(f *pflag.FlagSet) *containerFlags {
	o := &containerFlags{f: f}
	f.Var(list(&o.hosts, checkHost), "add-host", "Add a custom host-to-IP mapping (host:ip)")
	f.Var(&mapValue{m: &o.annotations}, "annotation", "Add an annotation to the container (passed through to the OCI runtime)")
	f.VarP(list(&o.attach, checkAttach), "attach", "a", "Attach to STDIN, STDOUT or STDERR")
	f.Uint16Var(&o.blkioWeight, "blkio-weight", 0, "Block IO (relative weight), between 10 and 1000, or 0 to disable (default 0)")
	f.Var(&weightValue{&o.weightDevices}, "blkio-weight-device", "Block IO weight (relative device weight)")
	f.Var(list(&o.capAdd, nil), "cap-add", "Add Linux capabilities")
	f.Var(list(&o.capDrop, nil), "cap-drop", "Drop Linux capabilities")
	f.StringVar(&o.cgroupParent, "cgroup-parent", "", "Optional parent cgroup for the container")
	f.StringVar(&o.cgroupns, "cgroupns", "", "Cgroup namespace to use (host|private)")
	f.StringVar(&o.cidfile, "cidfile", "", "Write the container ID to the file")
	f.Int64Var(&o.cpuPeriod, "cpu-period", 0, "Limit CPU CFS (Completely Fair Scheduler) period, in microseconds")
	f.Int64Var(&o.cpuQuota, "cpu-quota", 0, "Limit CPU CFS (Completely Fair Scheduler) quota, in microseconds")
	f.Int64Var(&o.cpuRTPeriod, "cpu-rt-period", 0, "Limit CPU real-time period in microseconds")
	f.Int64Var(&o.cpuRTRuntime, "cpu-rt-runtime", 0, "Limit CPU real-time runtime in microseconds")
	f.Int64VarP(&o.cpuShares, "cpu-shares", "c", 0, "CPU shares (relative weight)")
	f.Var(&cpusValue{&o.nanoCPUs}, "cpus", "Number of CPUs")
	f.StringVar(&o.cpusetCpus, "cpuset-cpus", "", "CPUs in which to allow execution (0-3, 0,1)")
	f.StringVar(&o.cpusetMems, "cpuset-mems", "", "MEMs in which to allow execution (0-3, 0,1)")
	f.Var(list(&o.devices, nil), "device", "Add a host device to the container")
	f.Var(list(&o.deviceRules, checkDeviceRule), "device-cgroup-rule", "Add a rule to the cgroup allowed devices list")
	f.Var(&throttleValue{&o.readBps, true}, "device-read-bps", "Limit read rate (bytes per second) from a device")
	f.Var(&throttleValue{&o.readIOps, false}, "device-read-iops", "Limit read rate (IO per second) from a device")
	f.Var(&throttleValue{&o.writeBps, true}, "device-write-bps", "Limit write rate (bytes per second) to a device")
	f.Var(&throttleValue{&o.writeIOps, false}, "device-write-iops", "Limit write rate (IO per second) to a device")
	f.Bool("disable-content-trust", true, "Skip image verification")
	f.Var(list(&o.dns, checkIP), "dns", "Set custom DNS servers")
	f.Var(list(&o.dnsOptions, nil), "dns-option", "Set DNS options")
	f.Var(list(&o.dnsOptions, nil), "dns-opt", "Set DNS options")
	f.Var(list(&o.dnsSearch, checkDNSSearch), "dns-search", "Set custom DNS search domains")
	f.StringVar(&o.domainname, "domainname", "", "Container NIS domain name")
	f.StringVar(&o.entrypoint, "entrypoint", "", "Overwrite the default ENTRYPOINT of the image")
	f.VarP(list(&o.env, checkEnv), "env", "e", "Set environment variables")
	f.Var(list(&o.envFile, nil), "env-file", "Read in a file of environment variables")
	f.Var(list(&o.expose, nil), "expose", "Expose a port or a range of ports")
	f.Var(gpuValue{}, "gpus", "GPU devices to add to the container (refused: kiri has no GPU driver)")
	f.Var(list(&o.groups, nil), "group-add", "Add additional groups to join")
	f.StringVar(&o.healthCmd, "health-cmd", "", "Command to run to check health")
	f.DurationVar(&o.healthInterval, "health-interval", 0, "Time between running the check (ms|s|m|h) (default 0s)")
	f.IntVar(&o.healthRetries, "health-retries", 0, "Consecutive failures needed to report unhealthy")
	f.DurationVar(&o.healthStartIv, "health-start-interval", 0, "Time between running the check during the start period (ms|s|m|h) (default 0s)")
	f.DurationVar(&o.healthStart, "health-start-period", 0, "Start period for the container to initialize before starting health-retries countdown (ms|s|m|h) (default 0s)")
	f.DurationVar(&o.healthTimeout, "health-timeout", 0, "Maximum time to allow one check to run (ms|s|m|h) (default 0s)")
	f.StringVarP(&o.hostname, "hostname", "h", "", "Container host name")
	f.BoolVar(&o.init, "init", false, "Run an init inside the container that forwards signals and reaps processes")
	f.BoolVarP(&o.interactive, "interactive", "i", false, "Keep STDIN open even if not attached")
	f.StringVar(&o.ip, "ip", "", "IPv4 address (e.g., 172.30.100.104)")
	f.StringVar(&o.ip6, "ip6", "", "IPv6 address (e.g., 2001:db8::33)")
	f.StringVar(&o.ipc, "ipc", "", "IPC mode to use")
	f.StringVar(&o.isolation, "isolation", "", "Container isolation technology")
	f.Var(&bytesValue{n: &o.kernelMemory}, "kernel-memory", "Kernel memory limit (has no effect: the kernel dropped it)")
	f.VarP(list(&o.labels, checkLabel), "label", "l", "Set meta data on a container")
	f.Var(list(&o.labelFile, nil), "label-file", "Read in a line delimited file of labels")
	f.Var(list(&o.links, checkLink), "link", "Add link to another container")
	f.Var(list(&o.linkLocal, nil), "link-local-ip", "Container IPv4/IPv6 link-local addresses")
	f.StringVar(&o.logDriver, "log-driver", "", "Logging driver for the container")
	f.Var(list(&o.logOpts, nil), "log-opt", "Log driver options")
	f.StringVar(&o.mac, "mac-address", "", "Container MAC address (e.g., 92:d0:c6:0a:29:33)")
	f.VarP(&bytesValue{n: &o.memory}, "memory", "m", "Memory limit")
	f.Var(&bytesValue{n: &o.reservation}, "memory-reservation", "Memory soft limit")
	f.Var(&bytesValue{n: &o.swap, swap: true}, "memory-swap", "Swap limit equal to memory plus swap: '-1' to enable unlimited swap")
	f.Int64Var(&o.swappiness, "memory-swappiness", -1, "Tune container memory swappiness (0 to 100)")
	f.Var(&mountValue{&o.mounts}, "mount", "Attach a filesystem mount to the container")
	f.Var(&networkValue{&o.nets}, "net", "Connect a container to a network")
	f.Var(list(&o.aliases, nil), "net-alias", "Add network-scoped alias for the container")
	f.Var(&networkValue{&o.nets}, "network", "Connect a container to a network")
	f.Var(list(&o.aliases, nil), "network-alias", "Add network-scoped alias for the container")
	f.BoolVar(&o.noHealth, "no-healthcheck", false, "Disable any container-specified HEALTHCHECK")
	f.BoolVar(&o.oomKillDisable, "oom-kill-disable", false, "Disable OOM Killer")
	f.IntVar(&o.oomScoreAdj, "oom-score-adj", 0, "Tune host's OOM preferences (-1000 to 1000)")
	f.StringVar(&o.pid, "pid", "", "PID namespace to use")
	f.Int64Var(&o.pidsLimit, "pids-limit", 0, "Tune container pids limit (set -1 for unlimited)")
	f.BoolVar(&o.privileged, "privileged", false, "Give extended privileges to this container")
	f.VarP(list(&o.publish, nil), "publish", "p", "Publish a container's port(s) to the host")
	f.BoolVarP(&o.publishAll, "publish-all", "P", false, "Publish all exposed ports to random ports")
	f.BoolVar(&o.readOnly, "read-only", false, "Mount the container's root filesystem as read only")
	f.StringVar(&o.restart, "restart", "no", "Restart policy to apply when a container exits")
	f.BoolVar(&o.rm, "rm", false, "Automatically remove the container and its associated anonymous volumes when it exits")
	f.StringVar(&o.runtime, "runtime", "", "Runtime to use for this container")
	f.Var(list(&o.security, nil), "security-opt", "Security Options")
	f.Var(&bytesValue{n: &o.shmSize}, "shm-size", "Size of /dev/shm")
	f.StringVar(&o.stopSignal, "stop-signal", "", "Signal to stop the container")
	f.IntVar(&o.stopTimeout, "stop-timeout", 0, "Timeout (in seconds) to stop a container")
	f.Var(list(&o.storage, nil), "storage-opt", "Storage driver options for the container")
	f.Var(&mapValue{m: &o.sysctls, check: checkSysctl}, "sysctl", "Sysctl options")
	f.Var(list(&o.tmpfs, nil), "tmpfs", "Mount a tmpfs directory")
	f.BoolVarP(&o.tty, "tty", "t", false, "Allocate a pseudo-TTY")
	f.Var(&ulimitValue{&o.ulimits}, "ulimit", "Ulimit options")
	f.StringVarP(&o.user, "user", "u", "", "Username or UID (format: <name|uid>[:<group|gid>])")
	f.StringVar(&o.userns, "userns", "", "User namespace to use")
	f.StringVar(&o.uts, "uts", "", "UTS namespace to use")
	f.VarP(list(&o.volumes, nil), "volume", "v", "Bind mount a volume")
	f.StringVar(&o.volumeDriver, "volume-driver", "", "Optional volume driver for the container")
	f.Var(list(&o.volumesFrom, nil), "volumes-from", "Mount volumes from the specified container(s)")
	f.StringVarP(&o.workdir, "workdir", "w", "", "Working directory inside the container")
	for _, hidden := range []string{"dns-opt", "net", "net-alias", "kernel-memory", "disable-content-trust"} {
		f.Lookup(hidden).Hidden = true
	}
	return o
}

// request turns the flags into what POST /containers/create takes.
func (o *containerFlags) request(image string, args []string) (*container.Config, *container.HostConfig, *network.NetworkingConfig, error) {
	cfg := &container.Config{
		Hostname: o.hostname, Domainname: o.domainname, User: o.user, Tty: o.tty, OpenStdin: o.interactive, Image: image,
		WorkingDir: o.workdir, StopSignal: o.stopSignal,
	}
	fail := func(err error) (*container.Config, *container.HostConfig, *network.NetworkingConfig, error) {
		return nil, nil, nil, err
	}
	cfg.AttachStdin = slices.Contains(o.attach, "stdin") || o.interactive
	cfg.AttachStdout = len(o.attach) == 0 || slices.Contains(o.attach, "stdout")
	cfg.AttachStderr = len(o.attach) == 0 || slices.Contains(o.attach, "stderr")
	cfg.StdinOnce = cfg.OpenStdin && cfg.AttachStdin
	if len(args) > 0 {
		cfg.Cmd = args
	}
	if o.f.Changed("entrypoint") {
		cfg.Entrypoint = []string{o.entrypoint}
	}
	if o.f.Changed("stop-timeout") {
		cfg.StopTimeout = &o.stopTimeout
	}
	var err error
	if cfg.Env, err = envOf(o.envFile, o.env); err != nil {
		return fail(err)
	}
	if cfg.Labels, err = labelsOf(o.labelFile, o.labels); err != nil {
		return fail(err)
	}
	if cfg.Healthcheck, err = o.health(); err != nil {
		return fail(err)
	}
	if o.swappiness != -1 && (o.swappiness < 0 || o.swappiness > 100) {
		return fail(fmt.Errorf("invalid value: %d. Valid memory swappiness range is 0-100", o.swappiness))
	}
	for _, m := range []struct {
		flag, val, kind string
		ok              bool
	}{
		{"pid", o.pid, "PID", o.pid == "" || o.pid == "host" || joins(o.pid)},
		{"uts", o.uts, "UTS", o.uts == "" || o.uts == "host"},
		{"userns", o.userns, "USER", o.userns == "" || o.userns == "host"},
		{"cgroupns", o.cgroupns, "CGROUP", o.cgroupns == "" || o.cgroupns == "host" || o.cgroupns == "private"},
	} {
		if !m.ok {
			return fail(fmt.Errorf("--%s: invalid %s mode", m.flag, m.kind))
		}
	}
	host := &container.HostConfig{
		ContainerIDFile: o.cidfile, AutoRemove: o.rm, VolumeDriver: o.volumeDriver, VolumesFrom: o.volumesFrom, Annotations: o.annotations,
		CapAdd: capabilities(o.capAdd), CapDrop: capabilities(o.capDrop), CgroupnsMode: container.CgroupnsMode(o.cgroupns),
		DNSOptions: o.dnsOptions, DNSSearch: o.dnsSearch, ExtraHosts: o.hosts, GroupAdd: o.groups, IpcMode: container.IpcMode(o.ipc),
		Links: o.links, OomScoreAdj: o.oomScoreAdj, PidMode: container.PidMode(o.pid), Privileged: o.privileged,
		PublishAllPorts: o.publishAll, ReadonlyRootfs: o.readOnly, UTSMode: container.UTSMode(o.uts),
		UsernsMode: container.UsernsMode(o.userns), ShmSize: o.shmSize, Sysctls: o.sysctls, Runtime: o.runtime,
		Isolation: container.Isolation(o.isolation), Mounts: o.mounts,
		Resources: container.Resources{
			CPUShares: o.cpuShares, Memory: o.memory, NanoCPUs: o.nanoCPUs, CgroupParent: o.cgroupParent, BlkioWeight: o.blkioWeight,
			BlkioWeightDevice: o.weightDevices, BlkioDeviceReadBps: o.readBps, BlkioDeviceWriteBps: o.writeBps,
			BlkioDeviceReadIOps: o.readIOps, BlkioDeviceWriteIOps: o.writeIOps, CPUPeriod: o.cpuPeriod, CPUQuota: o.cpuQuota,
			CPURealtimePeriod: o.cpuRTPeriod, CPURealtimeRuntime: o.cpuRTRuntime, CpusetCpus: o.cpusetCpus, CpusetMems: o.cpusetMems,
			DeviceCgroupRules: o.deviceRules, MemoryReservation: o.reservation, MemorySwap: o.swap,
		},
	}
	// A pointer is sent only when the flag was given: its absence is what asks for the engine's own default.
	if o.f.Changed("memory-swappiness") {
		host.MemorySwappiness = &o.swappiness
	}
	if o.f.Changed("oom-kill-disable") {
		host.OomKillDisable = &o.oomKillDisable
	}
	if o.f.Changed("pids-limit") {
		host.PidsLimit = &o.pidsLimit
	}
	if o.f.Changed("init") {
		host.Init = &o.init
	}
	for _, name := range slices.Sorted(mapKeys(o.ulimits)) {
		host.Ulimits = append(host.Ulimits, o.ulimits[name])
	}
	for _, d := range o.devices {
		dev, err := parseDevice(d)
		if err != nil {
			return fail(err)
		}
		host.Devices = append(host.Devices, dev)
	}
	for _, s := range o.dns {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return fail(err)
		}
		host.DNS = append(host.DNS, a)
	}
	if host.RestartPolicy, err = restartPolicy(o.restart); err != nil {
		return fail(err)
	}
	if o.rm && !host.RestartPolicy.IsNone() {
		return fail(errors.New("conflicting options: cannot specify both --restart and --rm"))
	}
	if host.SecurityOpt, host.MaskedPaths, host.ReadonlyPaths, err = securityOptions(o.security); err != nil {
		return fail(err)
	}
	if host.LogConfig, err = logConfig(o.logDriver, o.logOpts); err != nil {
		return fail(err)
	}
	if host.Binds, cfg.Volumes, err = o.binds(); err != nil {
		return fail(err)
	}
	for _, s := range o.storage {
		k, v, ok := strings.Cut(s, "=")
		if !ok {
			return fail(errors.New("invalid storage option"))
		}
		if host.StorageOpt == nil {
			host.StorageOpt = map[string]string{}
		}
		host.StorageOpt[k] = v
	}
	for _, t := range o.tmpfs {
		k, v, _ := strings.Cut(t, ":")
		if host.Tmpfs == nil {
			host.Tmpfs = map[string]string{}
		}
		host.Tmpfs[k] = v
	}
	if cfg.ExposedPorts, host.PortBindings, err = ports(o.publish, o.expose); err != nil {
		return fail(err)
	}
	mode, endpoints, err := o.networks()
	if err != nil {
		return fail(err)
	}
	host.NetworkMode = mode
	return cfg, host, &network.NetworkingConfig{EndpointsConfig: endpoints}, nil
}

func joins(mode string) bool {
	name, ok := strings.CutPrefix(mode, "container:")
	return ok && name != ""
}

func mapKeys[M ~map[string]V, V any](m M) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// capabilities writes each name as Docker's CLI sends it: upper case with CAP_, once, ALL as it is; "ALL" makes the others idle.
func capabilities(names []string) []string {
	var out []string
	for _, n := range names {
		n = strings.ToUpper(strings.TrimSpace(n))
		if n != "ALL" && !strings.HasPrefix(n, "CAP_") {
			n = "CAP_" + n
		}
		if !slices.Contains(out, n) {
			out = append(out, n)
		}
	}
	if slices.Contains(out, "ALL") {
		return []string{"ALL"}
	}
	slices.Sort(out)
	return out
}

func (o *containerFlags) health() (*container.HealthConfig, error) {
	given := o.healthCmd != "" || o.healthInterval != 0 || o.healthTimeout != 0 || o.healthStart != 0 || o.healthRetries != 0 || o.healthStartIv != 0
	if o.noHealth {
		if given {
			return nil, errors.New("--no-healthcheck conflicts with --health-* options")
		}
		return &container.HealthConfig{Test: []string{"NONE"}}, nil
	}
	if !given {
		return nil, nil
	}
	for _, v := range []struct {
		name string
		neg  bool
	}{
		{"interval", o.healthInterval < 0}, {"timeout", o.healthTimeout < 0}, {"retries", o.healthRetries < 0},
		{"start-period", o.healthStart < 0}, {"start-interval", o.healthStartIv < 0},
	} {
		if v.neg {
			return nil, fmt.Errorf("--health-%s cannot be negative", v.name)
		}
	}
	h := &container.HealthConfig{Interval: o.healthInterval, Timeout: o.healthTimeout, StartPeriod: o.healthStart, StartInterval: o.healthStartIv, Retries: o.healthRetries}
	if o.healthCmd != "" {
		h.Test = []string{"CMD-SHELL", o.healthCmd}
	}
	return h, nil
}

// binds sorts -v into mounts of something and anonymous volumes, and makes a relative source absolute.
func (o *containerFlags) binds() ([]string, map[string]struct{}, error) {
	var binds []string
	var anonymous map[string]struct{}
	for _, v := range o.volumes {
		if v == "" {
			return nil, nil, errors.New("invalid empty volume spec")
		}
		src, rest, ok := strings.Cut(v, ":")
		if !ok || src == "" {
			if anonymous == nil {
				anonymous = map[string]struct{}{}
			}
			anonymous[v] = struct{}{}
			continue
		}
		if strings.HasPrefix(src, ".") {
			abs, err := filepath.Abs(src)
			if err != nil {
				return nil, nil, fmt.Errorf("resolving bind source %s: %w", src, err)
			}
			v = abs + ":" + rest
		}
		if !slices.Contains(binds, v) {
			binds = append(binds, v)
		}
	}
	return binds, anonymous, nil
}

func restartPolicy(v string) (container.RestartPolicy, error) {
	if v == "" {
		return container.RestartPolicy{}, nil
	}
	name, count, ok := strings.Cut(v, ":")
	if name == "" {
		return container.RestartPolicy{}, errors.New("invalid restart policy format: no policy provided before colon")
	}
	p := container.RestartPolicy{Name: container.RestartPolicyMode(name)}
	if ok && count != "" {
		n, err := strconv.Atoi(count)
		if err != nil {
			return p, errors.New("invalid restart policy format: maximum retry count must be an integer")
		}
		p.MaximumRetryCount = n
	}
	return p, nil
}

// securityOptions reads a seccomp profile from its file, because only the caller can, and turns systempaths=unconfined into empty lists.
func securityOptions(opts []string) (out, masked, readonly []string, err error) {
	for _, o := range opts {
		if o == "systempaths=unconfined" {
			masked, readonly = []string{}, []string{}
			continue
		}
		key, val, ok := strings.Cut(o, "=")
		if !ok {
			key, val, ok = strings.Cut(o, ":")
		}
		if !ok && key != "no-new-privileges" {
			return nil, nil, nil, fmt.Errorf("Invalid --security-opt: %q", o) //lint:ignore ST1005 the words of Docker's CLI
		}
		if key == "seccomp" && val != "unconfined" && val != "builtin" {
			b, err := os.ReadFile(val)
			if err != nil {
				return nil, nil, nil, fmt.Errorf("opening seccomp profile (%s) failed: %w", val, err)
			}
			var compact bytes.Buffer
			if err := json.Compact(&compact, b); err != nil {
				return nil, nil, nil, fmt.Errorf("compacting json for seccomp profile (%s) failed: %w", val, err)
			}
			o = "seccomp=" + compact.String()
		}
		out = append(out, o)
	}
	return out, masked, readonly, nil
}

func logConfig(driver string, opts []string) (container.LogConfig, error) {
	lc := container.LogConfig{Type: driver}
	for _, o := range opts {
		if lc.Config == nil {
			lc.Config = map[string]string{}
		}
		k, v, _ := strings.Cut(o, "=")
		lc.Config[k] = v
	}
	if driver == "none" && len(opts) > 0 {
		return lc, fmt.Errorf("invalid logging opts for driver %s", driver)
	}
	return lc, nil
}

// readLines gives the lines of an --env-file or --label-file without comments and blank ones.
func readLines(kind, file string) ([]string, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var out []string
	sc := bufio.NewScanner(f)
	for n := 1; sc.Scan(); n++ {
		b := sc.Bytes()
		if n == 1 {
			b = bytes.TrimPrefix(b, []byte("\xef\xbb\xbf"))
		}
		if !utf8.Valid(b) {
			return nil, fmt.Errorf("invalid %s file (%s): invalid utf8 bytes at line %d: %v", kind, file, n, b)
		}
		line := strings.TrimLeftFunc(string(b), unicode.IsSpace)
		if line == "" || line[0] == '#' {
			continue
		}
		name, _, _ := strings.Cut(line, "=")
		if strings.ContainsFunc(name, unicode.IsSpace) {
			return nil, fmt.Errorf("invalid %s file (%s): variable '%s' contains whitespaces", kind, file, name)
		}
		if name == "" {
			return nil, fmt.Errorf("invalid %s file (%s): no variable name on line '%s'", kind, file, line)
		}
		out = append(out, line)
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("reading %s file %s: %w", kind, file, err)
	}
	return out, nil
}

// lookupEnv is a variable of the caller's environment.
func lookupEnv(name string) (string, bool) { return os.LookupEnv(name) }

// envOf joins files and -e, which wins by coming last. A bare name in a file is dropped when the caller has no such variable.
func envOf(files, given []string) ([]string, error) {
	var env []string
	for _, file := range files {
		lines, err := readLines("env", file)
		if err != nil {
			return nil, err
		}
		for _, l := range lines {
			if !strings.Contains(l, "=") {
				v, ok := lookupEnv(l)
				if !ok {
					continue
				}
				l += "=" + v
			}
			env = append(env, l)
		}
	}
	return append(env, given...), nil
}

func labelsOf(files, given []string) (map[string]string, error) {
	var all []string
	for _, file := range files {
		lines, err := readLines("label", file)
		if err != nil {
			return nil, err
		}
		all = append(all, lines...)
	}
	all = append(all, given...)
	if len(all) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(all))
	for _, l := range all {
		k, v, _ := strings.Cut(l, "=")
		m[k] = v
	}
	return m, nil
}

// ports reads -p and --expose. -p is [IP:][HOST]:CONTAINER[/PROTOCOL] with ranges of equal length on both sides.
func ports(publish, expose []string) (network.PortSet, network.PortMap, error) {
	var set network.PortSet
	var bound network.PortMap
	add := func(p network.Port) {
		if set == nil {
			set = network.PortSet{}
		}
		set[p] = struct{}{}
	}
	for _, spec := range publish {
		if strings.Contains(spec, "=") {
			var err error
			if spec, err = longPort(spec); err != nil {
				return nil, nil, err
			}
		}
		ip, hostPart, ctrPart, err := splitPort(spec)
		if err != nil {
			return nil, nil, err
		}
		ctrNum, proto, hasProto := strings.Cut(ctrPart, "/")
		if !hasProto {
			proto = "tcp"
		}
		ctr, err := network.ParsePortRange(ctrNum + "/" + proto)
		if err != nil {
			if proto = strings.ToLower(proto); proto != "tcp" && proto != "udp" && proto != "sctp" {
				return nil, nil, fmt.Errorf("invalid proto: %s", proto)
			}
			return nil, nil, fmt.Errorf("invalid containerPort: %s", ctrNum)
		}
		n := int(ctr.End()-ctr.Start()) + 1
		var host network.PortRange
		if hostPart != "" {
			if host, err = network.ParsePortRange(hostPart); err != nil {
				return nil, nil, fmt.Errorf("invalid hostPort: %s", hostPart)
			}
			// One container port may be given a range to choose a free host port from; anything else must match one to one.
			if hn := int(host.End()-host.Start()) + 1; hn != n && n != 1 {
				return nil, nil, fmt.Errorf("invalid ranges specified for container and host Ports: %s and %s", ctrNum, hostPart)
			}
		}
		i := 0
		for p := range ctr.All() {
			b := network.PortBinding{HostIP: ip}
			switch {
			case hostPart == "":
			case n == 1:
				b.HostPort = hostPart
			default:
				b.HostPort = strconv.Itoa(int(host.Start()) + i)
			}
			i++
			if bound == nil {
				bound = network.PortMap{}
			}
			bound[p] = append(bound[p], b)
			add(p)
		}
	}
	for _, e := range expose {
		if strings.Contains(e, ":") {
			return nil, nil, fmt.Errorf("invalid port format for --expose: %s", e)
		}
		r, err := network.ParsePortRange(e)
		if err != nil {
			return nil, nil, fmt.Errorf("invalid range format for --expose: %s, error: %w", e, err)
		}
		for p := range r.All() {
			add(p)
		}
	}
	return set, bound, nil
}

// splitPort cuts IP:HOST:CONTAINER, where the address may be in brackets.
func splitPort(spec string) (ip netip.Addr, host, ctr string, err error) {
	rest, ctr, ok := cutLast(spec, ":")
	if !ok {
		return ip, "", spec, noPort(spec)
	}
	addr, host, ok := cutLast(rest, ":")
	if !ok {
		return ip, rest, ctr, noPort(ctr)
	}
	trimmed := addr
	if strings.HasPrefix(addr, "[") && strings.HasSuffix(addr, "]") {
		trimmed = addr[1 : len(addr)-1]
	}
	if trimmed != "" {
		if ip, err = netip.ParseAddr(trimmed); err != nil {
			return ip, "", "", fmt.Errorf("invalid IP address: %s", addr)
		}
	}
	return ip, host, ctr, noPort(ctr)
}

func noPort(ctr string) error {
	if n, _, _ := strings.Cut(ctr, "/"); n == "" {
		return fmt.Errorf("no port specified: %s<empty>", ctr)
	}
	return nil
}

func cutLast(s, sep string) (before, after string, ok bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// longPort turns target=80,published=8080,protocol=tcp into the short form. mode is a word of swarm and changes nothing here.
func longPort(spec string) (string, error) {
	fields, err := csvFields(spec)
	if err != nil {
		return "", err
	}
	var target, published, proto string
	for _, f := range fields {
		k, v, ok := strings.Cut(f, "=")
		if !ok || v == "" {
			return "", fmt.Errorf("invalid field: %s", f)
		}
		switch strings.ToLower(k) {
		case "target":
			target = v
		case "published":
			published = v
		case "protocol":
			proto = "/" + strings.ToLower(v)
		case "mode":
		default:
			return "", fmt.Errorf("invalid field key: %s", k)
		}
	}
	if target == "" {
		return "", fmt.Errorf("missing mandatory field 'target' in %q", spec)
	}
	return published + ":" + target + proto, nil
}
