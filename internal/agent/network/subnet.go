//go:build linux

package network

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// maxBits is the smallest subnet: two hosts, the gateway and a container.
const maxBits = 30

// parseSubnet returns the gateway's address with the subnet's length: the address given or, if that is the network's
// own, the first.
func parseSubnet(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	if err != nil || !p.Addr().Is4() {
		return netip.Prefix{}, wire.Errorf(wire.Invalid, "invalid subnet %s: want an IPv4 address and a length", text)
	}
	if p.Bits() > maxBits || p.Bits() < 8 {
		return netip.Prefix{}, wire.Errorf(wire.Invalid, "invalid subnet %s: its length must be from 8 to %d", text, maxBits)
	}
	if p.Addr() == p.Masked().Addr() {
		return netip.PrefixFrom(p.Addr().Next(), p.Bits()), nil
	}
	return p, nil
}

// freeSubnet is the first of Docker's default pools (172.17 to 172.31, then 192.168 in parts) that overlaps no address,
// no route but default ones, and no name server of the host.
func (n *Network) freeSubnet() (netip.Prefix, error) {
	taken, err := n.takenSubnets()
	if err != nil {
		return netip.Prefix{}, err
	}
	var pools []netip.Prefix
	for b := 17; b <= 31; b++ {
		pools = append(pools, netip.PrefixFrom(netip.AddrFrom4([4]byte{172, byte(b), 0, 0}), 16))
	}
	for b := 0; b < 256; b += 16 {
		pools = append(pools, netip.PrefixFrom(netip.AddrFrom4([4]byte{192, 168, byte(b), 0}), 20))
	}
next:
	for _, p := range pools {
		for _, t := range taken {
			if t.Overlaps(p) {
				continue next
			}
		}
		return netip.PrefixFrom(p.Addr().Next(), p.Bits()), nil
	}
	return netip.Prefix{}, wire.Errorf(wire.Conflict, "all predefined address pools have been fully subnetted: the host's routes overlap each of them; give a subnet")
}

func (n *Network) takenSubnets() ([]netip.Prefix, error) {
	var taken []netip.Prefix
	addrs, err := n.links.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("listing addresses: %w", err)
	}
	for _, a := range addrs {
		if p, ok := prefix(a.IPNet); ok {
			taken = append(taken, p.Masked())
		}
		if p, ok := prefix(a.Peer); ok {
			taken = append(taken, p.Masked())
		}
	}
	// All tables: a VPN often routes in one of its own.
	routes, err := n.links.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		return nil, fmt.Errorf("listing routes: %w", err)
	}
	for _, r := range routes {
		// A route for half of everything is a VPN's way to say default.
		if p, ok := prefix(r.Dst); ok && p.Bits() > 1 {
			taken = append(taken, p.Masked())
		}
	}
	for _, a := range hostNameservers() {
		if a.Is4() {
			taken = append(taken, netip.PrefixFrom(a, 32))
		}
	}
	return taken, nil
}

// hostNameservers are those of the host's resolv.conf: one behind a gateway has no route of its own.
func hostNameservers() []netip.Addr {
	f, err := os.Open(hostResolv)
	if err != nil {
		return nil
	}
	defer f.Close()
	var out []netip.Addr
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if w := strings.Fields(lines.Text()); len(w) > 1 && w[0] == "nameserver" {
			if a, err := netip.ParseAddr(w[1]); err == nil {
				out = append(out, a)
			}
		}
	}
	return out
}

func prefix(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	a, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if a = a.Unmap(); !ok || !a.Is4() {
		return netip.Prefix{}, false
	}
	return netip.PrefixFrom(a, bits), true
}

// uplinkMTU is the MTU of the link with the default route, at most 1500. Docker takes 1500 whatever the uplink has; behind
// a tunnel large packets then depend on ICMP that often does not come back.
func (n *Network) uplinkMTU() (int, error) {
	routes, err := n.links.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_DST)
	if err != nil {
		return 0, fmt.Errorf("listing routes: %w", err)
	}
	mtu := defaultMTU
	for _, r := range routes {
		l, err := n.links.LinkByIndex(r.LinkIndex)
		if errors.As(err, &netlink.LinkNotFoundError{}) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("finding the uplink: %w", err)
		}
		mtu = min(mtu, l.Attrs().MTU)
	}
	return mtu, nil
}
