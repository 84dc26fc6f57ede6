//go:build !unix

package engine

import (
	"net"
	"os"
)

// agentEnd: streams to an agent in a machine go over its own transport, which is package vm's to bring.
func agentEnd(net.Conn) (*os.File, net.Conn, error) {
	return nil, nil, NotBuilt("streams to an agent on this system")
}
