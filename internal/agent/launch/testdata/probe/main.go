//go:build linux

// Probe is the payload of the launch tests: it does one thing inside a container and reports what it sees.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"
)

// Report is what a process can tell about itself.
type Report struct {
	Args, Env  []string
	Cwd        string
	PID, PPID  int
	SID, PGID  int
	Status     map[string]string // of /proc/self/status
	Namespaces map[string]string
	FDs        map[int]string
	Limits     string
	Hostname   string
	Domainname string
	Umask      int
	Mounts     []string
	OOMAdj     string
	Keyring    string
}

// setns is the number of setns(2), which package syscall does not have for every architecture.
var setns = map[string]uintptr{"amd64": 308, "arm64": 268}[runtime.GOARCH]

func main() {
	args := os.Args[1:]
	if filepath.Base(os.Args[0]) == "true" {
		return
	}
	if len(args) == 0 {
		fail(fmt.Errorf("no command"))
	}
	switch args[0] {
	case "true":
	case "report":
		report()
	case "exit":
		os.Exit(number(args[1]))
	case "cat":
		for _, f := range args[1:] {
			b, err := os.ReadFile(f)
			check(err)
			os.Stdout.Write(b)
		}
	case "write":
		check(os.WriteFile(args[1], []byte(args[2]), 0o644))
	case "chmod": // MODE PATH...
		for _, f := range args[2:] {
			check(os.Chmod(f, os.FileMode(number(args[1]))))
		}
	case "ls":
		l, err := os.ReadDir(args[1])
		check(err)
		for _, e := range l {
			fmt.Println(e.Name())
		}
	case "call": // a system call; prints its errno
		var a [7]uintptr
		for i, v := range args[1:] {
			n, err := strconv.ParseUint(v, 0, 64)
			check(err)
			a[i] = uintptr(n)
		}
		_, _, errno := syscall.Syscall6(a[0], a[1], a[2], a[3], a[4], a[5], a[6])
		fmt.Println(int(errno))
	case "wait": // until standard input ends, after printing files
		for _, f := range args[1:] {
			b, err := os.ReadFile(f)
			check(err)
			os.Stdout.Write(b)
		}
		fmt.Println("ready")
		io.Copy(io.Discard, os.Stdin)
	case "signal": // prints the first signal it gets
		c := make(chan os.Signal, 1)
		signal.Notify(c, syscall.SIGTERM, syscall.SIGUSR1)
		fmt.Println("ready")
		fmt.Println((<-c).(syscall.Signal))
	case "tty": // whether standard input is its session's terminal
		fg, err := ioctl(0, syscall.TIOCGPGRP)
		check(err)
		sid, err := ioctl(0, 0x5429) // TIOCGSID
		check(err)
		f, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
		if err == nil {
			f.Close()
		}
		fmt.Println(fg == syscall.Getpgrp(), sid, err)
	case "escape": // by the ways out of a chroot, with all rights; lists the root it ends up in
		check(os.MkdirAll("/tmp/inner", 0o755))
		root, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_DIRECTORY, 0)
		check(err)
		ns, err := syscall.Open("/proc/self/ns/mnt", syscall.O_RDONLY, 0)
		check(err)
		switch args[1] {
		case "chroot":
			check(syscall.Chroot("/tmp/inner"))
			check(syscall.Fchdir(root))
			for range 20 {
				check(syscall.Chdir(".."))
			}
			check(syscall.Chroot("."))
		case "umount":
			check(syscall.Unmount("/", syscall.MNT_DETACH))
			runtime.LockOSThread()
			check(syscall.Unshare(syscall.CLONE_FS))
			if _, _, errno := syscall.RawSyscall(setns, uintptr(ns), syscall.CLONE_NEWNS, 0); errno != 0 {
				fail(errno)
			}
		}
		l, err := os.ReadDir("/")
		check(err)
		for _, e := range l {
			fmt.Println(e.Name())
		}
		if err := os.WriteFile("/planted", nil, 0o644); err == nil {
			fmt.Println("written")
		}
	case "orphan": // leaves a child behind that exits, and waits for its end to show
		p, err := os.StartProcess("/proc/self/exe", []string{"probe", "spawn"}, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
		check(err)
		_, err = p.Wait()
		check(err)
		for len(numbers("/proc")) > 2 { // init and this process
			time.Sleep(time.Millisecond)
		}
		fmt.Println("reaped")
	case "spawn":
		_, err := os.StartProcess("/proc/self/exe", []string{"probe", "exit", "3"}, &os.ProcAttr{})
		check(err)
	case "kill-self":
		check(syscall.Kill(os.Getpid(), syscall.Signal(number(args[1]))))
		select {}
	case "inspect":
		inspect(number(args[1]), args[2])
	default:
		fail(fmt.Errorf("unknown command %q", args[0]))
	}
}

// inspect attacks a process of its PID namespace: it reads its memory, its descriptors and its rights, and prints
// what it finds. needle is what is looked for in memory.
func inspect(pid int, needle string) {
	dir := fmt.Sprintf("/proc/%d/", pid)
	mem, err := os.Open(dir + "mem")
	check(err)
	l, err := os.ReadDir(dir + "fd")
	check(err)
	for _, e := range l {
		to, err := os.Readlink(dir + "fd/" + e.Name())
		check(err)
		fmt.Println("descriptor", e.Name(), to)
	}
	b, err := os.ReadFile(dir + "status")
	check(err)
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), ":")
		fmt.Println("status", k, strings.TrimSpace(v))
	}
	to, err := os.Readlink(dir + "ns/mnt")
	check(err)
	fmt.Println("mnt", to)
	b, err = os.ReadFile(dir + "maps")
	check(err)
	for line := range strings.Lines(string(b)) {
		span, _, _ := strings.Cut(line, " ")
		lo, hi, _ := strings.Cut(span, "-")
		from, _ := strconv.ParseUint(lo, 16, 64)
		to, _ := strconv.ParseUint(hi, 16, 64)
		if int64(from) < 0 { // [vsyscall]
			continue
		}
		buf := make([]byte, to-from)
		n, _ := mem.ReadAt(buf, int64(from))
		fmt.Printf("map %x %x %d\n", from, to, n)
		if strings.Contains(string(buf[:n]), needle) {
			fmt.Print("LEAK ", line)
		}
	}
}

func numbers(dir string) []int {
	l, err := os.ReadDir(dir)
	check(err)
	var ns []int
	for _, e := range l {
		if n, err := strconv.Atoi(e.Name()); err == nil {
			ns = append(ns, n)
		}
	}
	return ns
}

func report() {
	r := Report{Args: os.Args, Env: os.Environ(), PID: os.Getpid(), PPID: os.Getppid(), Status: map[string]string{}, Namespaces: map[string]string{}, FDs: map[int]string{}}
	r.Umask = syscall.Umask(0)
	r.Cwd, _ = os.Getwd()
	sid, _, _ := syscall.Syscall(syscall.SYS_GETSID, 0, 0, 0)
	r.SID = int(sid)
	r.PGID = syscall.Getpgrp()
	r.Hostname, _ = os.Hostname()
	var u syscall.Utsname
	if syscall.Uname(&u) == nil {
		for _, c := range u.Domainname {
			if c == 0 {
				break
			}
			r.Domainname += string(rune(c))
		}
	}
	b, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), ":")
		r.Status[k] = strings.Join(strings.Fields(v), " ")
	}
	for _, n := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup", "user"} {
		r.Namespaces[n], _ = os.Readlink("/proc/self/ns/" + n)
	}
	l, _ := os.ReadDir("/proc/self/fd")
	for _, e := range l {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			r.FDs[number(e.Name())] = to
		}
	}
	b, _ = os.ReadFile("/proc/self/limits")
	r.Limits = string(b)
	b, _ = os.ReadFile("/proc/self/mountinfo")
	r.Mounts = strings.Split(strings.TrimSpace(string(b)), "\n")
	b, _ = os.ReadFile("/proc/self/oom_score_adj")
	r.OOMAdj = strings.TrimSpace(string(b))
	b, _ = os.ReadFile("/proc/keys")
	r.Keyring = string(b)
	check(json.NewEncoder(os.Stdout).Encode(r))
}

func ioctl(fd int, req uintptr) (int, error) {
	var v int32
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), req, uintptr(unsafe.Pointer(&v))); errno != 0 {
		return 0, errno
	}
	return int(v), nil
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	check(err)
	return n
}

func check(err error) {
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "probe:", err)
	os.Exit(99)
}
