//go:build linux

package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/cgroup"
	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/network"
	"runkiri.com/kiri/internal/wire"
)

// A cell is what a container needs and what does not depend on which container it is: namespaces, a cgroup, mounts, a
// state file, and a parked thread that has joined them, so that the one clone3 that makes the process inherits them.
// Cells of the usual kinds are made ahead of need, in the background, a few at a time; any other is made when it is
// asked for. A cell is used once.
type cell struct {
	kind    cellKind
	sandbox *network.Sandbox // nil: another's network
	cgroup  *cgroup.Cgroup
	thread  *launch.Thread
	fs      *cellFS
	dir     string // in the exec root
	state   *state
}

// cellKind says which namespaces a cell has of its own.
type cellKind struct {
	net string // "none", "bridge", "host" or "container"
	ipc string // "" private, "none" private without /dev/shm, "host" or "container"
	// split leaves /dev and /sys without what is mounted in them: something of the user's goes there instead.
	split bool
}

// pooled are the kinds that are made ahead.
func (k cellKind) pooled() bool {
	return (k.net == "none" || k.net == "bridge") && k.ipc == "" && !k.split
}

// joins are the processes whose namespaces a cell of an unusual kind joins.
// The mount namespaces are those of the same containers, for what has to be shared of their mounts.
type joins struct{ net, netMounts, ipc, ipcMounts *os.File } // nsfs descriptors

// cells makes cells.
type cells struct {
	a      *Agent
	prefix string // of cgroup names: those of an agent never meet those that an earlier one left

	making chan struct{} // full while as many are being made at once as pays

	fills sync.WaitGroup // refills under way

	mu    sync.Mutex // guards what is below
	count uint64
	pools map[cellKind]*pool
}

// pool holds the cells of one kind that are ready.
type pool struct {
	ready   []*cell
	filling bool
}

// makers is how many cells are made at once. Making one takes locks that are the whole kernel's (rtnl, mounts), so
// that more of them only stand in each other's way.
const makers = 2

// poolSize is how many cells of a kind are kept ready once one has been asked for.
const poolSize = 4

func (s *cells) init(a *Agent) {
	s.a = a
	s.prefix = strconv.FormatInt(time.Now().UnixNano()/1e6, 36) + "-"
	s.pools = map[cellKind]*pool{}
	s.making = make(chan struct{}, makers)
}

// take gives a ready cell, or makes one.
func (s *cells) take(k cellKind, j joins, want *wire.NetConfig) (*cell, error) {
	if k.pooled() && want.Address == "" && want.MAC == "" {
		s.mu.Lock()
		p := s.pools[k]
		if p == nil {
			p = &pool{}
			s.pools[k] = p
		}
		if n := len(p.ready); n > 0 {
			c := p.ready[n-1]
			p.ready[n-1] = nil
			p.ready = p.ready[:n-1]
			s.mu.Unlock()
			return c, nil
		}
		s.mu.Unlock()
	}
	return s.make(k, j, want)
}

// refill brings the pools that are in use up to size, in the background.
func (s *cells) refill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, p := range s.pools {
		if !p.filling && len(p.ready) < poolSize {
			p.filling = true
			s.fills.Go(func() { s.fill(k, p) })
		}
	}
}

func (s *cells) fill(k cellKind, p *pool) {
	for {
		s.a.calm.wait()
		c, err := s.make(k, joins{}, &wire.NetConfig{Mode: k.net})
		s.mu.Lock()
		if err != nil || s.pools[k] != p { // drained in the meantime
			p.filling = false
			s.mu.Unlock()
			if err != nil {
				s.a.logf("preparing for the next container: %v", err) // whoever wants one makes it, and gets the error
			} else {
				s.discard(c)
			}
			return
		}
		p.ready = append(p.ready, c)
		if len(p.ready) >= poolSize {
			p.filling = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
	}
}

// drain empties the pools; they fill again when a container is started.
func (s *cells) drain() {
	s.mu.Lock()
	var all []*cell
	for k, p := range s.pools {
		all = append(all, p.ready...)
		delete(s.pools, k)
	}
	s.mu.Unlock()
	for _, c := range all {
		s.discard(c)
	}
}

// make makes a cell, in the order that lets each piece be born in the one before it.
func (s *cells) make(k cellKind, j joins, want *wire.NetConfig) (_ *cell, err error) {
	s.making <- struct{}{}
	defer func() { <-s.making }()
	c := &cell{kind: k}
	defer func() {
		if err != nil {
			s.discard(c)
		}
	}()
	s.mu.Lock()
	s.count++
	name := s.prefix + strconv.FormatUint(s.count, 36)
	s.mu.Unlock()
	dir := filepath.Join(s.a.stateRoot(), name)
	if err := unix.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("making state directory %s: %w", dir, err)
	}
	c.dir = dir
	if c.state, err = newState(dir); err != nil {
		return nil, err
	}
	if c.cgroup, err = s.a.cgroups.New(name); err != nil {
		return nil, err
	}
	if k.net == "none" || k.net == "bridge" {
		if c.sandbox, err = s.a.net.New(k.net, *want); err != nil {
			return nil, err
		}
	}
	c.thread, err = launch.NewThread(func() error {
		if err := c.enter(j); err != nil {
			return err
		}
		c.fs, err = newCellFS(k, j, c.cgroup)
		return err
	})
	return c, err
}

// enter runs on the cell's thread, and moves only that.
func (c *cell) enter(j joins) error {
	join := func(f *os.File, ns int, name string) error {
		if err := unix.Setns(fdOf(f), ns); err != nil {
			return fmt.Errorf("joining the %s namespace: %w", name, err)
		}
		return nil
	}
	if c.sandbox != nil {
		if err := join(c.sandbox.NS, unix.CLONE_NEWNET, "network"); err != nil {
			return err
		}
	}
	if j.net != nil {
		if err := join(j.net, unix.CLONE_NEWNET, "network"); err != nil {
			return err
		}
	}
	if j.ipc != nil {
		if err := join(j.ipc, unix.CLONE_NEWIPC, "ipc"); err != nil {
			return err
		}
	}
	if c.kind.ipc == "" || c.kind.ipc == "none" {
		if err := unix.Unshare(unix.CLONE_NEWIPC); err != nil {
			return fmt.Errorf("making an ipc namespace: %w", err)
		}
	}
	return c.cgroup.JoinThread(0)
}

// used closes what of a cell a started container does not need any more. The container has the rest, the descriptor of
// the network namespace too.
func (s *cells) used(c *cell) {
	c.thread.Close()
	c.fs.close()
}

// discard takes a cell apart that no container has used.
func (s *cells) discard(c *cell) {
	if c.thread != nil {
		c.thread.Close()
	}
	if c.fs != nil {
		c.fs.close()
	}
	c.state.close()
	if c.dir != "" {
		if err := removeDir(c.dir); err != nil {
			s.a.logf("removing an unused state file: %v", err)
		}
	}
	if c.cgroup != nil {
		if err := c.cgroup.Remove(); err != nil {
			s.a.logf("removing an unused cgroup: %v", err)
		}
	}
	if c.sandbox != nil {
		c.sandbox.NS.Close()
		s.a.net.Release(c.sandbox.Endpoint)
	}
}
