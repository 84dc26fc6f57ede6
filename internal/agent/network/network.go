//go:build linux

// Package network gives containers their network: namespaces, the default bridge, addresses, NAT, and the resolver
// files. It talks rtnetlink and nf_tables to the kernel and runs no programs.
package network

import (
	"errors"
	"os"

	"runkiri.com/kiri/internal/wire"
)

var errNotBuilt = errors.New("not built yet")

// Config says what the default bridge is to be.
type Config struct {
	Bridge string // interface; "" is kiri0
	Table  string // nf_tables table of family ip; "" is kiri
	Subnet string // CIDR; its address, if it is not the network's own, is the gateway's. "": the first of 172.17.0.0/16 and on that is free
	MTU    int    // bytes; 0: the uplink's, at most 1500
}

// Network is the default bridge. Its methods may be called at the same time and from any thread.
type Network struct{}

// Sandbox is a network namespace with, on the bridge, an endpoint in it. The namespace lives as long as NS or a
// process in it does, and takes the veth pair with it; the address is free after Release.
type Sandbox struct {
	NS       *os.File
	Endpoint wire.Endpoint
}

// Open brings the bridge and the table to the state asked for; what is so already is left alone.
func Open(cfg Config) (*Network, error) { return nil, errNotBuilt }

// Bridge describes the bridge.
func (n *Network) Bridge() wire.Bridge { return wire.Bridge{} }

// Warnings are what on this host keeps containers from being reached, for `docker info`.
func (n *Network) Warnings() []string { return nil }

// New makes a namespace of kind "none" (lo only) or "bridge".
func (n *Network) New(kind string, want wire.NetConfig) (*Sandbox, error) { return nil, errNotBuilt }

// Publish opens ports of s on the host and returns them with the numbers chosen.
func (n *Network) Publish(s *Sandbox, ports []wire.Port) ([]wire.Port, error) {
	return nil, errNotBuilt
}

// Adopt marks the address of e as taken, after a restart. Conflict if it is.
func (n *Network) Adopt(e wire.Endpoint) error { return errNotBuilt }

// Release makes the address of e free again and unpublishes its ports.
func (n *Network) Release(e wire.Endpoint) {}

// Close closes the sockets; it removes nothing.
func (n *Network) Close() error { return nil }

// Remove deletes the bridge and the table.
func (n *Network) Remove() error { return errNotBuilt }

// WriteFiles writes hosts, hostname and resolv.conf for r to dir. ep.Gateway is what host-gateway stands for, also
// where the container has no address.
func WriteFiles(dir string, r *wire.Run, ep wire.Endpoint) error { return errNotBuilt }

// InterfaceStats are the counters of the interfaces, without lo, in the network namespace of a process.
func InterfaceStats(pid int) ([]wire.InterfaceStats, error) { return nil, errNotBuilt }
