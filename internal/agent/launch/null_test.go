//go:build linux && (amd64 || arm64)

package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Root in a container may change the mode of what it is given as a null device: it must not be the host's, nor that
// of another process.
func TestNullDeviceIsNotTheHosts(t *testing.T) {
	var before unix.Stat_t
	must(t, unix.Stat(os.DevNull, &before))
	check := func(what string) {
		t.Helper()
		var st unix.Stat_t
		must(t, unix.Stat(os.DevNull, &st))
		if st.Mode != before.Mode {
			unix.Chmod(os.DevNull, before.Mode&0o7777)
			t.Errorf("%s: the host's null device has mode %o, had %o", what, st.Mode, before.Mode)
		}
	}
	args := []string{"chmod", strconv.Itoa(0o667), "/proc/self/fd/0", "/dev/null"}
	for _, f := range []string{"/proc/keys", "/proc/timer_list", "/proc/interrupts"} {
		if _, err := os.Stat(f); err == nil {
			args = append(args, f)
		}
	}
	real := cloneMount
	t.Cleanup(func() { cloneMount = real })
	for _, kernel := range []string{"this kernel", "before 6.15"} {
		if kernel != "this kernel" {
			cloneMount = func(dir int, name string) (*os.File, error) {
				if name == "" {
					return nil, fmt.Errorf("open_tree: %w", unix.EINVAL)
				}
				return real(dir, name)
			}
		}
		for _, null := range []bool{true, false} {
			if !null && kernel != "this kernel" {
				continue // Null is for those
			}
			s := container(t, args...)
			if !null {
				s.Null = nil
			}
			what := fmt.Sprintf("%s, Null %v", kernel, null)
			if code, _, errs := start(t, nil, s).finish(); code != 0 {
				t.Errorf("%s: code %d %s", what, code, errs)
			}
			check(what)
		}
	}
}

// A container whose user has put something else on /dev starts with its files masked all the same.
func TestNullDeviceUnderAnotherDev(t *testing.T) {
	low := lower(t)
	for _, old := range []bool{false, true} {
		s := containerOn(t, low, "cat", "/proc/keys")
		if _, err := os.Stat("/proc/keys"); err != nil {
			s.Args = []string{"probe", "true"}
		}
		s.Mounts = s.Mounts[1:] // not /dev
		if old {
			real := cloneMount
			cloneMount = func(dir int, name string) (*os.File, error) {
				if name == "" {
					return nil, fmt.Errorf("open_tree: %w", unix.EINVAL)
				}
				return real(dir, name)
			}
			defer func() { cloneMount = real }()
		}
		if code, out, errs := start(t, nil, s).finish(); code != 0 || out != "" {
			t.Errorf("old %v: code %d, read %q %s", old, code, out, errs)
		}
	}
}

func TestNewNull(t *testing.T) {
	needRoot(t)
	a, err := newNull()
	must(t, err)
	defer a.Close()
	b, err := newNull()
	must(t, err)
	defer b.Close()
	must(t, a.Chmod(0))
	st, err := b.Stat()
	must(t, err)
	if st.Mode().Perm() != 0o666 || st.Sys().(*syscall.Stat_t).Rdev != unix.Mkdev(1, 3) {
		t.Errorf("a null device of its own: %v", st.Mode())
	}
	dir, err := nullFS()
	must(t, err)
	if l, err := os.ReadDir(filepath.Join("/proc/self/fd", strconv.Itoa(fdOf(dir)))); err != nil || len(l) != 0 {
		t.Errorf("left: %v, %v", l, err)
	}
}
