//go:build linux

package agent

import (
	"fmt"
	"os"
	"strings"
	"time"
)

// tracing makes the agent write how long each step of each start took, one line a start: KIRI_TRACE=1.
var tracing = os.Getenv("KIRI_TRACE") != ""

// trace is the clock of one start; nil when tracing is off, which costs one test a step.
type trace struct {
	last time.Time
	line strings.Builder
}

func newTrace() *trace {
	if !tracing {
		return nil
	}
	return &trace{last: time.Now()}
}

// step notes the time since the step before.
func (t *trace) step(name string) {
	if t == nil {
		return
	}
	now := time.Now()
	fmt.Fprintf(&t.line, " %s=%.1f", name, float64(now.Sub(t.last).Nanoseconds())/1e3)
	t.last = now
}
