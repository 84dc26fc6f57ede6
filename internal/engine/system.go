package engine

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/moby/api/types/build"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/registry"
	"github.com/moby/moby/api/types/swarm"
	"github.com/moby/moby/api/types/system"
	"github.com/moby/moby/api/types/volume"
)

// The Engine API versions that the types used here are of; the edge answers each in its own form.
const (
	apiVersion    = "1.57"
	minAPIVersion = "1.24"
)

// Info tells about the engine and the system its containers run on.
func (e *Engine) Info(ctx context.Context) (*system.Info, error) {
	hello := e.agent.greeting()
	lacks := func(feature string) bool { return !slices.Contains(hello.Features, feature) }
	name, _ := os.Hostname()
	v := &system.Info{
		ID: e.id, Name: name, Images: e.images.count(),
		Driver: storageDriver, DriverStatus: [][2]string{{"driver-type", "kiri layers by DiffID"}},
		Plugins: system.PluginsInfo{
			Volume: []string{volumeDriver}, Network: []string{"bridge", "host", "null"}, Log: []string{"json-file", "local", "none"},
		},
		MemoryLimit: !lacks("memory"), SwapLimit: !lacks("swap"), CPUCfsPeriod: !lacks("cpu-quota"), CPUCfsQuota: !lacks("cpu-quota"),
		CPUShares: !lacks("cpu-shares"), CPUSet: !lacks("cpuset"), PidsLimit: !lacks("pids"),
		OomKillDisable: !lacks("oom-kill-disable"), IPv4Forwarding: hello.Bridge.Name != "",
		Debug: e.cfg.Debug, NFd: openFiles(), NGoroutines: runtime.NumGoroutine(), NEventsListener: int(e.events.n.Load()),
		SystemTime: time.Now().Format(time.RFC3339Nano), LoggingDriver: cmp.Or(e.cfg.LogDriver, "json-file"), CgroupDriver: "cgroupfs",
		CgroupVersion: strconv.Itoa(hello.CgroupVersion), KernelVersion: hello.Kernel, OSType: "linux", Architecture: machine(hello.Arch),
		IndexServerAddress: "https://index.docker.io/v1/", RegistryConfig: e.registries(), NCPU: hello.NCPU, MemTotal: hello.MemTotal,
		DockerRootDir: e.cfg.DataRoot, Labels: e.cfg.Labels, ServerVersion: e.cfg.Version,
		HTTPProxy: proxy("HTTP_PROXY"), HTTPSProxy: proxy("HTTPS_PROXY"), NoProxy: proxy("NO_PROXY"),
		Runtimes:       map[string]system.RuntimeWithStatus{defaultRuntime: {Runtime: system.Runtime{Path: e.cfg.InitPath}}},
		DefaultRuntime: defaultRuntime, Swarm: swarm.Info{LocalNodeState: swarm.LocalNodeStateInactive},
		LiveRestoreEnabled: e.cfg.LiveRestore, InitBinary: "kiri-init", CDISpecDirs: []string{},
		SecurityOptions: []string{"name=seccomp,profile=builtin", "name=cgroupns"},
		FirewallBackend: &system.FirewallInfo{Driver: "nftables"},
		Warnings:        append([]string{}, hello.Warnings...),
	}
	v.OperatingSystem, v.OSVersion = osRelease()
	if e.cfg.SeccompProfile != "" {
		v.SecurityOptions[0] = "name=seccomp,profile=" + map[bool]string{true: "unconfined", false: "custom"}[e.cfg.SeccompProfile == "unconfined"]
		v.Warnings = append(v.Warnings, "WARNING: daemon is not using the default seccomp profile")
	}
	if e.cfg.NoNewPrivileges {
		v.SecurityOptions = append(v.SecurityOptions, "name=no-new-privileges")
	}
	for _, w := range []struct{ feature, text string }{
		{"memory", "No memory limit support"}, {"swap", "No swap limit support"}, {"cpu-quota", "No cpu cfs quota support"},
		{"cpu-shares", "No cpu shares support"}, {"cpuset", "No cpuset support"}, {"pids", "No pids limit support"},
	} {
		if lacks(w.feature) {
			v.Warnings = append(v.Warnings, "WARNING: "+w.text)
		}
	}
	for _, p := range e.cfg.DefaultAddressPools {
		if base, err := netip.ParsePrefix(p.Base); err == nil {
			v.DefaultAddressPools = append(v.DefaultAddressPools, system.NetworkAddressPool{Base: base, Size: p.Size})
		}
	}
	for _, c := range e.containers.all() {
		c.mu.Lock()
		status := c.status()
		c.mu.Unlock()
		v.Containers++
		switch status {
		case container.StateRunning:
			v.ContainersRunning++
		case container.StatePaused:
			v.ContainersPaused++
		default:
			v.ContainersStopped++
		}
	}
	return v, nil
}

// registries tells which registries are trusted without TLS: loopback always.
func (e *Engine) registries() *registry.ServiceConfig {
	c := &registry.ServiceConfig{
		InsecureRegistryCIDRs: []netip.Prefix{netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("127.0.0.0/8")},
		IndexConfigs:          map[string]*registry.IndexInfo{},
		Mirrors:               append([]string{}, e.cfg.RegistryMirrors...),
	}
	c.IndexConfigs["docker.io"] = &registry.IndexInfo{Name: "docker.io", Mirrors: c.Mirrors, Secure: true, Official: true}
	for _, r := range e.cfg.InsecureRegistries {
		if p, err := netip.ParsePrefix(r); err == nil {
			c.InsecureRegistryCIDRs = append(c.InsecureRegistryCIDRs, p)
		} else {
			c.IndexConfigs[r] = &registry.IndexInfo{Name: r, Mirrors: []string{}}
		}
	}
	return c
}

// machine is uname's word for a Go architecture.
func machine(arch string) string {
	switch arch {
	case "amd64":
		return "x86_64"
	case "arm64":
		return "aarch64"
	}
	return arch
}

// proxy is the daemon's own proxy setting, without the password in it.
func proxy(name string) string {
	v := cmp.Or(os.Getenv(name), os.Getenv(strings.ToLower(name)))
	scheme, rest, ok := strings.Cut(v, "://")
	if !ok {
		return v
	}
	if i := strings.LastIndex(rest, "@"); i >= 0 {
		rest = "xxxxx:xxxxx" + rest[i:]
	}
	return scheme + "://" + rest
}

func openFiles() int {
	l, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return -1
	}
	return len(l)
}

// osRelease reads the name and the version of the system, os-release(5).
func osRelease() (name, version string) {
	name = runtime.GOOS
	for _, path := range []string{"/etc/os-release", "/usr/lib/os-release"} {
		f, err := os.Open(path)
		if err != nil {
			continue
		}
		defer f.Close()
		for s := bufio.NewScanner(f); s.Scan(); {
			k, v, _ := strings.Cut(s.Text(), "=")
			v = strings.Trim(v, `"'`)
			switch k {
			case "PRETTY_NAME":
				name = v
			case "VERSION_ID":
				version = v
			}
		}
		break
	}
	return name, version
}

// Version tells the versions of the engine and its parts.
func (e *Engine) Version(ctx context.Context) (*system.VersionResponse, error) {
	hello := e.agent.greeting()
	arch := cmp.Or(hello.Arch, runtime.GOARCH)
	details := map[string]string{
		"ApiVersion": apiVersion, "MinAPIVersion": minAPIVersion, "GitCommit": e.cfg.GitCommit, "GoVersion": runtime.Version(),
		"Os": "linux", "Arch": arch, "BuildTime": e.cfg.BuildTime, "KernelVersion": hello.Kernel, "Experimental": "false",
	}
	return &system.VersionResponse{
		Platform: system.PlatformInfo{Name: "kiri"}, Version: e.cfg.Version, APIVersion: apiVersion, MinAPIVersion: minAPIVersion,
		Os: "linux", Arch: arch, GitCommit: e.cfg.GitCommit, GoVersion: runtime.Version(), KernelVersion: hello.Kernel,
		BuildTime: e.cfg.BuildTime,
		Components: []system.ComponentVersion{
			{Name: "Engine", Version: e.cfg.Version, Details: details},
			{Name: "kiri-init", Version: hello.Agent, Details: map[string]string{"Wire": fmt.Sprint(hello.Version)}},
		},
	}, nil
}

// DiskUsage counts what the engine's objects take on disk.
func (e *Engine) DiskUsage(ctx context.Context, opts DiskUsageOptions) (*system.DiskUsage, error) {
	all := !opts.Containers && !opts.Images && !opts.Volumes && !opts.BuildCache
	du := &system.DiskUsage{}
	if all || opts.Containers {
		u, err := e.containerUsage(ctx, opts.Verbose)
		if err != nil {
			return nil, err
		}
		du.ContainerUsage = u
	}
	if all || opts.Images {
		u, err := e.images.diskUsage(opts.Verbose)
		if err != nil {
			return nil, err
		}
		du.ImageUsage = u
	}
	if all || opts.Volumes {
		du.VolumeUsage = e.volumeUsage(ctx, opts.Verbose)
	}
	if all || opts.BuildCache {
		du.BuildCacheUsage = &build.DiskUsage{}
	}
	return du, nil
}

func (e *Engine) containerUsage(ctx context.Context, verbose bool) (*container.DiskUsage, error) {
	l, err := e.ContainerList(ctx, ListOptions{All: true, Size: true})
	if err != nil {
		return nil, err
	}
	u := &container.DiskUsage{TotalCount: int64(len(l))}
	for _, c := range l {
		u.TotalSize += c.SizeRw
		switch c.State {
		case container.StateRunning, container.StatePaused, container.StateRestarting:
			u.ActiveCount++
		default:
			u.Reclaimable += c.SizeRw
		}
	}
	if verbose {
		u.Items = l
	}
	return u, nil
}

func (e *Engine) volumeUsage(ctx context.Context, verbose bool) *volume.DiskUsage {
	list, users := e.volumes.list()
	u := &volume.DiskUsage{TotalCount: int64(len(list))}
	for _, v := range list {
		api := v.api()
		api.UsageData = &volume.UsageData{RefCount: int64(users[v.Name]), Size: e.volumeSize(ctx, v.Name)}
		if size := max(api.UsageData.Size, 0); users[v.Name] > 0 {
			u.ActiveCount++
			u.TotalSize += size
		} else {
			u.TotalSize += size
			u.Reclaimable += size
		}
		if verbose {
			u.Items = append(u.Items, api)
		}
	}
	return u
}

// Auth checks credentials against a registry, as `docker login` asks.
func (e *Engine) Auth(ctx context.Context, auth *registry.AuthConfig) (*registry.AuthResponse, error) {
	status, err := e.images.registry.Login(ctx, *auth)
	if err != nil {
		return nil, err
	}
	return &registry.AuthResponse{Status: status}, nil
}
