//go:build linux && (amd64 || arm64)

package launch

import (
	"cmp"
	"encoding/binary"
	"math"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/timerslack"
	"runkiri.com/kiri/internal/wire"
)

// namespaces are the flags that Spec.Cloneflags and IntoFlags may have. A user namespace needs its maps written by
// another process between clone and the first use of a capability, which a child that shares memory under vfork
// cannot wait for.
const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// InitName is argv[0] of PID 1 with Spec.Init; the command line is then InitName, "-x", path, "--", command and
// arguments. It is Docker's name, so that tools which look for it find it.
const InitName = "/sbin/docker-init"

// Compile makes the plan of s. Errors of class wire.Invalid tell of values that cannot be: an unknown rlimit, a NUL
// byte in an argument, contradictory fields. A plan is for one start; Close it if it is never started.
//
// The plan is in kernel order, top to bottom; where a step could stand elsewhere a comment says why it stands here.
func Compile(s *Spec) (*Plan, error) {
	if err := s.check(); err != nil {
		return nil, err
	}
	c := &compiler{Spec: s, plan: &Plan{cloneflags: s.Cloneflags, cgroup: s.CgroupFD}, procfs: noWord}
	c.p = &c.plan.prog
	c.p.steps = make([]step, 0, 128)
	c.p.data = make([]byte, 0, 8192+8*len(s.Seccomp))
	if s.Cloneflags&unix.CLONE_NEWPID == 0 {
		c.plan.template = true
		c.templateProgram()
	} else {
		c.directProgram()
	}
	if c.err != nil {
		c.plan.Close()
		return nil, c.err
	}
	return c.plan, nil
}

type compiler struct {
	*Spec
	plan   *Plan
	p      *program
	procfs word // descriptor of the proc that is mounted in the container; noWord: none
	caps   Caps // what the process ends up with
	err    error

	emptyDir *os.File // the first empty directory of the masked paths; the plan's
	ownNull  *os.File // made because Null is nil; the plan's
}

var noWord = word{kind: wordNone}

func (c *compiler) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (s *Spec) check() error {
	invalid := func(format string, args ...any) error { return wire.Errorf(wire.Invalid, format, args...) }
	switch {
	case s.Cloneflags&unix.CLONE_NEWUSER != 0:
		return wire.Errorf(wire.Unsupported, "user namespaces are not built yet")
	case s.Cloneflags&^namespaces != 0 || s.IntoFlags&^namespaces != 0:
		return invalid("clone flags %#x, %#x: only namespaces can be asked for", s.Cloneflags, s.IntoFlags)
	case s.Root != nil && s.Cloneflags&unix.CLONE_NEWNS == 0:
		return invalid("a root needs a mount namespace of its own")
	case s.Root == nil && (len(s.Mounts) > 0 || s.Proc != nil || len(s.Masked) > 0 || len(s.Readonly) > 0):
		return invalid("mounts without a root")
	case s.Root == nil && s.Cloneflags&unix.CLONE_NEWPID != 0:
		return invalid("a PID namespace of its own needs a root")
	case (s.Hostname != "" || s.Domainname != "") && s.Cloneflags&unix.CLONE_NEWUTS == 0:
		return invalid("a host name needs a UTS namespace of its own")
	case s.Proc != nil && s.ProcMount == nil && s.Cloneflags&unix.CLONE_NEWPID == 0:
		return invalid("a proc of a PID namespace that exists must be given")
	case len(s.Sysctls) > 0 && s.Proc == nil:
		return invalid("sysctls without /proc")
	case len(s.Args) == 0:
		return invalid("no command")
	case !path.IsAbs(s.Path) || (s.Cwd != "" && !path.IsAbs(s.Cwd)):
		return invalid("command %q, working directory %q: must be absolute", s.Path, s.Cwd)
	case len(s.Hostname) > 64 || len(s.Domainname) > 64: // __NEW_UTS_LEN
		return invalid("host name %q, domain name %q: longer than 64 bytes", s.Hostname, s.Domainname)
	}
	for _, list := range [][]string{s.Args, s.Env, {s.Path, s.Cwd, s.AppArmor, s.Keyring}, s.Masked, s.Readonly} {
		for _, v := range list {
			if strings.IndexByte(v, 0) >= 0 {
				return invalid("%q: has a NUL byte", v)
			}
		}
	}
	return nil
}

// directProgram is for a child of a Thread: it shares our memory until execve, has a PID namespace of its own, and
// has copies of all our descriptors.
func (c *compiler) directProgram() {
	c.p.note = "after a failure"
	c.exit(1)
	c.plan.start = c.p.here()
	c.p.note = "child: PID 1 of its namespace, the agent's memory and rights, the agent's thread waits (vfork)"
	c.join()
	if c.Cloneflags&unix.CLONE_NEWCGROUP != 0 {
		// Not by the clone, whose order of joining the cgroup and making the namespace would decide which cgroup becomes
		// the namespace's root. Linux 6.18 has it right; here it is right everywhere.
		p := c.p
		p.add("make a cgroup namespace", "", unix.SYS_UNSHARE, flagsOf(unix.CLONE_NEWCGROUP, cloneBits))
	}
	c.root()
	c.selfFiles()
	c.kernelNames()
	c.workdir()
	c.stdio()
	c.session()
	c.terminal()
	keep := 3
	if c.Init != nil {
		keep = c.keepInit()
	}
	c.closeFrom(keep)
	c.limits()
	c.rights()
	c.signals()
	c.filter()
	c.execute()
}

// selfFiles are writes to this process's own entry in /proc: that of the container if it is there, which nobody can
// have changed yet, else the host's.
func (c *compiler) selfFiles() {
	p := c.p
	dir, self := atFDCWD(), "/proc/self/"
	if c.procfs.kind != wordNone {
		dir, self = c.procfs, "self/"
	}
	write := func(what, obj, file, text string) {
		fd := p.newSlot()
		p.add(what, obj, unix.SYS_OPENAT, dir, p.str(self+file), flagsOf(unix.O_WRONLY|unix.O_CLOEXEC, openBits)).to = fd
		p.add(what, obj, unix.SYS_WRITE, slot(fd), p.str(text), num(len(text)))
	}
	if c.OOMScoreAdj != nil && (c.plan.template || *c.OOMScoreAdj != ownOOMScoreAdj()) {
		n := strconv.Itoa(*c.OOMScoreAdj)
		write("set oom_score_adj to ", n, "oom_score_adj", n)
	}
	if c.AppArmor != "" {
		write("change on exec to AppArmor profile ", c.AppArmor, "attr/apparmor/exec", "exec "+c.AppArmor)
	}
}

// ownOOMScoreAdj is the agent's own value, which children inherit; it does not change while an agent runs. A value
// that is never asked for stands for "unknown".
var ownOOMScoreAdj = sync.OnceValue(func() int {
	b, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return math.MinInt
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return math.MinInt
	}
	return n
})

// join enters the namespaces that exist already.
func (c *compiler) join() {
	p := c.p
	for _, f := range c.Join {
		p.add("join namespace ", f.Name(), unix.SYS_SETNS, p.file(f, f.Name()), num(0))
	}
	if c.Into != nil {
		// One call for all of them: the kernel checks first and then joins all or none (Linux 5.8).
		p.add("join the container's namespaces", "", unix.SYS_SETNS, p.file(c.Into, "container's pidfd"), flagsOf(c.IntoFlags, cloneBits))
	}
}

// kernelNames sets what is kept per UTS namespace, while CAP_SYS_ADMIN is there, and leaves the agent's keys.
func (c *compiler) kernelNames() {
	p := c.p
	if c.Hostname != "" {
		p.add("set host name ", c.Hostname, unix.SYS_SETHOSTNAME, p.str(c.Hostname), num(len(c.Hostname)))
	}
	if c.Domainname != "" {
		p.add("set domain name ", c.Domainname, unix.SYS_SETDOMAINNAME, p.str(c.Domainname), num(len(c.Domainname)))
	}
	// Without one of its own the container would share the agent's session keyring. A kernel without keys has nothing
	// to share.
	name := num(0)
	if c.Keyring != "" {
		name = p.str(c.Keyring)
	}
	s := p.add("join session keyring ", c.Keyring, unix.SYS_KEYCTL, shown(unix.KEYCTL_JOIN_SESSION_KEYRING, "KEYCTL_JOIN_SESSION_KEYRING"), name)
	s.alt, s.only = p.here(), unix.ENOSYS
}

// rlimitNames are the resources by their names without RLIMIT_, as Docker's --ulimit takes them.
var rlimitNames = map[string]int{
	"cpu": unix.RLIMIT_CPU, "fsize": unix.RLIMIT_FSIZE, "data": unix.RLIMIT_DATA, "stack": unix.RLIMIT_STACK,
	"core": unix.RLIMIT_CORE, "rss": unix.RLIMIT_RSS, "nproc": unix.RLIMIT_NPROC, "nofile": unix.RLIMIT_NOFILE,
	"memlock": unix.RLIMIT_MEMLOCK, "as": unix.RLIMIT_AS, "locks": unix.RLIMIT_LOCKS, "sigpending": unix.RLIMIT_SIGPENDING,
	"msgqueue": unix.RLIMIT_MSGQUEUE, "nice": unix.RLIMIT_NICE, "rtprio": unix.RLIMIT_RTPRIO, "rttime": unix.RLIMIT_RTTIME,
}

// limits sets resource limits and the file mode mask, still with all rights (CAP_SYS_RESOURCE raises a hard limit). It
// comes after the last descriptor has been made: the agent may have more of them open than the container may.
func (c *compiler) limits() {
	p := c.p
	for _, l := range c.Rlimits {
		nr, ok := rlimitNames[l.Name]
		if !ok {
			c.fail(wire.Errorf(wire.Invalid, "invalid ulimit type: %s", l.Name))
			return
		}
		lim := p.words(word{v: l.Soft}, word{v: l.Hard})
		p.add("set rlimit ", l.Name+" to "+showLimit(l.Soft)+":"+showLimit(l.Hard), unix.SYS_PRLIMIT64,
			num(0), shown(uint64(nr), "RLIMIT_"+strings.ToUpper(l.Name)), data(lim), num(0))
	}
	p.add("set umask", "", unix.SYS_UMASK, shown(0o022, "022"))
	// The agent lets its own timers be late, and children inherit that.
	p.add("give timers the usual slack", "", unix.SYS_PRCTL, shown(unix.PR_SET_TIMERSLACK, "PR_SET_TIMERSLACK"), num(int(timerslack.Usual)))
}

func showLimit(v uint64) string {
	if v == math.MaxUint64 {
		return "unlimited"
	}
	return strconv.FormatUint(v, 10)
}

// session cuts the process off from the agent's terminal and process group.
func (c *compiler) session() {
	c.p.add("start a session", "", unix.SYS_SETSID)
}

// terminal makes standard input the session's terminal.
func (c *compiler) terminal() {
	if !c.TTY {
		return
	}
	if c.Stdin == nil {
		c.fail(wire.Errorf(wire.Invalid, "a terminal without standard input"))
		return
	}
	c.p.add("take the terminal", "", unix.SYS_IOCTL, num(0), shown(unix.TIOCSCTTY, "TIOCSCTTY"), num(0))
}

// workdir enters the working directory without following magic links such as /proc/1/root, and then asks the kernel
// for its path: one outside of the root begins with "(unreachable)" (CVE-2024-21626 and kin). It comes before user
// and group: a directory that only root may enter is allowed, as in runc.
func (c *compiler) workdir() {
	p := c.p
	cwd := path.Clean("/" + c.Cwd)
	if cwd == "/" && (c.Root != nil || c.IntoFlags&unix.CLONE_NEWNS != 0) {
		return // where the change of root, or setns, has left us
	}
	const what = "change to working directory "
	fd := p.newSlot()
	p.add(what, cwd, unix.SYS_OPENAT2, atFDCWD(), p.str(cwd), c.how(unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC), num(sizeofHow)).to = fd
	p.add(what, cwd, unix.SYS_FCHDIR, slot(fd))
	p.add("stay inside the root with working directory ", cwd, unix.SYS_GETCWD, p.scratch(), num(unix.PathMax)).flags |= flagSlash
}

// stdio puts the three descriptors where they belong. A source below 3, the agent's own stdio, is moved up first so
// that it is not overwritten before it is used.
func (c *compiler) stdio() {
	p := c.p
	var from [3]word
	for i, f := range []*os.File{c.Stdin, c.Stdout, c.Stderr} {
		name := [...]string{"stdin", "stdout", "stderr"}[i]
		if f == nil {
			f, name = c.nullDevice(), "/dev/null"
			if f == nil {
				return
			}
		}
		from[i] = p.file(f, name)
		// Fd makes the file blocking, as os/exec does: ends of os.Pipe are not, and programs do not expect that.
		if fd := int(f.Fd()); !c.plan.template && fd < 3 {
			moved := p.newSlot()
			p.add("move ", name, unix.SYS_FCNTL, from[i], shown(unix.F_DUPFD, "F_DUPFD"), num(3)).to = moved
			from[i] = slot(moved)
		}
	}
	for i := range from {
		p.add("set up stdio", "", unix.SYS_DUP3, from[i], num(i), num(0))
	}
}

// closeFrom closes every descriptor from fd on: nothing of the host stays open beyond stdio.
func (c *compiler) closeFrom(fd int) {
	c.p.add("close descriptors", "", unix.SYS_CLOSE_RANGE, num(fd), shown(math.MaxUint32, "~0"), num(0))
}

func (c *compiler) exit(code int) { c.p.exit(code) }

// rights gives the process its identity and takes the rest away, all but the seccomp filter.
//
// Without no_new_privs the filter needs CAP_SYS_ADMIN, which is then kept until filter has run.
func (c *compiler) rights() {
	p := c.p
	all := AllCaps()
	caps := c.Caps
	for _, set := range []*uint64{&caps.Bounding, &caps.Effective, &caps.Permitted, &caps.Inheritable, &caps.Ambient} {
		*set &= all
	}
	// Ambient needs permitted and inheritable, effective needs permitted.
	caps.Inheritable |= caps.Ambient
	caps.Permitted |= caps.Ambient | caps.Effective

	// Needs CAP_SETPCAP, so before anything is given up.
	for i := range lastCap() + 1 {
		if caps.Bounding&(1<<i) == 0 {
			p.add("drop from the bounding set", "", unix.SYS_PRCTL, shown(unix.PR_CAPBSET_DROP, "PR_CAPBSET_DROP"), shown(uint64(i), capName(i)))
		}
	}
	// Groups before user: they need CAP_SETGID, which goes with the user.
	groups := make([]byte, 0, 4*len(c.Groups))
	for _, g := range c.Groups {
		groups = binary.LittleEndian.AppendUint32(groups, g)
	}
	ids := word{kind: wordData, as: asIDs, n: uint32(len(c.Groups)), v: uint64(p.bytes(groups))}
	p.add("set supplementary groups", "", unix.SYS_SETGROUPS, num(len(c.Groups)), ids)
	gid, uid := num(int(c.GID)), num(int(c.UID))
	p.add("set group", "", unix.SYS_SETRESGID, gid, gid, gid)
	if c.UID != 0 {
		p.add("keep capabilities over setuid", "", unix.SYS_PRCTL, shown(unix.PR_SET_KEEPCAPS, "PR_SET_KEEPCAPS"), num(1))
		p.add("set user", "", unix.SYS_SETRESUID, uid, uid, uid)
	}
	c.caps = caps
	if c.borrowsAdmin() {
		caps.Effective |= admin
		caps.Permitted |= admin
	}
	c.capset(caps)
	for i := range lastCap() + 1 {
		if caps.Ambient&(1<<i) != 0 {
			p.add("raise in the ambient set", "", unix.SYS_PRCTL, shown(unix.PR_CAP_AMBIENT, "PR_CAP_AMBIENT"),
				shown(unix.PR_CAP_AMBIENT_RAISE, "PR_CAP_AMBIENT_RAISE"), shown(uint64(i), capName(i)), num(0), num(0))
		}
	}
	if c.NoNewPrivs {
		p.add("set no_new_privs", "", unix.SYS_PRCTL, shown(unix.PR_SET_NO_NEW_PRIVS, "PR_SET_NO_NEW_PRIVS"), num(1), num(0), num(0), num(0))
	}
}

const admin = 1 << unix.CAP_SYS_ADMIN

// borrowsAdmin tells whether CAP_SYS_ADMIN is kept for loading the filter only.
func (c *compiler) borrowsAdmin() bool {
	return c.Seccomp != nil && !c.NoNewPrivs && c.Caps.Effective&AllCaps()&admin == 0
}

// filter loads the seccomp filter. It comes as late as possible, because all that follows must be allowed by it:
// after it there is at most one capset, and execve.
func (c *compiler) filter() {
	if c.Seccomp == nil {
		return
	}
	c.seccomp()
	if c.borrowsAdmin() {
		c.capset(c.caps)
	}
}

func (c *compiler) capset(caps Caps) {
	p := c.p
	hdr := p.words(word{v: unix.LINUX_CAPABILITY_VERSION_3})
	var d []byte
	for i := 0; i < 64; i += 32 {
		for _, set := range []uint64{caps.Effective, caps.Permitted, caps.Inheritable} {
			d = binary.LittleEndian.AppendUint32(d, uint32(set>>i))
		}
	}
	p.add("set capabilities", "", unix.SYS_CAPSET, shownData(hdr, "{_LINUX_CAPABILITY_VERSION_3, 0}"),
		dataAs(p.bytes(d), asCaps))
}

// seccomp loads the filter. SPEC_ALLOW as runc does: since Linux 5.16 the kernel no longer couples the speculation
// mitigations to seccomp by default, so only where an administrator has asked for that does the flag matter.
func (c *compiler) seccomp() {
	p := c.p
	filter := make([]byte, 0, 8*len(c.Seccomp))
	for _, f := range c.Seccomp {
		filter = binary.LittleEndian.AppendUint16(filter, f.Code)
		filter = append(filter, f.Jt, f.Jf)
		filter = binary.LittleEndian.AppendUint32(filter, f.K)
	}
	prog := p.words(word{v: uint64(len(c.Seccomp))}, data(p.bytes(filter)))
	p.add("load seccomp filter", "", unix.SYS_SECCOMP, shown(unix.SECCOMP_SET_MODE_FILTER, "SECCOMP_SET_MODE_FILTER"),
		shown(unix.SECCOMP_FILTER_FLAG_SPEC_ALLOW, "SECCOMP_FILTER_FLAG_SPEC_ALLOW"), shownData(prog, "filter"))
}

// signals makes the signal state a fresh one. Handlers are gone already (CLONE_CLEAR_SIGHAND), but a signal that the
// agent was started with ignored, as by nohup, stays so over clone and execve unless it is reset. The mask comes
// last of all: until here every signal but SIGKILL and SIGSTOP has been blocked.
func (c *compiler) signals() {
	p := c.p
	for sig := 1; sig <= 64; sig++ {
		if ownIgnored()&(1<<(sig-1)) != 0 {
			p.add("reset ignored signal", "", unix.SYS_RT_SIGACTION, shown(uint64(sig), unix.SignalName(unix.Signal(sig))),
				data(p.bytes(make([]byte, 32))), num(0), num(8))
		}
	}
	p.add("unblock signals", "", unix.SYS_RT_SIGPROCMASK, shown(unix.SIG_SETMASK, "SIG_SETMASK"), data(p.words(num(0))), num(0), num(8))
}

// ownIgnored is the set of signals that this process ignores, bit n-1 for signal n.
var ownIgnored = sync.OnceValue(func() uint64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "SigIgn:"); ok {
			v, _ := strconv.ParseUint(strings.TrimSpace(rest), 16, 64)
			return v &^ (1<<(unix.SIGKILL-1) | 1<<(unix.SIGSTOP-1))
		}
	}
	return 0
})

// keepInit moves the descriptor of the init program to 3 and returns the first descriptor behind it.
func (c *compiler) keepInit() int {
	p := c.p
	// Two steps, as 3 may be the source itself, which dup3 refuses. Close-on-exec closes it when it is executed.
	high := p.newSlot()
	p.add("keep init", "", unix.SYS_FCNTL, p.file(c.Init, "init"), shown(unix.F_DUPFD_CLOEXEC, "F_DUPFD_CLOEXEC"), num(4)).to = high
	p.add("keep init", "", unix.SYS_DUP3, slot(high), num(3), flagsOf(unix.O_CLOEXEC, openBits))
	return 4
}

// execute ends the program.
func (c *compiler) execute() {
	p := c.p
	if c.Init != nil {
		argv := append([]string{InitName, "-x", c.Path, "--"}, c.Args...)
		p.add("exec init", "", unix.SYS_EXECVEAT, num(3), p.str(""), p.strs(argv), p.strs(c.Env), shown(unix.AT_EMPTY_PATH, "AT_EMPTY_PATH"))
		return
	}
	p.add("exec ", c.Path, unix.SYS_EXECVE, p.str(c.Path), p.strs(c.Args), p.strs(c.Env)).exec = true
}

func capName(i int) string {
	if i < len(capNames) {
		return capNames[i]
	}
	return strconv.Itoa(i)
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// fdOf is f's descriptor number; unlike f.Fd it leaves the file's mode alone.
func fdOf(f *os.File) int {
	n := -1
	if c, err := f.SyscallConn(); err == nil {
		c.Control(func(fd uintptr) { n = int(fd) })
	}
	return n
}
