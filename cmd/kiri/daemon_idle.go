package main

import (
	"runtime/debug"
	"sync/atomic"
	"time"
)

// quiet is how long no request may have come before memory is given back to the system.
const quiet = 5 * time.Second

// idle gives memory back after bursts of work. There is no ticker: a daemon that nobody talks to never wakes up.
type idle struct {
	timer    *time.Timer
	armed    atomic.Bool
	requests atomic.Uint64
	seen     uint64 // requests at the timer's last turn; the timer's own
}

func newIdle() *idle {
	i := &idle{}
	i.timer = time.AfterFunc(time.Hour, i.turn)
	i.timer.Stop()
	return i
}

// touch notes a request. It costs two atomic operations unless it is the first after a quiet time.
func (i *idle) touch() {
	i.requests.Add(1)
	if !i.armed.Load() && i.armed.CompareAndSwap(false, true) {
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
	debug.FreeOSMemory()
	i.armed.Store(false)
	if i.requests.Load() != i.seen { // came between the look and the store, and found the timer armed
		i.touch()
	}
}
