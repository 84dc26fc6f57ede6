package dockerapi

import (
	"maps"
	"net/http"
	"strconv"

	"github.com/moby/moby/api/types/container"

	"runkiri.com/kiri/internal/engine"
)

// containerListChanges tell how an element of GET /containers/json differed.
var containerListChanges = []change{
	{below: 52, drop: []string{"Health"}},
	{below: 48, drop: []string{"ImageManifestDescriptor"}},
	{below: 48, path: "NetworkSettings.Networks.*", drop: []string{"GwPriority"}},
	{below: 46, path: "HostConfig", drop: []string{"Annotations"}},
	{below: 44, path: "NetworkSettings.Networks.*", drop: []string{"DNSNames"}},
}

// containerChanges tell how the answer of GET /containers/{id}/json differed.
var containerChanges = []change{
	{below: 56, path: "HostConfig", drop: []string{"Umask"}},
	{below: 52, path: "NetworkSettings", do: legacyNetwork, add: map[string]any{
		"Bridge": "", "HairpinMode": false, "LinkLocalIPv6Address": "", "LinkLocalIPv6PrefixLen": 0,
		"SecondaryIPAddresses": nil, "SecondaryIPv6Addresses": nil,
	}},
	{below: 52, path: "Config", add: map[string]any{"OnBuild": nil}},
	{below: 52, drop: []string{"Storage"}, do: func(obj, _ map[string]any) {
		if _, there := obj["GraphDriver"]; !there {
			obj["GraphDriver"] = map[string]any{"Data": nil, "Name": obj["Driver"]}
		}
	}},
	{below: 48, drop: []string{"ImageManifestDescriptor"}},
	{below: 48, path: "NetworkSettings.Networks.*", drop: []string{"GwPriority"}},
	{below: 45, path: "NetworkSettings.Networks", do: shortIDAliases},
	{below: 44, path: "NetworkSettings.Networks.*", drop: []string{"DNSNames"}},
	{below: 44, path: "Config.Healthcheck", drop: []string{"StartInterval"}},
	{below: 44, path: "HostConfig.Mounts.*.BindOptions", drop: []string{"ReadOnlyNonRecursive", "ReadOnlyForceRecursive"}},
	{below: 43, path: "HostConfig", drop: []string{"Annotations"}},
	{below: 42, path: "HostConfig", add: map[string]any{"KernelMemory": 0, "KernelMemoryTCP": 0}},
	{below: 42, path: "HostConfig.Mounts.*.BindOptions", drop: []string{"CreateMountpoint"}},
	{below: 41, path: "HostConfig", drop: []string{"CgroupnsMode"}},
	{below: 40, path: "HostConfig", drop: []string{"DeviceRequests", "KernelMemoryTCP"}},
	{below: 40, path: "HostConfig.Mounts.*.BindOptions", drop: []string{"NonRecursive"}},
}

// legacyNetwork repeats the endpoint on the default bridge at the top of the network settings, which is where it
// was before containers had several networks.
func legacyNetwork(settings, _ map[string]any) {
	legacy := map[string]any{
		"EndpointID": "", "Gateway": "", "GlobalIPv6Address": "", "GlobalIPv6PrefixLen": 0, "IPAddress": "",
		"IPPrefixLen": 0, "IPv6Gateway": "", "MacAddress": "",
	}
	networks, _ := member(settings, "Networks").(map[string]any)
	if bridge, ok := member(networks, "bridge").(map[string]any); ok {
		for name := range legacy {
			if v, there := bridge[name]; there {
				legacy[name] = v
			}
		}
	}
	maps.Copy(settings, legacy)
}

// shortIDAliases adds the short container id to the aliases on user-defined networks.
func shortIDAliases(networks, top map[string]any) {
	id, _ := member(top, "Id").(string)
	if len(id) < 12 {
		return
	}
	for name := range networks {
		if name == "bridge" || name == "host" || name == "none" || name == "default" {
			continue
		}
		if ep, ok := member(networks, name).(map[string]any); ok {
			aliases, _ := member(ep, "Aliases").([]any)
			ep["Aliases"] = append(aliases, id[:12])
		}
	}
}

func containerList(c *call) error {
	limit, err := c.integer("limit")
	if err != nil {
		return err
	}
	filters, err := c.filters()
	if err != nil {
		return err
	}
	opts := engine.ListOptions{All: c.flag("all"), Size: c.flag("size"), Filters: filters}
	if limit != nil {
		opts.Limit = *limit
	}
	l, err := c.s.engine.ContainerList(c.ctx, opts)
	if err != nil {
		return err
	}
	return c.shaped(list(l), containerListChanges)
}

func containerInspect(c *call) error {
	v, err := c.s.engine.ContainerInspect(c.ctx, c.name, c.flag("size"))
	if err != nil {
		return err
	}
	return c.shaped(v, containerChanges)
}

func containerTop(c *call) error {
	v, err := c.s.engine.ContainerTop(c.ctx, c.name, c.arg("ps_args"))
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}

func containerStart(c *call) error {
	// A host configuration in the body, as before API 1.24, is refused. Six bytes or less hold no object, and some
	// clients send "{}" or "null".
	if n := c.r.ContentLength; n > 7 || n == -1 {
		return invalidf("starting container with non-empty request body was deprecated since API v1.22 and removed in v1.24")
	}
	if c.arg("checkpoint") != "" || c.arg("checkpoint-dir") != "" {
		return notBuilt("start from a checkpoint")
	}
	if err := c.s.engine.ContainerStart(c.ctx, c.name); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

// stopArgs reads what stop and restart share. A signal came with API 1.42.
func (c *call) stopArgs() (signal string, timeout *int, err error) {
	if c.version >= 42 {
		signal = c.arg("signal")
	}
	timeout, err = c.integer("t")
	return signal, timeout, err
}

func containerStop(c *call) error {
	signal, timeout, err := c.stopArgs()
	if err != nil {
		return err
	}
	if err := c.s.engine.ContainerStop(c.ctx, c.name, signal, timeout); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

func containerRestart(c *call) error {
	signal, timeout, err := c.stopArgs()
	if err != nil {
		return err
	}
	if err := c.s.engine.ContainerRestart(c.ctx, c.name, signal, timeout); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

func containerKill(c *call) error {
	if err := c.s.engine.ContainerKill(c.ctx, c.name, c.arg("signal")); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

func containerPause(c *call) error {
	if err := c.s.engine.ContainerPause(c.ctx, c.name); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

func containerUnpause(c *call) error {
	if err := c.s.engine.ContainerUnpause(c.ctx, c.name); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

func containerRename(c *call) error {
	if err := c.s.engine.ContainerRename(c.ctx, c.name, c.arg("name")); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

func containerRemove(c *call) error {
	opts := engine.RemoveOptions{Force: c.flag("force"), Volumes: c.flag("v"), Link: c.flag("link")}
	if err := c.s.engine.ContainerRemove(c.ctx, c.name, opts); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

func containersPrune(c *call) error {
	filters, err := c.filters()
	if err != nil {
		return err
	}
	v, err := c.s.engine.ContainersPrune(c.ctx, filters)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}

func containerUpdate(c *call) error {
	var req container.UpdateConfig
	if err := c.readJSON(&req); err != nil {
		return err
	}
	if c.version < 40 {
		req.PidsLimit = nil // came with API 1.40
	}
	v, err := c.s.engine.ContainerUpdate(c.ctx, c.name, &req)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}

// size reads the height and width of a terminal, in characters.
func (c *call) size() (height, width uint32, err error) {
	for _, d := range []struct {
		name string
		to   *uint32
	}{{"h", &height}, {"w", &width}} {
		n, err := strconv.ParseUint(c.arg(d.name), 10, 32)
		if err != nil {
			return 0, 0, invalidf("invalid resize %s %q: must be a number of characters", d.name, c.arg(d.name))
		}
		*d.to = uint32(n)
	}
	return height, width, nil
}

func containerResize(c *call) error {
	height, width, err := c.size()
	if err != nil {
		return err
	}
	if err := c.s.engine.ContainerResize(c.ctx, c.name, height, width); err != nil {
		return err
	}
	return c.empty(http.StatusOK)
}

// containerWait answers with its header as soon as the wait is registered, so that the client can start the
// container and be sure not to miss its end. Before API 1.30 there was no condition and no early header.
func containerWait(c *call) error {
	condition := container.WaitConditionNotRunning
	if s := c.arg("condition"); s != "" && c.version >= 30 {
		condition = container.WaitCondition(s)
		switch condition {
		case container.WaitConditionNotRunning, container.WaitConditionNextExit, container.WaitConditionRemoved:
		default:
			return invalidf("invalid condition: %q", s)
		}
	}
	ch, err := c.s.engine.ContainerWait(c.ctx, c.name, condition)
	if err != nil {
		return err
	}
	if c.version >= 30 {
		c.begin("application/json")
	}
	select {
	case v := <-ch:
		if c.version < 30 {
			return c.json(http.StatusOK, v)
		}
		return c.sendJSON(v)
	case <-c.ctx.Done():
		return nil
	}
}

// containerPlan prints how a running container was started; see `kiri debug plan`.
func containerPlan(c *call) error {
	text, err := c.s.engine.Plan(c.ctx, c.name)
	if err != nil {
		return err
	}
	c.began = true
	c.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	c.w.Write([]byte(text))
	return nil
}
