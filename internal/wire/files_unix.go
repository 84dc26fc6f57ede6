//go:build unix

package wire

import (
	"fmt"
	"io"
	"net"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

func carriesFiles(c net.Conn) bool {
	_, ok := c.(*net.UnixConn)
	return ok
}

// sendFiles writes buf with files attached to its first byte. The descriptors are read without os.File.Fd, which
// would turn a non-blocking description blocking for everyone who shares it.
func sendFiles(c net.Conn, buf []byte, files []*os.File) error {
	fds := make([]int, len(files))
	for i, f := range files {
		rc, err := f.SyscallConn()
		if err != nil {
			return fmt.Errorf("sending descriptor %s: %w", f.Name(), err)
		}
		if err := rc.Control(func(fd uintptr) { fds[i] = int(fd) }); err != nil {
			return fmt.Errorf("sending descriptor %s: %w", f.Name(), err)
		}
	}
	n, _, err := c.(*net.UnixConn).WriteMsgUnix(buf, unix.UnixRights(fds...), nil)
	runtime.KeepAlive(files)
	if err == nil && n < len(buf) {
		_, err = c.Write(buf[n:])
	}
	return err
}

// receive reads what is there, at least one byte, and the descriptors that came with it.
func receive(c net.Conn, buf []byte) (int, []*os.File, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		n, err := c.Read(buf)
		if n > 0 {
			err = nil
		}
		return n, nil, err
	}
	var oob [16 + MaxFiles*4]byte // one SCM_RIGHTS message: cmsghdr is 16 bytes on 64-bit Linux
	n, oobn, flags, _, err := u.ReadMsgUnix(buf, oob[:])
	if err != nil {
		return 0, nil, err
	}
	files, err := parseFiles(oob[:oobn])
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = fmt.Errorf("descriptors lost on the way (limit on open files?): %w", unix.EMFILE)
	}
	if err == nil && n == 0 {
		err = io.EOF
	}
	return n, files, err
}

func parseFiles(oob []byte) ([]*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("reading control message: %w", err)
	}
	var files []*os.File
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			continue // not SCM_RIGHTS
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "wire"))
		}
	}
	return files, nil
}
