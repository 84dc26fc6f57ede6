//go:build linux && (amd64 || arm64)

package launch

import (
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	profiles "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

//go:generate go run gensyscalls.go

// filters keeps compiled filters: compiling takes about a millisecond, most of it building the profile.
var filters struct {
	sync.Mutex
	m map[filterKey][]unix.SockFilter
}

type filterKey struct {
	profile string
	caps    uint64
}

// maxFilters is how many are kept. A host has a handful; beyond it, all are forgotten, so that a client with ever new
// profiles fills no memory.
const maxFilters = 32

// SeccompFilter is the BPF program of a profile for a process with the bounding set caps. profile is "" for Docker's
// default or a profile in Docker's JSON form. A profile that cannot be used is an error of class wire.Invalid. The
// result is nil for a profile that filters nothing; it is shared and must not be changed.
func SeccompFilter(profile string, caps uint64) ([]unix.SockFilter, error) {
	key := filterKey{profile, caps}
	filters.Lock()
	defer filters.Unlock()
	if f, ok := filters.m[key]; ok {
		return f, nil
	}
	f, err := compileProfile(profile, caps)
	if err != nil {
		return nil, err
	}
	if filters.m == nil || len(filters.m) >= maxFilters {
		filters.m = map[filterKey][]unix.SockFilter{}
	}
	filters.m[key] = f
	return f, nil
}

func compileProfile(profile string, caps uint64) ([]unix.SockFilter, error) {
	spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: CapNames(caps)}}}
	load := func() (*specs.LinuxSeccomp, error) { return profiles.GetDefaultProfile(spec) }
	if profile != "" {
		load = func() (*specs.LinuxSeccomp, error) { return profiles.LoadProfile(profile, spec) }
	}
	cfg, err := load()
	if err != nil {
		return nil, wire.Errorf(wire.Invalid, "seccomp profile: %w", err)
	}
	if cfg == nil {
		return nil, nil
	}
	pol, err := policyOf(cfg)
	if err != nil {
		return nil, err
	}
	f := pol.compile(hasX32())
	if len(f) > unix.BPF_MAXINSNS {
		return nil, wire.Errorf(wire.Invalid, "seccomp profile: %d instructions, more than the kernel's %d", len(f), unix.BPF_MAXINSNS)
	}
	return f, nil
}

// policy is a profile with numbers for names.
type policy struct {
	def    uint32 // what is returned for a call without a rule
	arches []archPolicy
}

// archPolicy is the part for one architecture.
type archPolicy struct {
	sysArch
	last  uint32            // highest number that the profile names
	rules map[uint32][]rule // in the order of the profile
}

// rule gives ret if all conditions hold.
type rule struct {
	ret   uint32
	conds []specs.LinuxSeccompArg
}

// sysArch is an architecture that the kernel tells apart in seccomp_data.
type sysArch struct {
	name   specs.Arch
	audit  uint32
	column int    // in syscallTable
	bit    uint32 // of its system call numbers
	wide   bool   // arguments are 64 bits
}

// nativeArches are the architectures of programs that this kernel may run, native first.
func nativeArches() []sysArch {
	if runtime.GOARCH == "arm64" {
		return []sysArch{
			{name: specs.ArchAARCH64, audit: unix.AUDIT_ARCH_AARCH64, column: 4, wide: true},
			{name: specs.ArchARM, audit: unix.AUDIT_ARCH_ARM, column: 5},
		}
	}
	return []sysArch{
		{name: specs.ArchX86_64, audit: unix.AUDIT_ARCH_X86_64, column: 1, wide: true},
		{name: specs.ArchX32, audit: unix.AUDIT_ARCH_X86_64, column: 2, bit: x32Bit, wide: true},
		{name: specs.ArchX86, audit: unix.AUDIT_ARCH_I386, column: 3},
	}
}

// x32Bit marks an x32 call; it has the audit architecture of x86_64.
const x32Bit = 0x40000000

// syscallNumbers reads a column of syscallTable.
func syscallNumbers(column int) map[string]uint32 {
	m := make(map[string]uint32, 512)
	for line := range strings.Lines(syscallTable) {
		f := strings.Fields(line)
		if nr, err := strconv.ParseUint(f[column], 10, 32); err == nil {
			m[f[0]] = uint32(nr)
		}
	}
	return m
}

// policyOf applies the rules by which runc fills libseccomp: names that an architecture does not have are skipped, so
// are rules that do what the default does anyway, and of several conditions on one argument each is a rule of its own.
func policyOf(cfg *specs.LinuxSeccomp) (*policy, error) {
	def, err := verdict(cfg.DefaultAction, cfg.DefaultErrnoRet)
	if err != nil {
		return nil, err
	}
	if cfg.ListenerPath != "" {
		return nil, wire.Errorf(wire.Unsupported, "seccomp profile: listenerPath")
	}
	pol := &policy{def: def}
	for i, a := range nativeArches() {
		// The native one is always in, as in libseccomp.
		if i > 0 && !slices.Contains(cfg.Architectures, a.name) {
			continue
		}
		ap := archPolicy{sysArch: a, rules: map[uint32][]rule{}}
		numbers := syscallNumbers(a.column)
		for _, call := range cfg.Syscalls {
			ret, err := verdict(call.Action, call.ErrnoRet)
			if err != nil {
				return nil, err
			}
			rules, err := rulesOf(ret, call.Args)
			if err != nil {
				return nil, err
			}
			for _, name := range call.Names {
				nr, ok := numbers[name]
				if !ok {
					continue
				}
				ap.last = max(ap.last, nr)
				if ret != def {
					ap.rules[nr] = append(ap.rules[nr], rules...)
				}
			}
		}
		pol.arches = append(pol.arches, ap)
	}
	return pol, nil
}

func rulesOf(ret uint32, args []specs.LinuxSeccompArg) ([]rule, error) {
	seen := map[uint]int{}
	for _, a := range args {
		if a.Index > 5 {
			return nil, wire.Errorf(wire.Invalid, "seccomp profile: argument %d: there are six", a.Index)
		}
		switch a.Op {
		case specs.OpNotEqual, specs.OpLessThan, specs.OpLessEqual, specs.OpEqualTo, specs.OpGreaterEqual, specs.OpGreaterThan, specs.OpMaskedEqual:
		default:
			return nil, wire.Errorf(wire.Invalid, "seccomp profile: operator %q: unknown", a.Op)
		}
		seen[a.Index]++
	}
	if len(seen) == len(args) {
		return []rule{{ret, args}}, nil
	}
	rules := make([]rule, len(args))
	for i := range args {
		rules[i] = rule{ret, args[i : i+1]}
	}
	return rules, nil
}

// verdict is the value that the filter returns for an action.
func verdict(a specs.LinuxSeccompAction, errnoRet *uint) (uint32, error) {
	errno := uint32(unix.EPERM) // runc's default
	if errnoRet != nil {
		errno = uint32(*errnoRet) & unix.SECCOMP_RET_DATA
	}
	switch a {
	case specs.ActKill, specs.ActKillThread:
		return unix.SECCOMP_RET_KILL_THREAD, nil
	case specs.ActKillProcess:
		return unix.SECCOMP_RET_KILL_PROCESS, nil
	case specs.ActTrap:
		return unix.SECCOMP_RET_TRAP, nil
	case specs.ActErrno:
		return unix.SECCOMP_RET_ERRNO | errno, nil
	case specs.ActTrace:
		return unix.SECCOMP_RET_TRACE | errno, nil
	case specs.ActAllow:
		return unix.SECCOMP_RET_ALLOW, nil
	case specs.ActLog:
		return unix.SECCOMP_RET_LOG, nil
	case specs.ActNotify:
		return 0, wire.Errorf(wire.Unsupported, "seccomp profile: action %s", a)
	}
	return 0, wire.Errorf(wire.Invalid, "seccomp profile: action %q: unknown", a)
}
