//go:build linux

package agent

import (
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// faultPoint is where the agent kills itself, for the tests of what a kill at any instant may leave behind. It is
// set by the environment, KIRI_FAULT=name:n, and nil otherwise: a point that is off costs one load.
var faultPoint *struct {
	name string
	left atomic.Int64
}

func init() {
	name, n, ok := strings.Cut(os.Getenv("KIRI_FAULT"), ":")
	if !ok {
		return
	}
	left, err := strconv.ParseInt(n, 10, 64)
	if err != nil {
		return
	}
	faultPoint = &struct {
		name string
		left atomic.Int64
	}{name: name}
	faultPoint.left.Store(left)
}

// fault is a named point at which the agent may be told to die, as by kill -9, when it passes for the nth time.
func fault(name string) {
	if faultPoint != nil && faultPoint.name == name && faultPoint.left.Add(-1) == 0 {
		unix.Kill(unix.Getpid(), unix.SIGKILL)
		select {}
	}
}
