//go:build linux && (amd64 || arm64)

package launch

import "golang.org/x/sys/unix"

// evalFilter runs a seccomp filter on one system call and returns its verdict. It knows the instructions that
// seccomp filters are made of; another one, or a jump out of the program, gives SECCOMP_RET_KILL_PROCESS.
func evalFilter(prog []unix.SockFilter, arch, nr uint32, args [6]uint64) uint32 {
	load := func(off uint32) uint32 { // struct seccomp_data, little endian
		switch {
		case off == 0:
			return nr
		case off == 4:
			return arch
		case off >= 16 && off < 64 && off%4 == 0:
			return uint32(args[(off-16)/8] >> (8 * (off % 8)))
		}
		return 0 // the instruction pointer
	}
	var a, x uint32
	for pc := 0; pc < len(prog); pc++ {
		in := prog[pc]
		jump := func(yes bool) {
			if yes {
				pc += int(in.Jt)
			} else {
				pc += int(in.Jf)
			}
		}
		switch in.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			a = load(in.K)
		case unix.BPF_ALU | unix.BPF_AND | unix.BPF_K:
			a &= in.K
		case unix.BPF_JMP | unix.BPF_JA:
			pc += int(in.K)
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K:
			jump(a == in.K)
		case unix.BPF_JMP | unix.BPF_JGT | unix.BPF_K:
			jump(a > in.K)
		case unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			jump(a >= in.K)
		case unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K:
			jump(a&in.K != 0)
		case unix.BPF_MISC | unix.BPF_TAX:
			x = a
		case unix.BPF_MISC | unix.BPF_TXA:
			a = x
		case unix.BPF_RET | unix.BPF_K:
			return in.K
		case unix.BPF_RET | unix.BPF_A:
			return a
		default:
			return unix.SECCOMP_RET_KILL_PROCESS
		}
	}
	return unix.SECCOMP_RET_KILL_PROCESS
}
