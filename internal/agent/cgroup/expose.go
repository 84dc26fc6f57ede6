//go:build linux

package cgroup

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// V1File is a file or directory of a cgroup in one v1 hierarchy.
type V1File struct {
	Name string // of the hierarchy: its controllers, as "cpu" or "cpu,cpuacct"
	*os.File
}

// OpenV1 opens file, "cgroup.procs", in the cgroup in every v1 hierarchy, for writing; with file "" the directories
// themselves, by O_PATH. There are none on a pure v2 host. The files are the caller's.
func (c *Cgroup) OpenV1(file string) ([]V1File, error) {
	flags := unix.O_WRONLY
	if file == "" {
		flags = unix.O_PATH | unix.O_DIRECTORY
	}
	var files []V1File
	for i, dir := range c.v1 {
		name := c.name
		if file != "" {
			name += "/" + file
		}
		fd, err := unix.Openat(dir, name, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			for _, f := range files {
				f.Close()
			}
			return nil, fmt.Errorf("opening %s of cgroup %s: %w", file, c.Path(), err)
		}
		t := c.m.trees[i%len(c.m.trees)]
		label := strings.Join(t.controllers, ",")
		if t == c.m.h.devices && label == "" {
			label = "devices"
		}
		files = append(files, V1File{Name: label, File: os.NewFile(uintptr(fd), name)})
	}
	return files, nil
}
