//go:build linux

// Package network gives containers their network: namespaces, the default bridge, addresses, NAT, and the resolver
// files. It talks rtnetlink and nf_tables to the kernel and runs no programs.
package network

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/google/nftables"
	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Config says what the default bridge is to be.
type Config struct {
	Bridge string // interface; "" is kiri0
	Table  string // nf_tables table of family ip; "" is kiri
	Subnet string // CIDR; its address, if it is not the network's own, is the gateway's. "": the bridge's, or the first of 172.17.0.0/16 and on that is free
	MTU    int    // bytes; 0: that of the default route's link, at most 1500
}

const (
	defaultBridge = "kiri0"
	defaultTable  = "kiri"
	defaultMTU    = 1500
)

// Network is the default bridge. Its methods may be called at the same time and from any thread.
type Network struct {
	cfg   Config // with nothing left to choose
	index int    // of the bridge
	ipv6  bool   // the kernel has it
	pool  *pool
	links *netlink.Handle // for what is asked once
	rtnl  *rtnl           // for what is asked for every container
	nft   *nftables.Conn
	ports ports
	warn  []string
}

// Open brings the bridge and the table to the state asked for; what is so already is left alone, so that it is quiet
// after a crash of the agent. It acts in the network namespace of the calling thread.
func Open(cfg Config) (*Network, error) {
	n := &Network{cfg: cfg}
	if n.cfg.Bridge == "" {
		n.cfg.Bridge = defaultBridge
	}
	if n.cfg.Table == "" {
		n.cfg.Table = defaultTable
	}
	if err := n.open(); err != nil {
		n.Close()
		return nil, fmt.Errorf("setting up bridge %s: %w", n.cfg.Bridge, err)
	}
	return n, nil
}

func (n *Network) open() error {
	_, err := os.Stat(hostInetIPs)
	n.ipv6 = err == nil
	if n.links, err = netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER); err != nil {
		return fmt.Errorf("opening a route socket: %w", err)
	}
	if n.rtnl, err = openRTNL(); err != nil {
		return err
	}
	if n.nft, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(largeBuffers)); err != nil {
		return fmt.Errorf("opening an nf_tables socket: %w", err)
	}
	subnet, err := n.setUpBridge()
	if err != nil {
		return err
	}
	n.pool = newPool(subnet, subnet.Addr())
	n.cfg.Subnet = subnet.Masked().String()
	// The table before forwarding: at no time does the host pass on more than it should.
	forwarding, err := n.forwarding()
	if err != nil {
		return err
	}
	if err := n.setUpTable(!forwarding); err != nil {
		return err
	}
	if !forwarding {
		if err := sysctl("net/ipv4/ip_forward", "1"); err != nil {
			return err
		}
	}
	return n.lookForDrops()
}

// largeBuffers makes room for thousands of ports in one transaction. It is a limit, not memory held.
func largeBuffers(c *mdl.Conn) error {
	const size = 8 << 20
	return errors.Join(c.SetWriteBuffer(size), c.SetReadBuffer(size))
}

// Bridge describes the bridge.
func (n *Network) Bridge() wire.Bridge {
	return wire.Bridge{Name: n.cfg.Bridge, Subnet: n.cfg.Subnet, Gateway: n.pool.gateway.String(), MTU: n.cfg.MTU}
}

// Warnings are what on this host keeps containers from being reached, for `docker info`.
func (n *Network) Warnings() []string { return n.warn }

// Adopt marks the address of e as taken, after a restart of the agent. Conflict if it is.
func (n *Network) Adopt(e wire.Endpoint) error {
	if e.Address == "" {
		return nil
	}
	if err := n.pool.adopt(e.Address, e.MAC); err != nil {
		return err
	}
	return n.adoptPorts(e)
}

// Release makes the address of e free again and takes its ports off the host. The namespace must be dying. If the
// ports cannot be taken off, which only a kernel out of memory or a foreign change of the table can cause, the address
// is not given to another container.
func (n *Network) Release(e wire.Endpoint) error {
	if e.Address == "" {
		return nil
	}
	if err := n.unpublish(e); err != nil {
		return fmt.Errorf("releasing %s: %w", e.Address, err)
	}
	n.pool.release(e.Address)
	return nil
}

// Close closes the sockets, those of published ports too; it removes nothing.
func (n *Network) Close() error {
	var failed error
	n.ports.mu.Lock()
	defer n.ports.mu.Unlock()
	closeSockets(n.ports.held)
	n.ports.held = nil
	if n.links != nil {
		n.links.Close()
	}
	if n.rtnl != nil {
		failed = n.rtnl.close()
	}
	if n.nft != nil {
		failed = errors.Join(failed, n.nft.CloseLasting())
	}
	return failed
}

// Remove deletes the bridge and the table and, if it was kiri that turned forwarding on, turns it off: without the
// table the host would pass on what it never did. No container may be on the bridge. It acts in the namespace of Open,
// but for forwarding in that of the calling thread.
func (n *Network) Remove() error {
	err := n.removeTable()
	if l, lerr := n.links.LinkByName(n.cfg.Bridge); lerr == nil {
		err = errors.Join(err, n.links.LinkDel(l))
	} else if !errors.As(lerr, &netlink.LinkNotFoundError{}) {
		err = errors.Join(err, lerr)
	}
	if err != nil {
		return fmt.Errorf("removing bridge %s: %w", n.cfg.Bridge, err)
	}
	return nil
}

// setUpBridge returns the gateway's address with the subnet's length.
func (n *Network) setUpBridge() (netip.Prefix, error) {
	var asked netip.Prefix
	if n.cfg.Subnet != "" {
		var err error
		if asked, err = parseSubnet(n.cfg.Subnet); err != nil {
			return netip.Prefix{}, err
		}
	}
	mtu, err := n.uplinkMTU()
	if err != nil {
		return netip.Prefix{}, err
	}
	if n.cfg.MTU == 0 {
		n.cfg.MTU = mtu
	}
	link, made, err := n.bridgeLink()
	if err != nil {
		return netip.Prefix{}, err
	}
	n.index = link.Attrs().Index
	gateway, err := n.setUpAddress(link, asked)
	if err == nil && link.Attrs().Flags&net.FlagUp == 0 {
		err = n.links.LinkSetUp(link)
	}
	if err != nil && made {
		err = errors.Join(err, n.links.LinkDel(link))
	}
	return gateway, err
}

// bridgeLink finds or makes the interface. made is true if it was not there.
func (n *Network) bridgeLink() (link netlink.Link, made bool, err error) {
	link, err = n.links.LinkByName(n.cfg.Bridge)
	switch {
	case err == nil:
		if link.Type() != "bridge" {
			return nil, false, wire.Errorf(wire.Conflict, "interface %s is there and is not a bridge but a %s", n.cfg.Bridge, link.Type())
		}
		if link.Attrs().MTU != n.cfg.MTU {
			err = n.links.LinkSetMTU(link, n.cfg.MTU)
		}
		if link.Attrs().Group != linkGroup {
			err = errors.Join(err, n.links.LinkSetGroup(link, linkGroup))
		}
		return link, false, err
	case !errors.As(err, &netlink.LinkNotFoundError{}):
		return nil, false, fmt.Errorf("finding the interface: %w", err)
	}
	// With an address of its own the bridge does not take over that of a port, which would change with the ports.
	mac := make(net.HardwareAddr, 6)
	rand.Read(mac)
	mac[0] = mac[0]&^1 | 2
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr, attrs.Group = n.cfg.Bridge, n.cfg.MTU, mac, linkGroup
	if err := n.links.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return nil, false, fmt.Errorf("making the interface: %w", err)
	}
	if link, err = n.links.LinkByName(n.cfg.Bridge); err != nil {
		return nil, false, fmt.Errorf("finding the interface: %w", err)
	}
	// Containers have no IPv6, and without a link-local address the host cannot be reached by it past the firewall.
	if n.ipv6 {
		if err := sysctl("net/ipv6/conf/"+n.cfg.Bridge+"/disable_ipv6", "1"); err != nil {
			return nil, false, errors.Join(err, n.links.LinkDel(link))
		}
	}
	return link, true, nil
}

// setUpAddress sees to it that the bridge has the gateway's address and no other of IPv4.
func (n *Network) setUpAddress(link netlink.Link, asked netip.Prefix) (netip.Prefix, error) {
	have, err := n.links.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("listing addresses: %w", err)
	}
	if !asked.IsValid() {
		for _, a := range have {
			if p, ok := prefix(a.IPNet); ok && p.Bits() <= maxBits {
				return p, nil
			}
		}
		if asked, err = n.freeSubnet(); err != nil {
			return netip.Prefix{}, err
		}
	}
	found := false
	for _, a := range have {
		if p, ok := prefix(a.IPNet); ok && p == asked {
			found = true
		} else if err := n.links.AddrDel(link, &a); err != nil {
			return netip.Prefix{}, fmt.Errorf("removing address %s: %w", a.IPNet, err)
		}
	}
	if !found {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: asked.Addr().AsSlice(), Mask: net.CIDRMask(asked.Bits(), 32)}}
		p := pool{subnet: asked.Masked()}
		a.Broadcast = p.at(uint32(p.size() - 1)).AsSlice()
		if err := n.links.AddrAdd(link, a); err != nil {
			return netip.Prefix{}, fmt.Errorf("adding address %s: %w", asked, err)
		}
	}
	return asked, nil
}

// forwarding tells whether the host passes packets on.
func (n *Network) forwarding() (bool, error) {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
	if err != nil {
		return false, fmt.Errorf("reading ip_forward: %w", err)
	}
	return string(bytes.TrimSpace(b)) != "0", nil
}

// InterfaceStats are the counters of the interfaces, without lo, in the network namespace of a process.
func InterfaceStats(pid int) ([]wire.InterfaceStats, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", pid))
	if err != nil {
		return nil, fmt.Errorf("reading interface counters of process %d: %w", pid, err)
	}
	var out []wire.InterfaceStats
	for line := range strings.Lines(string(text)) {
		name, rest, ok := strings.Cut(line, ":")
		if name = strings.TrimSpace(name); !ok || name == "lo" {
			continue // the two lines of headings have no colon
		}
		s := wire.InterfaceStats{Name: name}
		var skip uint64
		_, err := fmt.Sscan(rest, &s.RxBytes, &s.RxPackets, &s.RxErrors, &s.RxDropped, &skip, &skip, &skip, &skip,
			&s.TxBytes, &s.TxPackets, &s.TxErrors, &s.TxDropped)
		if err != nil {
			return nil, fmt.Errorf("parsing interface counters of %s: %w", name, err)
		}
		out = append(out, s)
	}
	return out, nil
}
