//go:build linux

package cgroup

import (
	"bytes"
	"unsafe"

	"golang.org/x/sys/unix"
)

// appendDirs adds the names of the directories among the raw entries in buf. The type in the entry is trusted (cgroup
// file systems fill it in), which saves a stat for each of the fifty files that every cgroup has.
func appendDirs(names []string, buf []byte) []string {
	const header = int(unsafe.Offsetof(unix.Dirent{}.Name))
	for len(buf) >= header {
		e := (*unix.Dirent)(unsafe.Pointer(&buf[0]))
		size := int(e.Reclen)
		if size < header || size > len(buf) {
			return names
		}
		name, _, _ := bytes.Cut(buf[header:size], []byte{0})
		if e.Type == unix.DT_DIR && string(name) != "." && string(name) != ".." {
			names = append(names, string(name))
		}
		buf = buf[size:]
	}
	return names
}
