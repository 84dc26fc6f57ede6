//go:build linux && (amd64 || arm64)

package launch

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/wire"
)

// walk runs p from first on in a vfork child and returns the fatal failure, if there was one.
func walk(t testing.TB, p *program, first label) (unix.Errno, *step) {
	t.Helper()
	errno, at, _ := walkMem(t, p, first)
	return errno, at
}

func walkMem(t testing.TB, p *program, first label) (unix.Errno, *step, []uint64) {
	t.Helper()
	const head = statusWords
	mem := make([]uint64, head+p.memSize())
	base := addrOf(mem)
	p.link(mem[head:], base+8*head, nil)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	args := &cloneArgs{flags: unix.CLONE_VM | unix.CLONE_VFORK | unix.CLONE_CLEAR_SIGHAND, exitSignal: uint64(unix.SIGCHLD)}
	ret := spawn(args, base+8*(head+opWords*uint64(first)), base, base+8*head)
	if ret < 0 {
		t.Fatal(unix.Errno(-ret))
	}
	var st unix.WaitStatus
	if _, err := unix.Wait4(int(ret), &st, unix.WALL, nil); err != nil || !st.Exited() {
		t.Fatalf("wait: %v, status %#x", err, uint32(st))
	}
	keep(mem)
	if mem[statusOp] == 0 {
		return 0, nil, mem[head+len(p.steps)*opWords:]
	}
	return unix.Errno(mem[statusErrno]), p.stepAt(base+8*head, mem[statusOp]), nil
}

// TestWalker checks each thing an op can do: results in slots for every argument, jumps on errors and on zero, the
// check for a slash, failures.
func TestWalker(t *testing.T) {
	t.Run("slots", func(t *testing.T) {
		for i := range 6 {
			p := &program{}
			p.exit(1)
			first := p.here()
			fd, got := p.newSlot(), p.newSlot()
			p.add("", "", unix.SYS_FCNTL, num(0), num(unix.F_DUPFD), num(777)).to = fd
			// mmap hands all six arguments to the kernel; the result shows only that the call was possible, so the
			// argument is tested by a value that makes the call fail when it is not used.
			a := []word{num(0), num(pageSize), num(unix.PROT_READ), num(unix.MAP_PRIVATE | unix.MAP_ANONYMOUS), num(-1), num(0)}
			if i == 0 || i == 1 || i == 4 {
				a[i] = slot(fd)
			}
			switch i {
			case 0: // a hint: any will do
			case 1: // 777 bytes
			case 4: // ignored with MAP_ANONYMOUS
			default:
				v := p.words(a[i])
				a[i] = slot(v)
			}
			p.add("", "", unix.SYS_MMAP, a...).to = got
			p.exit(0)
			errno, at, data := walkMem(t, p, first)
			if at != nil {
				t.Fatalf("argument %d: %v", i, errno)
			}
			if data[0] != 777 || data[1] == 0 {
				t.Errorf("argument %d: slots %d, %#x", i, data[0], data[1])
			}
			unix.MunmapPtr(ptr(data[1]), pageSize)
		}
	})
	t.Run("jumps", func(t *testing.T) {
		p := &program{}
		p.exit(1)
		first := p.here()
		ran := p.newSlot()
		s := p.add("", "", unix.SYS_CLOSE, num(-1))
		s.alt, s.only = p.here()+1, unix.EBADF
		p.add("skipped by the error", "", unix.SYS_CLOSE, num(-1))
		p.add("the old mask is not 0", "", unix.SYS_UMASK, num(0)).zero = 0
		p.add("", "", unix.SYS_UMASK, num(0)).zero = p.here() + 1
		p.add("skipped by the zero", "", unix.SYS_CLOSE, num(-1))
		p.add("", "", unix.SYS_FCNTL, num(0), num(unix.F_DUPFD), num(500)).to = ran
		s = p.add("any error", "", unix.SYS_CLOSE, num(-1))
		s.alt = p.here() + 1
		p.exit(7)
		p.exit(0)
		errno, at, data := walkMem(t, p, first)
		if at != nil || data[0] != 500 {
			t.Errorf("%v at %+v, slot %d", errno, at, data)
		}
	})
	t.Run("another errno is fatal", func(t *testing.T) {
		p := &program{}
		p.exit(1)
		first := p.here()
		s := p.add("closing", "", unix.SYS_CLOSE, num(-1))
		s.alt, s.only = p.here(), unix.ENOENT
		p.exit(0)
		if errno, at := walk(t, p, first); errno != unix.EBADF || at == nil || at.what != "closing" {
			t.Errorf("%v at %v", errno, at)
		}
	})
	t.Run("slash", func(t *testing.T) {
		p := &program{}
		p.exit(1)
		first := p.here()
		p.add("", "", unix.SYS_GETCWD, p.scratch(), num(unix.PathMax)).flags |= flagSlash
		p.exit(0)
		if errno, at := walk(t, p, first); at != nil {
			t.Errorf("%v at %v", errno, at)
		}
	})
}

// TestManyAtOnce starts processes from many goroutines while the garbage collector runs all the time and memory is
// poisoned: an op that the collector has taken, or a handler that has run on the child's stack, would show.
func TestManyAtOnce(t *testing.T) {
	needRoot(t)
	defer debug.SetGCPercent(debug.SetGCPercent(1))
	stop := make(chan struct{})
	var noise sync.WaitGroup
	for range 2 {
		noise.Go(func() {
			var keep [][]byte
			for {
				select {
				case <-stop:
					return
				default:
				}
				b := make([]byte, 1+rand.IntN(32<<10))
				for i := range b {
					b[i] = 0xdb
				}
				keep = append(keep, b)
				if len(keep) > 64 {
					keep = nil
					runtime.GC()
				}
			}
		})
	}
	low := lower(t)
	const workers, each = 8, 40
	var wg sync.WaitGroup
	errs := make(chan error, workers*each)
	for w := range workers {
		wg.Go(func() {
			for i := range each {
				s := &Spec{
					Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
					Path:       "/bin/true",
					Args:       []string{"true", fmt.Sprint(w, i)},
					Hostname:   fmt.Sprint("w", w),
					Caps:       CapsFor(DefaultCaps(), 0),
				}
				bad := i%5 == 4
				if bad {
					s.Path = "/bin/nosuch"
				}
				errs <- once(s, low, bad)
			}
		})
	}
	wg.Wait()
	close(stop)
	noise.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	if c := children(t); len(c) != 0 {
		t.Errorf("children left: %v", c)
	}
}

// once starts s on a bind of low and waits for it.
func once(s *Spec, low string, bad bool) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, low, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return err
	}
	s.Root = os.NewFile(uintptr(fd), "root")
	defer s.Root.Close()
	plan, err := Compile(s)
	if err != nil {
		return err
	}
	th, err := NewThread(nil)
	if err != nil {
		return err
	}
	defer th.Close()
	p, err := th.Start(plan)
	if bad {
		if wire.ClassOf(err) != wire.NoCommand || !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("missing command: %w", err)
		}
		return nil
	}
	if err != nil {
		return err
	}
	defer p.PIDFD.Close()
	var st unix.WaitStatus
	for {
		_, err = unix.Wait4(p.PID, &st, unix.WALL, nil)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil || st != 0 {
		return fmt.Errorf("wait: %w, status %#x", err, uint32(st))
	}
	return nil
}
