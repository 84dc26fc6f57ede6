//go:build linux

package cgroup

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

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
// nor one for w allows alone.
func merge(rules []rule) []rule {
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

// program compiles rules to a BPF program that allows what any of them allows.
func program(rules []rule) (*ebpf.Program, error) {
	// struct bpf_cgroup_dev_ctx { u32 access_type (access<<16 | type); u32 major; u32 minor; }
	code := asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0, asm.Word),
		asm.Mov.Reg(asm.R3, asm.R2),
		asm.And.Imm(asm.R2, 0xffff),
		asm.RSh.Imm(asm.R3, 16),
		asm.LoadMem(asm.R4, asm.R1, 4, asm.Word),
		asm.LoadMem(asm.R5, asm.R1, 8, asm.Word),
	}
	label := func(i int) string { return "rule" + strconv.Itoa(i) }
	for i, r := range rules {
		first, next := len(code), label(i+1)
		switch r.kind {
		case 'b':
			code = append(code, asm.JNE.Imm(asm.R2, 1, next))
		case 'c':
			code = append(code, asm.JNE.Imm(asm.R2, 2, next))
		}
		if r.access != accessAll {
			code = append(code, asm.Mov.Reg(asm.R6, asm.R3), asm.And.Imm(asm.R6, int32(accessAll&^r.access)), asm.JNE.Imm(asm.R6, 0, next))
		}
		if r.major != anyone {
			code = append(code, asm.JNE.Imm(asm.R4, int32(r.major), next))
		}
		if r.minor != anyone {
			code = append(code, asm.JNE.Imm(asm.R5, int32(r.minor), next))
		}
		code = append(code, asm.Mov.Imm(asm.R0, 1), asm.Return())
		code[first] = code[first].WithSymbol(label(i))
	}
	if r := rules[len(rules)-1]; r != everything[0] { // after a rule for all there would be code that cannot be reached
		code = append(code, asm.Mov.Imm(asm.R0, 0).WithSymbol(label(len(rules))), asm.Return())
	}
	p, err := ebpf.NewProgramWithOptions(&ebpf.ProgramSpec{
		Name: "kiri_devices", Type: ebpf.CGroupDevice, AttachType: ebpf.AttachCGroupDevice, Instructions: code, License: "Apache-2.0",
	}, ebpf.ProgramOptions{LogDisabled: true})
	if err != nil {
		return nil, fmt.Errorf("loading the device rules: %w", err)
	}
	return p, nil
}

// BPF_F_ALLOW_MULTI: programs that something in the container attaches below can only forbid more.
const allowMulti = 2

// attach makes p the only program for devices of a v2 cgroup. The new one is there before the old ones go, so at no time
// is more allowed than before or after. The kernel keeps it as long as the cgroup exists, whether we live or not.
func attach(dir int, p *ebpf.Program) error {
	old, err := link.QueryPrograms(link.QueryOptions{Target: dir, Attach: ebpf.AttachCGroupDevice})
	if err != nil {
		return fmt.Errorf("listing the device programs: %w", err)
	}
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: dir, Program: p, Attach: ebpf.AttachCGroupDevice, Flags: allowMulti}); err != nil {
		return fmt.Errorf("attaching the device rules: %w", err)
	}
	for _, o := range old.Programs {
		if err := detach(dir, o.ID); err != nil {
			return err
		}
	}
	return nil
}

func detach(dir int, id ebpf.ProgramID) error {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return fmt.Errorf("opening the earlier device rules: %w", err)
	}
	defer p.Close()
	if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: dir, Program: p, Attach: ebpf.AttachCGroupDevice}); err != nil {
		return fmt.Errorf("detaching the earlier device rules: %w", err)
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
