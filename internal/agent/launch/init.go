//go:build linux && (amd64 || arm64)

package launch

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// InitMain is PID 1 of a container with --init: it starts the command, forwards signals to it, reaps orphans, and ends
// with the command's exit code, or 128 and the signal's number. args are os.Args, as written at InitName. cmd/kiri-init
// calls it, before anything else, when os.Args[0] is InitName.
//
// It runs as the container's user with the container's rights. As the command has been looked up before the container
// was made, a failure here is a race or a bad executable: the exit codes are Docker's, 127 and 126.
func InitMain(args []string) int {
	if len(args) < 5 || args[1] != "-x" || args[3] != "--" {
		fmt.Fprintf(os.Stderr, "%s: usage: %s -x FILE -- COMMAND [ARGUMENT...]\n", InitName, InitName)
		return 125
	}
	// Before the command starts, so that no signal is lost.
	signals := make(chan os.Signal, 64)
	signal.Notify(signals)
	attr := &syscall.ProcAttr{
		Env:   os.Environ(),
		Files: []uintptr{0, 1, 2},
		// A process group of its own: what the terminal sends to the group reaches the command once, and init,
		// which forwards, not at all.
		Sys: &syscall.SysProcAttr{Setpgid: true},
	}
	if _, err := unix.IoctlGetTermios(0, unix.TCGETS); err == nil {
		attr.Sys.Foreground, attr.Sys.Ctty = true, 0
	}
	pid, err := syscall.ForkExec(args[2], args[4:], attr)
	if err != nil {
		fmt.Fprintf(os.Stderr, "exec %s: %v\n", args[2], err)
		if errors.Is(err, unix.ENOENT) {
			return 127
		}
		return 126
	}
	go forward(pid, signals)
	for {
		var st unix.WaitStatus
		got, err := unix.Wait4(-1, &st, unix.WALL, nil)
		switch {
		case err == unix.EINTR:
		case err != nil: // no children: the command has been missed, which cannot be
			fmt.Fprintf(os.Stderr, "%s: wait: %v\n", InitName, err)
			return 125
		case got == pid && st.Exited():
			return st.ExitStatus()
		case got == pid && st.Signaled():
			return 128 + int(st.Signal())
		}
	}
}

// forward sends what init gets on to the command. SIGCHLD is for init itself; SIGURG cannot be forwarded, as the Go
// runtime sends it to its own threads all the time.
func forward(pid int, signals <-chan os.Signal) {
	for s := range signals {
		if s != unix.SIGCHLD && s != unix.SIGURG {
			syscall.Kill(pid, s.(syscall.Signal)) // an error means that it has just ended
		}
	}
}
