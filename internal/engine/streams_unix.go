//go:build unix

package engine

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// agentEnd returns the descriptor that the agent gets for a client's connection. A unix socket is handed over as it
// is, so that no byte crosses the daemon: near is nil. For any other connection (TLS) it is one end of a socket pair
// and near is the other, to be relayed.
func agentEnd(c net.Conn) (file *os.File, near net.Conn, err error) {
	if u, ok := c.(*net.UnixConn); ok {
		rc, err := u.SyscallConn()
		if err != nil {
			return nil, nil, err
		}
		// Not UnixConn.File: that makes the open file, which the agent will share, blocking.
		cerr := rc.Control(func(fd uintptr) {
			var n int
			if n, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); err == nil {
				file = os.NewFile(uintptr(n), "stream")
			}
		})
		if err == nil {
			err = cerr
		}
		return file, nil, err
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("making a socket pair: %w", err)
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	far := os.NewFile(uintptr(fds[0]), "stream")
	mine := os.NewFile(uintptr(fds[1]), "relay")
	defer mine.Close()
	near, err = net.FileConn(mine)
	if err != nil {
		far.Close()
		return nil, nil, err
	}
	return far, near, nil
}
