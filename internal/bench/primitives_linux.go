//go:build amd64 || arm64

package bench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Primitives measures the building blocks of a container start that are not a process, runs times each. All of it
// happens in namespaces and directories of its own; what could not be measured is told by the error, beside what could.
func Primitives(runs int) (map[string]Samples, error) {
	out := map[string]Samples{}
	var errs []error
	for _, m := range []func(int, map[string]Samples) error{cgroups, overlays, veths} {
		if err := m(runs, out); err != nil {
			errs = append(errs, err)
		}
	}
	return out, errors.Join(errs...)
}

func cgroups(runs int, out map[string]Samples) error {
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(root + "/cgroup.procs"); err != nil {
		root += "/unified" // hybrid: controllers in v1, the v2 tree beside them
	}
	dir := fmt.Sprintf("%s/kiri-bench-%d", root, os.Getpid())
	for range runs {
		start := time.Now()
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("%s: %w", PrimCgroup, err)
		}
		if err := os.Remove(dir); err != nil {
			return fmt.Errorf("%s: %w", PrimCgroup, err)
		}
		out[PrimCgroup] = append(out[PrimCgroup], time.Since(start))
	}
	return nil
}

func overlays(runs int, out map[string]Samples) error {
	dir, err := os.MkdirTemp("", "kiri-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, d := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			return err
		}
	}
	opts := fmt.Sprintf("lowerdir=%[1]s/lower,upperdir=%[1]s/upper,workdir=%[1]s/work", dir)
	return onThread(unix.CLONE_NEWNS|unix.CLONE_FS, func() error {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("%s: %w", PrimOverlay, err)
		}
		for range runs {
			start := time.Now()
			if err := unix.Mount("overlay", dir+"/merged", "overlay", 0, opts); err != nil {
				return fmt.Errorf("%s: %w", PrimOverlay, err)
			}
			if err := unix.Unmount(dir+"/merged", 0); err != nil {
				return fmt.Errorf("%s: %w", PrimOverlay, err)
			}
			out[PrimOverlay] = append(out[PrimOverlay], time.Since(start))
		}
		return nil
	})
}

func veths(runs int, out map[string]Samples) error {
	return onThread(unix.CLONE_NEWNET, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return fmt.Errorf("%s: %w", PrimVethCreate, err)
		}
		defer h.Close()
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
		if err := h.LinkAdd(bridge); err != nil {
			return fmt.Errorf("%s: making a bridge: %w", PrimVethCreate, err)
		}
		for range runs {
			veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0", MasterIndex: bridge.Index}, PeerName: "v1"}
			start := time.Now()
			if err := h.LinkAdd(veth); err != nil {
				return fmt.Errorf("%s: %w", PrimVethCreate, err)
			}
			created := time.Now()
			if err := h.LinkDel(veth); err != nil {
				return fmt.Errorf("%s: %w", PrimVethDelete, err)
			}
			out[PrimVethCreate] = append(out[PrimVethCreate], created.Sub(start))
			out[PrimVethDelete] = append(out[PrimVethDelete], time.Since(created))
		}
		return nil
	})
}

// onThread runs f on a thread with namespaces of its own. The thread is never unlocked, so that the runtime ends it
// and the kernel takes the namespaces back.
func onThread(flags int, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(flags); err != nil {
			done <- fmt.Errorf("making namespaces: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}
