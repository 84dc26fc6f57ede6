package config

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// Host is one address to listen on.
type Host struct {
	Proto string // "unix", "tcp" or "fd"
	Addr  string // a path; host:port; or the number of a passed descriptor, "" for all of them
}

func (h Host) String() string { return h.Proto + "://" + h.Addr }

// maxSocketPath is what the kernel can hold of a socket's path, in bytes: sun_path without its final zero.
const maxSocketPath = 107

// ParseHost reads a value of --host.
func ParseHost(s string) (Host, error) {
	proto, addr, ok := strings.Cut(s, "://")
	if !ok {
		return Host{}, fmt.Errorf("invalid host %q: must begin with unix://, tcp:// or fd://", s)
	}
	switch proto {
	case "unix":
		if !strings.HasPrefix(addr, "/") {
			return Host{}, fmt.Errorf("invalid host %q: a unix socket needs an absolute path", s)
		}
		if len(addr) > maxSocketPath {
			return Host{}, fmt.Errorf("invalid host %q: the path of a unix socket has at most %d bytes", s, maxSocketPath)
		}
	case "tcp":
		host, port, err := net.SplitHostPort(addr)
		if err != nil {
			if host, port, err = net.SplitHostPort(addr + ":2376"); err != nil { // Docker's port for TLS
				return Host{}, fmt.Errorf("invalid host %q: %w", s, err)
			}
		}
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return Host{}, fmt.Errorf("invalid host %q: no port %q", s, port)
		}
		addr = net.JoinHostPort(host, port)
	case "fd":
		if addr == "*" {
			addr = ""
		}
		if _, err := strconv.ParseUint(addr, 10, 16); err != nil && addr != "" {
			return Host{}, fmt.Errorf("invalid host %q: must be fd:// or fd:// and the number of a descriptor", s)
		}
	default:
		return Host{}, fmt.Errorf("invalid host %q: must begin with unix://, tcp:// or fd://", s)
	}
	return Host{Proto: proto, Addr: addr}, nil
}
