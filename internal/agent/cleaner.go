//go:build linux

package agent

import (
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"runkiri.com/kiri/internal/textpages"
)

// cleaner takes containers apart after their exit has been told: a few at a time, so that a burst of exits does not
// compete with starts for long, and with a bound on how many wait, so that starts cannot outrun it for ever.
type cleaner struct {
	mu      sync.Mutex
	room    *sync.Cond
	queue   []*container
	workers int
}

const (
	cleanWorkers = 2
	cleanBehind  = 64  // containers waiting at which calm moments are not waited for
	cleanBacklog = 256 // containers waiting to be taken apart at which starts wait
)

func (w *cleaner) init() { w.room = sync.NewCond(&w.mu) }

func (w *cleaner) add(c *container) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.queue = append(w.queue, c)
	if w.workers < cleanWorkers {
		w.workers++
		go w.work()
	}
}

func (w *cleaner) work() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.queue) > 0 {
		c := w.queue[0]
		w.queue[0] = nil
		w.queue = w.queue[1:]
		behind := len(w.queue) >= cleanBehind
		w.mu.Unlock()
		if !behind {
			c.a.calm.wait()
		}
		c.clean()
		w.mu.Lock()
		w.room.Broadcast()
	}
	w.queue = nil
	w.workers--
	w.room.Broadcast()
}

// wait returns when nothing is left to be taken apart.
func (w *cleaner) wait() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.workers > 0 {
		w.room.Wait()
	}
}

// admit waits while too much is to be cleaned.
func (w *cleaner) admit() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.queue) >= cleanBacklog {
		w.room.Wait()
	}
}

// quiet does, once it has been quiet for a while, what costs time and saves memory. Nothing ticks while nothing
// happens: the timer runs from the first activity to the last of these steps.
type quiet struct {
	mu    sync.Mutex
	timer *time.Timer
	last  time.Time
	step  int
}

// After this long without a start: plans are kept as text and memory goes back to the kernel; later the cells go too.
var quietSteps = []time.Duration{3 * time.Second, 5 * time.Minute}

// active notes that something has been started or read in bulk.
func (a *Agent) active() {
	q := &a.quiet
	q.mu.Lock()
	defer q.mu.Unlock()
	q.last = time.Now()
	if q.timer == nil {
		q.timer = time.AfterFunc(quietSteps[0], a.whenQuiet)
	} else if q.step > 0 { // it waits for a later step
		q.timer.Reset(quietSteps[0])
	}
	q.step = 0
}

func (a *Agent) whenQuiet() {
	q := &a.quiet
	q.mu.Lock()
	rest := quietSteps[q.step] - time.Since(q.last)
	step := q.step
	switch {
	case rest > 0:
		q.timer.Reset(rest)
	case step+1 < len(quietSteps):
		q.step++
		q.timer.Reset(quietSteps[q.step] - time.Since(q.last))
	default:
		q.timer = nil
	}
	q.mu.Unlock()
	if rest > 0 {
		return
	}
	if step == 0 {
		a.settlePlans()
	} else {
		a.cells.drain()
		a.roots.drain()
	}
	runtime.GC() // what pools hold is let go only by the second collection
	debug.FreeOSMemory()
	if text, err := textpages.Find(); err == nil {
		err = text.Release()
		if err != nil {
			a.logf("%v", err)
		}
	}
}
