package engine

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

// ContainerAttach connects the client to the container's stdio. It returns once the agent has the connection; for one
// that has to be relayed, once it has ended.
func (e *Engine) ContainerAttach(ctx context.Context, ref string, opts AttachOptions, open StreamOpener) error {
	keys, err := detachKeys(opts.DetachKeys)
	if err != nil {
		return invalid("Invalid detach keys (%s) provided", opts.DetachKeys)
	}
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	rec := c.snapshot()
	switch {
	case rec.State.Paused:
		return conflict("container %s is paused, unpause the container before attach", ref)
	case rec.State.Restarting:
		return conflict("container %s is restarting, wait until the container is running", ref)
	}
	if _, err := e.agent.get(ctx); err != nil {
		return fromAgent(err)
	}
	// A client that has seen the answer's header starts the container. Until the agent has the stream that start has
	// to wait, or the output of a quick command is lost.
	unlock := func() {}
	if !rec.State.Running {
		c.op.Lock()
		unlock = sync.OnceFunc(c.op.Unlock)
		defer unlock()
	}
	s, err := openStream(open, rec.Config.Tty)
	if err != nil {
		return err
	}
	m := &wire.Attach{
		ID: c.id, Stdin: opts.Stdin && rec.Config.OpenStdin, Stdout: opts.Stdout, Stderr: opts.Stderr, Framed: !rec.Config.Tty,
		Logs: opts.Logs, Stream: opts.Stream, DetachKeys: keys, Buffered: s.buffered,
	}
	_, err = s.hand(context.WithoutCancel(ctx), e.agent, m)
	unlock()
	if err != nil {
		s.fail(rec.Config.Tty, "Error attaching: "+err.Error()+"\n")
		return nil // the header is out: the stream is the only place left to tell it
	}
	e.containerEvent(c, events.ActionAttach)
	s.wait()
	return nil
}

// stream is a client's connection on its way to the agent.
type stream struct {
	conn     net.Conn
	buffered []byte
	relay    chan struct{} // closed when the relay has ended; nil without one
}

func openStream(open StreamOpener, tty bool) (*stream, error) {
	conn, buffered, err := open(tty)
	if err != nil {
		return nil, err
	}
	return &stream{conn: conn, buffered: buffered}, nil
}

// hand sends m with the connection. After a success the connection is the agent's (or the relay's).
func (s *stream) hand(ctx context.Context, l *link, m wire.Message) (*wire.Frame, error) {
	file, near, err := agentEnd(s.conn)
	if err != nil {
		return nil, internal("handing the connection to the agent: %w", err)
	}
	f, err := l.call(ctx, m, file)
	file.Close()
	if err != nil {
		if near != nil {
			near.Close()
		}
		return nil, fromAgent(err)
	}
	if near == nil {
		s.conn.Close()
	} else {
		s.relay = make(chan struct{})
		go func() {
			defer close(s.relay)
			relay(s.conn, near)
		}()
	}
	return f, nil
}

// fail tells the client, on stdout as Docker does, what went wrong after the answer's header was sent, and closes.
func (s *stream) fail(tty bool, text string) {
	b := []byte(text)
	if !tty {
		b = append(binary.BigEndian.AppendUint32([]byte{1, 0, 0, 0}, uint32(len(b))), b...)
	}
	s.conn.Write(b)
	s.conn.Close()
}

func (s *stream) wait() {
	if s.relay != nil {
		<-s.relay
	}
}

// relay copies between two connections, each direction until its end, and passes half-closes on.
func relay(client, agent net.Conn) {
	defer client.Close()
	defer agent.Close()
	up := make(chan struct{})
	go func() {
		defer close(up)
		io.Copy(agent, client)
		closeWrite(agent)
	}()
	io.Copy(client, agent)
	closeWrite(client)
	// The agent has said all it has to say. What the client still sends, nobody reads.
	client.Close()
	agent.Close()
	<-up
}

func closeWrite(c net.Conn) {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		h.CloseWrite()
	}
}

// detachKeys reads "ctrl-p,ctrl-q" or single characters, as the bytes a terminal sends for them; nil is the default.
func detachKeys(s string) ([]byte, error) {
	if s == "" {
		return []byte{16, 17}, nil // ctrl-p, ctrl-q
	}
	var keys []byte
	for key := range strings.SplitSeq(s, ",") {
		ctrl, isCtrl := strings.CutPrefix(key, "ctrl-")
		switch {
		case len(key) == 1:
			keys = append(keys, key[0])
		case key == "DEL":
			keys = append(keys, 127)
		case !isCtrl || len(ctrl) != 1:
			return nil, invalid("Unknown character: '%s'", key)
		case ctrl[0] >= 'a' && ctrl[0] <= 'z':
			keys = append(keys, ctrl[0]-'a'+1)
		case strings.Contains(`@[\]^_`, ctrl):
			keys = append(keys, ctrl[0]-'@')
		default:
			return nil, invalid("Unknown character: '%s'", key)
		}
	}
	return keys, nil
}

// ContainerLogs returns the log as a stream, already framed unless tty. The reader must close it.
func (e *Engine) ContainerLogs(ctx context.Context, ref string, opts LogsOptions) (io.ReadCloser, bool, error) {
	if !opts.Stdout && !opts.Stderr {
		return nil, false, invalid("You must choose at least one stream")
	}
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, false, err
	}
	c.mu.Lock()
	rec, gone := c.rec, c.removing || c.removed || c.rec.Dead
	c.mu.Unlock()
	if gone {
		return nil, false, conflict("can not get logs from container which is dead or marked for removal")
	}
	if rec.Host.LogConfig.Type == "none" {
		return nil, false, errf(cerrdefs.ErrNotImplemented, "configured logging driver does not support reading")
	}
	tail, err := strconv.ParseInt(opts.Tail, 10, 64)
	if err != nil || tail < 0 {
		tail = -1
	}
	m := &wire.Logs{
		ID: c.id, Log: logConfigOf(rec.Config, rec.Host), Stdout: opts.Stdout, Stderr: opts.Stderr, Framed: !rec.Config.Tty,
		Follow: opts.Follow && rec.State.Running, Timestamps: opts.Timestamps, Details: opts.Details, Tail: tail,
	}
	if !opts.Since.IsZero() {
		m.Since = opts.Since.UnixNano()
	}
	if !opts.Until.IsZero() {
		m.Until = opts.Until.UnixNano()
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, false, internal("making a pipe for the log: %w", err)
	}
	f, err := e.agent.call(ctx, m, w)
	w.Close()
	if err := done(f, err); err != nil {
		r.Close()
		return nil, false, err
	}
	return r, rec.Config.Tty, nil
}

// ContainerResize sets the size of the container's terminal, in characters.
func (e *Engine) ContainerResize(ctx context.Context, ref string, height, width uint32) error {
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	c.mu.Lock()
	running := c.rec.State.Running
	c.mu.Unlock()
	if !running {
		return notRunning(c.id)
	}
	f, err := e.agent.call(ctx, &wire.Resize{ID: c.id, Height: height, Width: width})
	if err := done(f, err); err != nil {
		return err
	}
	e.containerEvent(c, events.ActionResize, "height", strconv.FormatUint(uint64(height), 10), "width", strconv.FormatUint(uint64(width), 10))
	return nil
}
