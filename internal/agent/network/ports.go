//go:build linux

package network

import "runkiri.com/kiri/internal/wire"

// ports are the published ports.
type ports struct{}

// Publish opens ports of s on the host and returns them with the numbers chosen.
func (n *Network) Publish(s *Sandbox, ports []wire.Port) ([]wire.Port, error) {
	if len(ports) == 0 {
		return nil, nil
	}
	return nil, wire.Errorf(wire.Unsupported, "publishing port %d/%s: not built yet", ports[0].ContainerPort, ports[0].Proto)
}
