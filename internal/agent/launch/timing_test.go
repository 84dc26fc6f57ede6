//go:build linux && (amd64 || arm64)

package launch

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// timed puts a clock_gettime behind each step of p from first on and returns the offsets of the times in the data.
func timed(p *program, first label) (at []int) {
	old := p.steps
	p.steps = nil
	where := make([]label, len(old))
	stamp := func() {
		off := p.words(num(0), num(0))
		at = append(at, off)
		p.add("", "", unix.SYS_CLOCK_GETTIME, num(unix.CLOCK_MONOTONIC), data(off))
	}
	for i := range old {
		where[i] = p.here()
		if label(i) == first {
			stamp()
		}
		p.steps = append(p.steps, old[i])
		if label(i) >= first {
			stamp()
		}
	}
	for i := range p.steps {
		for _, l := range []*label{&p.steps[i].alt, &p.steps[i].zero} {
			if *l != noLabel && p.steps[i].nr != unix.SYS_CLOCK_GETTIME {
				*l = where[*l]
			}
		}
	}
	return at
}

// TestStepTimes prints what each step of a start takes: a tool, KIRI_TIMES=rounds go test -run StepTimes -v.
func TestStepTimes(t *testing.T) {
	rounds := 0
	if fmt.Sscan(os.Getenv("KIRI_TIMES"), &rounds); rounds == 0 {
		t.Skip("a tool: set KIRI_TIMES to a number of rounds")
	}
	low := staticTrue(t)
	filter, err := SeccompFilter("", DefaultCaps())
	must(t, err)
	var names []string
	var took [][]time.Duration
	for range rounds {
		s := containerOn(t, low)
		s.Path, s.Args, s.Seccomp = "/bin/true", []string{"true"}, filter
		s.Cloneflags &^= unix.CLONE_NEWNET
		plan, err := Compile(s)
		must(t, err)
		p := &plan.prog
		at := timed(p, plan.start)
		const head = statusWords + 1
		mem := make([]uint64, head+p.memSize())
		base := addrOf(mem)
		p.link(mem[head:head+p.size()], base+8*head, func(i int) uint64 { return uint64(fdOf(p.files[i])) })
		args := &cloneArgs{flags: plan.directFlags(), pidfd: base + 8*statusWords, exitSignal: uint64(unix.SIGCHLD)}
		th, err := NewThread(nil)
		must(t, err)
		var before, back, waited int64
		var mnt *os.File
		th.Do(func() error {
			var ts unix.Timespec
			unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
			before = ts.Nano()
			ret := spawn(args, base+8*(head+opWords*uint64(plan.start)), base, base+8*head)
			unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
			back = ts.Nano()
			proc := Proc{PID: int(ret), PIDFD: os.NewFile(uintptr(mem[statusWords]), "pidfd")}
			mnt, _ = proc.MountNS()
			waitFor(t, proc)
			unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
			waited = ts.Nano()
			proc.PIDFD.Close()
			return nil
		})
		th.Close()
		keep(mem)
		mnt.Close()
		plan.Close()
		release(s)
		dataAt := head + len(p.steps)*opWords
		names, took = names[:0], append(took, nil)
		last := before
		row := &took[len(took)-1]
		note := func(name string, now int64) {
			names = append(names, name)
			*row = append(*row, time.Duration(now-last))
			last = now
		}
		j := 0
		for i := range p.steps {
			st := &p.steps[i]
			if st.nr != unix.SYS_CLOCK_GETTIME || j == len(at) {
				continue
			}
			now := int64(mem[dataAt+at[j]/8])*1e9 + int64(mem[dataAt+at[j]/8+1])
			j++
			if now == 0 {
				continue
			}
			prev := &p.steps[i-1]
			name := "clone"
			if j > 1 {
				name = sysName(prev.nr) + " # " + prev.what + prev.obj
			}
			note(name, now)
		}
		note("execve", back)
		note("run and wait", waited)
	}
	var sum time.Duration
	for i, n := range names {
		col := make([]time.Duration, 0, rounds)
		for _, r := range took {
			if i < len(r) {
				col = append(col, r[i])
			}
		}
		slices.Sort(col)
		m := col[len(col)/4]
		sum += m
		t.Logf("%8.1f us  %s", float64(m.Nanoseconds())/1e3, n)
	}
	t.Logf("%8.1f us  sum of lower quartiles", float64(sum.Nanoseconds())/1e3)
}
