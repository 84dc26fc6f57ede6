package rootfs

import (
	"io"

	"golang.org/x/sys/unix"
)

// The unpacking child's descriptors.
const (
	childStream  = 0 // the tar
	childOut     = 1
	childErr     = 2
	childControl = 3 // SOCK_SEQPACKET, one message a packet
	childRoot    = 4 // the layer's fs/, as the root of a detached mount; locked
)

// unpackArg is the argument that makes kiri-init (or a test binary) call UnpackMain.
const unpackArg = "unpack"

// The first byte of each packet on the control socket.
const (
	packetBelow = 'b' // child: I need the layers below; agent: here they are, in a descriptor if there are any
	packetDone  = 'd' // child: the layer is whole; the text of its layerInfo
	packetError = 'e' // either: a wire.Error
)

// maxPacket bounds a packet; error texts are cut to fit.
const maxPacket = 16 << 10

// sendPacket sends one packet, with a descriptor if fd is not negative.
func sendPacket(sock int, p []byte, fd int) error {
	var oob []byte
	if fd >= 0 {
		oob = unix.UnixRights(fd)
	}
	return retry(func() error { return unix.Sendmsg(sock, p, oob, nil, unix.MSG_NOSIGNAL) })
}

// recvPacket receives one packet that must have no descriptor. io.EOF: the other end is gone.
func recvPacket(sock int, p []byte) (int, error) {
	var n int
	err := retry(func() (err error) { n, _, err = unix.Recvfrom(sock, p, 0); return })
	if err == unix.ECONNRESET || err == nil && n == 0 {
		return 0, io.EOF
	}
	return n, err
}

// recvPacketFile receives one packet and the descriptor that came with it, -1 if there was none.
func recvPacketFile(sock int, p []byte) (n, fd int, err error) {
	oob := make([]byte, unix.CmsgSpace(4))
	var oobn int
	err = retry(func() (err error) { n, oobn, _, _, err = unix.Recvmsg(sock, p, oob, unix.MSG_CMSG_CLOEXEC); return })
	if err != nil {
		return 0, -1, err
	}
	if n == 0 {
		return 0, -1, io.EOF
	}
	fd = -1
	if oobn > 0 {
		msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
		if err != nil {
			return 0, -1, err
		}
		for i := range msgs {
			fds, err := unix.ParseUnixRights(&msgs[i])
			if err == nil && len(fds) == 1 {
				fd = fds[0]
			}
		}
	}
	return n, fd, nil
}
