//go:build linux && (amd64 || arm64)

package launch

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// Template makes processes in PID namespaces that have inhabitants. It holds on to a process of a few pages, without
// secrets, that copies itself for each; one that has died is replaced at the next Start. Its methods are safe for
// concurrent use, and starts run side by side.
//
// Who uses a Template must reap children that it does not know: each Start makes one that ends at once, and the
// template process itself is one.
type Template struct {
	mu     sync.Mutex // guards the fields below, and writes to sock
	sock   *os.File   // nil: there is no process
	pid    int
	pidfd  *os.File
	closed bool
}

// making serializes the making of template processes, which all use the same memory of ours for a moment.
var making sync.Mutex

// NewTemplate starts a template process. It also makes this process non-dumpable (PR_SET_DUMPABLE), which the
// template and all that is copied from it inherit until they execute: only CAP_SYS_PTRACE opens their memory.
func NewTemplate() (*Template, error) {
	t := &Template{}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.make(); err != nil {
		return nil, err
	}
	return t, nil
}

// PID is the template process's id, 0 if there is none.
func (t *Template) PID() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.pid
}

// Close ends the template process. Starts under way are not disturbed.
func (t *Template) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	t.drop()
	return nil
}

// drop ends the process and reaps it, unless another waiter is quicker. t.mu is held.
func (t *Template) drop() {
	if t.sock == nil {
		return
	}
	t.sock.Close()
	Proc{PID: t.pid, PIDFD: t.pidfd}.discard()
	t.sock, t.pidfd, t.pid = nil, nil, 0
}

// alive tells whether there is a process. t.mu is held.
func (t *Template) alive() bool {
	if t.sock == nil {
		return false
	}
	p := []unix.PollFd{{Fd: int32(fdOf(t.pidfd)), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 0
}

// make makes the template process. t.mu is held.
func (t *Template) make() error {
	base, err := area()
	if err != nil {
		return err
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return wire.Errorf(wire.Internal, "make the agent non-dumpable: %w", err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return wire.Errorf(wire.Internal, "make socket for the template process: %w", err)
	}
	defer unix.Close(pair[1])
	sock := os.NewFile(uintptr(pair[0]), "template")
	pid, err := makeTemplate(base, pair[1])
	if err == nil {
		t.pidfd, err = openPIDFD(pid)
	}
	if err != nil {
		sock.Close()
		return wire.Errorf(wire.Internal, "make the template process: %w", err)
	}
	t.sock, t.pid = sock, pid
	return nil
}

func openPIDFD(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("open pidfd of %d: %w", pid, err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// makeTemplate makes the process in two steps. A child that shares our memory makes the copy, because a child that
// shares memory starts without a registration for restartable sequences (rseq), which a C library, if there is one,
// has made for the thread: the copy would die of it once that memory is unmapped.
func makeTemplate(base uint64, socket int) (int, error) {
	making.Lock()
	defer making.Unlock()
	unmap, err := unmapRanges([][2]uint64{{base, base + areaSize}, codePages()})
	if err != nil {
		return 0, err
	}
	null, err := newNull()
	if err != nil {
		return 0, err
	}
	defer null.Close()
	loop, start, fix := loopProgram(base, socket, fdOf(null), unmap)
	if 8*loop.memSize() > areaStatus {
		return 0, fmt.Errorf("its program has %d bytes: too many", 8*loop.memSize())
	}
	mem := make([]uint64, loop.size())
	loop.link(mem, base+areaLoop, func(int) uint64 { return 0 })
	fix(mem)
	fill(base+areaLoop, mem)
	defer drop(base, areaSize)

	maker := &program{}
	maker.exit(1)
	pid := maker.newSlot()
	args := maker.words(word{v: unix.CLONE_PARENT | unix.CLONE_CLEAR_SIGHAND}, num(0), num(0), num(0), num(0), num(0), num(0), num(0), num(0), num(0), num(0))
	first := maker.here()
	s := maker.add("", "", unix.SYS_CLONE3, data(args), num(11*8))
	s.to, s.alt = pid, 0
	maker.exit(0)
	const head = 1
	prog := make([]uint64, head+maker.memSize())
	at := addrOf(prog)
	maker.link(prog[head:], at+8*head, nil)
	// The copy goes on in the memory that it keeps.
	prog[head+int(first)*opWords+opZero] = base + areaLoop + 8*opWords*uint64(start)

	// The copy inherits where failures are stored and handled: in its own memory.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ret := spawn(&cloneArgs{
		flags:      unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_PIDFD | unix.CLONE_CLEAR_SIGHAND,
		exitSignal: uint64(unix.SIGCHLD),
		pidfd:      at,
	}, at+8*(head+opWords*uint64(first)), base+areaStatus, base+areaProgram)
	made := int(prog[head+len(maker.steps)*opWords+pid/8])
	keep(prog)
	if ret < 0 {
		return 0, cloneError(unix.Errno(-ret))
	}
	Proc{PID: int(ret), PIDFD: os.NewFile(uintptr(uint32(prog[0])), "pidfd")}.discard()
	if made == 0 {
		return 0, cloneError(unix.Errno(peek(base + areaStatus + 8*statusLast)))
	}
	return made, nil
}

// codePages are the pages of the walker's code.
func codePages() [2]uint64 {
	at := walkAddr()
	return [2]uint64{at &^ (pageSize - 1), (at + walkSize + pageSize - 1) &^ (pageSize - 1)}
}

// unmapRanges are the gaps between what a template keeps, and the kernel's own mappings ([vdso] and its kin), which
// some kernels forbid to unmap: a range with one of them in it would fail as a whole. They hold no secrets.
func unmapRanges(keep [][2]uint64) ([][2]uint64, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	var end uint64
	for line := range strings.Lines(string(maps)) {
		f := strings.Fields(line)
		if len(f) > 5 && f[5] == "[vsyscall]" {
			continue // above all user addresses
		}
		lo, hi, _ := strings.Cut(f[0], "-")
		from, err1 := strconv.ParseUint(lo, 16, 64)
		to, err2 := strconv.ParseUint(hi, 16, 64)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		end = max(end, to)
		if len(f) > 5 && strings.HasPrefix(f[5], "[v") {
			keep = append(keep, [2]uint64{from, to})
		}
	}
	return gaps(keep, end), nil
}

// shortWait is how long a thread waits for the outcome of a start, in milliseconds.
const shortWait = 20

// Start makes the plan's process; as Thread.Start, but for plans that need a Template. It returns when the execve has
// succeeded.
func (t *Template) Start(p *Plan) (Proc, error) {
	defer p.Close()
	if !p.template {
		return Proc{}, wire.Errorf(wire.Internal, "start plan: it is for a thread")
	}
	prog := &p.prog
	base, err := area()
	if err != nil {
		return Proc{}, err
	}
	base += areaProgram
	if 8*prog.memSize() > maxProgram {
		return Proc{}, wire.Errorf(wire.Invalid, "%s%s: %w", "exec ", "command", unix.E2BIG)
	}
	fds := make([]int, 1, 16) // the first is the report socket
	first := uint64(fdFirst)
	if p.cgroup > 0 {
		fds = append(fds, p.cgroup)
		first++
	}
	for _, f := range prog.files {
		fds = append(fds, fdOf(f))
	}
	if len(fds) > maxFiles {
		return Proc{}, wire.Errorf(wire.Unsupported, "start in a PID namespace that exists: %d descriptors, more than %d", len(fds), maxFiles)
	}

	const head = 3 + nonceSize/8 + 1
	mem := make([]uint64, head+prog.size())
	nonce := bytesOf(mem[3 : 3+nonceSize/8])
	rand.Read(nonce)
	mem[0], mem[1] = uint64(8*prog.size()), p.templateFlags()
	if p.cgroup > 0 {
		mem[2] = fdFirst
	}
	mem[head-1] = controlSize
	prog.link(mem[head:], base, func(i int) uint64 { return first + uint64(i) })

	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return Proc{}, wire.Errorf(wire.Internal, "make socket for the outcome of a start: %w", err)
	}
	fds[0] = pair[1]
	err = t.send(bytesOf(mem), fds)
	unix.Close(pair[1])
	runtime.KeepAlive(p)
	if err != nil {
		unix.Close(pair[0])
		return Proc{}, err
	}
	// A start takes less than a millisecond, so its outcome is first waited for with a blocked thread, which is woken
	// quicker than a goroutine; one that takes longer, as the container can make it, must not keep a thread.
	poll := []unix.PollFd{{Fd: int32(pair[0]), Events: unix.POLLIN}}
	unix.Poll(poll, shortWait)
	report := os.NewFile(uintptr(pair[0]), "report")
	defer report.Close()
	return prog.outcome(report, nonce, base)
}

// send gives the request to the template process, and makes the process if there is none.
func (t *Template) send(req []byte, fds []int) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return wire.Errorf(wire.Unavailable, "template process: %w", os.ErrClosed)
	}
	if !t.alive() {
		t.drop()
		if err := t.make(); err != nil {
			return err
		}
	}
	rights := unix.UnixRights(fds...)
	for len(req) > 0 {
		n, err := unix.SendmsgN(fdOf(t.sock), req, rights, nil, unix.MSG_NOSIGNAL)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.drop() // half a request may be in: nothing after it could be read
			return wire.Errorf(wire.Internal, "give a program to the template process: %w", err)
		}
		req, rights = req[n:], nil
	}
	return nil
}

// outcome waits for the report of a start. base is where the program was. Messages without the nonce come from the
// container and are dropped.
func (p *program) outcome(report *os.File, nonce []byte, base uint64) (Proc, error) {
	buf, oob := make([]byte, reportSize+1), make([]byte, unix.CmsgSpace(4*4))
	conn, err := report.SyscallConn()
	if err != nil {
		return Proc{}, wire.Errorf(wire.Internal, "wait for the outcome of a start: %w", err)
	}
	for {
		var n, oobn int
		var rerr error
		err := conn.Read(func(fd uintptr) bool {
			n, oobn, _, _, rerr = unix.Recvmsg(int(fd), buf, oob, unix.MSG_CMSG_CLOEXEC)
			return rerr != unix.EAGAIN
		})
		if err == nil {
			err = rerr
		}
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return Proc{}, wire.Errorf(wire.Internal, "wait for the outcome of a start: %w", err)
		}
		if n == 0 {
			return Proc{}, wire.Errorf(wire.Internal, "start process in the container: it was killed on the way")
		}
		files := receivedFiles(oob[:oobn])
		if n != reportSize || !bytes.Equal(buf[:nonceSize], nonce) {
			closeAll(files)
			continue
		}
		return p.reported(buf[nonceSize:], files, base)
	}
}

// reported turns a genuine report into a result. errno and op come from a page that the container may have written.
func (p *program) reported(b []byte, files []*os.File, base uint64) (Proc, error) {
	errno, op := unix.Errno(binary.NativeEndian.Uint64(b)&0xfff), binary.NativeEndian.Uint64(b[8:])
	pid := int(binary.NativeEndian.Uint64(b[16:]))
	if pid == 0 {
		closeAll(files)
		if op == 0 { // the template could not make the first process
			return Proc{}, cloneError(errno)
		}
		return Proc{}, p.failure(p.stepAt(base, op), errno)
	}
	if len(files) != 1 {
		closeAll(files)
		return Proc{}, wire.Errorf(wire.Internal, "start process %d in the container: the pidfd has not come", pid)
	}
	proc := Proc{PID: pid, PIDFD: files[0]}
	if op != 0 {
		proc.discard()
		return Proc{}, p.failure(p.stepAt(base, op), errno)
	}
	return proc, nil
}

func receivedFiles(oob []byte) []*os.File {
	var files []*os.File
	msgs, _ := unix.ParseSocketControlMessage(oob)
	for i := range msgs {
		fds, _ := unix.ParseUnixRights(&msgs[i])
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "pidfd"))
		}
	}
	return files
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
