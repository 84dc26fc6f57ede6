package main

import (
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"runkiri.com/kiri/internal/textpages"
)

// quiet is how long no request may have come before memory is given back to the system.
const quiet = 5 * time.Second

// idle gives memory back after bursts of work. There is no ticker: a daemon that nobody talks to never wakes up.
type idle struct {
	log      *slog.Logger
	text     *textpages.Text
	timer    *time.Timer
	armed    atomic.Bool
	requests atomic.Uint64
	seen     uint64 // requests when the timer was last set; of whoever sets it
}

func newIdle(log *slog.Logger) *idle {
	i := &idle{log: log}
	var err error
	if i.text, err = textpages.Find(); err != nil {
		log.Debug("finding code pages", "error", err)
		i.text = &textpages.Text{}
	}
	i.timer = time.AfterFunc(time.Hour, i.turn)
	i.timer.Stop()
	return i
}

// touch notes a request. It costs two atomic operations unless it is the first after a quiet time.
func (i *idle) touch() {
	n := i.requests.Add(1)
	if !i.armed.Load() && i.armed.CompareAndSwap(false, true) {
		i.seen = n
		i.timer.Reset(quiet)
	}
}

// turn looks whether it has been quiet since the last turn.
func (i *idle) turn() {
	if n := i.requests.Load(); n != i.seen {
		i.seen = n
		i.timer.Reset(quiet)
		return
	}
	runtime.GC() // what pools hold is let go only by the second collection
	debug.FreeOSMemory()
	if err := i.text.Release(); err != nil {
		i.log.Debug("giving code pages back", "error", err)
	}
	i.armed.Store(false)
	if i.requests.Load() != i.seen { // came between the look and the store, and found the timer armed
		i.touch()
	}
}
