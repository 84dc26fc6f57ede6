//go:build linux && (amd64 || arm64)

package launch

import (
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// cloneArgs is struct clone_args of linux/sched.h, version 2 (Linux 5.7, CLONE_INTO_CGROUP).
type cloneArgs struct {
	flags      uint64
	pidfd      uint64
	_          [2]uint64 // child_tid, parent_tid
	exitSignal uint64
	_          [5]uint64 // stack, stack_size, tls, set_tid, set_tid_size
	cgroup     uint64
}

// clone is clone3. The child walks ops; see walk_*.s.
//
//go:noescape
func clone(args *cloneArgs, size, start, status, fail uint64) (ret int64)

// The scheduler's own pair around a system call, pushed by the runtime for such uses (gVisor's systrap uses it too).
// Between them this thread owns no P, so a vfork that lasts a millisecond holds up neither other goroutines nor the
// garbage collector. Verified with Go 1.26; if a later one refuses the link, syscall.Syscall of a harmless call around
// the clone is no replacement: the way out is then a raw clone that holds its P.

//go:linkname entersyscall runtime.entersyscall
func entersyscall()

//go:linkname exitsyscall runtime.exitsyscall
func exitsyscall()

// spawn makes a child that walks the ops at start, and returns its PID or a negative errno. With CLONE_VFORK it
// returns when the child has executed or ended.
//
// The goroutine must be locked to its thread if the thread matters to the child. All memory that the ops name must be
// kept alive by the caller; Go's heap does not move. The memory args.pidfd points to must not be on the stack.
//
// All signals are blocked over the clone: the runtime sends SIGURG to preempt, and a child that shares memory must
// never run a handler. It inherits the full mask and lifts it as its last step; CLONE_CLEAR_SIGHAND has made all
// dispositions the default by then. A signal for the thread itself waits until the mask is back.
//
// Nothing here may be instrumented or grow the stack, as there is no P.
//
//go:norace
//go:nosplit
func spawn(args *cloneArgs, start, status, fail uint64) int64 {
	all, old := ^uint64(0), uint64(0)
	entersyscall()
	unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&all)), uintptr(unsafe.Pointer(&old)), 8, 0, 0)
	ret := clone(args, uint64(unsafe.Sizeof(*args)), start, status, fail)
	unix.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&old)), 0, 8, 0, 0)
	exitsyscall()
	return ret
}

// addrOf is where mem is. Go's heap does not move; the caller keeps mem alive for as long as the address is used.
func addrOf(mem []uint64) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))) }

// keep marks mem as used until here.
func keep(mem []uint64) { runtime.KeepAlive(unsafe.SliceData(mem)) }
