// Command kiri-hello is the program in the image kiri/hello: it says what it sees from inside its container. Called as `true` it does
// nothing, which is what start times are measured with.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	if filepath.Base(os.Args[0]) == "true" {
		return
	}
	host, err := os.Hostname()
	if err != nil {
		host = err.Error()
	}
	fmt.Print("Hello from a container.\n\n")
	line := func(name, value string) { fmt.Printf("  %-13s %s\n", name, value) }
	line("process", fmt.Sprintf("%d of %d", os.Getpid(), processes()))
	line("user", fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid()))
	line("host name", host)
	line("root", root())
	line("interfaces", interfaces())
	line("capabilities", status("CapEff"))
	line("seccomp", map[string]string{"0": "off", "1": "strict", "2": "filter"}[status("Seccomp")])
	line("kernel", strings.TrimSpace(read("/proc/sys/kernel/osrelease"))+", the host's own")
}

func read(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// processes counts what /proc shows: in a container of its own PID namespace, only its own.
func processes() int {
	n := 0
	entries, _ := os.ReadDir("/proc") // an unreadable /proc shows as none
	for _, e := range entries {
		if strings.Trim(e.Name(), "0123456789") == "" {
			n++
		}
	}
	return n
}

// root names the file system that / is on.
func root() string {
	for l := range strings.Lines(read("/proc/self/mountinfo")) {
		// 36 35 98:0 /mnt1 / rw,noatime master:1 - ext3 /dev/root rw
		before, after, ok := strings.Cut(l, " - ")
		if f := strings.Fields(before); ok && len(f) > 4 && f[4] == "/" {
			return strings.Fields(after)[0]
		}
	}
	return "unknown"
}

func interfaces() string {
	var out []string
	for l := range strings.Lines(read("/proc/net/dev")) {
		if name, _, ok := strings.Cut(l, ":"); ok {
			out = append(out, strings.TrimSpace(name))
		}
	}
	return strings.Join(out, " ")
}

// status is a line of /proc/self/status, which proc(5) describes.
func status(key string) string {
	for l := range strings.Lines(read("/proc/self/status")) {
		if k, v, ok := strings.Cut(l, ":"); ok && k == key {
			return strings.TrimSpace(v)
		}
	}
	return "unknown"
}
