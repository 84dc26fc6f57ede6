package engine

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/record"
	"runkiri.com/kiri/internal/wire"
)

// Engine is the daemon's state. All methods are safe for concurrent use.
type Engine struct {
	cfg     Config
	log     *slog.Logger
	id      string    // of this engine, told by info
	created time.Time // of the data root, which is when the predefined networks were made
	lock    *os.File

	agent  *link
	images *images

	containerRecords *record.Store[containerRecord]
	containers       containerIndex
	saver            saver
	execs            execIndex
	volumes          *volumeStore
	events           eventLog

	cleaning   chan struct{} // one token for each removal in the background
	background tasks         // they, and what else is finished before Close returns
	closing    atomic.Bool
	opened     chan struct{} // closed once Open has all that handling an exit needs
	failed     chan struct{} // closed if it failed instead

	pruningContainers, pruningVolumes atomic.Bool
}

// Open loads the records of cfg.DataRoot, starts or adopts the agent and what runs under it, and starts what its
// restart policy wants to run. It fails if another daemon has the data root.
func Open(ctx context.Context, cfg Config) (_ *Engine, err error) {
	return open(ctx, cfg, nil)
}

// open is Open with another host for the agent, for tests.
func open(ctx context.Context, cfg Config, host agentHost) (_ *Engine, err error) {
	e := &Engine{cfg: cfg, log: cfg.Log, cleaning: make(chan struct{}, cleaners), opened: make(chan struct{}), failed: make(chan struct{})}
	if e.log == nil {
		e.log = slog.New(slog.DiscardHandler)
	}
	e.containers.byID, e.containers.byName = map[string]*ctr{}, map[string]*ctr{}
	e.execs.m = map[string]*execution{}
	e.events.subs = map[*subscription]bool{}
	e.saver.idle = sync.NewCond(&e.saver.mu)
	defer func() {
		if err != nil {
			close(e.failed)
			e.release()
		}
	}()
	for _, dir := range []struct {
		path string
		mode os.FileMode
	}{{cfg.DataRoot, 0o711}, {cfg.ExecRoot, 0o711}} {
		if err := os.MkdirAll(dir.path, dir.mode); err != nil {
			return nil, fmt.Errorf("making the engine's directories: %w", err)
		}
	}
	if e.lock, err = lockDataRoot(filepath.Join(cfg.DataRoot, "daemon.lock")); err != nil {
		return nil, err
	}
	if err := e.identify(); err != nil {
		return nil, err
	}
	opts := record.Options{Log: e.log}
	if e.containerRecords, err = record.Open[containerRecord](filepath.Join(cfg.DataRoot, "records", "containers"), opts); err != nil {
		return nil, err
	}
	e.volumes = &volumeStore{e: e, m: map[string]*volumeRecord{}, users: map[string]map[string]bool{}}
	if e.volumes.records, err = record.Open[volumeRecord](filepath.Join(cfg.DataRoot, "records", "volumes"), opts); err != nil {
		return nil, err
	}
	e.volumes.load()
	e.load()

	if host == nil {
		host = newAgentHost(&e.cfg)
	}
	e.agent = &link{host: host, log: e.log, version: cfg.Version, handler: e, greeted: e.reconcile}
	if err := e.agent.open(ctx); err != nil {
		return nil, err
	}
	hello := e.agent.greeting()
	e.images, err = openImages(ctx, imagesConfig{
		DataRoot: cfg.DataRoot, Layers: e.agent, Log: e.log, InsecureRegistries: cfg.InsecureRegistries,
		RegistryMirrors: cfg.RegistryMirrors, Version: cfg.Version, Concurrent: cfg.MaxConcurrentDownload, Architecture: hello.Arch,
		Event: e.imageEvent, Running: e.isRunning,
	})
	if err != nil {
		return nil, err
	}
	all := e.containers.all()
	for _, c := range all {
		e.images.use(c.id, c.rec.Image, c.rec.Layers)
	}
	close(e.opened)
	if err := e.images.sweep(ctx); err != nil {
		e.log.Warn("giving back what an earlier daemon left of images", "error", err)
	}
	e.resume(all)
	return e, nil
}

// isOpen waits until Open has come far enough for the agent's news to be handled, and tells whether it did.
func (e *Engine) isOpen() bool {
	select {
	case <-e.opened:
		return true
	case <-e.failed:
		return false
	}
}

// identify reads the engine's id, or makes one.
func (e *Engine) identify() error {
	path := filepath.Join(e.cfg.DataRoot, "engine-id")
	b, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) || err == nil && len(b) == 0 {
		var u [16]byte
		rand.Read(u[:])
		u[6], u[8] = u[6]&0x0f|0x40, u[8]&0x3f|0x80
		b = fmt.Appendf(nil, "%x-%x-%x-%x-%x\n", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
		err = os.WriteFile(path, b, 0o644)
	}
	if err != nil {
		return fmt.Errorf("reading the engine's id: %w", err)
	}
	e.id = strings.TrimSpace(string(b))
	st, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("reading the engine's id: %w", err)
	}
	e.created = st.ModTime()
	return nil
}

// load makes the containers of the records. Nothing runs until the agent has said so.
func (e *Engine) load() {
	list := []*containerRecord{}
	for id, rec := range e.containerRecords.Load() {
		if rec.ID != id || rec.Config == nil || rec.Host == nil {
			e.log.Error("a container's record is not whole and is left alone", "record", id)
			continue
		}
		list = append(list, rec)
	}
	// Oldest first: a name that two have after a crash stays with the one that had it first.
	slices.SortFunc(list, func(a, b *containerRecord) int { return a.Created.Compare(b.Created) })
	for _, rec := range list {
		c := &ctr{id: rec.ID, rec: *rec}
		if other := e.containers.reserve(rec.Name, c); other != nil {
			e.log.Error("two containers have one name; the later one is called by its id", "name", rec.Name, "containers", []string{other.id, c.id})
			c.rec.Name = shortID(c.id)
			e.containers.reserve(c.rec.Name, c)
		}
		e.containers.publish(c)
		e.volumes.adopt(rec)
	}
}

// byFullID returns the container of a whole id, nil if there is none.
func (x *containerIndex) byFullID(id string) *ctr {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.byID[id]
}

// reconcile makes what the engine believes and what a fresh agent says one: at the daemon's start, and whenever the
// agent has been replaced. conn is not used by anyone else yet.
func (e *Engine) reconcile(ctx context.Context, conn *wire.Conn, hello *wire.HelloReply) error {
	told := map[string]*wire.Running{}
	for i := range hello.Containers {
		r := &hello.Containers[i]
		told[r.ID] = r
		if e.containers.byFullID(r.ID) == nil {
			e.disown(r)
		}
	}
	for _, c := range e.containers.all() {
		c.mu.Lock()
		running := c.rec.State.Running && !c.rec.State.Restarting
		run, held, stdin := c.rec.Run, c.held, c.rec.Config.OpenStdin
		c.mu.Unlock()
		r := told[c.id]
		switch {
		case r != nil && r.Exited != nil:
			e.adopt(c, r)
			go e.exited(r.Exited)
		case r != nil:
			e.adopt(c, r)
			e.handOver(ctx, conn, c, run, held, stdin)
		case running && e.handOver(ctx, conn, c, run, held, stdin):
			// It goes on under this agent.
		case running:
			go e.lost(c, run)
		}
	}
	return nil
}

// handOver gives a container of the last agent, and the descriptors kept for that, to this one.
func (e *Engine) handOver(ctx context.Context, conn *wire.Conn, c *ctr, run uint64, held []*os.File, stdin bool) bool {
	files := make([]*os.File, 0, len(held))
	for _, f := range held {
		if f != nil {
			files = append(files, f)
		}
	}
	if len(files) == 0 {
		return false
	}
	f, err := conn.Call(ctx, &wire.Adopt{ID: c.id, Run: run, Stdin: stdin && len(files) == 4}, files...)
	if err := done(f, err); err != nil {
		e.log.Error("the agent cannot adopt a container", "container", c.id, "error", err)
		return false
	}
	return true
}

// adopt takes over what the agent says of a container: the daemon may have died before it could write it down.
func (e *Engine) adopt(c *ctr, r *wire.Running) {
	c.mu.Lock()
	s := &c.rec.State
	if s.Running && c.rec.Run == r.Run && s.Pid == r.Reply.PID {
		s.Paused = r.Paused
		c.mu.Unlock()
		return
	}
	recorded := r.Exited != nil && r.Run == c.rec.Run && !s.Running && s.FinishedAt.UnixNano() == r.Exited.At
	if recorded || r.Run < c.rec.Run { // told again, because the acknowledgement was lost
		c.mu.Unlock()
		return
	}
	c.rec.Run, c.rec.StartedBefore = r.Run, true
	s.Running, s.Restarting, s.Paused, s.OOMKilled, s.Error, s.ExitCode = true, false, r.Paused, false, "", 0
	c.running(&r.Reply)
	c.mu.Unlock()
	if r.StdioLost {
		e.log.Warn("a container goes on, but what it wrote since the agent's end is lost", "container", c.id)
	}
	e.saveSoon(c)
}

// disown ends what an agent holds of a container that the engine does not know: it was removed, or its data root
// belongs to nobody any more.
func (e *Engine) disown(r *wire.Running) {
	e.log.Warn("ending a container without a record", "container", r.ID)
	ack := &wire.Ack{ID: r.ID, Run: r.Run}
	if r.Exited != nil {
		go e.clean(r.ID, ack) // needs the connection that is not everyone's yet
		return
	}
	e.background.start(func() {
		f, err := e.agent.call(context.Background(), &wire.Signal{ID: r.ID, Signal: sigKill, All: true})
		if err := done(f, err); err != nil {
			e.log.Error("ending a container without a record", "container", r.ID, "error", err)
		}
		// Its Exited cleans up.
	})
}

// lost is the end of a container that was running and that no agent knows: the host was started anew, or everything
// died at once. Nobody saw its exit code.
func (e *Engine) lost(c *ctr, run uint64) {
	e.exited(&wire.Exited{ID: c.id, Run: run, Code: 255, At: time.Now().UnixNano(), CodeLost: true})
}

// resume does what an earlier daemon has left undone: removals, health checks and restarts.
func (e *Engine) resume(all []*ctr) {
	slices.SortFunc(all, func(a, b *ctr) int { return a.rec.Created.Compare(b.rec.Created) })
	var again []*ctr
	for _, c := range all {
		c.mu.Lock()
		rec := c.rec
		c.mu.Unlock()
		switch {
		case rec.Dead, !rec.State.Running && rec.Host.AutoRemove && rec.StartedBefore:
			e.background.start(func() {
				c.mu.Lock()
				c.rec.Dead = false
				c.mu.Unlock()
				if err := e.remove(context.Background(), c, c.id, RemoveOptions{Force: true, Volumes: rec.Host.AutoRemove}); err != nil {
					e.log.Error("finishing the removal of a container", "container", c.id, "error", err)
				}
			})
		case rec.State.Running && !rec.State.Restarting:
			e.beginHealth(c, rec.State.Health)
		case startAgain(&rec):
			again = append(again, c)
		}
	}
	if len(again) == 0 {
		return
	}
	e.background.start(func() {
		e.startAll(again)
	})
}

// startAgain tells whether the restart policy starts a stopped container with the daemon: always even after a stop by
// hand, unless-stopped only without one, on-failure if it has failed and has tries left.
func startAgain(rec *containerRecord) bool {
	p := rec.Host.RestartPolicy
	switch {
	case rec.State.Restarting:
		return true
	case !rec.StartedBefore:
		return false
	case p.IsAlways():
		return true
	case p.IsUnlessStopped():
		return !rec.ManualStop
	case p.IsOnFailure():
		return !rec.ManualStop && rec.State.ExitCode != 0 && (p.MaximumRetryCount == 0 || rec.RestartCount < p.MaximumRetryCount)
	}
	return false
}

// startAll starts containers some at a time; those that share another's namespaces come after all others.
func (e *Engine) startAll(list []*ctr) {
	dependent := func(c *ctr) bool {
		h := c.snapshot().Host
		return h.NetworkMode.IsContainer() || h.IpcMode.IsContainer() || h.PidMode.IsContainer()
	}
	for _, second := range []bool{false, true} {
		var wg sync.WaitGroup
		slots := make(chan struct{}, 2*runtime.NumCPU())
		for _, c := range list {
			if dependent(c) != second {
				continue
			}
			slots <- struct{}{}
			wg.Add(1)
			go func() {
				defer wg.Done()
				defer func() { <-slots }()
				c.op.Lock()
				_, err := e.startLocked(context.Background(), c, false)
				c.op.Unlock()
				if err != nil {
					e.log.Error("starting a container with the daemon", "container", c.id, "error", err)
				}
			}()
		}
		wg.Wait()
	}
}

// Close ends the engine as dockerd does at SIGTERM: containers are stopped, unless live-restore says to leave them
// (the agent then goes on). Records are synced. A Close that is cut short, or a kill, loses nothing: the next Open
// finds what runs.
func (e *Engine) Close(ctx context.Context) error {
	if !e.closing.CompareAndSwap(false, true) {
		return nil
	}
	if !e.cfg.LiveRestore {
		e.stopAll(ctx)
	}
	for _, c := range e.containers.all() {
		c.mu.Lock()
		c.restart.reset()
		c.mu.Unlock()
		e.stopHealth(c)
	}
	waitFor(ctx, e.background.wait)
	waitFor(ctx, e.drainSaver)
	e.events.close()
	return e.release()
}

// release gives back what open has taken, as far as it came.
func (e *Engine) release() error {
	var errs []error
	if e.images != nil {
		errs = append(errs, e.images.close())
	}
	if e.agent != nil {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		e.agent.close(ctx, !e.cfg.LiveRestore && e.closing.Load())
		cancel()
	}
	for _, c := range e.containers.all() {
		c.mu.Lock()
		c.hold(nil)
		c.mu.Unlock()
	}
	if e.containerRecords != nil {
		errs = append(errs, e.containerRecords.Close())
	}
	if e.volumes != nil && e.volumes.records != nil {
		errs = append(errs, e.volumes.records.Close())
	}
	if e.lock != nil {
		errs = append(errs, e.lock.Close())
	}
	return errors.Join(errs...)
}

// stopAll stops what runs, side by side, each within its own stop timeout (15 s for those that have none).
func (e *Engine) stopAll(ctx context.Context) {
	var wg sync.WaitGroup
	for _, c := range e.containers.all() {
		rec := c.snapshot()
		if !rec.State.Running {
			continue
		}
		timeout := cmp.Or(e.cfg.ShutdownTimeout, 15)
		if rec.Config.StopTimeout != nil {
			timeout = *rec.Config.StopTimeout
		}
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := e.stop(ctx, c, "", &timeout); err != nil {
				e.log.Error("stopping a container at shutdown", "container", c.id, "error", err)
			}
		}()
	}
	wg.Wait()
}

// waitFor calls f and returns when it has returned or ctx has ended.
func waitFor(ctx context.Context, f func()) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		f()
	}()
	select {
	case <-ended:
	case <-ctx.Done():
	}
}

// close ends all subscriptions.
func (l *eventLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for s := range l.subs {
		l.drop(s)
	}
}

// imageEvent is the image store's way to tell what happens.
func (e *Engine) imageEvent(action, actor, name string, labels map[string]string) {
	m := make(map[string]string, len(labels)+1)
	for k, v := range labels {
		m[k] = v
	}
	m["name"] = name
	e.events.publish(events.ImageEventType, events.Action(action), actor, m)
}

func (e *Engine) isRunning(id string) bool {
	c := e.containers.byFullID(id)
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec.State.Running
}

// tasks counts goroutines that are to be finished before the engine is closed. Unlike a sync.WaitGroup it may be waited
// for while others are still being started.
type tasks struct {
	mu   sync.Mutex
	n    int
	none sync.Cond
}

func (t *tasks) start(f func()) {
	t.mu.Lock()
	t.n++
	t.mu.Unlock()
	go func() {
		defer func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			if t.n--; t.n == 0 && t.none.L != nil {
				t.none.Broadcast()
			}
		}()
		f()
	}()
}

// wait returns at a moment when none runs.
func (t *tasks) wait() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.none.L = &t.mu
	for t.n > 0 {
		t.none.Wait()
	}
}
