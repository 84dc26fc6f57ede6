package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"runkiri.com/kiri/internal/wire"
)

// Rules of the link to the agent.
const (
	agentStartTimeout = 15 * time.Second // from the start of its process until it answers
	agentWait         = 20 * time.Second // how long a call waits for an agent that is being started again
	agentSteady       = 10 * time.Second // one that lived this long and dies is started again at once
	agentBackoff      = 100 * time.Millisecond
	agentBackoffMax   = 5 * time.Second
)

// agentHost starts an agent and finds the one that runs: what depends on where agents live.
type agentHost interface {
	// dial connects to an agent that runs; os.ErrNotExist or a refused connection says that none does.
	dial(ctx context.Context) (net.Conn, error)
	// start starts one that will soon accept dial. gone is closed if its process ends.
	start() (gone <-chan struct{}, err error)
}

// link is the daemon's connection to its agent: it adopts one that runs, starts one if there is none, and starts
// another when it dies. One goroutine sleeps on the connection's end.
type link struct {
	host    agentHost
	log     *slog.Logger
	version string
	handler wire.Handler
	// greeted reconciles what the engine believes with what a fresh agent says, before any other call can use conn.
	greeted func(ctx context.Context, conn *wire.Conn, hello *wire.HelloReply) error

	mu     sync.Mutex
	conn   *wire.Conn // nil while there is none
	hello  *wire.HelloReply
	change chan struct{} // closed, and replaced, when conn or err changes
	err    error         // why the last attempt failed, nil while one is under way or conn stands
	closed bool

	stop context.CancelFunc
	done chan struct{} // closed when the supervisor has ended
}

// open connects for the first time and begins to supervise. An error here is the daemon's own.
func (l *link) open(ctx context.Context) error {
	l.change = make(chan struct{})
	l.done = make(chan struct{})
	sctx, stop := context.WithCancel(context.Background())
	l.stop = stop
	conn, err := l.connect(ctx)
	if err != nil {
		stop()
		close(l.done)
		return err
	}
	go l.supervise(sctx, conn)
	return nil
}

// supervise lives as long as the engine: when a connection ends it makes the next one.
func (l *link) supervise(ctx context.Context, conn *wire.Conn) {
	defer close(l.done)
	backoff := time.Duration(0)
	for {
		since := time.Now()
		select {
		case <-conn.Done():
		case <-ctx.Done():
			return
		}
		l.set(nil, nil, nil)
		if ctx.Err() != nil {
			return
		}
		l.log.Warn("the connection to the agent has ended; starting another", "cause", conn.Err())
		if time.Since(since) >= agentSteady {
			backoff = 0
		}
		for conn = nil; conn == nil; {
			if backoff > 0 {
				select {
				case <-time.After(backoff):
				case <-ctx.Done():
					return
				}
			}
			backoff = min(max(backoff*2, agentBackoff), agentBackoffMax)
			next, err := l.connect(ctx)
			if err != nil {
				if ctx.Err() != nil {
					return
				}
				l.log.Error("no agent", "error", err)
				l.set(nil, nil, err)
				continue
			}
			conn = next
		}
	}
}

// connect greets the agent that runs, or starts one. One of another version is retired first.
func (l *link) connect(ctx context.Context) (*wire.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, agentStartTimeout)
	defer cancel()
	var gone <-chan struct{}
	pause := time.Millisecond
	retired := 0
	for {
		c, err := l.host.dial(ctx)
		if err != nil {
			if gone == nil {
				if gone, err = l.host.start(); err != nil {
					return nil, fmt.Errorf("starting the agent: %w", err)
				}
				continue
			}
			// It is not listening yet. There is nothing to wait on but the socket itself.
			select {
			case <-gone:
				if retired > 0 && ctx.Err() == nil {
					// The one that was retired has let go of the connection, and not yet of the exec root.
					gone = nil
					time.Sleep(pause)
					pause = min(pause*2, 20*time.Millisecond)
					continue
				}
				return nil, fmt.Errorf("starting the agent: its process ended at once (its log is in the exec root)")
			case <-ctx.Done():
				return nil, fmt.Errorf("starting the agent: it does not listen after %v: %w", agentStartTimeout, err)
			case <-time.After(pause):
			}
			pause = min(pause*2, 20*time.Millisecond)
			continue
		}
		conn := wire.NewConn(c, l.handler)
		hello, err := wire.CallFor[*wire.HelloReply](ctx, conn, &wire.Hello{Version: wire.Version, Daemon: l.version})
		// The release is compared only of an agent that ran before: one just started is what this installation has.
		if err == nil && hello.Version == wire.Version && (hello.Agent == l.version || gone != nil) {
			if err = l.greeted(ctx, conn, hello); err != nil {
				conn.Close()
				return nil, fmt.Errorf("adopting what the agent holds: %w", err)
			}
			l.set(conn, hello, nil)
			return conn, nil
		}
		if err != nil {
			conn.Close()
			// An agent that runs already and gives no answer that can be read is one of another version.
			if gone != nil || wire.ClassOf(err) == wire.Conflict || retired > 0 {
				return nil, fmt.Errorf("greeting the agent: %w", err)
			}
			if c, err = l.host.dial(ctx); err != nil {
				continue
			}
			conn = wire.NewConn(c, l.handler)
		} else {
			l.log.Info("replacing the agent", "its version", hello.Agent, "ours", l.version)
		}
		if retired++; retired > 2 {
			conn.Close()
			return nil, errors.New("greeting the agent: it stays the wrong version after it was retired: is kiri-init of this release?")
		}
		if _, err := conn.Call(ctx, &wire.Retire{}); err != nil && wire.ClassOf(err) != wire.Unavailable {
			conn.Close()
			return nil, fmt.Errorf("retiring an agent of another version: %w", err)
		}
		select {
		case <-conn.Done():
		case <-ctx.Done():
		}
		conn.Close()
		gone = nil
	}
}

func (l *link) set(conn *wire.Conn, hello *wire.HelloReply, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.conn, l.err = conn, err
	if hello != nil {
		l.hello = hello
	}
	close(l.change)
	l.change = make(chan struct{})
}

// get returns the connection, waiting a while for one that is being made.
func (l *link) get(ctx context.Context) (*wire.Conn, error) {
	l.mu.Lock()
	if c := l.conn; c != nil && c.Err() == nil {
		l.mu.Unlock()
		return c, nil
	}
	l.mu.Unlock()
	timer := time.NewTimer(agentWait)
	defer timer.Stop()
	for {
		l.mu.Lock()
		conn, change, err, closed := l.conn, l.change, l.err, l.closed
		l.mu.Unlock()
		if conn != nil && conn.Err() == nil { // one that has ended is about to be replaced
			return conn, nil
		}
		if closed {
			return nil, wire.Errorf(wire.Unavailable, "the engine is shutting down")
		}
		select {
		case <-change:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for the agent: %w", context.Cause(ctx))
		case <-timer.C:
			if err == nil {
				err = errors.New("it is being started")
			}
			return nil, wire.Errorf(wire.Unavailable, "the agent does not answer: %v", err)
		}
	}
}

// call sends m and waits for the answer. A call that can be repeated without harm is, if the agent dies under it.
func (l *link) call(ctx context.Context, m wire.Message, files ...*os.File) (*wire.Frame, error) {
	for try := 0; ; try++ {
		conn, err := l.get(ctx)
		if err != nil {
			return nil, err
		}
		f, err := conn.Call(ctx, m, files...)
		if err == nil || try == 2 || !errors.Is(err, wire.ErrClosed) || !repeatable(m) {
			return f, err
		}
	}
}

// repeatable tells whether doing m twice is doing it once.
func repeatable(m wire.Message) bool {
	switch m := m.(type) {
	case *wire.Freeze, *wire.Update, *wire.Resize, *wire.Stats, *wire.Top, *wire.Plan, *wire.Remove,
		*wire.Layers, *wire.RemoveLayer, *wire.Volume, *wire.RemoveVolume, *wire.Logs:
		return true
	case *wire.Signal:
		return m.Signal == sigKill
	case *wire.Changes:
		return m.Size // half a list may be out
	}
	return false
}

// notify sends m, unasked, if there is an agent.
func (l *link) notify(m wire.Message) {
	l.mu.Lock()
	conn := l.conn
	l.mu.Unlock()
	if conn != nil {
		conn.Notify(m) // an error ends the connection, which the supervisor sees
	}
}

// greeting returns what the agent told of itself; the last one's while there is none.
func (l *link) greeting() *wire.HelloReply {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hello == nil {
		return &wire.HelloReply{}
	}
	return l.hello
}

// close ends the supervision and the connection. With retire the agent is asked to end too; what it runs goes on.
func (l *link) close(ctx context.Context, retire bool) {
	l.mu.Lock()
	conn := l.conn
	l.closed = true
	l.mu.Unlock()
	if l.stop == nil {
		return
	}
	l.stop()
	<-l.done
	if conn == nil {
		return
	}
	if retire {
		if _, err := conn.Call(ctx, &wire.Retire{}); err != nil {
			l.log.Warn("the agent did not retire", "error", err)
		}
	}
	conn.Close()
	l.set(nil, nil, nil)
}

// Unpack, Layers and RemoveLayer make the link the image store's LayerStore.
func (l *link) Unpack(ctx context.Context, m *wire.Unpack, stream *os.File) (*wire.UnpackReply, error) {
	f, err := l.call(ctx, m, stream)
	return reply[*wire.UnpackReply](f, err)
}

// Layers lists the agent's layers.
func (l *link) Layers(ctx context.Context) ([]wire.UnpackReply, error) {
	f, err := l.call(ctx, &wire.Layers{})
	r, err := reply[*wire.LayersReply](f, err)
	if err != nil {
		return nil, err
	}
	return r.Layers, nil
}

// RemoveLayer deletes a layer.
func (l *link) RemoveLayer(ctx context.Context, diffID string) error {
	f, err := l.call(ctx, &wire.RemoveLayer{DiffID: diffID})
	return done(f, err)
}

// reply returns the message of an answer that brings no descriptors, with the error sorted.
func reply[R wire.Message](f *wire.Frame, err error) (R, error) {
	var zero R
	if err != nil {
		return zero, fromAgent(err)
	}
	f.Close()
	r, ok := f.Msg.(R)
	if !ok {
		return zero, internal("the agent answered with %T", f.Msg)
	}
	return r, nil
}

// done is reply for answers that say only that it is done.
func done(f *wire.Frame, err error) error {
	if err != nil {
		return fromAgent(err)
	}
	f.Close()
	return nil
}

// agentSocket is where the host's agent listens.
func agentSocket(execRoot string) string { return filepath.Join(execRoot, "agent.sock") }
