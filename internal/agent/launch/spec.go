//go:build linux && (amd64 || arm64)

package launch

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// Spec describes one process and the isolation around it. All is decided and prepared: descriptors and numbers, no
// names left to look up. The descriptors stay the caller's, who may close them once Start has returned.
//
// Which fields are used follows from Cloneflags: with CLONE_NEWPID the plan is for Thread.Start, without it for
// Template.Start (see the package comment).
type Spec struct {
	// Namespaces, cgroup.
	Cloneflags uint64     // CLONE_NEW* of the namespaces to make
	Into       *os.File   // exec: pidfd of the container's main process, whose namespaces IntoFlags are joined
	IntoFlags  uint64     // CLONE_NEW* of the namespaces of Into to join
	Join       []*os.File // namespaces to join first (nsfs descriptors), for the ipc, net, uts of another container
	CgroupFD   int        // v2 cgroup directory to start in; 0 or less: the caller's own (0 is never a cgroup)
	// CgroupProcs are cgroup.procs or tasks files of v1 cgroups, open for writing, that a process made by a Template
	// moves itself into. A Thread does not need them: its children start in the v1 cgroups that it is in.
	CgroupProcs []*os.File

	// File system. Root is a detached mount that becomes the root. A Thread has no other; for a Template nil leaves the
	// root that was joined.
	Root      *os.File
	Mounts    []MountAt // attached in this order
	Proc      *os.File  // O_PATH of the directory that /proc is mounted on; nil: no /proc
	ProcMount *os.File  // detached proc to use for it, needed without CLONE_NEWPID (see ProcMount); nil: made by the child
	Masked    []string  // absolute paths hidden under Null or an empty directory; missing ones are skipped
	Readonly  []string  // absolute paths made read-only; missing ones are skipped
	Sysctls   map[string]string

	// Process.
	Args       []string // argv; must not be empty
	Env        []string
	Path       string // file to execute, absolute inside the root (rootfs.LookPath)
	Cwd        string // absolute inside the root; "" is /; must exist
	UID, GID   uint32
	Groups     []uint32 // supplementary
	Caps       Caps
	NoNewPrivs bool
	Seccomp    []unix.SockFilter // nil: none
	AppArmor   string            // profile to change to at execve; "" none
	// Keyring is the name of the session keyring, which is made if there is none of that name: the same for all processes
	// of a container. "" is a new one without a name; the agent's is never kept.
	Keyring string
	Rlimits []wire.Rlimit
	// OOMScoreAdj is nil for the agent's own. A value that is the agent's own anyway costs nothing.
	OOMScoreAdj *int
	Hostname    string // needs CLONE_NEWUTS
	Domainname  string

	// Stdio. nil is a null device. The files are put into blocking mode, as os/exec does.
	Stdin, Stdout, Stderr *os.File
	// Null is the null device in the /dev that is among Mounts, open for reading and writing. It hides the masked files
	// and stands for stdio that is not given. It must never be the host's, whose mode and owner root in the container
	// could then change for everybody. nil is one made for this process alone, which can hide no file before Linux 6.15.
	Null *os.File
	TTY  bool     // Stdin becomes the controlling terminal
	Init *os.File // program to run as PID 1 over the command (--init): the agent's own sealed memfd
}

// MountAt is one prepared mount and where it goes.
type MountAt struct {
	Mount  *os.File // detached mount
	Target *os.File // O_PATH, in Root or in a Mount that comes earlier
	Proc   string   // instead of Target: a path below /proc, as "cpuinfo"; attached after /proc is there
	Desc   string   // "bind /srv on /data", for messages and the printed plan
}

// Caps are capability sets as bits (1 << CAP_CHOWN ...). Bits that the agent does not hold itself are left out, as
// runc does. A process keeps what execve leaves it: root gets Bounding, another user only Ambient.
type Caps struct{ Bounding, Effective, Permitted, Inheritable, Ambient uint64 }

// Proc is a process that has been started. Its execve has succeeded. It is a child of this process and may have
// ended, and been reaped by whoever waits for any child, before the caller sees this. Its files are the caller's.
type Proc struct {
	PID   int // in the agent's PID namespace
	PIDFD *os.File
}

// MountNS opens the mount namespace of p. Whoever holds it takes the unmounting of the container's file systems, some
// tenths of a millisecond, out of the process's exit: it happens when the last holder closes it. That is a matter of
// what can be answered first; p's mounts are gone only then. An error means that p has ended already.
func (p Proc) MountNS() (*os.File, error) {
	fd, err := unix.IoctlRetInt(fdOf(p.PIDFD), unix.PIDFD_GET_MNT_NAMESPACE) // Linux 6.11
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EINVAL) {
		fd, err = unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", p.PID), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open mount namespace of %d: %w", p.PID, err)
	}
	return os.NewFile(uintptr(fd), "mount namespace"), nil
}
