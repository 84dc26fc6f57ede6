//go:build linux && (amd64 || arm64)

package launch

import (
	"cmp"
	"encoding/binary"
	"math"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// The memory of a template process, at the same address in every one of them. The agent has the range reserved, so
// that programs can be bound to it beforehand.
const (
	pageSize    = 4096
	areaLoop    = 0            // the template's own program
	areaStatus  = 1 * pageSize // where a walk stores its failure
	areaHeader  = 2 * pageSize // the nonce of the request under way
	areaProgram = 3 * pageSize // the program received
	// maxProgram is above what execve takes as arguments and environment (6 MiB), so the kernel's limit shows first.
	maxProgram = 8 << 20
	areaSize   = areaProgram + maxProgram
)

// The descriptors of a template process and of the one it makes first.
const (
	fdRequests = 3 // the template's socket; only there
	fdReport   = 4 // first descriptor of a request: where the outcome is sent
	fdFirst    = 5 // the cgroup if there is one, then the program's files
)

const nonceSize = 16

// reportSize is nonce, errno, op, pid.
const reportSize = nonceSize + 3*8

// area is where templates have their memory. Reserving it costs one mapping without pages; it is never given back.
var area = sync.OnceValues(func() (uint64, error) {
	addr, err := reserve(areaSize)
	if err != nil {
		return 0, wire.Errorf(wire.Internal, "reserve memory for the template process: %w", err)
	}
	return addr, nil
})

// templateFlags are the flags of the clone that the template makes.
func (p *Plan) templateFlags() uint64 {
	f := uint64(unix.CLONE_PARENT)
	if p.cgroup > 0 {
		f |= unix.CLONE_INTO_CGROUP
	}
	return f
}

// templateProgram is for a process in a PID namespace that has inhabitants. Two processes walk it. The first is a copy
// of the template, in the agent's PID namespace, where no container sees it; it joins and drops all there is to join
// and drop. The second is its copy, in the container's PID namespace: from its first moment a container with
// CAP_SYS_PTRACE may read and change its memory and descriptors, so it has nothing by then that the container has not.
//
// What the second could misuse is taken care of thus: the template's socket is closed before it is made; the socket
// that the outcome is reported on it inherits for a moment, but not the nonce that makes a report genuine, which is
// on a page that is not copied (MADV_DONTFORK); the status page that it shares with the first is read as untrusted
// numbers.
//
// Both are made with CLONE_PARENT and so are the agent's children; the first ends when the second has executed.
func (c *compiler) templateProgram() {
	base, err := area()
	if err != nil {
		c.fail(err)
		return
	}
	p := c.p
	pid := p.newSlot()
	iov := p.words(
		word{v: base + areaHeader}, num(nonceSize),
		word{v: base + areaStatus}, num(8*2), // errno, op
		data(pid), num(8))
	// struct cmsghdr with one descriptor, which the kernel's clone writes right there.
	pidfd := p.words(word{v: unix.SizeofCmsghdr + 4}, word{v: unix.SOL_SOCKET | unix.SCM_RIGHTS<<32}, num(0))
	done := p.words(msghdr(data(iov), 3, data(pidfd), 3*8)...)
	failed := p.words(msghdr(data(iov), 3, num(0), 0)...)

	p.note = "after a failure"
	p.add("report the failure", "", unix.SYS_SENDMSG, num(fdReport), shownData(failed, "{nonce, errno, step}"), num(0)).alt = p.here()
	c.exit(1)

	c.plan.start = p.here()
	p.note = "first process: a copy of the template, in the agent's PID namespace, all rights"
	p.add("keep the nonce from the second process", "", unix.SYS_MADVISE, shown(base+areaHeader, "header"), num(pageSize), shown(unix.MADV_DONTFORK, "MADV_DONTFORK"))
	p.add("share the status with the second process", "", unix.SYS_MMAP, shown(base+areaStatus, "status"), num(pageSize),
		shown(unix.PROT_READ|unix.PROT_WRITE, "PROT_READ|PROT_WRITE"),
		shown(unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_FIXED, "MAP_SHARED|MAP_ANONYMOUS|MAP_FIXED"), num(-1), num(0))
	p.add("close the template's socket", "", unix.SYS_CLOSE, num(fdRequests))
	c.selfFiles() // the host's
	for _, f := range c.CgroupProcs {
		p.add("enter cgroup ", f.Name(), unix.SYS_WRITE, p.file(f, f.Name()), p.str("0"), num(1))
	}
	c.join()
	if c.Cloneflags != 0 {
		p.add("make namespaces", "", unix.SYS_UNSHARE, flagsOf(c.Cloneflags, cloneBits))
	}
	c.root()
	c.kernelNames()
	c.workdir()
	c.stdio()
	if c.Init != nil {
		c.keepInit()
	}
	c.closeFrom(fdFirst)
	c.limits()
	c.rights()
	second := c.secondFilters()
	if !second {
		c.filter()
	}
	// vfork without shared memory: it only makes this one wait until the second has executed or failed.
	flags := flagsOf(unix.CLONE_PARENT|unix.CLONE_PIDFD|unix.CLONE_VFORK, cloneBits)
	clone := p.here()
	p.add("make the process", "", unix.SYS_CLONE, flags, num(0), shownData(pidfd+16, "&pidfd"), num(0), num(0)).to = pid
	p.add("report the outcome", "", unix.SYS_SENDMSG, num(fdReport), shownData(done, "{nonce, errno, step, pid, pidfd}"), num(0))
	c.exit(0)

	p.note = "second process: in the container's PID namespace, the container's rights and no more"
	p.steps[clone].zero = p.here()
	keep := 3
	if c.Init != nil {
		keep = 4
	}
	c.closeFrom(keep)
	c.session()
	c.terminal()
	c.signals()
	if second {
		c.filter()
	}
	c.execute()
}

// secondFilters tells whether the second process loads the filter: it may if that takes no right it would not have
// anyway. Else the first does, and the filter must allow the few calls that come after it; where it does not, the
// second borrows CAP_SYS_ADMIN, provided that nobody in the container could take it over meanwhile.
func (c *compiler) secondFilters() bool {
	if c.Seccomp == nil || !c.borrowsAdmin() {
		return true
	}
	needed := []struct {
		name string
		nr   uint64
		args [6]uint64
	}{
		{"capset", unix.SYS_CAPSET, [6]uint64{}},
		{"clone", unix.SYS_CLONE, [6]uint64{unix.CLONE_PARENT | unix.CLONE_PIDFD | unix.CLONE_VFORK}},
		{"sendmsg", unix.SYS_SENDMSG, [6]uint64{fdReport}},
		{"exit_group", unix.SYS_EXIT_GROUP, [6]uint64{}},
		{"close_range", unix.SYS_CLOSE_RANGE, [6]uint64{3, math.MaxUint32}},
		{"setsid", unix.SYS_SETSID, [6]uint64{}},
		{"ioctl", unix.SYS_IOCTL, [6]uint64{0, unix.TIOCSCTTY}},
		{"rt_sigaction", unix.SYS_RT_SIGACTION, [6]uint64{1}},
		{"rt_sigprocmask", unix.SYS_RT_SIGPROCMASK, [6]uint64{unix.SIG_SETMASK}},
	}
	for _, n := range needed {
		if evalFilter(c.Seccomp, nativeArch, uint32(n.nr), n.args) != unix.SECCOMP_RET_ALLOW {
			if c.Caps.Bounding&(1<<unix.CAP_SYS_PTRACE) != 0 {
				c.fail(wire.Errorf(wire.Unsupported, "the seccomp profile forbids %s: with CAP_SYS_PTRACE it must be allowed to start a process in a running container", n.name))
			}
			return true
		}
	}
	return false
}

// gaps are the ranges between the ranges of used, from address 0 to end.
func gaps(used [][2]uint64, end uint64) [][2]uint64 {
	slices.SortFunc(used, func(a, b [2]uint64) int { return cmp.Compare(a[0], b[0]) })
	var free [][2]uint64
	at := uint64(0)
	for _, u := range used {
		if u[0] > at {
			free = append(free, [2]uint64{at, u[0]})
		}
		at = max(at, u[1])
	}
	if at < end {
		free = append(free, [2]uint64{at, end})
	}
	return free
}

// msghdr is struct msghdr as words.
func msghdr(iov word, iovlen int, control word, controllen int) []word {
	return []word{num(0), num(0), iov, num(iovlen), control, num(controllen), num(0)}
}

// loopProgram is the template's own: take a request, make the first process, tidy, again. It ends when the socket's
// other end is closed. null becomes its stdio. start is where it begins, in the memory that is the agent's until the rest has been unmapped.
//
// A request is a header (program length, clone flags, cgroup descriptor, nonce) with the descriptors, and then the
// size of the control buffer, which the kernel overwrites at each receive, and the program. Each part is received
// right where it is used.
func loopProgram(base uint64, socket, null int, unmap [][2]uint64) (p *program, start label, fix func(mem []uint64)) {
	p = &program{}
	control := p.bytes(make([]byte, controlSize))
	args := p.words(num(0), num(0), num(0), num(0), num(0), num(0), num(0), num(0), num(0), num(0), num(0))
	iov2 := p.words(num(0), num(8), word{v: base + areaProgram}, num(0))
	iov1 := p.words(
		data(iov2+3*8), num(8),
		data(args), num(8),
		data(args+10*8), num(8),
		word{v: base + areaHeader}, num(nonceSize))
	head := p.words(msghdr(data(iov1), 4, data(control), controlSize)...)
	body := p.words(msghdr(data(iov2), 2, num(0), 0)...)
	binary.LittleEndian.PutUint64(p.data[iov2:], uint64(head+5*8)) // where the control size goes
	p.relocs = append(p.relocs, iov2)
	report := p.words(word{v: base + areaHeader}, num(nonceSize), word{v: base + areaStatus + 8*statusLast}, num(8),
		data(p.words(num(0), num(0))), num(2*8)) // no op, no pid
	failed := p.words(msghdr(data(report), 3, num(0), 0)...)

	// Nobody is told of a failure from here to the loop but by the socket being closed.
	exit := p.here()
	p.add("", "", unix.SYS_EXIT_GROUP, num(0))
	start = p.here()
	sock := p.newSlot()
	p.add("", "", unix.SYS_FCNTL, num(socket), num(unix.F_DUPFD), num(fdFirst)).to = sock
	p.add("", "", unix.SYS_DUP3, slot(sock), num(fdRequests), num(unix.O_CLOEXEC))
	for fd := range 3 {
		p.add("", "", unix.SYS_DUP3, num(null), num(fd), num(0)).alt = p.here()
	}
	p.add("", "", unix.SYS_CLOSE_RANGE, num(fdRequests+1), num(math.MaxUint32), num(0))
	p.add("", "", unix.SYS_PRCTL, num(unix.PR_SET_DUMPABLE), num(0))
	p.add("", "", unix.SYS_PRCTL, num(unix.PR_SET_NAME), p.str("kiri-template"))
	p.add("", "", unix.SYS_SETSID)
	p.add("", "", unix.SYS_CHDIR, p.str("/"))
	for _, r := range unmap {
		p.add("", "", unix.SYS_MUNMAP, word{v: r[0]}, word{v: r[1] - r[0]}).alt = p.here()
	}

	loop := p.here()
	s := p.add("", "", unix.SYS_RECVMSG, num(fdRequests), data(head), num(unix.MSG_WAITALL|unix.MSG_CMSG_CLOEXEC))
	s.alt, s.zero = exit, exit
	s = p.add("", "", unix.SYS_RECVMSG, num(fdRequests), data(body), num(unix.MSG_WAITALL))
	s.alt, s.zero = exit, exit
	clone := p.here()
	p.add("", "", unix.SYS_CLONE3, data(args), num(11*8))
	tidy := func() {
		p.add("", "", unix.SYS_MADVISE, word{v: base + areaProgram}, num(maxProgram), num(unix.MADV_DONTNEED))
		p.add("", "", unix.SYS_CLOSE_RANGE, num(fdReport), num(math.MaxUint32), num(0)).zero = loop
	}
	tidy()
	p.steps[clone].alt = p.here()
	p.add("", "", unix.SYS_SENDMSG, num(fdReport), data(failed), num(unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)).alt = p.here()
	tidy()
	for i := range p.steps {
		if p.steps[i].alt == noLabel {
			p.steps[i].alt = exit
		}
	}
	fix = func(mem []uint64) {
		// The child goes on in the program it has received, behind the two ops for failures.
		mem[int(clone)*opWords+opZero] = base + areaProgram + 8*opWords*templateStart
	}
	return p, start, fix
}

// templateStart is the step that templateProgram's first process begins with.
const templateStart = 2

// maxFiles is the largest number of descriptors in a request (unix(7), SCM_MAX_FD); controlSize is what they take as
// a control message.
const (
	maxFiles    = 253
	controlSize = unix.SizeofCmsghdr + (maxFiles*4+7)/8*8
)
