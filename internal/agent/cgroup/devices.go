//go:build linux

package cgroup

import (
	"encoding/binary"
	"slices"
	"strconv"
	"strings"

	"runkiri.com/kiri/internal/wire"
)

// Bits of the access field of struct bpf_cgroup_dev_ctx (linux/bpf.h).
const (
	accessMknod = 1 << iota
	accessRead
	accessWrite
	accessAll = accessMknod | accessRead | accessWrite
)

// Device numbers are 12 and 20 bits (linux/kdev_t.h).
const (
	maxMajor = 1<<12 - 1
	maxMinor = 1<<20 - 1
	anyone   = -1 // major or minor: *
)

// rule allows access to devices.
type rule struct {
	kind         byte // 'a', 'b' or 'c'
	major, minor int
	access       int
}

// defaultRules are what every container may use: Docker's own list (null, zero, full, random, urandom, tty, console)
// and what runc adds for all its callers (making nodes of any kind, ptmx, pts, tun).
var defaultRules = []rule{
	{'c', anyone, anyone, accessMknod},
	{'b', anyone, anyone, accessMknod},
	{'c', 1, 3, accessAll},        // null
	{'c', 1, 5, accessAll},        // zero
	{'c', 1, 7, accessAll},        // full
	{'c', 1, 8, accessAll},        // random
	{'c', 1, 9, accessAll},        // urandom
	{'c', 5, 0, accessAll},        // tty
	{'c', 5, 1, accessAll},        // console
	{'c', 5, 2, accessAll},        // ptmx
	{'c', 136, anyone, accessAll}, // pts
	{'c', 10, 200, accessAll},     // net/tun
}

var everything = []rule{{'a', anyone, anyone, accessAll}}

// parseRules reads rules in the kernel's form, "c 10:229 rwm", as Docker's --device-cgroup-rule takes it.
func parseRules(texts []string) ([]rule, error) {
	var rules []rule
	for _, t := range texts {
		r, err := parseRule(t)
		if err != nil {
			return nil, err
		}
		rules = append(rules, r)
	}
	return rules, nil
}

func parseRule(text string) (rule, error) {
	bad := func() (rule, error) {
		return rule{}, wire.Errorf(wire.Invalid, "invalid device cgroup rule format: '%s'", text)
	}
	f := strings.Split(text, " ")
	if len(f) != 3 || len(f[0]) != 1 || !strings.Contains("abc", f[0]) || f[2] == "" || len(f[2]) > 3 {
		return bad()
	}
	r := rule{kind: f[0][0]}
	major, minor, ok := strings.Cut(f[1], ":")
	if !ok {
		return bad()
	}
	var err error
	if r.major, err = parseNumber(major, maxMajor); err != nil {
		return bad()
	}
	if r.minor, err = parseNumber(minor, maxMinor); err != nil {
		return bad()
	}
	for _, a := range f[2] {
		switch a {
		case 'm':
			r.access |= accessMknod
		case 'r':
			r.access |= accessRead
		case 'w':
			r.access |= accessWrite
		default:
			return bad()
		}
	}
	return r, nil
}

func parseNumber(s string, limit uint64) (int, error) {
	if s == "*" {
		return anyone, nil
	}
	n, err := strconv.ParseUint(s, 10, 32)
	if err == nil && n > limit {
		err = strconv.ErrRange
	}
	return int(n), err
}

// merge joins the accesses of rules for the same devices: the kernel asks for "rw" at once, which neither a rule for r
// nor one for w allows alone. If one allows everything it alone is left.
func merge(rules []rule) []rule {
	if slices.Contains(rules, everything[0]) {
		return everything
	}
	var out []rule
next:
	for _, r := range rules {
		for i := range out {
			if o := &out[i]; o.kind == r.kind && o.major == r.major && o.minor == r.minor {
				o.access |= r.access
				continue next
			}
		}
		out = append(out, r)
	}
	return out
}

// String is the form of devices.allow.
func (r rule) String() string {
	n := func(v int) string {
		if v == anyone {
			return "*"
		}
		return strconv.Itoa(v)
	}
	s := string(r.kind) + " " + n(r.major) + ":" + n(r.minor) + " "
	for i, c := range "mrw" {
		if r.access&(1<<i) != 0 {
			s += string(c)
		}
	}
	return s
}

// instruction is struct bpf_insn.
type instruction struct {
	op   uint8
	regs uint8 // destination in the low four bits on little-endian machines, source in the high ones
	off  int16
	imm  int32
}

// Operations of linux/bpf.h and linux/bpf_common.h: class, size or source, and operation in one byte.
const (
	opLoadWord = 0x61 // BPF_LDX | BPF_MEM | BPF_W
	opMov      = 0xb7 // BPF_ALU64 | BPF_MOV | BPF_K
	opMovReg   = 0xbf // BPF_ALU64 | BPF_MOV | BPF_X
	opAnd      = 0x57 // BPF_ALU64 | BPF_AND | BPF_K
	opShift    = 0x77 // BPF_ALU64 | BPF_RSH | BPF_K
	opJumpNot  = 0x55 // BPF_JMP | BPF_JNE | BPF_K
	opExit     = 0x95 // BPF_JMP | BPF_EXIT
)

// registers packs a destination and a source in the machine's order of bit fields.
func registers(dst, src uint8) uint8 {
	if binary.NativeEndian.Uint16([]byte{1, 0}) == 1 {
		return dst | src<<4
	}
	return dst<<4 | src
}

// compile makes a program that allows what any of the rules allows. Its argument is struct bpf_cgroup_dev_ctx
// { u32 access_type (access<<16 | type); u32 major; u32 minor; } in register 1.
func compile(rules []rule) []instruction {
	load := func(dst uint8, off int16) instruction {
		return instruction{op: opLoadWord, regs: registers(dst, 1), off: off}
	}
	op := func(op, dst uint8, imm int) instruction {
		return instruction{op: op, regs: registers(dst, 0), imm: int32(imm)}
	}
	const kind, access, major, minor, scratch = 2, 3, 4, 5, 6 // registers
	code := []instruction{
		load(kind, 0),
		{op: opMovReg, regs: registers(access, kind)},
		op(opAnd, kind, 0xffff),
		op(opShift, access, 16),
		load(major, 4),
		load(minor, 8),
	}
	for _, r := range rules {
		first := len(code)
		switch r.kind {
		case 'b':
			code = append(code, op(opJumpNot, kind, 1))
		case 'c':
			code = append(code, op(opJumpNot, kind, 2))
		}
		if r.access != accessAll {
			code = append(code,
				instruction{op: opMovReg, regs: registers(scratch, access)},
				op(opAnd, scratch, accessAll&^r.access),
				op(opJumpNot, scratch, 0))
		}
		if r.major != anyone {
			code = append(code, op(opJumpNot, major, r.major))
		}
		if r.minor != anyone {
			code = append(code, op(opJumpNot, minor, r.minor))
		}
		code = append(code, op(opMov, 0, 1), op(opExit, 0, 0))
		for i := first; i < len(code); i++ { // what does not match goes on behind this rule
			if code[i].op == opJumpNot {
				code[i].off = int16(len(code) - i - 1)
			}
		}
	}
	if rules[len(rules)-1] == everything[0] {
		return code // the verifier takes no code that cannot be reached
	}
	return append(code, op(opMov, 0, 0), op(opExit, 0, 0))
}

// attach makes a program the only one for devices of a v2 cgroup. The new one is there before the old ones go, so at no
// time is more allowed than before or after. The kernel keeps it as long as the cgroup exists, whether we live or not.
func attach(dir, program int) error {
	old, err := programsOn(dir)
	if err != nil {
		return err
	}
	if err := attachProgram(dir, program); err != nil {
		return err
	}
	for _, id := range old {
		if err := detachProgram(dir, id); err != nil {
			return err
		}
	}
	return nil
}

// allowV1 makes rules the only ones of a cgroup in the v1 devices tree. Its parent must allow as much. It must have
// no children.
func allowV1(dir int, path string, rules []rule) error {
	if err := write(dir, path+"/devices.deny", "a"); err != nil {
		return err
	}
	for _, r := range rules {
		if err := write(dir, path+"/devices.allow", r.String()); err != nil {
			return err
		}
	}
	return nil
}
