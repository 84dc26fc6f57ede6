//go:build linux

package network

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync"

	"runkiri.com/kiri/internal/wire"
)

// pool hands out the addresses of one subnet in turn, so that one that was just freed comes last: who still holds it in
// a cache gets no answer rather than someone else's.
type pool struct {
	subnet  netip.Prefix
	gateway netip.Addr

	mu   sync.Mutex
	used map[netip.Addr]string // address -> MAC
	next uint32                // host number to try first
}

func newPool(subnet netip.Prefix, gateway netip.Addr) *pool {
	return &pool{subnet: subnet.Masked(), gateway: gateway, used: map[netip.Addr]string{}, next: 1}
}

// size is the number of addresses in the subnet, the first and the last of which are not for hosts.
func (p *pool) size() uint64 { return 1 << (32 - p.subnet.Bits()) }

func (p *pool) at(host uint32) netip.Addr {
	a := p.subnet.Addr().As4()
	binary.BigEndian.PutUint32(a[:], binary.BigEndian.Uint32(a[:])+host)
	return netip.AddrFrom4(a)
}

func (p *pool) host(a netip.Addr) uint32 {
	x, base := a.As4(), p.subnet.Addr().As4()
	return binary.BigEndian.Uint32(x[:]) - binary.BigEndian.Uint32(base[:])
}

// take reserves the address asked for ("" any) with a MAC ("" the address's own) and returns both. Errors are Invalid for
// what no container of this subnet can have, Conflict for what another has, Internal for a full pool, with Docker's words.
func (p *pool) take(address, mac string) (netip.Addr, net.HardwareAddr, error) {
	var hw net.HardwareAddr
	if mac != "" {
		var err error
		if hw, err = net.ParseMAC(mac); err != nil || len(hw) != 6 {
			return netip.Addr{}, nil, wire.Errorf(wire.Invalid, "invalid MAC address: %s", mac)
		}
		if hw[0]&1 != 0 || hw.String() == "00:00:00:00:00:00" {
			return netip.Addr{}, nil, wire.Errorf(wire.Invalid, "invalid MAC address: %s is not the address of one interface", mac)
		}
	}
	var want netip.Addr
	if address != "" {
		var err error
		if want, err = netip.ParseAddr(address); err != nil || !want.Is4() {
			return netip.Addr{}, nil, wire.Errorf(wire.Invalid, "invalid IPv4 address: %s", address)
		}
		if !p.subnet.Contains(want) {
			return netip.Addr{}, nil, wire.Errorf(wire.Invalid, "no configured subnet or ip-range contain the IP address %s", address)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if hw != nil {
		for _, m := range p.used {
			if m == hw.String() {
				return netip.Addr{}, nil, wire.Errorf(wire.Conflict, "MAC address %s is already in use", hw)
			}
		}
	}
	if want.IsValid() {
		if !p.free(want) {
			return netip.Addr{}, nil, wire.Errorf(wire.Conflict, "Address already in use")
		}
	} else if want = p.nextFree(); !want.IsValid() {
		return netip.Addr{}, nil, wire.Errorf(wire.Internal, "no available IPv4 addresses on this network's address pools: bridge (%s)", p.subnet)
	}
	if hw == nil {
		hw = macOf(want)
	}
	p.used[want] = hw.String()
	return want, hw, nil
}

// macOf is the MAC of an address. A fixed one keeps the neighbour caches of the host and of the other containers true
// when an address finds a new owner; it is unique on the bridge because the address is. 02 marks it as locally made.
func macOf(a netip.Addr) net.HardwareAddr {
	b := a.As4()
	return net.HardwareAddr{0x02, 0x42, b[0], b[1], b[2], b[3]}
}

// free tells whether a host may be given the address. p.mu is held.
func (p *pool) free(a netip.Addr) bool {
	n := uint64(p.host(a))
	_, used := p.used[a]
	return n != 0 && n != p.size()-1 && a != p.gateway && !used
}

// nextFree goes round once. p.mu is held.
func (p *pool) nextFree() netip.Addr {
	n := uint64(p.next)
	for range p.size() {
		a := p.at(uint32(n))
		n = (n + 1) % p.size()
		if p.free(a) {
			p.next = uint32(n)
			return a
		}
	}
	return netip.Addr{}
}

// adopt marks an address as taken.
func (p *pool) adopt(address, mac string) error {
	a, err := netip.ParseAddr(address)
	if err != nil || !p.subnet.Contains(a) {
		return wire.Errorf(wire.Invalid, "adopting address %s: not in %s", address, p.subnet)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.free(a) {
		return wire.Errorf(wire.Conflict, "adopting address %s: Address already in use", address)
	}
	p.used[a] = mac
	// Those after it were handed out later or are free: going on from there keeps the turn over a restart.
	if n := p.host(a) + 1; n > p.next && uint64(n) < p.size() {
		p.next = n
	}
	return nil
}

func (p *pool) release(address string) {
	a, err := netip.ParseAddr(address)
	if err != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, a)
}
