//go:build linux && (amd64 || arm64)

package launch

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// bit names one flag.
type bit struct {
	v    uint64
	name string
}

var (
	cloneBits = []bit{
		{unix.CLONE_NEWNS, "CLONE_NEWNS"}, {unix.CLONE_NEWUTS, "CLONE_NEWUTS"}, {unix.CLONE_NEWIPC, "CLONE_NEWIPC"},
		{unix.CLONE_NEWPID, "CLONE_NEWPID"}, {unix.CLONE_NEWNET, "CLONE_NEWNET"}, {unix.CLONE_NEWCGROUP, "CLONE_NEWCGROUP"},
		{unix.CLONE_VM, "CLONE_VM"}, {unix.CLONE_VFORK, "CLONE_VFORK"}, {unix.CLONE_PIDFD, "CLONE_PIDFD"},
		{unix.CLONE_PARENT, "CLONE_PARENT"}, {unix.CLONE_CLEAR_SIGHAND, "CLONE_CLEAR_SIGHAND"}, {unix.CLONE_INTO_CGROUP, "CLONE_INTO_CGROUP"},
	}
	openBits = []bit{
		{unix.O_WRONLY, "O_WRONLY"}, {unix.O_RDWR, "O_RDWR"}, {unix.O_PATH, "O_PATH"}, {unix.O_DIRECTORY, "O_DIRECTORY"},
		{unix.O_CLOEXEC, "O_CLOEXEC"},
	}
	mountBits   = []bit{{unix.MS_REC, "MS_REC"}, {unix.MS_PRIVATE, "MS_PRIVATE"}}
	moveBits    = []bit{{unix.MOVE_MOUNT_F_EMPTY_PATH, "MOVE_MOUNT_F_EMPTY_PATH"}, {unix.MOVE_MOUNT_T_EMPTY_PATH, "MOVE_MOUNT_T_EMPTY_PATH"}}
	umountBits  = []bit{{unix.MNT_DETACH, "MNT_DETACH"}}
	fsopenBits  = []bit{{unix.FSOPEN_CLOEXEC, "FSOPEN_CLOEXEC"}}
	fsmountBits = []bit{{unix.FSMOUNT_CLOEXEC, "FSMOUNT_CLOEXEC"}}
	attrBits    = []bit{
		{unix.MOUNT_ATTR_RDONLY, "MOUNT_ATTR_RDONLY"}, {unix.MOUNT_ATTR_NOSUID, "MOUNT_ATTR_NOSUID"},
		{unix.MOUNT_ATTR_NODEV, "MOUNT_ATTR_NODEV"}, {unix.MOUNT_ATTR_NOEXEC, "MOUNT_ATTR_NOEXEC"},
	}
	treeBits = []bit{
		{unix.OPEN_TREE_CLONE, "OPEN_TREE_CLONE"}, {unix.OPEN_TREE_CLOEXEC, "OPEN_TREE_CLOEXEC"},
		{unix.AT_RECURSIVE, "AT_RECURSIVE"}, {unix.AT_EMPTY_PATH, "AT_EMPTY_PATH"},
	}
)

// showBits spells v out with the names of t; what has none stays a number.
func showBits(v uint64, t []bit) string {
	var names []string
	for _, b := range t {
		if v&b.v == b.v && b.v != 0 {
			names = append(names, b.name)
			v &^= b.v
		}
	}
	if v != 0 || len(names) == 0 {
		names = append(names, fmt.Sprintf("%#x", v))
	}
	return strings.Join(names, "|")
}

// sysNames are the system calls that programs use.
var sysNames = map[uint64]string{
	unix.SYS_CAPSET: "capset", unix.SYS_CHDIR: "chdir", unix.SYS_CHROOT: "chroot", unix.SYS_CLONE: "clone", unix.SYS_CLOSE: "close",
	unix.SYS_CLOSE_RANGE: "close_range", unix.SYS_DUP3: "dup3", unix.SYS_EXECVE: "execve", unix.SYS_EXECVEAT: "execveat",
	unix.SYS_EXIT_GROUP: "exit_group", unix.SYS_FCHDIR: "fchdir", unix.SYS_FCNTL: "fcntl", unix.SYS_FSCONFIG: "fsconfig",
	unix.SYS_FSMOUNT: "fsmount", unix.SYS_FSOPEN: "fsopen", unix.SYS_GETCWD: "getcwd", unix.SYS_IOCTL: "ioctl",
	unix.SYS_KEYCTL: "keyctl", unix.SYS_MADVISE: "madvise", unix.SYS_MMAP: "mmap", unix.SYS_MOUNT: "mount",
	unix.SYS_MOUNT_SETATTR: "mount_setattr", unix.SYS_MOVE_MOUNT: "move_mount", unix.SYS_MUNMAP: "munmap",
	unix.SYS_OPENAT: "openat", unix.SYS_OPENAT2: "openat2", unix.SYS_OPEN_TREE: "open_tree", unix.SYS_PIVOT_ROOT: "pivot_root",
	unix.SYS_PRCTL: "prctl", unix.SYS_PRLIMIT64: "prlimit64", unix.SYS_RECVMSG: "recvmsg", unix.SYS_RT_SIGACTION: "rt_sigaction",
	unix.SYS_RT_SIGPROCMASK: "rt_sigprocmask", unix.SYS_SECCOMP: "seccomp", unix.SYS_SENDMSG: "sendmsg",
	unix.SYS_SETDOMAINNAME: "setdomainname", unix.SYS_SETGROUPS: "setgroups", unix.SYS_SETHOSTNAME: "sethostname",
	unix.SYS_SETNS: "setns", unix.SYS_SETRESGID: "setresgid", unix.SYS_SETRESUID: "setresuid", unix.SYS_SETSID: "setsid",
	unix.SYS_UMASK: "umask", unix.SYS_UMOUNT2: "umount2", unix.SYS_UNSHARE: "unshare", unix.SYS_WRITE: "write",
}

func sysName(nr uint64) string {
	if n, ok := sysNames[nr]; ok {
		return n
	}
	return "syscall " + strconv.FormatUint(nr, 10)
}

// quoted prints a string operand, cut if it is long.
func quoted(s string) string {
	const limit = 64
	if len(s) > limit {
		return strconv.Quote(s[:limit]) + "..."
	}
	return strconv.Quote(s)
}

// String prints the program, one operation a line: number, call, what it is for. Results that later calls use are
// called $n after the step that stores them.
func (p *program) String() string {
	var b strings.Builder
	results := map[int]int{} // slot -> step
	for i := range p.steps {
		if p.steps[i].to >= 0 {
			results[p.steps[i].to] = i
		}
	}
	for i := range p.steps {
		s := &p.steps[i]
		if s.note != "" {
			fmt.Fprintf(&b, "# %s\n", s.note)
		}
		args := make([]string, s.nargs)
		for j := range args {
			args[j] = p.show(s.args[j], results)
		}
		line := fmt.Sprintf("%3d %s(%s)", i, sysName(s.nr), strings.Join(args, ", "))
		if s.to >= 0 {
			line += fmt.Sprintf(" = $%d", i)
		}
		var notes []string
		if d := s.what + s.obj; d != "" {
			notes = append(notes, d)
		}
		if s.alt != noLabel {
			e := "any error"
			if s.only != 0 {
				e = unix.ErrnoName(s.only)
			}
			notes = append(notes, fmt.Sprintf("%s: go to %d", e, s.alt))
		}
		if s.zero != noLabel {
			notes = append(notes, fmt.Sprintf("0: go to %d", s.zero))
		}
		if s.flags&flagSlash != 0 {
			notes = append(notes, "must begin with /")
		}
		fmt.Fprintf(&b, "%-100s # %s\n", line, strings.Join(notes, "; "))
	}
	return b.String()
}

func (p *program) show(w word, results map[int]int) string {
	switch {
	case w.text != "":
		return w.text
	case w.bits != nil:
		return showBits(w.v, w.bits)
	}
	switch w.kind {
	case wordFile:
		return "<" + p.names[w.v] + ">"
	case wordSlot:
		return "$" + strconv.Itoa(results[int(w.v)])
	case wordScratch:
		return "buffer"
	case wordData:
		return p.showData(int(w.v), w.as, int(w.n))
	}
	return strconv.FormatInt(int64(w.v), 10)
}

// showData prints what is at off in the data.
func (p *program) showData(off int, as wordForm, n int) string {
	d := p.data[off:]
	switch as {
	case asString:
		s, _, _ := strings.Cut(string(d), "\x00")
		return quoted(s)
	case asVector:
		var list []string
		for v := binary.LittleEndian.Uint64(d); slices.Contains(p.relocs, off); v = binary.LittleEndian.Uint64(p.data[off:]) {
			list = append(list, p.showData(int(v), asString, 0))
			off += 8
		}
		return "[" + strings.Join(list, ", ") + "]"
	case asIDs:
		list := make([]string, n)
		for i := range list {
			list[i] = strconv.FormatUint(uint64(binary.LittleEndian.Uint32(d[4*i:])), 10)
		}
		return "[" + strings.Join(list, ", ") + "]"
	case asCaps:
		set := func(i int) string {
			return showCaps(uint64(binary.LittleEndian.Uint32(d[4*i:])) | uint64(binary.LittleEndian.Uint32(d[4*i+12:]))<<32)
		}
		return "{effective " + set(0) + ", permitted " + set(1) + ", inheritable " + set(2) + "}"
	case asHow:
		return "{" + showBits(binary.LittleEndian.Uint64(d), openBits) + ", RESOLVE_IN_ROOT|RESOLVE_NO_MAGICLINKS}"
	}
	return "data"
}
