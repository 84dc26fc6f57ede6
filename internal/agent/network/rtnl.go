//go:build linux

package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// rtnl is a route socket for changes. It sends several messages in one datagram, which the kernel works off in order,
// and asks for one answer: the library's way is a datagram and an answer each. The socket belongs to the network
// namespace of the thread that opened it and can be used from any other.
type rtnl struct {
	mu  sync.Mutex
	fd  int
	seq uint32
	buf [8192]byte
}

func openRTNL() (*rtnl, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening a route socket: %w", err)
	}
	for _, opt := range []int{unix.NETLINK_CAP_ACK, unix.NETLINK_EXT_ACK} {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, opt, 1); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("setting up a route socket: %w", err)
		}
	}
	return &rtnl{fd: fd}, nil
}

func (s *rtnl) close() error { return unix.Close(s.fd) }

// request starts a message: RTM_NEWLINK and the like with flags besides NLM_F_REQUEST.
func request(kind, flags int, data ...nl.NetlinkRequestData) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(kind, flags)
	r.Data = data
	return r
}

// do sends the messages and waits for the answer. The kernel goes on after a message that fails; the error is that of
// the first, with the reason the kernel gives.
func (s *rtnl) do(reqs ...*nl.NetlinkRequest) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []byte
	for i, r := range reqs {
		s.seq++
		r.Seq = s.seq
		if i == len(reqs)-1 {
			r.Flags |= unix.NLM_F_ACK
		} else {
			r.Flags &^= unix.NLM_F_ACK // failures are told without it
		}
		out = append(out, r.Serialize()...)
	}
	if err := unix.Sendto(s.fd, out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("sending to the route socket: %w", err)
	}
	first, last := reqs[0].Seq, s.seq
	var failed error
	for {
		n, from, err := unix.Recvfrom(s.fd, s.buf[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading from the route socket: %w", err)
		}
		if a, ok := from.(*unix.SockaddrNetlink); !ok || a.Pid != 0 {
			continue // not from the kernel
		}
		msgs, err := syscall.ParseNetlinkMessage(s.buf[:n])
		if err != nil {
			return fmt.Errorf("reading from the route socket: %w", err)
		}
		for _, m := range msgs {
			if m.Header.Type != unix.NLMSG_ERROR || m.Header.Seq < first || m.Header.Seq > last {
				continue // an answer that an interrupted call did not take
			}
			if err := answer(m); err != nil && failed == nil {
				failed = err
			}
			if m.Header.Seq == last {
				return failed
			}
		}
	}
}

// answer reads struct nlmsgerr and, of the attributes after it, NLMSGERR_ATTR_MSG.
func answer(m syscall.NetlinkMessage) error {
	if len(m.Data) < 4+unix.NLMSG_HDRLEN {
		return fmt.Errorf("answer of the route socket: %w", unix.EBADMSG)
	}
	no := -int32(binary.NativeEndian.Uint32(m.Data))
	if no == 0 {
		return nil
	}
	if m.Header.Flags&unix.NLM_F_ACK_TLVS != 0 {
		attrs, err := nl.ParseRouteAttrAsMap(m.Data[4+unix.NLMSG_HDRLEN:])
		if a, ok := attrs[1]; err == nil && ok { // NLMSGERR_ATTR_MSG
			return fmt.Errorf("%s: %w", nl.BytesToString(a.Value), syscall.Errno(no))
		}
	}
	return syscall.Errno(no)
}
