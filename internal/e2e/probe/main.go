// Command probe is the payload of the container tests: a static program that reports what it sees from inside, one
// verb at a time, so that a test asserts on the container's own view and needs no tools in the image.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var verbs = map[string]func([]string) error{
	"status": status, "cwd": cwd, "mounts": mounts, "access": access, "unshare": unshare,
	"count": count, "flood": flood, "lines": lines, "exit": exit, "memhog": memhog, "ignore": ignore, "mknod": mknod,
}

func main() {
	if len(os.Args) < 2 || verbs[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: probe VERB [ARG...], with a verb of", slices.Sorted(func(y func(string) bool) {
			for v := range verbs {
				if !y(v) {
					return
				}
			}
		}))
		os.Exit(2)
	}
	if err := verbs[os.Args[1]](os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

// status prints fields of /proc/self/status as JSON: CapEff, Seccomp, NoNewPrivs, Groups, ...
func status([]string) error {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	m := map[string]string{}
	for l := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(l, ":"); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	for _, ns := range []string{"mnt", "pid", "uts", "ipc", "net", "cgroup", "user"} {
		m["ns:"+ns], _ = os.Readlink("/proc/self/ns/" + ns)
	}
	return json.NewEncoder(os.Stdout).Encode(m)
}

func cwd([]string) error {
	d, err := os.Getwd()
	fmt.Println(d)
	return err
}

// mounts prints mount points and their options, one a line.
func mounts([]string) error {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	for l := range strings.Lines(string(b)) {
		f := strings.Fields(l)
		sep := slices.Index(f, "-")
		fmt.Println(f[4], f[5], f[sep+1])
	}
	return nil
}

// access tries to read and to write each path and prints what happened.
func access(paths []string) error {
	try := func(p string, flags int) string {
		f, err := os.OpenFile(p, flags, 0)
		if err != nil {
			return errno(err)
		}
		defer f.Close()
		if flags == os.O_RDONLY {
			n, err := f.Read(make([]byte, 64))
			if err != nil && err != io.EOF {
				return errno(err)
			}
			return strconv.Itoa(n)
		}
		return "ok"
	}
	for _, p := range paths {
		fmt.Println(p, "read", try(p, os.O_RDONLY), "write", try(p, os.O_WRONLY))
	}
	return nil
}

func errno(err error) string {
	var no syscall.Errno
	if errors.As(err, &no) {
		return unix.ErrnoName(no)
	}
	return err.Error()
}

// unshare tries to make a user namespace, which Docker's seccomp profile refuses.
func unshare([]string) error {
	if err := unix.Unshare(unix.CLONE_NEWUSER); err != nil {
		fmt.Println(errno(err))
		return nil
	}
	fmt.Println("ok")
	return nil
}

// count prints 0, 1, 2 ... one a line, every ARG milliseconds, until it is killed.
func count(args []string) error {
	every := 10
	if len(args) > 0 {
		every, _ = strconv.Atoi(args[0])
	}
	for i := 0; ; i++ {
		if _, err := fmt.Println(i); err != nil {
			return err
		}
		time.Sleep(time.Duration(every) * time.Millisecond)
	}
}

// flood writes ARG bytes in lines of 64.
func flood(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	buf := []byte(strings.Repeat(strings.Repeat("x", 63)+"\n", 1024))
	for n > 0 {
		k := min(n, len(buf))
		if _, err := os.Stdout.Write(buf[:k]); err != nil {
			return err
		}
		n -= k
	}
	return nil
}

// lines writes 1 to ARG in turn to stdout and stderr.
func lines(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	for i := 1; i <= n; i++ {
		w := os.Stdout
		if i%2 == 0 {
			w = os.Stderr
		}
		if _, err := fmt.Fprintln(w, i); err != nil {
			return err
		}
	}
	return nil
}

func exit(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	os.Exit(n)
	return nil
}

// memhog touches ARG MiB.
func memhog(args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	b := make([]byte, n<<20)
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1
	}
	fmt.Println("touched", n)
	return nil
}

// ignore ignores SIGTERM and sleeps.
func ignore([]string) error {
	signal.Ignore(unix.SIGTERM)
	fmt.Println("ready")
	for {
		time.Sleep(time.Hour)
	}
}

// mknod tries to make and to open the device "c MAJOR MINOR".
func mknod(args []string) error {
	if len(args) != 3 {
		return errors.New("want TYPE MAJOR MINOR")
	}
	major, _ := strconv.Atoi(args[1])
	minor, _ := strconv.Atoi(args[2])
	mode := uint32(unix.S_IFCHR)
	if args[0] == "b" {
		mode = unix.S_IFBLK
	}
	p := filepath.Join(os.TempDir(), "node")
	os.Remove(p)
	if err := unix.Mknod(p, mode|0o600, int(unix.Mkdev(uint32(major), uint32(minor)))); err != nil {
		fmt.Println("mknod", errno(err))
		return nil
	}
	f, err := os.OpenFile(p, os.O_RDWR, 0)
	if err != nil {
		fmt.Println("open", errno(err))
		return nil
	}
	f.Close()
	fmt.Println("ok")
	return nil
}
