package dockerapi

import (
	"net/http"
	"slices"
	"strings"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
)

// CreateRequest is the body of POST /containers/create: the current one, and what only older versions have.
type CreateRequest struct {
	*container.Config
	HostConfig       *container.HostConfig
	NetworkingConfig *network.NetworkingConfig

	Cmd        words
	Entrypoint words
	Shell      words

	MacAddress network.HardwareAddr // before API 1.52, of the whole container

	warnings []string
}

// createChanges bring the body of an older client to the current form: what its version did not have is taken out,
// as if it had not been sent, or refused where the client would get something else than it asked for.
var createChanges = []struct {
	below version
	do    func(*CreateRequest) error
}{
	{56, func(r *CreateRequest) error { r.HostConfig.Umask = nil; return nil }},
	{52, containerMAC},
	{48, func(r *CreateRequest) error {
		for _, m := range r.HostConfig.Mounts {
			if m.Type == mount.TypeImage {
				return invalidf("Mount type `Image` needs API v1.48 or newer")
			}
		}
		return nil
	}},
	{48, func(r *CreateRequest) error {
		for _, ep := range r.NetworkingConfig.EndpointsConfig {
			if ep != nil && ep.GwPriority != 0 {
				return invalidf("EndpointSettings.GwPriority needs API v1.48 or newer")
			}
		}
		return nil
	}},
	{45, func(r *CreateRequest) error {
		for _, m := range r.HostConfig.Mounts {
			if m.VolumeOptions != nil && m.VolumeOptions.Subpath != "" {
				return invalidf("VolumeOptions.Subpath needs API v1.45 or newer")
			}
		}
		return nil
	}},
	{44, func(r *CreateRequest) error {
		if r.Healthcheck != nil {
			r.Healthcheck.StartInterval = 0
		}
		for i := range r.HostConfig.Mounts {
			if b := r.HostConfig.Mounts[i].BindOptions; b != nil {
				b.ReadOnlyNonRecursive = false
				if b.ReadOnlyForceRecursive {
					return invalidf("BindOptions.ReadOnlyForceRecursive needs API v1.44 or newer")
				}
			}
		}
		if len(r.NetworkingConfig.EndpointsConfig) > 1 {
			var names []string
			for name := range r.NetworkingConfig.EndpointsConfig {
				names = append(names, name)
			}
			slices.Sort(names)
			return invalidf("Container cannot be created with multiple network endpoints: %s", strings.Join(names, ", "))
		}
		return nil
	}},
	{43, func(r *CreateRequest) error { r.HostConfig.Annotations = nil; return nil }},
	{42, func(r *CreateRequest) error {
		r.HostConfig.ConsoleSize = [2]uint{}
		for i := range r.HostConfig.Mounts {
			// Options of another type than the mount's own were not looked at.
			m := &r.HostConfig.Mounts[i]
			if m.BindOptions != nil {
				m.BindOptions.CreateMountpoint = false
			}
			if m.Type != mount.TypeBind {
				m.BindOptions = nil
			}
			if m.Type != mount.TypeVolume {
				m.VolumeOptions = nil
			}
			if m.Type != mount.TypeTmpfs {
				m.TmpfsOptions = nil
			}
		}
		return nil
	}},
	{40, func(r *CreateRequest) error {
		if r.HostConfig.IpcMode.IsEmpty() {
			r.HostConfig.IpcMode = container.IPCModeShareable
		}
		for i := range r.HostConfig.Mounts {
			if b := r.HostConfig.Mounts[i].BindOptions; b != nil {
				b.NonRecursive = false
			}
		}
		r.HostConfig.DeviceRequests = nil
		return nil
	}},
	{25, func(r *CreateRequest) error {
		r.HostConfig.AutoRemove = false // was the client's work
		r.HostConfig.Mounts = nil
		r.StopTimeout = nil
		return nil
	}},
}

// containerMAC moves the container-wide MAC address of API 1.51 and before to the endpoint of its network, where the
// current version has it. Before 1.44 it was the only place for one.
func containerMAC(r *CreateRequest) error {
	if len(r.MacAddress) == 0 {
		return nil
	}
	mode := r.HostConfig.NetworkMode
	if mode.IsHost() || mode.IsContainer() || mode.IsNone() {
		return invalidf("conflicting options: mac-address and the network mode")
	}
	name := string(mode)
	if mode.IsDefault() || name == "" {
		name = "default"
	}
	eps := r.NetworkingConfig.EndpointsConfig
	if len(eps) == 1 {
		for only := range eps { // the mode may be an id where the endpoint has the name
			name = only
		}
	}
	if eps == nil {
		eps = map[string]*network.EndpointSettings{}
		r.NetworkingConfig.EndpointsConfig = eps
	}
	ep := eps[name]
	if ep == nil {
		ep = &network.EndpointSettings{}
		eps[name] = ep
	}
	switch {
	case len(ep.MacAddress) == 0:
		ep.MacAddress = r.MacAddress
	case ep.MacAddress.String() != r.MacAddress.String():
		return invalidf("the container-wide MAC address must match the endpoint-specific MAC address for the main network, or be left empty")
	}
	return nil
}

// decodeCreate reads and checks the body of a create and brings it to the current form.
func (c *call) decodeCreate() (*CreateRequest, error) {
	if !c.hasBody() {
		return nil, invalidf("invalid JSON: got EOF while reading request body")
	}
	req := &CreateRequest{}
	if err := c.readJSON(&req); err != nil {
		return nil, err
	}
	switch {
	case req == nil || req.Config == nil && len(req.Cmd)+len(req.Entrypoint) == 0:
		return nil, invalidf("config cannot be empty in order to create a container")
	case req.Config == nil:
		req.Config = &container.Config{}
	}
	req.Config.Cmd, req.Config.Entrypoint, req.Config.Shell = req.Cmd, req.Entrypoint, req.Shell
	if req.HostConfig == nil {
		req.HostConfig = &container.HostConfig{}
	}
	if req.NetworkingConfig == nil {
		req.NetworkingConfig = &network.NetworkingConfig{}
	}
	if c.version >= 44 && c.version < 52 && len(req.MacAddress) > 0 {
		req.warnings = append(req.warnings, "The container-wide MacAddress field is now deprecated. It should be specified in EndpointsConfig instead.")
	}
	if c.version < 44 { // not there yet; ignored before the container-wide one moves here
		for _, ep := range req.NetworkingConfig.EndpointsConfig {
			if ep != nil {
				ep.MacAddress = nil
			}
		}
	}
	for _, ch := range createChanges {
		if c.version < ch.below {
			if err := ch.do(req); err != nil {
				return nil, err
			}
		}
	}
	return req, nil
}

func containerCreate(c *call) error {
	req, err := c.decodeCreate()
	if err != nil {
		return err
	}
	platform := ""
	if c.version >= 41 {
		platform = c.arg("platform")
	}
	v, err := c.s.engine.ContainerCreate(c.ctx, c.arg("name"), &container.CreateRequest{
		Config: req.Config, HostConfig: req.HostConfig, NetworkingConfig: req.NetworkingConfig,
	}, platform)
	if err != nil {
		return err
	}
	v.Warnings = append(list(v.Warnings), req.warnings...)
	return c.json(http.StatusCreated, v)
}
