package engine

import (
	"cmp"
	"context"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/network"
)

const nameChars = `[a-zA-Z0-9][a-zA-Z0-9_.-]`

// isName tells whether s is nameChars and at least one more of its second class. It is written out because a regular expression would be
// compiled before main of every kiri command.
func isName(s string) bool {
	for i := range len(s) {
		c := s[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && (i == 0 || c != '_' && c != '.' && c != '-') {
			return false
		}
	}
	return len(s) > 1
}

// ContainerCreate makes a container of an image. The request is the engine's to keep and to change.
func (e *Engine) ContainerCreate(ctx context.Context, name string, req *container.CreateRequest, platform string) (container.CreateResponse, error) {
	none := container.CreateResponse{Warnings: []string{}}
	if req == nil || req.Config == nil {
		return none, invalid("config cannot be empty in order to create a container")
	}
	config, host := req.Config, req.HostConfig
	if host == nil {
		host = &container.HostConfig{}
	}
	if host.NetworkMode == "" || host.NetworkMode.IsDefault() {
		host.NetworkMode = network.NetworkBridge
	}
	warnings, err := e.validateCreate(config, host, req.NetworkingConfig)
	if err != nil {
		return none, err
	}
	c := &ctr{id: newID()}
	img, err := e.images.acquire(config.Image, platform, c.id)
	if err != nil {
		return none, err
	}
	undo := []func(){func() { e.images.unuse(c.id) }}
	defer func() {
		for _, f := range slices.Backward(undo) {
			f()
		}
	}()
	mergeConfig(config, img)
	if len(config.Entrypoint) == 1 && config.Entrypoint[0] == "" {
		config.Entrypoint = nil
	}
	if len(config.Entrypoint) == 0 && len(config.Cmd) == 0 {
		return none, invalid("no command specified")
	}
	if err := e.mergeLogConfig(&host.LogConfig); err != nil {
		return none, err
	}
	e.adaptHost(host)
	if err := e.reserveName(c, name); err != nil {
		return none, err
	}
	undo = append(undo, func() { e.containers.release(c.rec.Name, c) })

	if config.Hostname == "" {
		config.Hostname = shortID(c.id)
		if host.NetworkMode.IsHost() {
			if config.Hostname, err = os.Hostname(); err != nil {
				return none, internal("reading the host's name: %w", err)
			}
		}
	}
	command := slices.Concat(config.Entrypoint, config.Cmd)
	rec := &c.rec
	rec.ID, rec.Created = c.id, time.Now().UTC()
	rec.Image, rec.Layers = img.ID, img.Layers
	rec.Platform = img.Config.Platform
	rec.Path, rec.Args = command[0], command[1:]
	rec.Config, rec.Host = config, host
	rec.Networks = configuredNetworks(host, req.NetworkingConfig)
	if rec.Mounts, err = e.planMounts(ctx, c); err != nil {
		return none, err
	}
	undo = append(undo, func() { e.volumes.discard(c.id) })
	if err := e.save(c); err != nil {
		return none, err
	}
	undo = nil
	e.containers.publish(c)
	e.containerEventOf(rec, events.ActionCreate)
	if warnings == nil {
		warnings = []string{}
	}
	return container.CreateResponse{ID: c.id, Warnings: warnings}, nil
}

// reserveName gives the container the name asked for, or one made up.
func (e *Engine) reserveName(c *ctr, name string) error {
	if name == "" {
		for range 6 {
			if n := randomName(); e.containers.reserve(n, c) == nil {
				c.rec.Name = n
				return nil
			}
		}
		c.rec.Name = shortID(c.id)
		if e.containers.reserve(c.rec.Name, c) != nil {
			return conflict("no free name was found for container %s", c.id)
		}
		return nil
	}
	plain := strings.TrimPrefix(name, "/")
	if !isName(plain) {
		return invalid("Invalid container name (%s), only %s are allowed", name, nameChars)
	}
	if other := e.containers.reserve(plain, c); other != nil {
		return nameConflict(plain, other)
	}
	c.rec.Name = plain
	return nil
}

func nameConflict(name string, other *ctr) error {
	return conflict("Conflict. The container name %q is already in use by container %q. You have to remove (or rename) that container to be able to reuse that name.", "/"+name, other.id)
}

// mergeConfig fills what the request leaves open from the image's configuration. What is the image's is shared by all
// its containers and so is copied before anything is added to it.
func mergeConfig(c *container.Config, img *resolved) {
	i := &img.Config.Config
	c.User = cmp.Or(c.User, i.User)
	c.WorkingDir = cmp.Or(c.WorkingDir, i.WorkingDir)
	c.StopSignal = cmp.Or(c.StopSignal, i.StopSignal)
	for s := range i.ExposedPorts {
		port, err := network.ParsePort(s)
		if err != nil {
			continue // an image's odd port must not make it unusable
		}
		if c.ExposedPorts == nil {
			c.ExposedPorts = network.PortSet{}
		}
		c.ExposedPorts[port] = struct{}{}
	}
	if len(c.Env) == 0 {
		c.Env = i.Env
	} else {
		own := len(c.Env)
		for _, env := range i.Env {
			key, _, _ := strings.Cut(env, "=")
			if !slices.ContainsFunc(c.Env[:own], func(s string) bool {
				k, _, _ := strings.Cut(s, "=")
				return k == key
			}) {
				c.Env = append(c.Env, env)
			}
		}
	}
	if c.Labels == nil {
		c.Labels = map[string]string{}
	}
	for k, v := range i.Labels {
		if _, ok := c.Labels[k]; !ok {
			c.Labels[k] = v
		}
	}
	if len(c.Entrypoint) == 0 {
		if len(c.Cmd) == 0 {
			c.Cmd = i.Cmd
		}
		if c.Entrypoint == nil {
			c.Entrypoint = i.Entrypoint
		}
	}
	if len(i.Volumes) > 0 {
		if c.Volumes == nil {
			c.Volumes = map[string]struct{}{}
		}
		maps.Copy(c.Volumes, i.Volumes)
	}
	if len(c.Shell) == 0 {
		c.Shell = i.Shell
	}
	if i.OnBuild != nil && c.OnBuild == nil {
		c.OnBuild = i.OnBuild
	}
	mergeHealth(c, i.Healthcheck)
}

func mergeHealth(c *container.Config, i *container.HealthConfig) {
	if i == nil {
		return
	}
	if c.Healthcheck == nil {
		c.Healthcheck = i
		return
	}
	h := c.Healthcheck
	if len(h.Test) == 0 {
		h.Test = i.Test
	}
	h.Interval = cmp.Or(h.Interval, i.Interval)
	h.Timeout = cmp.Or(h.Timeout, i.Timeout)
	h.StartPeriod = cmp.Or(h.StartPeriod, i.StartPeriod)
	h.StartInterval = cmp.Or(h.StartInterval, i.StartInterval)
	h.Retries = cmp.Or(h.Retries, i.Retries)
}

// adaptHost writes down the defaults, so that inspect shows what holds and a later change of the daemon's
// configuration changes no container.
func (e *Engine) adaptHost(h *container.HostConfig) {
	if h.Memory > 0 && h.MemorySwap == 0 {
		h.MemorySwap = h.Memory * 2
	}
	if h.ShmSize == 0 {
		h.ShmSize = cmp.Or(e.cfg.DefaultShmSize, 64<<20)
	}
	if h.IpcMode.IsEmpty() {
		h.IpcMode = container.IpcMode(cmp.Or(e.cfg.DefaultIpcMode, string(container.IPCModePrivate)))
	}
	if h.CgroupnsMode.IsEmpty() {
		h.CgroupnsMode = container.CgroupnsMode(cmp.Or(e.cfg.DefaultCgroupnsMode, string(container.CgroupnsModePrivate)))
		if h.Privileged && e.agent.greeting().CgroupVersion != 2 {
			h.CgroupnsMode = container.CgroupnsModeHost
		}
	}
	if h.OomKillDisable == nil && slices.Contains(e.agent.greeting().Features, "oom-kill-disable") {
		no := false
		h.OomKillDisable = &no
	}
	if h.PidsLimit != nil && *h.PidsLimit <= 0 {
		h.PidsLimit = nil
	}
	if h.Runtime == "" {
		h.Runtime = defaultRuntime
	}
	if !h.Privileged {
		if h.MaskedPaths == nil {
			h.MaskedPaths = defaultMasked
		}
		if h.ReadonlyPaths == nil {
			h.ReadonlyPaths = defaultReadonly
		}
	}
	if h.PortBindings == nil {
		h.PortBindings = network.PortMap{}
	}
	// Namespaces are shared with a container, not with whoever has its name later.
	byID := func(mode string) string {
		if ref, ok := strings.CutPrefix(mode, "container:"); ok {
			if c, err := e.containers.get(ref); err == nil {
				return "container:" + c.id
			}
		}
		return mode
	}
	h.PidMode = container.PidMode(byID(string(h.PidMode)))
	h.IpcMode = container.IpcMode(byID(string(h.IpcMode)))
	h.NetworkMode = container.NetworkMode(byID(string(h.NetworkMode)))
}

// configuredNetworks is what inspect shows of a container's networks before it runs.
func configuredNetworks(h *container.HostConfig, nets *network.NetworkingConfig) map[string]*network.EndpointSettings {
	if h.NetworkMode.IsContainer() {
		return map[string]*network.EndpointSettings{}
	}
	name := h.NetworkMode.NetworkName()
	ep := &network.EndpointSettings{}
	if nets != nil {
		for _, n := range []string{name, network.NetworkDefault} {
			if given := nets.EndpointsConfig[n]; given != nil {
				ep = given
				break
			}
		}
	}
	return map[string]*network.EndpointSettings{name: ep}
}

var logOptions = map[string][]string{
	"json-file": {"max-size", "max-file", "compress", "labels", "labels-regex", "env", "env-regex", "tag"},
	"local":     {"max-size", "max-file", "compress", "labels", "labels-regex", "env", "env-regex", "tag"},
	"none":      nil,
}

var otherLogDrivers = []string{"syslog", "journald", "gelf", "fluentd", "awslogs", "splunk", "etwlogs", "gcplogs"}

// mergeLogConfig puts the daemon's log driver and options where the container names none, and checks both.
func (e *Engine) mergeLogConfig(l *container.LogConfig) error {
	preset := cmp.Or(e.cfg.LogDriver, "json-file")
	l.Type = cmp.Or(l.Type, preset)
	if l.Config == nil {
		l.Config = map[string]string{}
	}
	if l.Type == preset {
		for k, v := range e.cfg.LogOpts {
			if _, ok := l.Config[k]; !ok {
				l.Config[k] = v
			}
		}
	}
	known, ok := logOptions[l.Type]
	if !ok {
		if slices.Contains(otherLogDrivers, l.Type) {
			return NotBuilt("the log driver " + l.Type)
		}
		return invalid("logger: no log driver named '%s' is registered", l.Type)
	}
	for k, v := range l.Config {
		switch {
		case k == "mode" && v == string(container.LogModeBlocking):
		case k == "mode" && v == string(container.LogModeNonBlock):
			return NotBuilt("the log option mode=non-blocking")
		case k == "mode":
			return invalid("logger: logging mode not supported: %s", v)
		case k == "max-buffer-size":
			return invalid("logger: max-buffer-size option is only supported with 'mode=%s'", container.LogModeNonBlock)
		case k == "labels-regex" || k == "env-regex" || k == "tag":
			return NotBuilt("the log option " + k)
		case !slices.Contains(known, k):
			return invalid("unknown log opt '%s' for %s log driver", k, l.Type)
		}
	}
	return nil
}
