//go:build linux

package agent

import (
	"os"
	"sync"
	"time"

	"runkiri.com/kiri/internal/wire"
)

// calm knows whether a start is under way. What can be done at any time, taking containers apart and making cells,
// competes with starts for the same locks of the kernel (rtnl, mounts) and for CPUs, so it waits for a calm moment,
// but never long.
type calm struct {
	mu     sync.Mutex
	starts int
	over   chan struct{} // closed when starts is 0; nil while it is
}

// maxStorm is how long something waits for a calm moment.
const maxStorm = 50 * time.Millisecond

func (c *calm) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.starts == 0 {
		c.over = make(chan struct{})
	}
	c.starts++
}

func (c *calm) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.starts--
	if c.starts == 0 {
		close(c.over)
		c.over = nil
	}
}

// wait returns when no start is under way, at the latest after maxStorm.
func (c *calm) wait() {
	c.mu.Lock()
	over := c.over
	c.mu.Unlock()
	if over == nil {
		return
	}
	t := time.NewTimer(maxStorm)
	defer t.Stop()
	select {
	case <-over:
	case <-t.C:
	}
}

// sandboxes keeps the network namespaces of containers that have ended open while starts are under way. The kernel
// takes a namespace apart when its last descriptor is closed, holding the lock (rtnl) that every veth pair of a new
// container needs, some 20 ms for one namespace and hardly more for many. Nothing is lost if the agent is killed: its
// descriptors are closed then.
type sandboxes struct {
	mu      sync.Mutex
	dying   []dyingSandbox
	waiting bool // somebody will let them go
}

type dyingSandbox struct {
	ns *os.File
	ep wire.Endpoint
}

// maxDying is how many namespaces are kept at most; each has some 100 KB in the kernel.
const maxDying = 128

// endSandbox lets the network namespace of a container that has ended go, now or in a calm moment. Its address is free
// only then. ns may be nil: another agent's, or the kernel's already.
func (a *Agent) endSandbox(ns *os.File, ep wire.Endpoint) {
	s := &a.sandboxes
	s.mu.Lock()
	s.dying = append(s.dying, dyingSandbox{ns, ep})
	full := len(s.dying) >= maxDying
	first := !s.waiting
	s.waiting = true
	s.mu.Unlock()
	if full {
		a.endSandboxes()
	}
	if first {
		go func() {
			a.calm.wait()
			s.mu.Lock()
			s.waiting = false
			s.mu.Unlock()
			a.endSandboxes()
		}()
	}
}

// endSandboxes lets all of them go.
func (a *Agent) endSandboxes() {
	s := &a.sandboxes
	s.mu.Lock()
	all := s.dying
	s.dying = nil
	s.mu.Unlock()
	for _, d := range all {
		if d.ns != nil {
			d.ns.Close()
		}
	}
	for _, d := range all {
		if d.ep.Address == "" {
			continue
		}
		if err := a.net.Release(d.ep); err != nil {
			a.logf("%v", err)
		}
	}
}
