//go:build linux && (amd64 || arm64)

package launch

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Benchmarks interleave what they compare, round by round, so that a noisy machine disturbs both alike, and report
// medians in milliseconds. KIRI_QUANTILE=10 reports the tenth percentile instead, for a machine with other work.

type medians map[string][]time.Duration

func (m medians) add(name string, d time.Duration) { m[name] = append(m[name], d) }

func (m medians) ms(name string) float64 {
	l := slices.Clone(m[name])
	slices.Sort(l)
	q := 50
	fmt.Sscan(os.Getenv("KIRI_QUANTILE"), &q)
	return float64(l[len(l)*q/100].Nanoseconds()) / 1e6
}

func (m medians) report(b *testing.B, base string, names ...string) {
	b.ReportMetric(0, "ns/op")
	for _, n := range names {
		b.ReportMetric(m.ms(n), n+"-ms")
		if n != base {
			b.ReportMetric(m.ms(n)/m.ms(base), n+"/"+base)
		}
	}
}

// staticTrue makes a root with a small static /bin/true, as the floor asks for; with a C compiler it is the very one
// that an independent floor would use, else the probe.
func staticTrue(b testing.TB) string {
	dir := lower(b)
	src := dir + "/tmp/true.c"
	must(b, os.WriteFile(src, []byte("int main(void) { return 0; }\n"), 0o644))
	if err := exec.Command("cc", "-static", "-O2", "-o", dir+"/tmp/true", src).Run(); err == nil {
		must(b, os.Rename(dir+"/tmp/true", dir+"/bin/true"))
	}
	must(b, os.Remove(src))
	return dir
}

// BenchmarkStart measures a start with Docker's isolation, from Compile until the process has been waited for, against
// the floor. Mounts are prepared before, as the agent does for the most part in the background.
func BenchmarkStart(b *testing.B) {
	low := staticTrue(b)
	needRoot(b)
	m, err := NewMeasurer(low, b.TempDir())
	must(b, err)
	defer m.Close()
	filter, err := SeccompFilter("", DefaultCaps())
	must(b, err)
	for _, net := range []bool{false, true} {
		name, floor := "none", FloorNone
		if net {
			name, floor = "net", FloorNet
		}
		b.Run(name, func(b *testing.B) {
			all := medians{}
			for b.Loop() {
				runtime.LockOSThread()
				d, err := m.Once(floor)
				runtime.UnlockOSThread()
				must(b, err)
				all.add("floor", d)

				th, err := NewThread(nil)
				must(b, err)
				s := prepare(b, low, net)
				s.Seccomp = filter
				before := time.Now()
				plan, err := Compile(s)
				must(b, err)
				compiled := time.Now()
				p, err := th.Start(plan)
				must(b, err)
				began := time.Now()
				mnt, _ := p.MountNS()
				waitFor(b, p)
				all.add("start", time.Since(before))
				all.add("compile", compiled.Sub(before))
				all.add("toexec", began.Sub(compiled))
				p.PIDFD.Close()
				mnt.Close()
				th.Close()
				release(s)
			}
			all.report(b, "floor", "floor", "start", "compile", "toexec")
		})
	}
}

// prepare is container without t.Cleanup, for many rounds.
func prepare(b *testing.B, low string, net bool) *Spec {
	s := containerOn(b, low)
	s.Path, s.Args = "/bin/true", []string{"true"}
	if !net {
		s.Cloneflags &^= unix.CLONE_NEWNET
	}
	return s
}

func release(s *Spec) {
	s.Root.Close()
	s.Proc.Close()
	for _, m := range s.Mounts {
		m.Mount.Close()
		m.Target.Close()
	}
}

func waitFor(b testing.TB, p Proc) {
	for {
		_, err := unix.Wait4(p.PID, nil, unix.WALL, nil)
		if err != unix.EINTR {
			must(b, err)
			return
		}
	}
}

// BenchmarkPrimitives measures what the floor is made of.
func BenchmarkPrimitives(b *testing.B) {
	low := staticTrue(b)
	needRoot(b)
	m, err := NewMeasurer(low, b.TempDir())
	must(b, err)
	defer m.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	all := medians{}
	for b.Loop() {
		for p := ForkExec; p <= FloorNet; p++ {
			d, err := m.Once(p)
			must(b, err)
			all.add(p.String(), d)
		}
	}
	b.ReportMetric(0, "ns/op")
	for p := ForkExec; p <= FloorNet; p++ {
		b.Logf("%-44s p50 %.3f ms", p, all.ms(p.String()))
	}
}

// BenchmarkExec measures an exec in a container, from Compile until the process has been waited for, against fork and
// exec of the same program.
func BenchmarkExec(b *testing.B) {
	low := staticTrue(b)
	tm := template(b)
	filter, err := SeccompFilter("", DefaultCaps())
	must(b, err)
	s := containerOn(b, low, "wait")
	c := start(b, nil, s)
	defer c.finish()
	c.line()
	m, err := NewMeasurer(low, b.TempDir())
	must(b, err)
	defer m.Close()
	all := medians{}
	for b.Loop() {
		runtime.LockOSThread()
		d, err := m.Once(ForkExec)
		runtime.UnlockOSThread()
		must(b, err)
		all.add("forkexec", d)
		s := execIn(c)
		s.Path, s.Args, s.Seccomp = "/bin/true", []string{"true"}, filter
		before := time.Now()
		plan, err := Compile(s)
		must(b, err)
		p, err := tm.Start(plan)
		must(b, err)
		began := time.Now()
		waitFor(b, p)
		all.add("exec", time.Since(before))
		all.add("toexec", began.Sub(before))
		p.PIDFD.Close()
		reap()
	}
	all.report(b, "forkexec", "forkexec", "exec", "toexec")
}

func BenchmarkCompile(b *testing.B) {
	s := containerOn(b, lower(b), "true")
	filter, err := SeccompFilter("", DefaultCaps())
	must(b, err)
	s.Seccomp = filter
	b.ReportAllocs()
	for b.Loop() {
		p, err := Compile(s)
		must(b, err)
		p.Close()
	}
}

// BenchmarkThread measures the way to a parked thread and back.
func BenchmarkThread(b *testing.B) {
	b.Run("do", func(b *testing.B) {
		th, err := NewThread(nil)
		must(b, err)
		defer th.Close()
		for b.Loop() {
			th.Do(func() error { return nil })
		}
	})
	b.Run("new", func(b *testing.B) {
		for b.Loop() {
			th, err := NewThread(nil)
			must(b, err)
			th.Close()
		}
	})
}
