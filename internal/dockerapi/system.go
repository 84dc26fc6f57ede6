package dockerapi

import (
	"fmt"
	"net/http"
	"strings"

	"github.com/moby/moby/api/types/build"
	"github.com/moby/moby/api/types/registry"
	"github.com/moby/moby/api/types/system"

	"runkiri.com/kiri/internal/engine"
)

// infoChanges tell how the answer of GET /info differed.
var infoChanges = []change{
	{below: 53, drop: []string{"NRI"}},
	{below: 52, do: func(info, _ map[string]any) {
		if member(info, "CgroupVersion") == "1" { // with cgroup v2 the field was left out from 1.42 on
			info["KernelMemoryTCP"] = true
		}
	}},
	{below: 50, drop: []string{"DiscoveredDevices"}, add: map[string]any{"BridgeNfIptables": false, "BridgeNfIp6tables": false}},
	{below: 49, drop: []string{"FirewallBackend"}},
	{below: 49, path: "RegistryConfig", add: map[string]any{
		"AllowNondistributableArtifactsCIDRs": nil, "AllowNondistributableArtifactsHostnames": nil,
	}},
	{below: 49, path: "ContainerdCommit", do: expectedCommit},
	{below: 49, path: "RuncCommit", do: expectedCommit},
	{below: 49, path: "InitCommit", do: expectedCommit},
	{below: 46, drop: []string{"Containerd"}},
	{below: 44, drop: []string{"CDISpecDirs"}},
	{below: 44, path: "Runtimes.*", drop: []string{"status"}},
	{below: 42, add: map[string]any{"KernelMemory": true, "KernelMemoryTCP": true}},
	{below: 41, drop: []string{"CgroupVersion", "DefaultAddressPools"}},
	{below: 40, drop: []string{"PidsLimit", "KernelMemoryTCP"}},
	{below: 39, drop: []string{"Warnings", "ProductLicense"}, do: func(info, _ map[string]any) {
		for _, name := range []string{"KernelVersion", "OperatingSystem"} {
			if member(info, name) == "" {
				info[name] = "<unknown>"
			}
		}
	}},
	{below: 25, add: map[string]any{"ExecutionDriver": "<not supported>"}, do: securityNames},
}

// expectedCommit repeats the commit as the one that was expected.
func expectedCommit(commit, _ map[string]any) { commit["Expected"] = commit["ID"] }

// securityNames turns "name=seccomp,profile=builtin" into "seccomp", all that was told before API 1.25.
func securityNames(info, _ map[string]any) {
	options, _ := member(info, "SecurityOptions").([]any)
	names := []string{}
	for _, o := range options {
		s, _ := open(o).(string)
		for _, kv := range strings.Split(s, ",") {
			if name, ok := strings.CutPrefix(kv, "name="); ok {
				names = append(names, name)
			}
		}
	}
	info["SecurityOptions"] = names
}

// versionChanges tell how the answer of GET /version differed.
var versionChanges = []change{
	{below: 35, drop: []string{"Platform", "Components"}},
	{below: 25, drop: []string{"MinAPIVersion"}},
}

func systemPing(c *call) error {
	h := c.w.Header()
	h["Builder-Version"] = headerBuilder
	h["Swarm"] = headerSwarm
	h["Cache-Control"] = headerNoCache
	h["Pragma"] = headerPragma
	h["Content-Type"] = headerText
	c.began = true
	if c.r.Method == http.MethodHead {
		h["Content-Length"] = headerZero
		c.w.WriteHeader(http.StatusOK)
		return nil
	}
	h["Content-Length"] = headerTwo
	c.w.WriteHeader(http.StatusOK)
	c.w.Write(ok)
	return nil
}

var (
	headerBuilder = []string{"2"} // what clients should build with: BuildKit
	headerSwarm   = []string{"inactive"}
	headerNoCache = []string{"no-cache, no-store, must-revalidate"}
	headerPragma  = []string{"no-cache"}
	headerText    = []string{"text/plain; charset=utf-8"}
	headerZero    = []string{"0"}
	headerTwo     = []string{"2"}
	ok            = []byte("OK")
)

func systemInfo(c *call) error {
	v, err := c.s.engine.Info(c.ctx)
	if err != nil {
		return err
	}
	return c.shaped(v, infoChanges)
}

// systemVersion completes the engine's answer with what this package knows: the versions of the API.
func systemVersion(c *call) error {
	v, err := c.s.engine.Version(c.ctx)
	if err != nil {
		return err
	}
	v.APIVersion, v.MinAPIVersion = MaxVersion, MinVersion
	for i := range v.Components {
		if d := v.Components[i].Details; v.Components[i].Name == "Engine" && d != nil {
			d["ApiVersion"], d["MinAPIVersion"] = MaxVersion, MinVersion
		}
	}
	return c.shaped(v, versionChanges)
}

func systemAuth(c *call) error {
	var auth registry.AuthConfig
	if err := c.readJSON(&auth); err != nil {
		return err
	}
	v, err := c.s.engine.Auth(c.ctx, &auth)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}

// buildPrune answers that there was nothing: without a builder there is no cache. `docker system prune` asks for it
// among other things and would fail as a whole.
func buildPrune(c *call) error {
	if _, err := c.filters(); err != nil {
		return err
	}
	return c.json(http.StatusOK, build.CachePruneReport{})
}

// systemDiskUsage: the answer had lists of everything before API 1.52; 1.52 has those and the current form, 1.53
// only the current one, whose lists are filled when asked for.
func systemDiskUsage(c *call) error {
	verbose := c.version >= 52 && c.flag("verbose")
	legacy := c.version < 52 || c.version == 52 && !verbose
	opts := engine.DiskUsageOptions{Verbose: verbose || legacy}
	if c.version >= 42 {
		for _, kind := range c.query["type"] {
			switch system.DiskUsageObject(kind) {
			case system.ContainerObject:
				opts.Containers = true
			case system.ImageObject:
				opts.Images = true
			case system.VolumeObject:
				opts.Volumes = true
			case system.BuildCacheObject:
				opts.BuildCache = true
			default:
				return invalidf("unknown object type: %s", kind)
			}
		}
	}
	du, err := c.s.engine.DiskUsage(c.ctx, opts)
	if err != nil {
		return err
	}
	if !legacy {
		return c.json(http.StatusOK, du)
	}
	answer, err := c.legacyDiskUsage(du)
	if err != nil {
		return err
	}
	if c.version == 52 {
		brief := stripItems(du)
		answer["ImageUsage"], answer["ContainerUsage"] = brief.ImageUsage, brief.ContainerUsage
		answer["VolumeUsage"], answer["BuildCacheUsage"] = brief.VolumeUsage, brief.BuildCacheUsage
	}
	return c.json(http.StatusOK, answer)
}

func (c *call) legacyDiskUsage(du *system.DiskUsage) (map[string]any, error) {
	answer := map[string]any{"LayersSize": 0, "Images": nil, "Containers": nil, "Volumes": nil, "BuildCache": nil}
	var err error
	if u := du.ImageUsage; u != nil {
		answer["LayersSize"] = u.TotalSize
		if answer["Images"], err = shape(list(u.Items), c.version, imageSummaryChanges); err != nil {
			return nil, fmt.Errorf("images: %w", err)
		}
	}
	if u := du.ContainerUsage; u != nil {
		if answer["Containers"], err = shape(list(u.Items), c.version, containerListChanges); err != nil {
			return nil, fmt.Errorf("containers: %w", err)
		}
	}
	if u := du.VolumeUsage; u != nil {
		answer["Volumes"] = list(u.Items)
	}
	if u := du.BuildCacheUsage; u != nil && c.version >= 39 {
		answer["BuildCache"] = list(u.Items)
	}
	if c.version < 42 {
		answer["BuilderSize"] = 0
	}
	return answer, nil
}

// stripItems returns du without its lists.
func stripItems(du *system.DiskUsage) system.DiskUsage {
	brief := *du
	if u := du.ImageUsage; u != nil {
		short := *u
		short.Items = nil
		brief.ImageUsage = &short
	}
	if u := du.ContainerUsage; u != nil {
		short := *u
		short.Items = nil
		brief.ContainerUsage = &short
	}
	if u := du.VolumeUsage; u != nil {
		short := *u
		short.Items = nil
		brief.VolumeUsage = &short
	}
	if u := du.BuildCacheUsage; u != nil {
		short := *u
		short.Items = nil
		brief.BuildCacheUsage = &short
	}
	return brief
}
