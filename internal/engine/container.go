package engine

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/wire"
)

// ctr is one container.
//
// Two locks, op before mu. op makes what changes the container's life (start, the sending of signals, pause, update,
// the handling of an exit, removal) follow one another and is held over calls to the agent. mu guards the fields and
// is never held over such a call or a file operation, so that lists and inspection never wait for a slow start.
//
// Everything that rec points at is replaced, never changed in place, once the container is published: a shallow copy
// taken under mu is a consistent snapshot that can be read without it.
type ctr struct {
	id string // = rec.ID

	op     sync.Mutex
	saving sync.Mutex // one write of the record at a time, in order; taken before mu

	mu       sync.Mutex
	rec      containerRecord
	removing bool // a removal is under way
	removed  bool // it is done
	dirty    bool // queued in the saver
	waiters  []*waiter
	held     []*os.File // the descriptors of RunReply, for the next agent; nil while nothing runs

	restart restarter
	health  *healthMonitor  // nil without a check or while nothing runs
	execs   map[string]bool // ids of those that have not ended
}

// containerRecord is what is kept of a container on disk.
type containerRecord struct {
	ID       string
	Name     string // without a slash
	Created  time.Time
	Image    string // its id, the digest of the manifest or index
	Platform ocispec.Platform
	Layers   []string // DiffIDs, lowest first

	Path     string
	Args     []string
	Config   *container.Config
	Host     *container.HostConfig
	Networks map[string]*network.EndpointSettings
	Mounts   []mountPoint

	State containerState
	Run   uint64 // counts starts; wire.Run.Run of the last one

	RestartCount  int  // by the restart policy, since the last start by hand
	ManualStop    bool // stopped by hand: unless-stopped leaves it alone
	StartedBefore bool
	Dead          bool // its removal has begun: it is finished at the next start of the daemon
}

// containerState is Docker's State, with times as times. Running stays true while a restart policy waits to start it
// again (Restarting) and while it is paused.
type containerState struct {
	Running    bool
	Paused     bool
	Restarting bool
	OOMKilled  bool
	Pid        int
	ExitCode   int
	Error      string
	StartedAt  time.Time
	FinishedAt time.Time
	Health     *container.Health `json:",omitempty"`

	Endpoint   wire.Endpoint
	EndpointID string
	SandboxID  string
	CgroupPath string
}

// status returns Docker's word for the state.
func (c *ctr) status() container.ContainerState {
	s := &c.rec.State
	switch {
	case s.Running && s.Paused:
		return container.StatePaused
	case s.Running && s.Restarting:
		return container.StateRestarting
	case s.Running:
		return container.StateRunning
	case c.removing:
		return container.StateRemoving
	case c.rec.Dead:
		return container.StateDead
	case s.StartedAt.IsZero():
		return container.StateCreated
	}
	return container.StateExited
}

// snapshot returns a copy of the record that can be read without the lock.
func (c *ctr) snapshot() containerRecord {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec
}

func (c *ctr) name() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec.Name
}

// waiter is one who waits for an exit or, with removal, for the removal only.
type waiter struct {
	removal bool
	ch      chan container.WaitResponse // room for one
}

func (c *ctr) response() container.WaitResponse {
	r := container.WaitResponse{StatusCode: int64(c.rec.State.ExitCode)}
	if c.rec.State.Error != "" {
		r.Error = &container.WaitExitError{Message: c.rec.State.Error}
	}
	return r
}

// notify answers those who wait for an exit and, if the container is removed, all others too. mu is held.
func (c *ctr) notify() {
	if len(c.waiters) == 0 {
		return
	}
	r := c.response()
	c.waiters = slices.DeleteFunc(c.waiters, func(w *waiter) bool {
		if w.removal && !c.removed {
			return false
		}
		w.ch <- r
		return true
	})
}

// await registers a waiter. mu is held.
func (c *ctr) await(removal bool) *waiter {
	w := &waiter{removal: removal, ch: make(chan container.WaitResponse, 1)}
	c.waiters = append(c.waiters, w)
	return w
}

func (c *ctr) forget(w *waiter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if i := slices.Index(c.waiters, w); i >= 0 {
		c.waiters = slices.Delete(c.waiters, i, i+1)
	}
}

// ContainerWait returns once ref is resolved and the wait registered, so that the answer's header can be sent; the
// channel gives one value, unless ctx ends first.
func (e *Engine) ContainerWait(ctx context.Context, ref string, condition container.WaitCondition) (<-chan container.WaitResponse, error) {
	switch condition {
	case "", container.WaitConditionNotRunning, container.WaitConditionNextExit, container.WaitConditionRemoved:
	default:
		return nil, invalid("invalid condition: %q", string(condition))
	}
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	met := condition == container.WaitConditionRemoved && c.removed ||
		(condition == "" || condition == container.WaitConditionNotRunning) && !c.rec.State.Running
	if met {
		ch := make(chan container.WaitResponse, 1)
		ch <- c.response()
		return ch, nil
	}
	w := c.await(condition == container.WaitConditionRemoved)
	context.AfterFunc(ctx, func() { c.forget(w) })
	return w.ch, nil
}

// waitStopped waits until the container is not running, or ctx ends.
func (c *ctr) waitStopped(ctx context.Context) error {
	c.mu.Lock()
	if !c.rec.State.Running || c.rec.State.Restarting {
		c.mu.Unlock()
		return nil
	}
	w := c.await(false)
	c.mu.Unlock()
	select {
	case <-w.ch:
		return nil
	case <-ctx.Done():
		c.forget(w)
		return ctx.Err()
	}
}

// containerIndex finds containers by id, name and id prefix.
type containerIndex struct {
	mu     sync.RWMutex
	byID   map[string]*ctr
	byName map[string]*ctr // also of containers that are being created and not yet in byID
	ids    idIndex
}

// get finds a container as Docker does: by whole id, then by name, then by a prefix of its id.
func (x *containerIndex) get(ref string) (*ctr, error) {
	if ref == "" {
		return nil, invalid("invalid name or ID supplied: %q", ref)
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	if c := x.byID[ref]; c != nil {
		return c, nil
	}
	if c := x.byName[strings.TrimPrefix(ref, "/")]; c != nil && x.byID[c.id] == c {
		return c, nil
	}
	id, n := x.ids.find(ref)
	switch n {
	case 0:
		return nil, notFound("No such container: %s", ref)
	case 1:
		return x.byID[id], nil
	}
	return nil, invalid("multiple IDs found with provided prefix: %s", ref)
}

// reserve gives name to c, or returns the container that has it.
func (x *containerIndex) reserve(name string, c *ctr) *ctr {
	x.mu.Lock()
	defer x.mu.Unlock()
	if other := x.byName[name]; other != nil {
		return other
	}
	x.byName[name] = c
	return nil
}

// release frees a name that c has.
func (x *containerIndex) release(name string, c *ctr) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.byName[name] == c {
		delete(x.byName, name)
	}
}

func (x *containerIndex) publish(c *ctr) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.byID[c.id] = c
	x.ids.add(c.id)
}

// withdraw takes c and its name out.
func (x *containerIndex) withdraw(c *ctr, name string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.byID, c.id)
	x.ids.remove(c.id)
	if x.byName[name] == c {
		delete(x.byName, name)
	}
}

// all returns the containers in no order.
func (x *containerIndex) all() []*ctr {
	x.mu.RLock()
	defer x.mu.RUnlock()
	l := make([]*ctr, 0, len(x.byID))
	for _, c := range x.byID {
		l = append(l, c)
	}
	return l
}

// save writes the container's record now.
func (e *Engine) save(c *ctr) error {
	c.saving.Lock()
	defer c.saving.Unlock()
	c.mu.Lock()
	if c.removed {
		c.mu.Unlock()
		return nil
	}
	rec := c.rec
	c.mu.Unlock()
	if err := e.containerRecords.Put(c.id, &rec); err != nil {
		return internal("saving container %s: %w", c.id, err)
	}
	return nil
}

// saveDelay is how long a change that the agent can tell of again waits to be written: most containers that are run to
// be removed are gone by then and never cost the second file.
const saveDelay = 100 * time.Millisecond

// saveSoon queues the record to be written in the background: for what a daemon that dies at once can learn again
// from the agent. acks are sent to the agent once it is written.
func (e *Engine) saveSoon(c *ctr, acks ...*wire.Ack) {
	s := &e.saver
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acks = append(s.acks, acks...)
	if !c.dirty {
		c.dirty = true
		s.queue = append(s.queue, c)
	}
	if !s.busy {
		s.busy = true
		delay := saveDelay
		if s.hurry {
			delay = 0
		}
		s.timer = time.AfterFunc(delay, e.runSaver)
	}
}

// saver writes records in the background; while its queue is empty it has no goroutine and no timer. Its mu guards
// ctr.dirty too.
type saver struct {
	mu    sync.Mutex
	queue []*ctr
	acks  []*wire.Ack
	busy  bool // there is something in the queue, or being written
	timer *time.Timer
	hurry bool       // do not wait any more: the engine is being closed
	idle  *sync.Cond // signalled when busy becomes false
}

// runSaver writes what has come together.
func (e *Engine) runSaver() {
	s := &e.saver
	s.mu.Lock()
	queue, acks := s.queue, s.acks
	s.queue, s.acks = nil, nil
	for _, c := range queue {
		c.dirty = false
	}
	s.mu.Unlock()
	failed := map[string]bool{}
	for _, c := range queue {
		if err := e.save(c); err != nil {
			failed[c.id] = true
			e.log.Error("a container's state is not on disk", "container", c.id, "error", err)
		}
	}
	for _, a := range acks {
		if !failed[a.ID] { // the agent will repeat what was not recorded
			e.ack(a)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case len(s.queue)+len(s.acks) == 0:
		s.busy, s.timer = false, nil
		s.idle.Broadcast()
	case s.hurry:
		go e.runSaver()
	default:
		s.timer = time.AfterFunc(saveDelay, e.runSaver)
	}
}

// drainSaver writes what is queued now, and waits until nothing is left.
func (e *Engine) drainSaver() {
	s := &e.saver
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hurry = true
	if s.busy && s.timer.Stop() {
		go e.runSaver()
	}
	for s.busy {
		s.idle.Wait()
	}
}
