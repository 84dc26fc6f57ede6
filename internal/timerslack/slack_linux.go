// Package timerslack lets a program's timers come late, so that the Go runtime's own wake-ups cost less.
package timerslack

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"
)

// Usual is what the kernel gives a process whose parent has asked for nothing else (prctl(2), PR_SET_TIMERSLACK).
const Usual = 50 * time.Microsecond

// Relax lets timers of this process be up to d late, on all threads there are; those made later inherit it, and so do
// child processes, which must be given Usual again where it matters.
//
// It is meant for the runtime's monitor thread, which sleeps for 20 us at a time while the program is busy: with the
// usual slack that was a tenth of the CPU time of a container's start (two cores, Linux 6.18, November 2026), and
// letting it sleep for a millisecond took 0.8 to 1.3 ms off a `run --rm` of 6 ms. What the monitor does, taking
// processors from threads that sit in a system call, is then done later, which matters little where there are spare
// ones.
//
// Other threads than the calling one need CAP_SYS_NICE (Linux 4.6).
func Relax(d time.Duration) error {
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return fmt.Errorf("setting timer slack: %w", err)
	}
	text := []byte(strconv.FormatInt(d.Nanoseconds(), 10))
	for _, t := range tasks {
		err := os.WriteFile("/proc/"+t.Name()+"/timerslack_ns", text, 0)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // a thread may have ended
			return fmt.Errorf("setting timer slack: %w", err)
		}
	}
	return nil
}
