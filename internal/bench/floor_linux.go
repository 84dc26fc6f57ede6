//go:build amd64 || arm64

package bench

import (
	"errors"
	"os"
	"runtime"
	"time"

	"runkiri.com/kiri/internal/agent/launch"
)

// Floor measures what the kernel alone takes: the floors and the process primitives, one sample of each a round, so
// that they can be interleaved with the engines.
type Floor struct {
	m    *launch.Measurer
	dir  string // made for the run; "" if the caller gave a root
	took map[string]Samples
}

var floorOf = map[string]launch.Primitive{
	PrimExec: launch.ForkExec, PrimNamespaces: launch.Namespaces, PrimNet: launch.NetworkToo,
	FloorNone: launch.FloorNone, FloorBridge: launch.FloorNet,
}

// NewFloor prepares the measurement. root is a directory with a static /bin/true, /proc and /dev; "" makes one whose
// true is TrueProgram. It needs root.
func NewFloor(root string) (*Floor, error) {
	f := &Floor{took: map[string]Samples{}}
	if root == "" {
		dir, err := os.MkdirTemp("", "kiri-bench-")
		if err != nil {
			return nil, err
		}
		if err := trueRoot(dir); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
		f.dir, root = dir, dir
	}
	var err error
	if f.m, err = launch.NewMeasurer(root, ""); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// Round takes one sample of each floor and process primitive; they count only if timed is set.
func (f *Floor) Round(timed bool) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for name, p := range floorOf {
		d, err := f.m.Once(p)
		if err != nil {
			return err
		}
		if timed {
			f.took[name] = append(f.took[name], time.Duration(d))
		}
	}
	return nil
}

// Samples returns what was taken so far, by name.
func (f *Floor) Samples() map[string]Samples { return f.took }

// Close removes what NewFloor has made.
func (f *Floor) Close() error {
	var err error
	if f.m != nil {
		err = f.m.Close()
	}
	if f.dir != "" {
		err = errors.Join(err, os.RemoveAll(f.dir))
	}
	return err
}
