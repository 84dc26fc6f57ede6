//go:build linux && (amd64 || arm64)

package launch

import (
	"encoding/binary"
	"os"

	"golang.org/x/sys/unix"
)

// An op is one system call of a program, as the walker in walk_*.s reads it. All fields are 64-bit words, so that the
// layout is the same everywhere:
//
//	nr             system call number
//	args[6]        arguments; with bit opSlot<<i of flags argument i is the address of a word that holds it
//	to             address that the result is stored at; 0: nowhere
//	alt            address of the op to go on with when the call fails (see only); 0: a failure is fatal
//	zero           address of the op to go on with when the result is 0; 0: the next one
//	only           errno that alt is for; 0: any
//	flags
//
// A fatal failure stores its errno and the op's address at the status address, and the walk goes on at the program's
// failure ops, which end the process. Every failure, allowed or not, stores its errno behind those two. execve and exit
// are ops like any other; they do not return.
const (
	opNr    = 0
	opArgs  = 1
	opTo    = 7
	opAlt   = 8
	opZero  = 9
	opOnly  = 10
	opFlags = 11
	opWords = 12 // walk_*.s: 96 bytes

	flagSlash = 1      // after success the memory at args[0] must begin with '/'; else it counts as ENOENT
	flagSlot0 = 1 << 8 // argument 0 is the address of its value; and so on to bit 13
)

// The words of a walk's status.
const (
	statusErrno = 0 // of the fatal failure
	statusOp    = 1 // address of the op that failed; 0 if none has
	statusLast  = 2 // errno of the last failure
	statusWords = 3
)

// label names a place in a program: the index of a step. noLabel is none.
type label int

const noLabel label = -1

// word is an argument before it has an address.
type word struct {
	kind wordKind
	as   wordForm // how data is printed
	n    uint32   // of asIDs: how many
	v    uint64
	text string // printed instead; "": by kind and form
	bits []bit  // names of its bits
}

// wordForm tells what data is. Printing looks at the data again, so that nothing is formatted for a plan that nobody
// prints.
type wordForm uint8

const (
	asData wordForm = iota
	asString
	asVector // of strings, NULL at the end
	asIDs    // 32-bit numbers
	asCaps   // of capset
	asHow    // struct open_how
)

type wordKind uint8

const (
	wordNum     wordKind = iota // v itself
	wordData                    // offset v in the data
	wordFile                    // descriptor number of files[v]
	wordSlot                    // the result that was stored in the slot at offset v of the data
	wordScratch                 // a page behind the data that the kernel writes to
	wordNone                    // not there
)

// step is one op with what a reader needs: what and obj are the doing for messages, "mount " and "proc on /proc".
type step struct {
	nr    uint64
	args  [6]word
	nargs uint8
	exec  bool // execve: errors are the command's
	to    int  // offset of the slot in the data, -1 none
	alt   label
	zero  label
	only  unix.Errno
	flags uint64
	what  string
	obj   string
	note  string // heading printed before the step: who is running from here on
}

// program is a list of steps with their data, before it is bound to an address.
type program struct {
	steps  []step
	data   []byte
	relocs []int // offsets in data of words that hold an offset in data and become addresses
	files  []*os.File
	names  []string // of files, for printing
	note   string   // heading for the next step
	page   bool     // a scratch page follows the data
}

func num(v int) word                   { return word{v: uint64(int64(v))} }
func flagsOf(v uint64, t []bit) word   { return word{v: v, bits: t} }
func shown(v uint64, text string) word { return word{v: v, text: text} }
func data(off int) word                { return word{kind: wordData, v: uint64(off)} }
func dataAs(off int, f wordForm) word  { return word{kind: wordData, as: f, v: uint64(off)} }
func shownData(off int, t string) word { return word{kind: wordData, v: uint64(off), text: t} }
func slot(off int) word                { return word{kind: wordSlot, v: uint64(off)} }
func atFDCWD() word                    { return word{v: atCWD, text: "AT_FDCWD"} }

// atCWD is AT_FDCWD as the kernel sees it in a register.
const atCWD = ^uint64(100 - 1) // -100

// add appends a fatal step and returns it for adjustment; the pointer is good until the next add.
func (p *program) add(what, obj string, nr uint64, args ...word) *step {
	p.steps = append(p.steps, step{nr: nr, nargs: uint8(len(args)), to: -1, alt: noLabel, zero: noLabel, what: what, obj: obj, note: p.note})
	p.note = ""
	s := &p.steps[len(p.steps)-1]
	copy(s.args[:], args)
	return s
}

// exit appends the end of the process.
func (p *program) exit(code int) { p.add("exit", "", unix.SYS_EXIT_GROUP, num(code)) }

// here is the label of the step that is added next.
func (p *program) here() label { return label(len(p.steps)) }

// newSlot makes room for a result.
func (p *program) newSlot() int { return p.bytes(make([]byte, 8)) }

// bytes puts b into the data, aligned to 8 bytes, and returns its offset.
func (p *program) bytes(b []byte) int {
	off := len(p.data)
	p.data = append(p.data, b...)
	p.align()
	return off
}

// str puts s into the data with a NUL behind it.
func (p *program) str(s string) word {
	off := len(p.data)
	p.data = append(p.data, s...)
	p.data = append(p.data, 0)
	p.align()
	return dataAs(off, asString)
}

func (p *program) align() {
	for len(p.data)%8 != 0 {
		p.data = append(p.data, 0)
	}
}

// words puts 64-bit words into the data; those of kind wordData become addresses.
func (p *program) words(ws ...word) int {
	off := len(p.data)
	for i, w := range ws {
		if w.kind != wordNum {
			p.relocs = append(p.relocs, off+8*i)
		}
		p.data = binary.LittleEndian.AppendUint64(p.data, w.v)
	}
	return off
}

// strs puts a NULL-terminated vector of strings, as argv, into the data.
func (p *program) strs(list []string) word {
	ws := make([]word, 0, len(list)+1)
	for _, s := range list {
		ws = append(ws, p.str(s))
	}
	return dataAs(p.words(append(ws, num(0))...), asVector)
}

// file adds f to the descriptors that the program uses. The same file may be added twice.
func (p *program) file(f *os.File, name string) word {
	for i, have := range p.files {
		if have == f {
			return word{kind: wordFile, v: uint64(i)}
		}
	}
	p.files = append(p.files, f)
	p.names = append(p.names, name)
	return word{kind: wordFile, v: uint64(len(p.files) - 1)}
}

// scratch is a page for the kernel to write to. All of a program's are the same one.
func (p *program) scratch() word {
	p.page = true
	return word{kind: wordScratch}
}

// size is the length of the linked program in words; the scratch page, if it has one, is memSize-size words behind.
func (p *program) size() int { return len(p.steps)*opWords + len(p.data)/8 }

func (p *program) memSize() int {
	if p.page {
		return p.size() + unix.PathMax/8
	}
	return p.size()
}

// link writes the program into mem, of size words, which will be seen at address base by the process that walks it. fd tells the
// number of files[i] there. The steps come first, so step i is at base + 8*opWords*i.
func (p *program) link(mem []uint64, base uint64, fd func(i int) uint64) {
	dataAt := base + uint64(8*opWords*len(p.steps))
	at := func(l label) uint64 {
		if l == noLabel {
			return 0
		}
		return base + uint64(8*opWords*int(l))
	}
	for i := range p.steps {
		s, o := &p.steps[i], mem[i*opWords:]
		o[opNr] = s.nr
		flags := s.flags
		for j, w := range s.args {
			switch w.kind {
			case wordNum:
				o[opArgs+j] = w.v
			case wordFile:
				o[opArgs+j] = fd(int(w.v))
			case wordData:
				o[opArgs+j] = dataAt + w.v
			case wordScratch:
				o[opArgs+j] = dataAt + uint64(len(p.data))
			case wordSlot:
				o[opArgs+j] = dataAt + w.v
				flags |= flagSlot0 << j
			}
		}
		o[opTo] = 0
		if s.to >= 0 {
			o[opTo] = dataAt + uint64(s.to)
		}
		o[opAlt], o[opZero] = at(s.alt), at(s.zero)
		o[opOnly] = uint64(s.only)
		o[opFlags] = flags
	}
	d := mem[len(p.steps)*opWords:]
	for i := 0; i+8 <= len(p.data); i += 8 {
		d[i/8] = binary.LittleEndian.Uint64(p.data[i:])
	}
	for _, off := range p.relocs {
		d[off/8] += dataAt
	}
}

// stepAt is the step at address addr of a program linked at base; nil if there is none.
func (p *program) stepAt(base, addr uint64) *step {
	i := (addr - base) / (8 * opWords)
	if addr < base || i >= uint64(len(p.steps)) {
		return nil
	}
	return &p.steps[i]
}
