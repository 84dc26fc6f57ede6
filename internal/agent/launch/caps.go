//go:build linux && (amd64 || arm64)

package launch

import (
	"math/bits"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// capNames are the capabilities in the order of their numbers (linux/capability.h of Linux 6.18).
var capNames = [...]string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID",
	"CAP_SETUID", "CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN",
	"CAP_NET_RAW", "CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT",
	"CAP_SYS_PTRACE", "CAP_SYS_PACCT", "CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE",
	"CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL",
	"CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG", "CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND",
	"CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}

// DefaultCaps is the set that Docker gives a container that asks for nothing: 14 capabilities.
func DefaultCaps() uint64 {
	return 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FSETID | 1<<unix.CAP_FOWNER | 1<<unix.CAP_MKNOD |
		1<<unix.CAP_NET_RAW | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETUID | 1<<unix.CAP_SETFCAP | 1<<unix.CAP_SETPCAP |
		1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_SYS_CHROOT | 1<<unix.CAP_KILL | 1<<unix.CAP_AUDIT_WRITE
}

// AllCaps is every capability this process can hand on: its permitted set within its bounding set, as it was at the
// first call. It is what --privileged gives.
var AllCaps = sync.OnceValue(func() uint64 {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	if unix.Capget(&hdr, &d[0]) != nil {
		return 0
	}
	permitted := uint64(d[1].Permitted)<<32 | uint64(d[0].Permitted)
	for i := range uint64(64) {
		if permitted&(1<<i) == 0 {
			continue
		}
		if r, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(i), 0, 0, 0); err != nil || r == 0 {
			permitted &^= 1 << i
		}
	}
	return permitted
})

// lastCap is the highest capability the kernel knows.
var lastCap = sync.OnceValue(func() int {
	n := 0
	for i := range 64 {
		if _, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(i), 0, 0, 0); err != nil {
			break
		}
		n = i
	}
	return n
})

// CapsFor spreads set over the five sets as Docker does: for root the set is bounding, effective and permitted, for
// another user bounding alone, which is what execve would leave of it anyway. Inheritable and ambient stay empty
// (CVE-2022-24769).
func CapsFor(set uint64, uid uint32) Caps {
	if uid != 0 {
		return Caps{Bounding: set}
	}
	return Caps{Bounding: set, Effective: set, Permitted: set}
}

// ParseCaps turns names such as "CAP_CHOWN" into bits. Names of other kernels, in any case, with or without CAP_, are
// for the daemon to sort out: an unknown name is an error of class wire.Invalid.
func ParseCaps(names []string) (uint64, error) {
	var set uint64
next:
	for _, name := range names {
		for i, n := range capNames {
			if n == name {
				set |= 1 << i
				continue next
			}
		}
		return 0, wire.Errorf(wire.Invalid, "unknown capability %q", name)
	}
	return set, nil
}

// CapNames lists the capabilities of set by number, as "CAP_CHOWN"; a bit without a name is left out.
func CapNames(set uint64) []string {
	names := make([]string, 0, bits.OnesCount64(set))
	for i, n := range capNames {
		if set&(1<<i) != 0 {
			names = append(names, n)
		}
	}
	return names
}

// showCaps prints a set for the plan.
func showCaps(set uint64) string {
	switch set {
	case 0:
		return "none"
	case DefaultCaps():
		return "Docker's default"
	}
	return strings.ToLower(strings.ReplaceAll(strings.Join(CapNames(set), "|"), "CAP_", ""))
}
