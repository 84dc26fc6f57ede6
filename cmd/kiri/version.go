package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/system"
	"github.com/spf13/pflag"
)

func cmdVersion() *command {
	return &command{
		name: "version", use: "[OPTIONS]", short: "Show the kiri version information",
		example: "  kiri version\n  kiri version --format '{{.Server.Version}}'", max: 0,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			format := f.StringP("format", "f", "", "Format output using a custom template: 'json', or a Go TEMPLATE")
			return func([]string) error { return c.version(*format) }
		},
	}
}

// clientVersion has the field names of docker's, which templates use.
type clientVersion struct {
	Version           string
	APIVersion        string `json:"ApiVersion"`
	DefaultAPIVersion string
	GitCommit         string
	GoVersion         string
	Os                string
	Arch              string
	BuildTime         string `json:",omitempty"`
	Context           string
}

type serverVersion struct {
	system.VersionResponse
	Platform   struct{ Name string }
	Components []versionComponent `json:",omitempty"`
	// The fields that docker's templates have always had, whatever version the types are of.
	Version       string
	APIVersion    string `json:"ApiVersion"`
	MinAPIVersion string `json:"MinAPIVersion,omitempty"`
	GitCommit     string
	GoVersion     string
	Os            string
	Arch          string
	KernelVersion string `json:",omitempty"`
	Experimental  bool   `json:",omitempty"`
	BuildTime     string `json:",omitempty"`
}

type versionComponent struct {
	Name    string
	Version string
	Details map[string]string `json:",omitempty"`
}

func (c *cli) version(format string) error {
	v := struct {
		Client clientVersion
		Server *serverVersion `json:",omitempty"`
	}{Client: clientVersion{Version: version, APIVersion: apiVersion, DefaultAPIVersion: apiVersion, GitCommit: gitCommit, GoVersion: runtime.Version(), Os: runtime.GOOS, Arch: runtime.GOARCH, Context: prog}}
	cl, err := c.client()
	if err == nil {
		v.Server = &serverVersion{}
		if err = cl.call("GET", "/version", nil, nil, v.Server); err != nil {
			v.Server = nil
		}
	}
	if format != "" {
		if perr := c.printValue(format, v); perr != nil {
			return perr
		}
		return err
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Client: %s\n Version:           %s\n API version:       %s\n Go version:        %s\n Git commit:        %s\n OS/Arch:           %s/%s\n Context:           %s\n",
		prog, v.Client.Version, v.Client.APIVersion, v.Client.GoVersion, v.Client.GitCommit, v.Client.Os, v.Client.Arch, v.Client.Context)
	if s := v.Server; s != nil {
		fmt.Fprintf(&b, "\nServer:%s\n", map[bool]string{true: " " + s.Platform.Name, false: ""}[s.Platform.Name != ""])
		for _, comp := range s.Components {
			fmt.Fprintf(&b, " %s:\n  Version:          %s\n", comp.Name, comp.Version)
			d := comp.Details
			if api := d["ApiVersion"]; api != "" {
				fmt.Fprintf(&b, "  API version:      %s (minimum version %s)\n  Go version:       %s\n", api, d["MinAPIVersion"], d["GoVersion"])
			}
			if commit, ok := d["GitCommit"]; ok {
				fmt.Fprintf(&b, "  Git commit:       %s\n", commit)
			}
			if built := d["BuildTime"]; built != "" {
				fmt.Fprintf(&b, "  Built:            %s\n", ctime(built))
			}
			if d["Os"] != "" {
				fmt.Fprintf(&b, "  OS/Arch:          %s/%s\n", d["Os"], d["Arch"])
			}
			if exp := d["Experimental"]; exp != "" {
				fmt.Fprintf(&b, "  Experimental:     %s\n", exp)
			}
		}
		if len(s.Components) == 0 {
			fmt.Fprintf(&b, " Version:           %s\n API version:       %s (minimum version %s)\n", s.Version, s.APIVersion, s.MinAPIVersion)
		}
	}
	fmt.Fprint(c.out, b.String())
	return err
}

func ctime(s string) string {
	if t, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return t.Format(time.ANSIC)
	}
	return s
}

func (c *cli) printVersionLine() {
	fmt.Fprintf(c.out, "%s version %s, build %s\n", prog, version, gitCommit)
}

func cmdInfo() *command {
	return &command{
		name: "info", long: []string{"system info"}, use: "[OPTIONS]", short: "Display system-wide information",
		example: "  kiri info\n  kiri info --format '{{.CgroupVersion}}'", max: 0,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			format := f.StringP("format", "f", "", "Format output using a custom template: 'json', or a Go TEMPLATE")
			return func([]string) error { return c.info(*format) }
		},
	}
}

func (c *cli) info(format string) error {
	type clientInfo struct {
		Debug     bool
		Version   string
		GitCommit string
		GoVersion string
		Os, Arch  string
		Context   string
	}
	client := clientInfo{c.global.debug, version, gitCommit, runtime.Version(), runtime.GOOS, runtime.GOARCH, prog}
	cl, err := c.client()
	var raw []byte
	if err == nil {
		raw, err = cl.raw("GET", "/info", nil)
	}
	v := struct {
		*system.Info
		ServerErrors []string `json:",omitempty"`
		ClientInfo   clientInfo
	}{ClientInfo: client}
	if err == nil {
		v.Info = &system.Info{}
		if err := json.Unmarshal(raw, v.Info); err != nil {
			return fmt.Errorf("decoding the answer of the kiri daemon: %w", err)
		}
	} else {
		v.ServerErrors = []string{err.Error()}
	}
	if format != "" {
		if perr := c.printValue(format, v); perr != nil {
			return perr
		}
		return err
	}
	fmt.Fprintf(c.out, "Client: %s\n Version:    %s\n Context:    %s\n Debug Mode: %v\n\nServer:\n", prog, version, prog, client.Debug)
	if err != nil {
		return err
	}
	fmt.Fprint(c.out, serverInfo(v.Info))
	for _, w := range v.Info.Warnings {
		fmt.Fprintln(c.err, w)
	}
	return nil
}

// serverInfo writes the lines of `docker info` below "Server:", in the same order.
func serverInfo(i *system.Info) string {
	var b strings.Builder
	line := func(format string, a ...any) { fmt.Fprintf(&b, " "+format+"\n", a...) }
	some := func(name, v string) {
		if v != "" {
			line("%s: %s", name, v)
		}
	}
	line("Containers: %d", i.Containers)
	line(" Running: %d", i.ContainersRunning)
	line(" Paused: %d", i.ContainersPaused)
	line(" Stopped: %d", i.ContainersStopped)
	line("Images: %d", i.Images)
	some("Server Version", i.ServerVersion)
	some("Storage Driver", i.Driver)
	for _, p := range i.DriverStatus {
		line(" %s: %s", p[0], p[1])
	}
	some("Logging Driver", i.LoggingDriver)
	some("Cgroup Driver", i.CgroupDriver)
	some("Cgroup Version", i.CgroupVersion)
	line("Plugins:")
	line(" Volume: %s", strings.Join(i.Plugins.Volume, " "))
	line(" Network: %s", strings.Join(i.Plugins.Network, " "))
	if len(i.Plugins.Log) > 0 {
		line(" Log: %s", strings.Join(i.Plugins.Log, " "))
	}
	if i.Swarm.LocalNodeState != "" {
		line("Swarm: %s", i.Swarm.LocalNodeState)
	}
	if len(i.Runtimes) > 0 {
		line("Runtimes: %s", strings.Join(slices.Sorted(mapKeys(i.Runtimes)), " "))
		line("Default Runtime: %s", i.DefaultRuntime)
	}
	some("Init Binary", i.InitBinary)
	if len(i.SecurityOptions) > 0 {
		line("Security Options:")
		for _, o := range i.SecurityOptions {
			for n, kv := range strings.Split(o, ",") {
				k, v, _ := strings.Cut(kv, "=")
				switch {
				case n == 0:
					line(" %s", v)
				default:
					line("  %s: %s", upperFirst(k), v)
				}
			}
		}
	}
	some("Kernel Version", i.KernelVersion)
	some("Operating System", i.OperatingSystem)
	some("OSType", i.OSType)
	some("Architecture", i.Architecture)
	line("CPUs: %d", i.NCPU)
	line("Total Memory: %s", units.BytesSize(float64(i.MemTotal)))
	some("Name", i.Name)
	some("ID", i.ID)
	some("Docker Root Dir", i.DockerRootDir)
	line("Debug Mode: %v", i.Debug)
	some("HTTP Proxy", i.HTTPProxy)
	some("HTTPS Proxy", i.HTTPSProxy)
	some("No Proxy", i.NoProxy)
	if len(i.Labels) > 0 {
		line("Labels:")
		for _, l := range i.Labels {
			line(" %s", l)
		}
	}
	line("Experimental: %v", i.ExperimentalBuild)
	if r := i.RegistryConfig; r != nil {
		line("Insecure Registries:")
		for _, name := range slices.Sorted(mapKeys(r.IndexConfigs)) {
			if !r.IndexConfigs[name].Secure {
				line(" %s", name)
			}
		}
		for _, cidr := range r.InsecureRegistryCIDRs {
			line(" %s", cidr)
		}
		if len(r.Mirrors) > 0 {
			line("Registry Mirrors:")
			for _, m := range r.Mirrors {
				line(" %s", m)
			}
		}
	}
	line("Live Restore Enabled: %v", i.LiveRestoreEnabled)
	return b.String() + "\n"
}
