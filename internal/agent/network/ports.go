//go:build linux

package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Published ports.
//
// A port is an element of the map in kiri's table: protocol . host's address . host's port -> container's address . port,
// with 0.0.0.0 for all of the host's. Packets take the kernel's path, also those of clients on the host itself, by its
// loopback too: the kernel lets 127.0.0.1 out by the bridge (route_localnet) and the table gives such packets the
// bridge's address; the same switch would let containers reach what listens on the host's loopback alone, so the table
// drops what comes from the bridge for or from 127.0.0.0/8. There is no relay and no process a port.
//
// A socket is bound to each port for as long as it is published. Nothing arrives there; it makes a port that is taken an
// error now, and one that is ours an error for whoever comes later, as Docker's does.

// portKey is an element's key as the kernel has it: each field padded to four bytes.
type portKey [12]byte

func makeKey(proto uint8, host netip.Addr, port uint16) (k portKey) {
	k[0] = proto
	copy(k[4:], host.AsSlice())
	binary.BigEndian.PutUint16(k[8:], port)
	return k
}

// portValue is an element's value: address, port, padding.
type portValue [8]byte

func makeValue(container netip.Addr, port uint16) (v portValue) {
	copy(v[:], container.AsSlice())
	binary.BigEndian.PutUint16(v[4:], port)
	return v
}

func (v portValue) addr() netip.Addr { return netip.AddrFrom4([4]byte(v[:4])) }

// ports are the published ones. mu also guards the nf_tables socket, which collects messages until they are sent.
type ports struct {
	mu    sync.Mutex
	held  map[portKey]heldPort
	stale map[portKey]portValue // in the table when we started, and adopted for nobody yet
	local bool                  // route_localnet is on
}

type heldPort struct {
	to     portValue
	socket int // -1 if the port was taken when it was adopted
}

// elementsPerMessage keeps a message's list below the 64 KiB that one attribute can have. All messages of a change are
// one transaction.
const elementsPerMessage = 1000

var protocols = map[string]uint8{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}

// Publish opens ports of s on the host and returns them with the numbers chosen. It is all or nothing. A port that is
// taken is an error of class Internal with Docker's words (and its status), one that cannot be of class Invalid.
func (n *Network) Publish(s *Sandbox, want []wire.Port) ([]wire.Port, error) {
	if len(want) == 0 {
		return nil, nil
	}
	to, err := netip.ParseAddr(s.Endpoint.Address)
	if err != nil {
		return nil, wire.Errorf(wire.Invalid, "publishing ports: the container has no address")
	}
	n.ports.mu.Lock()
	defer n.ports.mu.Unlock()
	if err := n.routeLocal(); err != nil {
		return nil, err
	}
	if err := n.rtnl.do(hairpin(s.Endpoint.Interface)); err != nil {
		return nil, fmt.Errorf("setting up %s for published ports: %w", s.Endpoint.Interface, err)
	}
	got := slices.Clone(want)
	added := make(map[portKey]heldPort, len(want))
	for i := range got {
		if err := n.hold(&got[i], to, added); err != nil {
			closeSockets(added)
			return nil, err
		}
	}
	if err := n.change(nil, added); err != nil {
		closeSockets(added)
		return nil, fmt.Errorf("publishing ports: %w", err)
	}
	n.keep(added)
	return got, nil
}

// hairpin makes the message that lets the bridge send a packet back by the port it came from: a container that uses its
// own published port. Where br_netfilter applies NAT to bridged packets (a host with Docker or Kubernetes) the bridge
// itself must do that; elsewhere the host routes such packets and the bridge sees them leave as its own.
func hairpin(name string) *nl.NetlinkRequest {
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(unix.IFLA_INFO_SLAVE_KIND, nl.NonZeroTerminated("bridge"))
	info.AddRtAttr(unix.IFLA_INFO_SLAVE_DATA, nil).AddRtAttr(nl.IFLA_BRPORT_MODE, []byte{1})
	return request(unix.RTM_NEWLINK, 0, nl.NewIfInfomsg(unix.AF_UNSPEC), nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name)), info)
}

// hold binds the socket of p, fills in what p leaves open, and enters it in added. n.ports.mu is held.
func (n *Network) hold(p *wire.Port, to netip.Addr, added map[portKey]heldPort) error {
	proto, host, err := checkPort(p)
	if err != nil {
		return err
	}
	key := makeKey(proto, host, uint16(p.HostPort))
	_, ours := n.ports.held[key]
	_, twice := added[key]
	if p.HostPort != 0 && (ours || twice) {
		return wire.Errorf(wire.Internal, "Bind for %s:%d failed: port is already allocated", host, p.HostPort)
	}
	fd, port, err := bind(proto, host, uint16(p.HostPort))
	if err != nil {
		return wire.Errorf(wire.Internal, "failed to bind host port %s:%d/%s: %w", host, p.HostPort, p.Proto, err)
	}
	p.HostIP, p.HostPort = host.String(), int(port)
	added[makeKey(proto, host, port)] = heldPort{makeValue(to, uint16(p.ContainerPort)), fd}
	return nil
}

// checkPort returns the protocol's number and the host's address.
func checkPort(p *wire.Port) (uint8, netip.Addr, error) {
	proto, ok := protocols[p.Proto]
	if !ok {
		return 0, netip.Addr{}, wire.Errorf(wire.Invalid, "invalid proto: %s", p.Proto)
	}
	if p.ContainerPort < 1 || p.ContainerPort > 65535 || p.HostPort < 0 || p.HostPort > 65535 {
		return 0, netip.Addr{}, wire.Errorf(wire.Invalid, "invalid port: %d:%d", p.HostPort, p.ContainerPort)
	}
	if p.HostIP == "" {
		return proto, netip.IPv4Unspecified(), nil
	}
	host, err := netip.ParseAddr(p.HostIP)
	if err != nil {
		return 0, netip.Addr{}, wire.Errorf(wire.Invalid, "invalid IP address: %s", p.HostIP)
	}
	if host = host.Unmap(); !host.Is4() {
		return 0, netip.Addr{}, wire.Errorf(wire.Unsupported, "publishing on the IPv6 address %s: not built yet", p.HostIP)
	}
	return proto, host, nil
}

// bind takes a port of the host's, any that is free for 0. For TCP the socket also listens: only then is the port
// refused to a server that sets SO_REUSEADDR, as ours must for ports with connections that are still closing.
func bind(proto uint8, host netip.Addr, port uint16) (fd int, got uint16, err error) {
	kind := unix.SOCK_STREAM
	if proto == unix.IPPROTO_UDP {
		kind = unix.SOCK_DGRAM
	}
	fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, int(proto))
	if err != nil {
		if proto == unix.IPPROTO_SCTP && port != 0 && errors.Is(err, unix.EPROTONOSUPPORT) {
			return -1, port, nil // without the protocol's module nothing on the host can have it; it is forwarded all the same
		}
		return -1, 0, err
	}
	if proto == unix.IPPROTO_TCP {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: host.As4(), Port: int(port)})
	}
	if err == nil && proto == unix.IPPROTO_TCP {
		err = unix.Listen(fd, 1)
	}
	if err == nil {
		var sa unix.Sockaddr
		if sa, err = unix.Getsockname(fd); err == nil {
			if in, ok := sa.(*unix.SockaddrInet4); ok {
				return fd, uint16(in.Port), nil
			}
			err = unix.EAFNOSUPPORT
		}
	}
	unix.Close(fd)
	return -1, 0, err
}

func closeSockets(ports map[portKey]heldPort) {
	for _, h := range ports {
		if h.socket >= 0 {
			unix.Close(h.socket)
		}
	}
}

// keep enters ports that are in the table. n.ports.mu is held.
func (n *Network) keep(added map[portKey]heldPort) {
	if n.ports.held == nil {
		n.ports.held = map[portKey]heldPort{}
	}
	for k, h := range added {
		n.ports.held[k] = h
		delete(n.ports.stale, k)
	}
}

// change takes elements out of the map and puts others in, in one transaction; a stale one in the way of a new one goes
// first. n.ports.mu is held.
func (n *Network) change(remove map[portKey]portValue, add map[portKey]heldPort) error {
	set := n.portMap()
	var out, in []nftables.SetElement
	for k, v := range remove {
		out = append(out, nftables.SetElement{Key: k[:], Val: v[:]})
	}
	for k, h := range add {
		if v, ok := n.ports.stale[k]; ok {
			if v == h.to {
				continue // there as it should be
			}
			out = append(out, nftables.SetElement{Key: k[:], Val: v[:]})
		}
		in = append(in, nftables.SetElement{Key: k[:], Val: h.to[:]})
	}
	for some := range slices.Chunk(out, elementsPerMessage) {
		if err := n.nft.SetDeleteElements(set, some); err != nil {
			return err
		}
	}
	for some := range slices.Chunk(in, elementsPerMessage) {
		if err := n.nft.SetAddElements(set, some); err != nil {
			return err
		}
	}
	if err := n.nft.Flush(); err != nil {
		return fmt.Errorf("writing map %s of table ip %s: %w", set.Name, n.cfg.Table, err)
	}
	return nil
}

// routeLocal lets the host's loopback reach containers by the bridge. n.ports.mu is held.
func (n *Network) routeLocal() error {
	if n.ports.local {
		return nil
	}
	if err := sysctl("net/ipv4/conf/"+n.cfg.Bridge+"/route_localnet", "1"); err != nil {
		return err
	}
	n.ports.local = true
	return nil
}

// adoptPorts takes over the ports of a container that has run on. A socket that cannot be bound again (someone took the
// port while there was no agent) is done without: the table still has the port.
func (n *Network) adoptPorts(e wire.Endpoint) error {
	if len(e.Ports) == 0 {
		return nil
	}
	to, err := netip.ParseAddr(e.Address)
	if err != nil {
		return wire.Errorf(wire.Invalid, "adopting ports: %w", err)
	}
	n.ports.mu.Lock()
	defer n.ports.mu.Unlock()
	if err := n.routeLocal(); err != nil {
		return err
	}
	added := map[portKey]heldPort{}
	for _, p := range e.Ports {
		proto, host, err := checkPort(&p)
		if err != nil {
			closeSockets(added)
			return err
		}
		fd, _, err := bind(proto, host, uint16(p.HostPort))
		if err != nil {
			fd = -1
		}
		added[makeKey(proto, host, uint16(p.HostPort))] = heldPort{makeValue(to, uint16(p.ContainerPort)), fd}
	}
	if err := n.change(nil, added); err != nil {
		closeSockets(added)
		return fmt.Errorf("adopting ports: %w", err)
	}
	n.keep(added)
	return nil
}

// Adopted ends the adoption after a restart: ports in the table that no container was adopted for are taken out. Until
// then they lead to addresses that are given to nobody.
func (n *Network) Adopted() error {
	n.ports.mu.Lock()
	defer n.ports.mu.Unlock()
	return n.dropStale(func(portValue) bool { return true })
}

// dropStale takes stale ports out of the table. n.ports.mu is held.
func (n *Network) dropStale(which func(portValue) bool) error {
	gone := map[portKey]portValue{}
	for k, v := range n.ports.stale {
		if which(v) {
			gone[k] = v
		}
	}
	if len(gone) == 0 {
		return nil
	}
	if err := n.change(gone, nil); err != nil {
		return err
	}
	for k := range gone {
		delete(n.ports.stale, k)
	}
	return nil
}

// unpublish takes the ports of an endpoint off the host and makes the kernel forget the UDP flows to it: one goes on as
// long as its client sends, and would lead to the address's next owner. TCP's end with their sockets.
func (n *Network) unpublish(e wire.Endpoint) error {
	gone := map[portKey]portValue{}
	udp := false
	n.ports.mu.Lock()
	defer n.ports.mu.Unlock()
	for _, p := range e.Ports {
		proto, host, err := checkPort(&p)
		if err != nil {
			continue
		}
		key := makeKey(proto, host, uint16(p.HostPort))
		if h, ok := n.ports.held[key]; ok && h.to.addr().String() == e.Address {
			gone[key] = h.to
			udp = udp || proto == unix.IPPROTO_UDP
		}
	}
	if len(gone) == 0 {
		return nil
	}
	err := n.change(gone, nil)
	// The sockets go last, so that nobody binds a port whose packets still go elsewhere.
	for k := range gone {
		if fd := n.ports.held[k].socket; fd >= 0 {
			unix.Close(fd)
		}
		delete(n.ports.held, k)
	}
	if udp {
		filter := &netlink.ConntrackFilter{}
		err = errors.Join(err, filter.AddIP(netlink.ConntrackReplySrcIP, net.ParseIP(e.Address)), filter.AddProtocol(unix.IPPROTO_UDP))
		if _, cerr := n.links.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, filter); cerr != nil {
			err = errors.Join(err, fmt.Errorf("forgetting UDP flows to %s: %w", e.Address, cerr))
		}
	}
	return err
}
