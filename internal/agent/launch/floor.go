//go:build linux && (amd64 || arm64)

package launch

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// A Primitive is one thing that the floor measures: what the kernel alone takes, with no engine around it.
type Primitive int

const (
	ForkExec   Primitive = iota // clone3 with vfork, execve of a static program, wait
	Namespaces                  // and mount, uts, ipc and PID namespaces
	NetworkToo                  // and a network namespace
	FloorNone                   // Namespaces, and overlay root, proc, a tmpfs on /dev, pivot_root: the floor for --network none
	FloorNet                    // and a network namespace: the floor for the bridge
)

// String names p as floor reports do.
func (p Primitive) String() string {
	return [...]string{"fork + exec", "+ mnt uts ipc pid", "+ net", "mnt uts ipc pid, overlay proc dev pivot", "mnt uts ipc pid net, overlay proc dev pivot"}[p]
}

func (p Primitive) cloneflags() uint64 {
	const base = unix.CLONE_NEWNS | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWPID
	switch p {
	case ForkExec:
		return 0
	case Namespaces, FloorNone:
		return base
	}
	return base | unix.CLONE_NEWNET
}

// Measurer measures primitives with the same walker that starts containers.
type Measurer struct {
	root, dir, merged, overlay string
}

// NewMeasurer prepares for measuring. root is a directory with a static bin/true and directories proc and dev; scratch
// is where the overlay's upper directory is made, on a file system that can hold one.
func NewMeasurer(root, scratch string) (*Measurer, error) {
	dir, err := os.MkdirTemp(scratch, "floor-")
	if err != nil {
		return nil, err
	}
	m := &Measurer{root: root, dir: dir, merged: filepath.Join(dir, "merged")}
	for _, d := range []string{"upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			return nil, errors.Join(err, m.Close())
		}
	}
	m.overlay = fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", root, dir, dir)
	return m, nil
}

// Close removes what NewMeasurer has made.
func (m *Measurer) Close() error { return os.RemoveAll(m.dir) }

// Once makes one process and returns the time from before its clone3 until it has been waited for. The caller should
// be locked to its thread.
func (m *Measurer) Once(p Primitive) (time.Duration, error) {
	prog := &program{}
	prog.exit(1)
	start := prog.here()
	m.program(prog, p >= FloorNone)
	const head = statusWords
	mem := make([]uint64, head+prog.memSize())
	base := addrOf(mem)
	prog.link(mem[head:], base+8*head, nil)
	args := &cloneArgs{
		flags:      p.cloneflags() | unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_CLEAR_SIGHAND,
		exitSignal: uint64(unix.SIGCHLD),
	}
	before := time.Now()
	ret := spawn(args, base+8*(head+opWords*uint64(start)), base, base+8*head)
	keep(mem)
	if ret < 0 {
		return 0, cloneError(unix.Errno(-ret))
	}
	var st unix.WaitStatus
	var err error
	for {
		_, err = unix.Wait4(int(ret), &st, unix.WALL, nil)
		if err != unix.EINTR {
			break
		}
	}
	took := time.Since(before)
	switch {
	case mem[statusOp] != 0:
		return 0, prog.failure(prog.stepAt(base+8*head, mem[statusOp]), unix.Errno(mem[statusErrno]))
	case err != nil:
		return 0, fmt.Errorf("wait for %d: %w", ret, err)
	case st != 0:
		return 0, fmt.Errorf("%s/bin/true: status %#x", m.root, uint32(st))
	}
	return took, nil
}

// program is what the child does: exactly the steps that the floor is defined by, as path-based mounts.
func (m *Measurer) program(p *program, root bool) {
	path := filepath.Join(m.root, "bin/true")
	if root {
		path = "/bin/true"
		p.add("make mounts private", "", unix.SYS_MOUNT, num(0), p.str("/"), num(0), flagsOf(unix.MS_REC|unix.MS_PRIVATE, mountBits), num(0))
		p.add("mount overlay on ", m.merged, unix.SYS_MOUNT, p.str("overlay"), p.str(m.merged), p.str("overlay"), num(0), p.str(m.overlay))
		p.add("enter the root", "", unix.SYS_CHDIR, p.str(m.merged))
		p.add("mount proc on /proc", "", unix.SYS_MOUNT, p.str("proc"), p.str("proc"), p.str("proc"), num(0), num(0))
		p.add("mount tmpfs on /dev", "", unix.SYS_MOUNT, p.str("tmpfs"), p.str("dev"), p.str("tmpfs"), num(0), p.str("mode=755,size=65536k"))
		p.add("pivot to the root", "", unix.SYS_PIVOT_ROOT, p.str("."), p.str("."))
		p.add("detach the old root", "", unix.SYS_UMOUNT2, p.str("."), flagsOf(unix.MNT_DETACH, umountBits))
		p.add("enter the root", "", unix.SYS_CHDIR, p.str("/"))
	}
	p.add("unblock signals", "", unix.SYS_RT_SIGPROCMASK, num(unix.SIG_SETMASK), data(p.words(num(0))), num(0), num(8))
	p.add("exec ", path, unix.SYS_EXECVE, p.str(path), p.strs([]string{"true"}), p.strs(nil)).exec = true
}

// Floor measures the floor runs times, with or without a network namespace, and returns the durations sorted. root is
// as for NewMeasurer.
func Floor(root string, netns bool, runs int) ([]time.Duration, error) {
	p := FloorNone
	if netns {
		p = FloorNet
	}
	return MeasurePrimitive(root, p, runs)
}

// MeasurePrimitive measures p runs times and returns the durations sorted.
func MeasurePrimitive(root string, p Primitive, runs int) ([]time.Duration, error) {
	m, err := NewMeasurer(root, "")
	if err != nil {
		return nil, err
	}
	defer m.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	all := make([]time.Duration, 0, runs)
	for range runs {
		d, err := m.Once(p)
		if err != nil {
			return nil, fmt.Errorf("measure %s: %w", p, err)
		}
		all = append(all, d)
	}
	slices.Sort(all)
	return all, nil
}
