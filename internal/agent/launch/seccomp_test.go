//go:build linux && (amd64 || arm64)

package launch

import (
	"math/rand/v2"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	lib "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	profiles "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// TestSyscallTable holds the text table against the library it is made from.
func TestSyscallTable(t *testing.T) {
	for column, a := range []*arch.Info{arch.X86_64, arch.X32, arch.I386, arch.AARCH64, arch.ARM} {
		m := syscallNumbers(column + 1)
		for nr, name := range a.SyscallNumbers {
			// Some calls of x32 have two numbers; the one from 512 on is its own.
			if got, ok := m[name]; !ok || int(got) != nr && (a != arch.X32 || got < 512) {
				t.Errorf("%s %s: %d, %v, want %d", a.Name, name, got, ok, nr)
			}
		}
	}
	if m := syscallNumbers(1); m["execve"] != 59 || m["listns"] != 470 {
		t.Errorf("execve %d, listns %d", m["execve"], m["listns"])
	}
}

// judge says what a profile means, straight from its rules, without a program: the reference for compile.
func judge(pol *policy, a *archPolicy, nr uint32, args [6]uint64) uint32 {
	nr -= a.bit
	if nr > a.last {
		if pol.def == unix.SECCOMP_RET_ALLOW || pol.def == unix.SECCOMP_RET_LOG {
			return pol.def
		}
		return unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	}
	for _, r := range a.rules[nr] {
		if len(r.conds) == 0 {
			return r.ret
		}
	}
	for _, r := range a.rules[nr] {
		all := true
		for _, c := range r.conds {
			v, want, two := args[c.Index], c.Value, c.ValueTwo
			if !a.wide {
				v, want, two = uint64(uint32(v)), uint64(uint32(want)), uint64(uint32(two))
			}
			switch c.Op {
			case specs.OpEqualTo:
				all = all && v == want
			case specs.OpNotEqual:
				all = all && v != want
			case specs.OpLessThan:
				all = all && v < want
			case specs.OpLessEqual:
				all = all && v <= want
			case specs.OpGreaterThan:
				all = all && v > want
			case specs.OpGreaterEqual:
				all = all && v >= want
			case specs.OpMaskedEqual:
				all = all && v&want == two
			}
		}
		if all {
			return r.ret
		}
	}
	return pol.def
}

func policyFor(t testing.TB, profile string, caps uint64) *policy {
	t.Helper()
	spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: CapNames(caps)}}}
	cfg, err := profiles.GetDefaultProfile(spec)
	if profile != "" {
		cfg, err = profiles.LoadProfile(profile, spec)
	}
	must(t, err)
	pol, err := policyOf(cfg)
	must(t, err)
	return pol
}

// interesting values of an argument: around all constants of the rules and across the halves.
func interesting(a *archPolicy, nr uint32) []uint64 {
	vs := []uint64{0, 1, 0xffffffff, 1 << 32, 1<<32 + 1, ^uint64(0), rand.Uint64()}
	for _, r := range a.rules[nr] {
		for _, c := range r.conds {
			for _, v := range []uint64{c.Value, c.ValueTwo} {
				vs = append(vs, v, v-1, v+1, v|1<<32, v|1<<63, v^rand.Uint64())
			}
		}
	}
	return vs
}

const denyList = `{"defaultAction":"SCMP_ACT_ALLOW","architectures":["SCMP_ARCH_X86_64","SCMP_ARCH_X86","SCMP_ARCH_AARCH64"],"syscalls":[
	{"names":["mkdir","mkdirat"],"action":"SCMP_ACT_ERRNO","errnoRet":5},
	{"names":["personality"],"action":"SCMP_ACT_KILL_PROCESS","args":[{"index":0,"value":8589934597,"op":"SCMP_CMP_GE"},{"index":1,"value":3,"op":"SCMP_CMP_NE"}]},
	{"names":["ioctl"],"action":"SCMP_ACT_TRAP","args":[{"index":1,"value":8589934597,"op":"SCMP_CMP_LT"},{"index":2,"value":7,"op":"SCMP_CMP_LE"}]},
	{"names":["prctl"],"action":"SCMP_ACT_LOG","args":[{"index":0,"value":4294967295,"op":"SCMP_CMP_GT"}]},
	{"names":["prctl"],"action":"SCMP_ACT_ERRNO","args":[{"index":0,"value":18374686479671623935,"valueTwo":81985529216486895,"op":"SCMP_CMP_MASKED_EQ"}]},
	{"names":["fcntl"],"action":"SCMP_ACT_ERRNO","args":[{"index":1,"value":1,"op":"SCMP_CMP_GE"},{"index":1,"value":1000,"op":"SCMP_CMP_LE"}]},
	{"names":["nosuchcall"],"action":"SCMP_ACT_KILL"}]}`

// TestFiltersMeanTheProfile runs the compiled filters over every call of every architecture.
func TestFiltersMeanTheProfile(t *testing.T) {
	for name, pol := range map[string]*policy{
		"default":    policyFor(t, "", DefaultCaps()),
		"sys_admin":  policyFor(t, "", DefaultCaps()|1<<unix.CAP_SYS_ADMIN),
		"everything": policyFor(t, "", 1<<len(capNames)-1),
		"nothing":    policyFor(t, "", 0),
		"deny list":  policyFor(t, denyList, 0),
	} {
		f := pol.compile(true)
		t.Logf("%s: %d instructions, %d without x32", name, len(f), len(pol.compile(false)))
		for i := range pol.arches {
			a := &pol.arches[i]
			for nr := uint32(0); nr < 700; nr++ {
				for index := range 3 {
					for _, v := range interesting(a, nr) {
						args := [6]uint64{rand.Uint64(), rand.Uint64(), rand.Uint64()}
						args[index] = v
						got, want := evalFilter(f, a.audit, nr+a.bit, args), judge(pol, a, nr+a.bit, args)
						if got != want {
							t.Fatalf("%s, %s, call %d %#x: %#x, want %#x", name, a.name, nr, args, got, want)
						}
					}
				}
			}
		}
		without := pol.compile(false)
		if got := evalFilter(without, unix.AUDIT_ARCH_X86_64, x32Bit, [6]uint64{}); nativeArch == unix.AUDIT_ARCH_X86_64 && got == unix.SECCOMP_RET_ALLOW {
			t.Errorf("%s: x32 call is allowed", name)
		}
		for nr := range uint32(600) {
			if got, want := evalFilter(without, nativeArch, nr, [6]uint64{}), judge(pol, &pol.arches[0], nr, [6]uint64{}); got != want {
				t.Errorf("%s: without x32, call %d: %#x, want %#x", name, nr, got, want)
			}
		}
		if got := evalFilter(f, unix.AUDIT_ARCH_MIPS, 1, [6]uint64{}); got != unix.SECCOMP_RET_KILL_THREAD {
			t.Errorf("%s: foreign architecture: %#x", name, got)
		}
	}
}

// TestDefaultProfile names what a container may and may not do, on this architecture.
func TestDefaultProfile(t *testing.T) {
	allow, eperm, enosys := uint32(unix.SECCOMP_RET_ALLOW), unix.SECCOMP_RET_ERRNO|uint32(unix.EPERM), unix.SECCOMP_RET_ERRNO|uint32(unix.ENOSYS)
	f, err := SeccompFilter("", DefaultCaps())
	must(t, err)
	fAdmin, err := SeccompFilter("", DefaultCaps()|1<<unix.CAP_SYS_ADMIN)
	must(t, err)
	for _, tt := range []struct {
		nr             uint32
		a0             uint64
		default_, full uint32
	}{
		{unix.SYS_READ, 0, allow, allow},
		{unix.SYS_MOUNT, 0, eperm, allow},
		{unix.SYS_UNSHARE, 0, eperm, allow},
		{unix.SYS_KEYCTL, 0, eperm, eperm},
		{unix.SYS_REBOOT, 0, eperm, eperm},
		{unix.SYS_CLONE, uint64(unix.SIGCHLD), allow, allow},
		{unix.SYS_CLONE, unix.CLONE_NEWUSER, eperm, allow},
		{unix.SYS_CLONE, unix.CLONE_NEWNET, eperm, allow},
		{unix.SYS_CLONE3, 0, enosys, allow},
		{unix.SYS_SOCKET, unix.AF_INET, allow, allow},
		{unix.SYS_SOCKET, unix.AF_VSOCK, eperm, eperm},
		{unix.SYS_PERSONALITY, 0, allow, allow},
		{unix.SYS_PERSONALITY, 0x0400000, eperm, eperm},
		{10000, 0, enosys, enosys},
	} {
		args := [6]uint64{tt.a0}
		if got := evalFilter(f, nativeArch, tt.nr, args); got != tt.default_ {
			t.Errorf("call %d(%#x): %#x, want %#x", tt.nr, tt.a0, got, tt.default_)
		}
		if got := evalFilter(fAdmin, nativeArch, tt.nr, args); got != tt.full {
			t.Errorf("with CAP_SYS_ADMIN: call %d(%#x): %#x, want %#x", tt.nr, tt.a0, got, tt.full)
		}
	}
}

// TestFilterInKernel asks the kernel, from inside.
func TestFilterInKernel(t *testing.T) {
	for _, tt := range []struct {
		profile string
		call    []string
		errno   int
	}{
		{"", []string{strconv.Itoa(unix.SYS_UNSHARE), "0x10000000"}, int(unix.EPERM)},
		{"", []string{strconv.Itoa(unix.SYS_CLONE3), "0", "0"}, int(unix.ENOSYS)},
		{"", []string{strconv.Itoa(unix.SYS_KEYCTL), "0"}, int(unix.EPERM)},
		{"", []string{strconv.Itoa(unix.SYS_GETPID)}, 0},
		{`{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["mkdirat"],"action":"SCMP_ACT_ERRNO","errnoRet":5}]}`, []string{strconv.Itoa(unix.SYS_MKDIRAT), "0", "0", "0"}, 5},
	} {
		s := container(t, append([]string{"call"}, tt.call...)...)
		f, err := SeccompFilter(tt.profile, DefaultCaps())
		must(t, err)
		s.Seccomp = f
		if code, out, errs := start(t, nil, s).finish(); code != 0 || strings.TrimSpace(out) != strconv.Itoa(tt.errno) {
			t.Errorf("%v: code %d, errno %q %s, want %d", tt.call, code, out, errs, tt.errno)
		}
	}
}

func TestBadProfiles(t *testing.T) {
	for name, p := range map[string]string{
		"no JSON":   `{`,
		"action":    `{"defaultAction":"SCMP_ACT_NOSUCH","syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW"}]}`,
		"operator":  `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_ERRNO","args":[{"index":0,"value":1,"op":"X"}]}]}`,
		"argument":  `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["read"],"action":"SCMP_ACT_ERRNO","args":[{"index":6,"value":1,"op":"SCMP_CMP_EQ"}]}]}`,
		"two names": `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"name":"read","names":["read"],"action":"SCMP_ACT_ERRNO"}]}`,
	} {
		if _, err := SeccompFilter(p, 0); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if f, err := SeccompFilter(`{}`, 0); f != nil || err != nil {
		t.Errorf("empty profile: %v %v", f, err)
	}
	if _, err := SeccompFilter(`{"defaultAction":"SCMP_ACT_NOTIFY","syscalls":[{"names":["read"],"action":"SCMP_ACT_ALLOW"}]}`, 0); wire.ClassOf(err) != wire.Unsupported {
		t.Errorf("notify: %v", err)
	}
}

// TestExecUnderStrictProfile starts a process by a template under a profile that forbids what the first process still
// has to do.
func TestExecUnderStrictProfile(t *testing.T) {
	const noClone = `{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[{"names":["sendmsg","close_range"],"action":"SCMP_ACT_ERRNO"}]}`
	tm := template(t)
	c := running(t, nil)
	defer c.finish()
	f, err := SeccompFilter(noClone, DefaultCaps())
	must(t, err)
	s := execIn(c, "report")
	s.Seccomp = f
	if r := see(t, tm, s); r.Status["Seccomp"] != "2" || r.Status["CapEff"] != pad16(DefaultCaps()) || r.Status["CapPrm"] != pad16(DefaultCaps()) {
		t.Errorf("seccomp %s, capabilities %s", r.Status["Seccomp"], r.Status["CapEff"])
	}
	s = execIn(c, "true")
	s.Seccomp, s.Caps = f, CapsFor(DefaultCaps()|1<<unix.CAP_SYS_PTRACE, 0)
	if _, err := tryStart(t, tm, s); wire.ClassOf(err) != wire.Unsupported {
		t.Errorf("with CAP_SYS_PTRACE: %v", err)
	}
}

// linear is the filter as libseccomp writes it without optimization, and as the library does: one comparison after
// the other.
func linear(pol *policy) []unix.SockFilter {
	code := block{ret(unix.SECCOMP_RET_KILL_THREAD)}
	for i := range pol.arches {
		a := &pol.arches[i]
		if a.bit == x32Bit {
			continue
		}
		b := block{load(dataNr)}
		for nr, rules := range a.rules {
			if len(rules[0].conds) == 0 {
				b = append(b, jump(unix.BPF_JEQ, nr+a.bit, 0, 1), ret(rules[0].ret))
			} else {
				c := pol.rulesCode(a, rules)
				if len(c) < 256 {
					b = append(append(b, jump(unix.BPF_JEQ, nr+a.bit, 0, len(c))), c...)
				}
			}
		}
		b = append(b, ret(pol.def))
		code = append(append(block{jump(unix.BPF_JEQ, a.audit, 1, 0), {Code: unix.BPF_JMP | unix.BPF_JA, K: uint32(len(b))}}, b...), code...)
	}
	return append(block{load(dataArch)}, code...)
}

func libraryFilter(b testing.TB, caps uint64) []unix.SockFilter {
	pol := policyFor(b, "", caps)
	var names []string
	numbers := map[uint32]string{}
	for n, nr := range syscallNumbers(pol.arches[0].column) {
		numbers[nr] = n
	}
	for nr, r := range pol.arches[0].rules {
		if len(r[0].conds) == 0 {
			names = append(names, numbers[nr])
		}
	}
	p := lib.Policy{DefaultAction: lib.ActionErrno, Syscalls: []lib.SyscallGroup{{Names: names, Action: lib.ActionAllow}}}
	ins, err := p.Assemble()
	must(b, err)
	raw, err := bpf.Assemble(ins)
	must(b, err)
	var f []unix.SockFilter
	for _, r := range raw {
		f = append(f, unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K})
	}
	return f
}

// BenchmarkFilterLoad measures seccomp(2) alone, on a thread of its own each time.
func BenchmarkFilterLoad(b *testing.B) {
	pol := policyFor(b, "", DefaultCaps())
	filters := map[string][]unix.SockFilter{
		"search":     pol.compile(hasX32()),
		"search+x32": pol.compile(true),
		"linear":     linear(pol),
		"one":        {ret(unix.SECCOMP_RET_ALLOW)},
		"library":    libraryFilter(b, DefaultCaps()), // native and unconditional rules only
	}
	all := medians{}
	for b.Loop() {
		for name, f := range filters {
			d, err := timeLoad(f)
			must(b, err)
			all.add(name, d)
		}
	}
	for name, f := range filters {
		b.Logf("%s: %d instructions", name, len(f))
	}
	all.report(b, "search", sortedKeys(filters)...)
}

func timeLoad(f []unix.SockFilter) (d time.Duration, err error) {
	th, err := NewThread(func() error {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return err
		}
		prog := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
		before := time.Now()
		_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW, uintptr(unsafe.Pointer(&prog)))
		d = time.Since(before)
		runtime.KeepAlive(f)
		if errno != 0 {
			return errno
		}
		return nil
	})
	if err != nil {
		return 0, err
	}
	th.Close()
	return d, nil
}

func BenchmarkCompileFilter(b *testing.B) {
	for b.Loop() {
		if _, err := compileProfile("", DefaultCaps()); err != nil {
			b.Fatal(err)
		}
	}
}
