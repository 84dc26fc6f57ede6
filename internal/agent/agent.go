//go:build linux

package agent

import (
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/cgroup"
	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/network"
	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// Config says where an agent keeps its things.
type Config struct {
	DataRoot string         // durable: layers, writable layers, logs, volumes
	ExecRoot string         // until reboot: the socket, state files, spools
	Network  network.Config // the default bridge
	Version  string
}

// Agent is the supervisor. Its mutex guards the maps; what is inside a container has locks of its own (container.mu,
// output.mu, stream.mu), and Agent.mu is never taken while one of those is held.
type Agent struct {
	cfg     Config
	store   *rootfs.Store
	host    *cgroup.Host
	cgroups *cgroup.Manager
	net     *network.Network
	loop    *loop
	self    *os.File // this program, sealed: what --init runs

	template *launch.Template

	cells   cells
	roots   roots
	cleaner cleaner
	quiet   quiet
	calm    calm

	sandboxes sandboxes

	mu         sync.Mutex
	containers map[string]*container
	procs      map[int]*process       // our children that matter, by pid
	starting   int                    // starts under way, whose children may end before they are in procs
	strays     map[int]exitStatus     // children that ended while starts were under way and nobody knew them
	early      map[string]*earlyStdio // what came for containers before their Run
	daemon     *wire.Conn             // the daemon that has said Hello
	born       chan struct{}          // holds one: there are children again
	retired    chan struct{}          // closed when the agent is to end; nil before Serve and after
}

// initProgram is what --init runs as PID 1 in a container: this program. Only a test, whose own binary may need a dynamic
// loader that no image has, says otherwise.
var initProgram = "/proc/self/exe"

// New opens what is there below the roots and finds what an earlier agent left. Nothing listens yet.
func New(cfg Config) (a *Agent, err error) {
	a = &Agent{
		cfg:        cfg,
		containers: map[string]*container{},
		procs:      map[int]*process{},
		strays:     map[int]exitStatus{},
		early:      map[string]*earlyStdio{},
		born:       make(chan struct{}, 1),
	}
	defer func() {
		if err != nil {
			a.closeAll()
		}
	}()
	if err := os.MkdirAll(a.stateRoot(), 0o700); err != nil {
		return nil, fmt.Errorf("making the exec root: %w", err)
	}
	if a.self, err = os.Open(initProgram); err != nil {
		return nil, fmt.Errorf("opening this program: %w", err)
	}
	if a.loop, err = newLoop(); err != nil {
		return nil, err
	}
	if a.host, err = cgroup.Detect(); err != nil {
		return nil, err
	}
	if a.cgroups, err = a.host.Open(cgroupParent(cfg.ExecRoot)); err != nil {
		return nil, err
	}
	if a.net, err = network.Open(cfg.Network); err != nil {
		return nil, err
	}
	if a.store, err = rootfs.OpenStore(cfg.DataRoot); err != nil {
		return nil, err
	}
	if a.template, err = launch.NewTemplate(); err != nil {
		return nil, err
	}
	a.cells.init(a)
	a.roots.init(a)
	a.cleaner.init()
	if err := a.findContainers(); err != nil {
		return nil, err
	}
	if err := a.net.Adopted(); err != nil {
		return nil, err
	}
	go a.reap()
	a.active() // the start itself has touched much that is not needed again
	return a, nil
}

// cgroupParent is the name of this agent's place in the cgroup trees. Agents with other exec roots have others.
func cgroupParent(execRoot string) string {
	h := fnv.New32a()
	h.Write([]byte(execRoot))
	s := strconv.FormatUint(uint64(h.Sum32()), 16)
	return "/kiri-" + "00000000"[len(s):] + s
}

// closeAll gives back what New has opened. Containers go on.
func (a *Agent) closeAll() {
	a.cells.drain()
	a.roots.drain()
	if a.template != nil {
		a.template.Close()
	}
	if a.store != nil {
		a.store.Close()
	}
	if a.net != nil {
		a.net.Close()
	}
	if a.cgroups != nil {
		a.cgroups.Close()
	}
	if a.loop != nil {
		a.loop.close()
	}
	if a.self != nil {
		a.self.Close()
	}
}

// logf writes a line to the agent's own log, its standard error.
func (a *Agent) logf(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s kiri-init: %s\n", time.Now().UTC().Format("2006-01-02T15:04:05.000Z"), fmt.Sprintf(format, args...))
}

// notify tells the daemon, if there is one. What it must know is kept elsewhere until it has said so.
func (a *Agent) notify(m wire.Message) {
	a.mu.Lock()
	d := a.daemon
	a.mu.Unlock()
	if d != nil {
		d.Notify(m)
	}
}

// find returns the container, or an error of class NotFound.
func (a *Agent) find(id string) (*container, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.containers[id]; c != nil {
		return c, nil
	}
	return nil, wire.Errorf(wire.NotFound, "no container %s here", short(id))
}

// findRunning returns a container whose main process runs; Conflict if it does not.
func (a *Agent) findRunning(id string) (*container, error) {
	c, err := a.find(id)
	if err != nil {
		return nil, wire.Errorf(wire.Conflict, "container %s is not running", short(id))
	}
	if c.phase.Load() != phaseRunning {
		return nil, wire.Errorf(wire.Conflict, "container %s is not running", short(id))
	}
	return c, nil
}

func short(id string) string { return id[:min(len(id), 12)] }

// validID keeps ids from being anything but a file name of ours.
func validID(id string) error {
	if len(id) != 64 {
		return wire.Errorf(wire.Invalid, "container id %q: want 64 hex digits", short(id))
	}
	for _, c := range []byte(id) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return wire.Errorf(wire.Invalid, "container id %q: want 64 hex digits", short(id))
		}
	}
	return nil
}

// stateRoot holds a directory for each run of a container, and for each cell that waits for one.
func (a *Agent) stateRoot() string { return filepath.Join(a.cfg.ExecRoot, "containers") }

func (a *Agent) logPath(id string) string { return logName(a.store.ContainerDir(id), id) }

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
