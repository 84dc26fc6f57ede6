package engine

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/moby/api/types/container"
)

// capabilities of Linux by number (capability(7)); the agent leaves out what its kernel has not.
var capabilities = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW",
	"CAP_IPC_LOCK", "CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_PACCT",
	"CAP_SYS_ADMIN", "CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD",
	"CAP_LEASE", "CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG",
	"CAP_WAKE_ALARM", "CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}

// defaultCaps are those that Docker gives a container, by number.
var defaultCaps = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SYS_CHROOT", "CAP_MKNOD", "CAP_AUDIT_WRITE", "CAP_SETFCAP",
}

const allCaps = "ALL"

// normalizeCaps writes names as the kernel does; ALL stays.
func normalizeCaps(names []string) ([]string, error) {
	if len(names) == 0 {
		return nil, nil
	}
	l := make([]string, 0, len(names))
	for _, n := range names {
		n = strings.ToUpper(n)
		if n != allCaps && !strings.HasPrefix(n, "CAP_") {
			n = "CAP_" + n
		}
		if n != allCaps && !slices.Contains(capabilities, n) {
			return nil, fmt.Errorf("unknown capability: %q", n)
		}
		l = append(l, n)
	}
	return l, nil
}

// capsOf returns the capabilities of a container, sorted by number. The names have been validated.
func capsOf(h *container.HostConfig) []string {
	if h.Privileged {
		return capabilities
	}
	if len(h.CapAdd) == 0 && len(h.CapDrop) == 0 {
		return defaultCaps
	}
	add, _ := normalizeCaps(h.CapAdd)
	drop, _ := normalizeCaps(h.CapDrop)
	var has func(string) bool
	switch {
	case slices.Contains(add, allCaps):
		has = func(c string) bool { return !slices.Contains(drop, c) }
	case slices.Contains(drop, allCaps):
		has = func(c string) bool { return slices.Contains(add, c) }
	default:
		has = func(c string) bool {
			return slices.Contains(add, c) || slices.Contains(defaultCaps, c) && !slices.Contains(drop, c)
		}
	}
	l := make([]string, 0, len(capabilities))
	for _, c := range capabilities {
		if has(c) {
			l = append(l, c)
		}
	}
	return l
}

// security is what HostConfig.SecurityOpt asks for.
type security struct {
	noNewPrivs *bool
	seccomp    *string // "unconfined", or a profile in JSON; "builtin" is ""
	apparmor   string
}

func parseSecurity(opts []string) (security, error) {
	var s security
	for _, opt := range opts {
		if opt == "no-new-privileges" {
			yes := true
			s.noNewPrivs = &yes
			continue
		}
		if opt == "disable" { // an old word for label=disable
			continue
		}
		k, v, ok := strings.Cut(opt, "=")
		if !ok {
			k, v, ok = strings.Cut(opt, ":")
		}
		if !ok {
			if opt == "writable-cgroups" {
				return s, NotBuilt("HostConfig.SecurityOpt writable-cgroups")
			}
			return s, invalid("invalid --security-opt 1: %q", opt)
		}
		switch k {
		case "no-new-privileges":
			b, err := strconv.ParseBool(v)
			if err != nil {
				return s, invalid("invalid --security-opt 2: %q", opt)
			}
			s.noNewPrivs = &b
		case "seccomp":
			if v == "builtin" {
				v = ""
			}
			s.seccomp = &v
		case "apparmor":
			s.apparmor = v
		case "label":
			if v != "disable" { // no labels are set, so that one is what happens anyway
				return s, NotBuilt("HostConfig.SecurityOpt label (SELinux)")
			}
		case "writable-cgroups":
			if b, err := strconv.ParseBool(v); err != nil {
				return s, invalid("invalid --security-opt 2: %q", opt)
			} else if b {
				return s, NotBuilt("HostConfig.SecurityOpt writable-cgroups")
			}
		default:
			return s, invalid("invalid --security-opt 2: %q", opt)
		}
	}
	return s, nil
}

// The paths of /proc and /sys that Docker hides from a container or makes read-only.
var (
	defaultMasked = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug",
		"/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap", "/sys/firmware",
	}
	defaultReadonly = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

func isIP(s string) bool {
	_, err := netip.ParseAddr(s)
	return err == nil
}
