//go:build linux

package cgroup

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The few calls of bpf(2) that device rules need are made here. A library would do it, but costs the agent 1.5 MB of
// memory (3.8 MB instead of 2.3 MB resident for a program that only imports it), an eighth of what it may have.

// Commands and constants of linux/bpf.h.
const (
	bpfProgLoad     = 5
	bpfProgAttach   = 8
	bpfProgDetach   = 9
	bpfProgFDByID   = 13
	bpfProgQuery    = 16
	typeCgroupDev   = 15 // BPF_PROG_TYPE_CGROUP_DEVICE
	attachCgroupDev = 6  // BPF_CGROUP_DEVICE
	allowMulti      = 2  // BPF_F_ALLOW_MULTI: programs that something attaches below can only forbid more
)

// maxPrograms bounds the programs on one cgroup; the kernel allows 64.
const maxPrograms = 64

func bpf(cmd int, attr unsafe.Pointer, size uintptr) (int, error) {
	for {
		r, _, no := unix.Syscall(unix.SYS_BPF, uintptr(cmd), uintptr(attr), size)
		switch no {
		case 0:
			return int(r), nil
		case unix.EINTR, unix.EAGAIN: // the verifier was interrupted by a signal
			continue
		}
		return -1, no
	}
}

// loadProgram gives the kernel a program and returns its descriptor.
func loadProgram(code []instruction) (int, error) {
	license := []byte("Apache-2.0\x00")
	attr := struct {
		kind, count        uint32
		code, license      uint64
		logLevel, logSize  uint32
		log                uint64
		version, flags     uint32
		name               [16]byte
		ifindex, attachFor uint32
	}{
		kind: typeCgroupDev, count: uint32(len(code)), attachFor: attachCgroupDev,
		code: uint64(uintptr(unsafe.Pointer(&code[0]))), license: uint64(uintptr(unsafe.Pointer(&license[0]))),
	}
	copy(attr.name[:], "kiri_devices")
	fd, err := bpf(bpfProgLoad, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(code)
	runtime.KeepAlive(license)
	if err != nil {
		return -1, fmt.Errorf("loading the device rules: %w", err)
	}
	return fd, nil
}

type attachAttr struct{ cgroup, program, kind, flags uint32 }

func attachProgram(dir, program int) error {
	attr := attachAttr{uint32(dir), uint32(program), attachCgroupDev, allowMulti}
	if _, err := bpf(bpfProgAttach, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); err != nil {
		return fmt.Errorf("attaching the device rules: %w", err)
	}
	return nil
}

func detachProgram(dir int, id uint32) error {
	open := struct{ id, next, flags uint32 }{id: id}
	fd, err := bpf(bpfProgFDByID, unsafe.Pointer(&open), unsafe.Sizeof(open))
	if err != nil {
		return fmt.Errorf("opening the earlier device rules: %w", err)
	}
	defer unix.Close(fd)
	attr := attachAttr{uint32(dir), uint32(fd), attachCgroupDev, 0}
	if _, err := bpf(bpfProgDetach, unsafe.Pointer(&attr), unsafe.Sizeof(attr)); err != nil {
		return fmt.Errorf("detaching the earlier device rules: %w", err)
	}
	return nil
}

// programsOn lists the ids of the device programs attached to a cgroup itself.
func programsOn(dir int) ([]uint32, error) {
	ids := make([]uint32, maxPrograms)
	attr := struct {
		cgroup, kind, query, flags uint32
		ids                        uint64
		count, pad                 uint32
	}{cgroup: uint32(dir), kind: attachCgroupDev, ids: uint64(uintptr(unsafe.Pointer(&ids[0]))), count: maxPrograms}
	_, err := bpf(bpfProgQuery, unsafe.Pointer(&attr), unsafe.Sizeof(attr))
	runtime.KeepAlive(ids)
	if err != nil {
		return nil, fmt.Errorf("listing the device programs: %w", err)
	}
	return ids[:min(attr.count, maxPrograms)], nil
}
