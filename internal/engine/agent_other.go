//go:build !linux

package engine

import (
	"context"
	"net"
	"os"
)

// noHost stands where there is no Linux: containers need a machine, which is package vm's to bring.
type noHost struct{}

func newAgentHost(*Config) agentHost { return noHost{} }

func (noHost) dial(context.Context) (net.Conn, error) { return nil, os.ErrNotExist }

func (noHost) start() (<-chan struct{}, error) {
	return nil, NotBuilt("running containers on this system (its engine machine)")
}
