//go:build linux && (amd64 || arm64)

package launch

import (
	"cmp"
	"maps"
	"math"
	"runtime"
	"slices"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// The filter is a binary search over ranges of neighbouring system calls with the same verdict, where libseccomp and
// github.com/elastic/go-seccomp-bpf compare with one number after the other. That is for the start path, not only for
// the calls: on loading, the kernel runs the filter for every number there is to learn which ones are always allowed
// (since Linux 5.11), so the cost of loading goes with the depth as well as with the length. Measured figures are at
// BenchmarkFilterLoad. The library handles one architecture a filter, too, and Docker's profile has three.

// block is code that only jumps forward and within itself, and ends in a return.
type block = []unix.SockFilter

func stmt(code uint16, k uint32) unix.SockFilter { return unix.SockFilter{Code: code, K: k} }

func ret(k uint32) unix.SockFilter { return stmt(unix.BPF_RET|unix.BPF_K, k) }

func load(off uint32) unix.SockFilter { return stmt(unix.BPF_LD|unix.BPF_W|unix.BPF_ABS, off) }

func jump(op uint16, k uint32, yes, no int) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | op | unix.BPF_K, Jt: uint8(yes), Jf: uint8(no), K: k}
}

// Offsets in struct seccomp_data; both architectures are little endian.
const (
	dataNr   = 0
	dataArch = 4
	dataArgs = 16
)

// split runs high if the accumulator op k, else low.
func split(op uint16, k uint32, high, low block) block {
	var head block
	if len(low) <= math.MaxUint8 {
		head = block{jump(op, k, len(low), 0)}
	} else {
		head = block{jump(op, k, 0, 1), stmt(unix.BPF_JMP|unix.BPF_JA, uint32(len(low)))}
	}
	return slices.Concat(head, low, high)
}

// compile makes the filter. A call of an architecture that is not in the profile kills the thread, as libseccomp
// does. Without x32, the part for it is one instruction: a kernel that has no x32 answers each of its calls with
// ENOSYS anyway, and what is not there need not be loaded at each start.
func (p *policy) compile(x32 bool) []unix.SockFilter {
	kill := block{ret(unix.SECCOMP_RET_KILL_THREAD)}
	above64 := kill // for the numbers from x32Bit on
	for i := range p.arches {
		if a := &p.arches[i]; a.bit == x32Bit {
			above64 = block{ret(unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS))}
			if x32 {
				above64 = tree(p.segments(a, nil))
			}
		}
	}
	code := kill
	for i := range p.arches {
		// Backwards, so that the native one is asked for first.
		a := &p.arches[len(p.arches)-1-i]
		if a.bit == x32Bit {
			continue
		}
		var above block
		if a.audit == unix.AUDIT_ARCH_X86_64 {
			above = above64
		}
		code = split(unix.BPF_JEQ, a.audit, slices.Concat(block{load(dataNr)}, tree(p.segments(a, above))), code)
	}
	return slices.Concat(block{load(dataArch)}, code)
}

// hasX32 tells whether this kernel runs x32 programs: hardly any does.
var hasX32 = sync.OnceValue(func() bool {
	if runtime.GOARCH != "amd64" {
		return false
	}
	_, _, errno := unix.RawSyscall(x32Bit|unix.SYS_GETPID, 0, 0, 0)
	return errno != unix.ENOSYS
})

// segment is a range of system call numbers, up to the next segment's first, with the same code.
type segment struct {
	first uint32
	code  block
}

// segments are the calls of one architecture in order; x32 is the code for numbers from x32Bit on, nil if there are
// none to tell apart.
//
// A call newer than the profile, that is above all it names, gives ENOSYS instead of the default's errno, so that a C
// library falls back to an older one: runc does the same since 1.0.0-rc93.
func (p *policy) segments(a *archPolicy, x32 block) []segment {
	above := p.def
	if above != unix.SECCOMP_RET_ALLOW && above != unix.SECCOMP_RET_LOG {
		above = unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)
	}
	def := block{ret(p.def)}
	segs := []segment{{a.bit, def}}
	put := func(first uint32, code block) {
		last := &segs[len(segs)-1]
		switch {
		case last.first == first:
			last.code = code
			if n := len(segs); n > 1 && slices.Equal(segs[n-2].code, code) {
				segs = segs[:n-1]
			}
		case !slices.Equal(last.code, code):
			segs = append(segs, segment{first, code})
		}
	}
	for _, nr := range slices.Sorted(maps.Keys(a.rules)) {
		put(nr+a.bit, p.rulesCode(a, a.rules[nr]))
		put(nr+a.bit+1, def)
	}
	put(a.last+a.bit+1, block{ret(above)})
	if x32 != nil {
		put(x32Bit, x32)
	}
	return segs
}

// middle is the segment at which to cut: not the one that halves their count, but the one that best halves the calls,
// because on loading each number is looked for once. The last segment, without an end, counts as one.
func middle(segs []segment) int {
	first, last := segs[0].first, segs[len(segs)-1].first+1
	best, off := 1, uint32(math.MaxUint32)
	for i := 1; i < len(segs); i++ {
		low, high := segs[i].first-first, last-segs[i].first
		if d := max(low, high) - min(low, high); d < off {
			best, off = i, d
		}
	}
	return best
}

// tree is the search: a comparison for each border between segments, and behind them once each code that they lead
// to. What is out of the reach of a jump, 255 instructions, is cut in two.
func tree(segs []segment) block {
	var targets []block
	target := make([]int, len(segs)) // of each segment
	for i, s := range segs {
		target[i] = slices.IndexFunc(targets, func(b block) bool { return slices.Equal(b, s.code) })
		if target[i] < 0 {
			target[i] = len(targets)
			targets = append(targets, s.code)
		}
	}
	// Short ones first: only their beginnings must be in reach.
	order := make([]int, len(targets))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(len(targets[a]), len(targets[b])) })
	at := make([]int, len(targets))
	end, last := len(segs)-1, 0
	for _, t := range order {
		at[t], last = end, end
		end += len(targets[t])
	}
	if last > math.MaxUint8 {
		mid := middle(segs)
		return split(unix.BPF_JGE, segs[mid].first, tree(segs[mid:]), tree(segs[:mid]))
	}
	code := make(block, 0, end)
	// node appends the comparisons for segs[from:to]; there are at least two.
	var node func(from, to int)
	node = func(from, to int) {
		mid, next := from+middle(segs[from:to]), len(code)+1
		yes, no := mid-from-1, 0 // the comparisons of the lower half come first
		if to-mid == 1 {
			yes = at[target[mid]] - next
		}
		if mid-from == 1 {
			no = at[target[from]] - next
		}
		code = append(code, jump(unix.BPF_JGE, segs[mid].first, yes, no))
		if mid-from > 1 {
			node(from, mid)
		}
		if to-mid > 1 {
			node(mid, to)
		}
	}
	if len(segs) > 1 {
		node(0, len(segs))
	}
	for _, t := range order {
		code = append(code, targets[t]...)
	}
	return code
}

// rulesCode is the code for the rules of one call. A rule without conditions wins over those with, wherever it
// stands, as in libseccomp; of the others the first that holds.
func (p *policy) rulesCode(a *archPolicy, rules []rule) block {
	for _, r := range rules {
		if len(r.conds) == 0 {
			return block{ret(r.ret)}
		}
	}
	var code block
	for len(rules) > 0 {
		n, set, ok := rangesOf(a, rules)
		if ok {
			code = append(code, rangesCode(a, rules[0].conds[0].Index, set, rules[0].ret)...)
		} else {
			n = 1
			code = append(code, ruleCode(a, rules[0])...)
		}
		rules = rules[n:]
	}
	return append(code, ret(p.def))
}

// ruleCode runs on behind its end if a condition does not hold.
func ruleCode(a *archPolicy, r rule) block {
	code := block{ret(r.ret)}
	for _, c := range slices.Backward(r.conds) {
		code = append(condition(a, c, len(code)), code...)
	}
	return code
}

// condition goes on behind itself if c holds, else skips another fail instructions.
func condition(a *archPolicy, c specs.LinuxSeccompArg, fail int) block {
	lo := dataArgs + 8*uint32(c.Index)
	hi := lo + 4
	// With MASKED_EQ the mask is in Value, what is compared with in ValueTwo.
	value, mask := c.Value, uint64(math.MaxUint64)
	if c.Op == specs.OpMaskedEqual {
		value, mask = c.ValueTwo, c.Value
	}
	vhi, vlo := uint32(value>>32), uint32(value)
	op, not := uint16(unix.BPF_JEQ), false
	switch c.Op {
	case specs.OpNotEqual:
		not = true
	case specs.OpGreaterThan:
		op = unix.BPF_JGT
	case specs.OpGreaterEqual:
		op = unix.BPF_JGE
	case specs.OpLessEqual:
		op, not = unix.BPF_JGT, true
	case specs.OpLessThan:
		op, not = unix.BPF_JGE, true
	}
	// last compares the low half, which decides if the high halves are equal.
	var low block
	low = append(low, load(lo))
	if uint32(mask) != math.MaxUint32 {
		low = append(low, stmt(unix.BPF_ALU|unix.BPF_AND|unix.BPF_K, uint32(mask)))
	}
	if not {
		low = append(low, jump(op, vlo, fail, 0))
	} else {
		low = append(low, jump(op, vlo, 0, fail))
	}
	if !a.wide || (uint32(mask>>32) == 0 && vhi == 0) {
		return low
	}
	var high block
	high = append(high, load(hi))
	if uint32(mask>>32) != math.MaxUint32 {
		high = append(high, stmt(unix.BPF_ALU|unix.BPF_AND|unix.BPF_K, uint32(mask>>32)))
	}
	// Where the high halves differ: equality is settled, for an order the high half alone tells.
	holds, fails := len(low), len(low)+fail
	if not {
		holds, fails = fails, holds
	}
	if op == unix.BPF_JEQ {
		high = append(high, jump(unix.BPF_JEQ, vhi, 0, fails))
	} else {
		high = append(high, jump(unix.BPF_JGT, vhi, holds+1, 0), jump(unix.BPF_JEQ, vhi, 0, fails))
	}
	return append(high, low...)
}

// valueRange is a range of 32-bit values, both ends in it.
type valueRange struct{ first, last uint32 }

// rangesOf takes the longest run of rules at the front that give the same verdict for values of one argument, and
// returns how many and the values as ranges in order. Docker's profile allows socket(2) for 30 address families by
// one rule each; as ranges they are 9. ok is false if the first rule is not of that kind or stands alone.
func rangesOf(a *archPolicy, rules []rule) (n int, set []valueRange, ok bool) {
	for _, r := range rules {
		if len(r.conds) != 1 || r.ret != rules[0].ret || r.conds[0].Index != rules[0].conds[0].Index {
			break
		}
		v := r.conds[0].Value
		if v > math.MaxUint32 {
			break
		}
		var s valueRange
		switch op := r.conds[0].Op; {
		case op == specs.OpEqualTo:
			s = valueRange{uint32(v), uint32(v)}
		case op == specs.OpLessEqual:
			s = valueRange{0, uint32(v)}
		case op == specs.OpLessThan && v > 0:
			s = valueRange{0, uint32(v) - 1}
		default:
			ok = n > 1
			return n, merge(set), ok
		}
		set = append(set, s)
		n++
	}
	return n, merge(set), n > 1
}

func merge(set []valueRange) []valueRange {
	slices.SortFunc(set, func(a, b valueRange) int { return cmp.Compare(a.first, b.first) })
	var out []valueRange
	for _, s := range set {
		if n := len(out); n > 0 && (out[n-1].last == math.MaxUint32 || s.first <= out[n-1].last+1) {
			out[n-1].last = max(out[n-1].last, s.last)
			continue
		}
		out = append(out, s)
	}
	return out
}

// rangesCode returns ret if the argument is in one of the ranges, and else runs on behind its end.
func rangesCode(a *archPolicy, arg uint, set []valueRange, verdict uint32) block {
	match := block{ret(verdict)}
	// Backwards: code is what follows; a value below a range is in none of those that follow.
	code := append(block{stmt(unix.BPF_JMP|unix.BPF_JA, uint32(len(match)))}, match...)
	for _, s := range slices.Backward(set) {
		toMatch, toEnd := len(code)-len(match), len(code)
		if toEnd+4 > math.MaxUint8 {
			// So many ranges that a jump does not reach: one rule after the other.
			return eachRange(a, arg, set, verdict)
		}
		if s.first == s.last {
			code = append(block{jump(unix.BPF_JEQ, s.first, toMatch, 0)}, code...)
		} else {
			code = append(block{jump(unix.BPF_JGE, s.first, 0, toEnd+1), jump(unix.BPF_JGT, s.last, 0, toMatch)}, code...)
		}
	}
	code = append(block{load(dataArgs + 8*uint32(arg))}, code...)
	if a.wide {
		code = append(block{load(dataArgs + 8*uint32(arg) + 4), jump(unix.BPF_JEQ, 0, 0, len(code))}, code...)
	}
	return code
}

func eachRange(a *archPolicy, arg uint, set []valueRange, verdict uint32) block {
	half := len(set) / 2
	return append(rangesCode(a, arg, set[:half], verdict), rangesCode(a, arg, set[half:], verdict)...)
}
