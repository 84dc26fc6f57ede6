package bench

import (
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
)

// exitCode is exit(0) in machine code: the whole of a static `true`.
var exitCode = map[string]struct {
	machine elf.Machine
	code    []byte
}{
	// mov eax, 60; xor edi, edi; syscall
	"amd64": {elf.EM_X86_64, []byte{0xb8, 60, 0, 0, 0, 0x31, 0xff, 0x0f, 0x05}},
	// mov x0, #0; mov x8, #93; svc #0
	"arm64": {elf.EM_AARCH64, []byte{0x00, 0x00, 0x80, 0xd2, 0xa8, 0x0b, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4}},
}

// TrueProgram returns a static executable that does nothing but exit with 0, for this machine: one page, one segment.
// What is measured around it is then the kernel's and the engine's work, not a C library's.
func TrueProgram() ([]byte, error) {
	m, ok := exitCode[runtime.GOARCH]
	if !ok {
		return nil, fmt.Errorf("no machine code for %s", runtime.GOARCH)
	}
	const base, header = 0x400000, 64 + 56
	size := uint64(header + len(m.code))
	h := elf.Header64{
		Type: uint16(elf.ET_EXEC), Machine: uint16(m.machine), Version: 1, Entry: base + header,
		Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1,
	}
	copy(h.Ident[:], elf.ELFMAG)
	h.Ident[elf.EI_CLASS], h.Ident[elf.EI_DATA], h.Ident[elf.EI_VERSION] = byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), 1
	p := elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Vaddr: base, Paddr: base, Filesz: size, Memsz: size, Align: 0x1000}
	b, err := binary.Append(nil, binary.LittleEndian, h)
	if err == nil {
		b, err = binary.Append(b, binary.LittleEndian, p)
	}
	return append(b, m.code...), err
}

// trueRoot makes a root file system in dir with the static true and the directories that the floor mounts on.
func trueRoot(dir string) error {
	b, err := TrueProgram()
	if err != nil {
		return err
	}
	for _, d := range []string{"bin", "proc", "dev"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	return os.WriteFile(filepath.Join(dir, "bin", "true"), b, 0o755)
}
