//go:build !unix

package wire

import (
	"net"
	"os"
)

// Where there is no SCM_RIGHTS the agent is in a machine and bytes travel by streams of their own.
func carriesFiles(net.Conn) bool { return false }

func sendFiles(net.Conn, []byte, []*os.File) error {
	return Errorf(Unsupported, "this platform passes no descriptors")
}

func receive(c net.Conn, buf []byte) (int, []*os.File, error) {
	n, err := c.Read(buf)
	if n > 0 {
		err = nil
	}
	return n, nil, err
}
