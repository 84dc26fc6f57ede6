package engine

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/network"
)

// The predefined networks have the same ids wherever kiri runs.
var (
	bridgeNetworkID = predefinedID(network.NetworkBridge)
	hostNetworkID   = predefinedID(network.NetworkHost)
	noneNetworkID   = predefinedID(network.NetworkNone)
)

func predefinedID(name string) string {
	sum := sha256.Sum256([]byte("kiri predefined network " + name))
	return hex.EncodeToString(sum[:])
}

func predefined(name string) bool {
	return name == network.NetworkBridge || name == network.NetworkHost || name == network.NetworkNone || name == network.NetworkDefault
}

// networks returns the predefined networks, those of users come with the networks issue.
func (e *Engine) networks() []network.Network {
	make := func(name, driver, id string) network.Network {
		return network.Network{
			Name: name, ID: id, Created: e.created, Scope: "local", Driver: driver, EnableIPv4: true,
			IPAM:    network.IPAM{Driver: "default", Config: []network.IPAMConfig{}},
			Options: map[string]string{}, Labels: map[string]string{},
		}
	}
	bridge := make(network.NetworkBridge, "bridge", bridgeNetworkID)
	if b := e.agent.greeting().Bridge; b.Name != "" {
		c := network.IPAMConfig{}
		c.Subnet, _ = netip.ParsePrefix(b.Subnet)
		c.Gateway, _ = netip.ParseAddr(b.Gateway)
		bridge.IPAM.Config = append(bridge.IPAM.Config, c)
		bridge.Options = map[string]string{
			"com.docker.network.bridge.default_bridge":       "true",
			"com.docker.network.bridge.enable_icc":           "true",
			"com.docker.network.bridge.enable_ip_masquerade": "true",
			"com.docker.network.bridge.host_binding_ipv4":    "0.0.0.0",
			"com.docker.network.bridge.name":                 b.Name,
			"com.docker.network.driver.mtu":                  strconv.Itoa(b.MTU),
		}
	}
	return []network.Network{
		bridge, make(network.NetworkHost, "host", hostNetworkID), make(network.NetworkNone, "null", noneNetworkID),
	}
}

// network finds one by name, id or a prefix of the id.
func (e *Engine) network(ref string) (network.Network, error) {
	all := e.networks()
	if ref != "" {
		for _, match := range []func(network.Network) bool{
			func(n network.Network) bool { return n.Name == ref || n.ID == ref },
			func(n network.Network) bool { return strings.HasPrefix(n.ID, ref) },
		} {
			if i := slices.IndexFunc(all, match); i >= 0 {
				return all[i], nil
			}
		}
	}
	return network.Network{}, notFound("network %s not found", ref)
}

// NetworkList lists the networks that pass the filters.
func (e *Engine) NetworkList(ctx context.Context, filters Filters) ([]network.Summary, error) {
	if err := filters.validate("dangling", "driver", "id", "label", "name", "scope", "type"); err != nil {
		return nil, err
	}
	byUse := filters.has("dangling")
	dangling, err := filters.boolean("dangling", false)
	if err != nil {
		return nil, err
	}
	for _, t := range filters.get("type") {
		if t != "builtin" && t != "custom" {
			return nil, invalid("invalid filter: 'type'='%s'", t)
		}
	}
	l := []network.Summary{}
	for _, n := range e.networks() {
		if byUse && dangling || filters.has("type") && !filters["type"]["builtin"] || !filters.exact("driver", n.Driver) ||
			!filters.exact("scope", n.Scope) || !filters.match("name", n.Name) || !filters.match("id", n.ID) ||
			!filters.labels("label", n.Labels) {
			continue
		}
		l = append(l, network.Summary{Network: n})
	}
	return l, nil
}

// NetworkInspect tells about one network and the containers in it.
func (e *Engine) NetworkInspect(ctx context.Context, ref, scope string, verbose bool) (*network.Inspect, error) {
	n, err := e.network(ref)
	if err != nil {
		return nil, err
	}
	if scope != "" && scope != n.Scope {
		return nil, notFound("network %s not found", ref)
	}
	r := &network.Inspect{Network: n, Containers: map[string]network.EndpointResource{}}
	for _, c := range e.containers.all() {
		rec := c.snapshot()
		id, name := networkOf(&rec)
		ep := rec.Networks[name]
		if id != n.ID || rec.State.EndpointID == "" || ep == nil {
			continue
		}
		res := network.EndpointResource{Name: rec.Name, EndpointID: ep.EndpointID, MacAddress: ep.MacAddress}
		if ep.IPAddress.IsValid() {
			res.IPv4Address = netip.PrefixFrom(ep.IPAddress, ep.IPPrefixLen)
		}
		r.Containers[rec.ID] = res
	}
	return r, nil
}

// NetworkCreate refuses: networks of users are not built yet.
func (e *Engine) NetworkCreate(ctx context.Context, req *network.CreateRequest) (*network.CreateResponse, error) {
	if predefined(req.Name) {
		return nil, errf(cerrdefs.ErrPermissionDenied, "operation is not permitted on predefined %s network ", req.Name)
	}
	return nil, NotBuilt("creating networks")
}

// NetworkRemove refuses the predefined networks, and there are no others yet.
func (e *Engine) NetworkRemove(ctx context.Context, ref string) error {
	n, err := e.network(ref)
	if err != nil {
		return err
	}
	return errf(cerrdefs.ErrPermissionDenied, "%s is a pre-defined network and cannot be removed", n.Name)
}

// NetworkConnect refuses what can never be, and the rest as not built.
func (e *Engine) NetworkConnect(ctx context.Context, ref string, req *network.ConnectRequest) error {
	n, c, err := e.networkAndContainer(ref, req.Container)
	if err != nil {
		return err
	}
	rec := c.snapshot()
	switch {
	case n.Name == network.NetworkHost:
		return invalid("cannot connect container to host network - container must be created in host network mode")
	case rec.Host.NetworkMode.IsHost() || rec.Host.NetworkMode.IsContainer():
		return invalid("container sharing network namespace with another container or host cannot be connected to any other network")
	case rec.Host.NetworkMode.IsNone() || n.Name == network.NetworkNone:
		return invalid("container cannot be connected to multiple networks with one of the networks in private (none) mode")
	}
	return errf(cerrdefs.ErrPermissionDenied, "endpoint with name %s already exists in network %s", rec.Name, n.Name)
}

// NetworkDisconnect refuses what can never be, and the rest as not built.
func (e *Engine) NetworkDisconnect(ctx context.Context, ref string, req *network.DisconnectRequest) error {
	n, c, err := e.networkAndContainer(ref, req.Container)
	if err != nil {
		return err
	}
	rec := c.snapshot()
	if n.Name == network.NetworkHost && rec.Host.NetworkMode.IsHost() {
		return invalid("cannot disconnect container from host network - container was created in host network mode")
	}
	if id, _ := networkOf(&rec); id != n.ID {
		return errf(cerrdefs.ErrPermissionDenied, "container %s is not connected to network %s", c.id, n.Name)
	}
	return NotBuilt("disconnecting a container from a network")
}

func (e *Engine) networkAndContainer(ref, container string) (network.Network, *ctr, error) {
	n, err := e.network(ref)
	if err != nil {
		return n, nil, err
	}
	c, err := e.containers.get(container)
	return n, c, err
}

// NetworksPrune removes unused networks of users; there are none yet.
func (e *Engine) NetworksPrune(ctx context.Context, filters Filters) (*network.PruneReport, error) {
	if err := filters.validate("label", "label!", "until"); err != nil {
		return nil, err
	}
	if _, err := filters.until(); err != nil {
		return nil, err
	}
	return &network.PruneReport{}, nil
}
