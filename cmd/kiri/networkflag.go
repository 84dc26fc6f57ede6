package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
)

// A networkOpt is one --network: the network's name and what is asked of the endpoint there.
type networkOpt struct {
	name       string
	aliases    []string
	driverOpts map[string]string
	links      []string
	ip, ip6    netip.Addr
	linkLocal  []netip.Addr
	mac        string
	priority   int
}

type networkValue struct{ nets *[]networkOpt }

func (n *networkValue) String() string { return "" }
func (n *networkValue) Type() string   { return "network" }

// Set reads NAME, or name=NAME,alias=...,ip=...
func (n *networkValue) Set(v string) error {
	o := networkOpt{name: v}
	if strings.Contains(v, "=") {
		o.name = ""
		fields, err := csvFields(v)
		if err != nil {
			return err
		}
		for _, field := range fields {
			key, val, ok := strings.Cut(strings.ToLower(field), "=")
			if !ok {
				return fmt.Errorf("invalid field %s", field)
			}
			val = strings.TrimSpace(val)
			switch strings.TrimSpace(key) {
			case "name":
				o.name = val
			case "alias":
				o.aliases = append(o.aliases, val)
			case "driver-opt":
				k, d, ok := strings.Cut(val, "=")
				if !ok {
					return errors.New("invalid key value pair format in driver options")
				}
				if o.driverOpts == nil {
					o.driverOpts = map[string]string{}
				}
				o.driverOpts[k] = d
			case "ip":
				if o.ip, err = parseIP(val); err != nil {
					return err
				}
			case "ip6":
				if o.ip6, err = parseIP(val); err != nil {
					return err
				}
			case "link-local-ip":
				a, err := parseIP(val)
				if err != nil {
					return err
				}
				o.linkLocal = append(o.linkLocal, a)
			case "mac-address":
				if _, err := net.ParseMAC(val); err != nil {
					return fmt.Errorf("%s is not a valid mac address", val)
				}
				o.mac = val
			case "gw-priority":
				if o.priority, err = strconv.Atoi(val); err != nil {
					return fmt.Errorf("invalid gw-priority: %w", err)
				}
			default:
				return fmt.Errorf("invalid field key %s", strings.TrimSpace(key))
			}
		}
		if o.name == "" {
			return errors.New("network name/id is not specified")
		}
	}
	*n.nets = append(*n.nets, o)
	return nil
}

func parseIP(v string) (netip.Addr, error) { return netip.ParseAddr(v) }

// userDefined tells a network that the user made from the three that are always there and from another container's.
func userDefined(mode string) bool {
	return !slices.Contains([]string{"default", "bridge", "host", "none", ""}, mode) && !strings.HasPrefix(mode, "container:")
}

// networks turns --network and the flags that belong to the first of them into the mode of the container and the endpoints.
func (f *containerFlags) networks() (container.NetworkMode, map[string]*network.EndpointSettings, error) {
	nets := f.nets
	if len(nets) == 0 {
		nets = []networkOpt{{name: "default"}}
	}
	first := &nets[0]
	for _, n := range nets {
		if n.name == "" {
			return "", nil, errors.New("no name set for network")
		}
	}
	conflict := func(is bool, flag, name string) error {
		if is {
			return fmt.Errorf("conflicting options: cannot specify both --%s and per-network %s", flag, name)
		}
		return nil
	}
	if err := errors.Join(
		conflict(len(f.aliases) > 0 && len(first.aliases) > 0, "network-alias", "alias"),
		conflict(f.ip != "" && first.ip.IsValid(), "ip", "IPv4 address"),
		conflict(f.ip6 != "" && first.ip6.IsValid(), "ip6", "IPv6 address"),
		conflict(f.mac != "" && first.mac != "", "mac-address", "MAC address"),
		conflict(len(f.linkLocal) > 0 && len(first.linkLocal) > 0, "link-local-ip", "link-local IP addresses"),
	); err != nil {
		return "", nil, err
	}
	first.aliases = append(first.aliases, f.aliases...)
	if userDefined(first.name) {
		first.links = f.links
	}
	if f.mac != "" {
		if _, err := net.ParseMAC(strings.TrimSpace(f.mac)); err != nil {
			return "", nil, fmt.Errorf("%s is not a valid mac address", f.mac)
		}
		first.mac = strings.TrimSpace(f.mac)
	}
	for _, a := range []struct {
		flag, kind string
		dst        *netip.Addr
	}{{f.ip, "IPv4", &first.ip}, {f.ip6, "IPv6", &first.ip6}} {
		if a.flag != "" {
			var err error
			if *a.dst, err = parseIP(a.flag); err != nil {
				return "", nil, fmt.Errorf("invalid %s address: %s", a.kind, a.flag)
			}
		}
	}
	for _, a := range f.linkLocal {
		ip, err := parseIP(a)
		if err != nil {
			return "", nil, err
		}
		first.linkLocal = append(first.linkLocal, ip)
	}
	endpoints := map[string]*network.EndpointSettings{}
	for i := range nets {
		n := &nets[i]
		if i > 0 && (!userDefined(n.name) && n.name != "bridge" || !userDefined(nets[0].name) && nets[0].name != "bridge" && nets[0].name != "default") {
			return "", nil, fmt.Errorf("conflicting options: cannot attach both user-defined and non-user-defined network-modes")
		}
		if _, ok := endpoints[n.name]; ok {
			return "", nil, fmt.Errorf("network %q is specified multiple times", n.name)
		}
		ep := &network.EndpointSettings{Aliases: n.aliases, Links: n.links, DriverOpts: n.driverOpts, GwPriority: n.priority}
		if n.ip.IsValid() || n.ip6.IsValid() || len(n.linkLocal) > 0 {
			ep.IPAMConfig = &network.EndpointIPAMConfig{IPv4Address: n.ip, IPv6Address: n.ip6, LinkLocalIPs: n.linkLocal}
		}
		if n.mac != "" {
			mac, err := net.ParseMAC(n.mac)
			if err != nil {
				return "", nil, fmt.Errorf("%s is not a valid mac address", n.mac)
			}
			ep.MacAddress = network.HardwareAddr(mac)
		}
		if i == 0 && !userDefined(n.name) && ep.IPAMConfig == nil && n.mac == "" && len(n.aliases) == 0 && len(n.driverOpts) == 0 {
			continue // nothing is asked of the endpoint: the mode says it all
		}
		endpoints[n.name] = ep
	}
	return container.NetworkMode(nets[0].name), endpoints, nil
}
