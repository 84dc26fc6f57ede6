//go:build linux && (amd64 || arm64)

package launch

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// Plan is a compiled Spec: what the child will do, in order. It holds on to the Spec's descriptors, which must stay
// open until it has been started. It is for one start and for one goroutine.
type Plan struct {
	prog       program
	start      label
	cloneflags uint64
	cgroup     int
	template   bool
	own        []*os.File // mounts made by Compile
}

// Close releases what Compile has prepared. Start does it too; calling it again is harmless.
func (p *Plan) Close() {
	for _, f := range p.own {
		f.Close()
	}
	p.own = nil
}

// NeedsTemplate tells which way the plan is started: Template.Start (true) or Thread.Start.
func (p *Plan) NeedsTemplate() bool { return p.template }

// String prints the plan, one operation a line, as `kiri debug plan` shows it.
func (p *Plan) String() string {
	var b strings.Builder
	if p.template {
		fmt.Fprintf(&b, "clone3({%s})  # by the template process\n", showBits(p.templateFlags(), cloneBits))
	} else {
		fmt.Fprintf(&b, "clone3({%s, cgroup %s})\n", showBits(p.directFlags(), cloneBits), p.showCgroup())
	}
	b.WriteString(p.prog.String())
	return b.String()
}

func (p *Plan) showCgroup() string {
	if p.cgroup <= 0 {
		return "inherited"
	}
	return "given"
}

func (p *Plan) directFlags() uint64 {
	f := p.cloneflags&^unix.CLONE_NEWCGROUP | unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_PIDFD | unix.CLONE_CLEAR_SIGHAND
	if p.cgroup > 0 {
		f |= unix.CLONE_INTO_CGROUP
	}
	return f
}

// direct makes the child of the calling thread and returns when it has executed its command. The thread must be
// locked; its namespaces and v1 cgroups are what the child starts from.
func (p *Plan) direct() (Proc, error) {
	if p.template {
		return Proc{}, wire.Errorf(wire.Internal, "start plan: it is for a template process")
	}
	defer p.Close()
	prog := &p.prog
	// One piece of memory: status, pidfd, program. It is Go's, free of pointers, and does not move.
	const head = statusWords + 1
	mem := make([]uint64, head+prog.memSize())
	base := addrOf(mem)
	prog.link(mem[head:head+prog.size()], base+8*head, func(i int) uint64 { return uint64(fdOf(prog.files[i])) })
	args := &cloneArgs{
		flags:      p.directFlags(),
		pidfd:      base + 8*statusWords,
		exitSignal: uint64(unix.SIGCHLD),
	}
	if p.cgroup > 0 {
		args.cgroup = uint64(p.cgroup)
	}
	ret := spawn(args, base+8*(head+opWords*uint64(p.start)), base, base+8*head)
	keep(mem)
	runtime.KeepAlive(p)
	if ret < 0 {
		return Proc{}, cloneError(unix.Errno(-ret))
	}
	proc := Proc{PID: int(ret), PIDFD: os.NewFile(uintptr(uint32(mem[statusWords])), "pidfd")}
	if mem[statusOp] == 0 {
		return proc, nil
	}
	err := prog.failure(prog.stepAt(base+8*head, mem[statusOp]), unix.Errno(mem[statusErrno]))
	proc.discard()
	return Proc{}, err
}

// discard reaps a child that has failed before its execve, unless another waiter was quicker.
func (p Proc) discard() {
	for {
		err := unix.Waitid(unix.P_PIDFD, fdOf(p.PIDFD), nil, unix.WEXITED|unix.WALL, nil)
		if err != unix.EINTR {
			break
		}
	}
	p.PIDFD.Close()
}

func cloneError(errno unix.Errno) error {
	switch errno {
	case unix.EAGAIN:
		return wire.Errorf(wire.Internal, "clone: %w (limit of processes reached)", errno)
	case unix.EBUSY:
		return wire.Errorf(wire.Internal, "clone into cgroup: %w (it has controllers enabled for its children)", errno)
	case unix.ENODEV:
		return wire.Errorf(wire.Internal, "clone into cgroup: %w (it has been removed)", errno)
	case unix.ENOMEM:
		// Also what the kernel says when the PID namespace has lost its PID 1.
		return wire.Errorf(wire.Internal, "clone: %w", errno)
	}
	return wire.Errorf(wire.Internal, "clone: %w", errno)
}

// failure makes the error of a step. The words for a command that does not start are Docker's; its exit codes
// follow from the class (127 NoCommand, 126 NotExecutable).
func (p *program) failure(s *step, errno unix.Errno) error {
	if s == nil {
		return wire.Errorf(wire.Internal, "start process: %w (step unknown)", errno)
	}
	if s.exec {
		class := wire.Internal
		switch errno {
		case unix.ENOENT, unix.ENOTDIR:
			// The file was found when the command was looked up: what is missing is its interpreter.
			class = wire.NoCommand
		case unix.EACCES, unix.EPERM, unix.ENOEXEC, unix.EISDIR, unix.ELIBBAD, unix.EINVAL, unix.ETXTBSY, unix.ELOOP:
			class = wire.NotExecutable
		case unix.E2BIG:
			class = wire.Invalid
		}
		return wire.Errorf(class, "%s%s: %w", s.what, s.obj, errno)
	}
	return wire.Errorf(wire.Internal, "%s%s: %w%s", s.what, s.obj, errno, hint(s, errno))
}

// hint explains an errno whose standard text misleads at this step.
func hint(s *step, errno unix.Errno) string {
	switch {
	case s.nr == unix.SYS_GETCWD && errno == unix.ENOENT:
		return " (it is outside of the container's root)"
	case s.nr == unix.SYS_OPENAT2 && errno == unix.ELOOP:
		return " (a link into another process, or too many links)"
	case s.nr == unix.SYS_MOVE_MOUNT && errno == unix.ELOOP:
		return " (the target is inside of the mount)"
	case s.nr == unix.SYS_CLONE && errno == unix.EAGAIN:
		return " (limit of processes reached)"
	case s.nr == unix.SYS_CLONE && errno == unix.ENOMEM:
		return " (or the container has stopped)"
	case s.nr == unix.SYS_SETNS && errno == unix.ESRCH:
		return " (the container has stopped)"
	case s.nr == unix.SYS_PRLIMIT64 && errno == unix.EPERM:
		return " (raising a hard limit needs CAP_SYS_RESOURCE)"
	}
	return ""
}
