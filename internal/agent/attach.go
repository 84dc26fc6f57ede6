//go:build linux

package agent

import (
	"context"
	"fmt"
	"os"

	"runkiri.com/kiri/internal/wire"
)

// earlyStdio is what has come for a container (or an exec) before it runs.
type earlyStdio struct {
	streams       []earlyStream
	height, width uint32
}

type earlyStream struct {
	stream   *stream
	stdin    bool
	keys     []byte
	buffered []byte
}

// maxEarly bounds how many containers and execs may have something waiting, and maxEarlyStreams for one of them: what
// never starts must not fill memory. A client that goes away takes its own off.
const (
	maxEarly        = 4096
	maxEarlyStreams = 64
)

// close ends the streams: the start has failed.
func (e *earlyStdio) close() {
	for _, s := range e.streams {
		s.stream.close()
	}
}

// release lets input flow: the process runs.
func (e *earlyStdio) release() {
	for _, s := range e.streams {
		s.stream.begin()
	}
}

// takeEarly takes what waits for id.
func (a *Agent) takeEarly(id string) *earlyStdio {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.early[id]
	if e == nil {
		return &earlyStdio{}
	}
	delete(a.early, id)
	return e
}

// earlyFor returns what waits for id, to add to. The caller holds a.mu.
func (a *Agent) earlyFor(id string) (*earlyStdio, error) {
	e := a.early[id]
	if e == nil {
		if len(a.early) >= maxEarly {
			return nil, wire.Errorf(wire.Conflict, "too many clients wait for containers to start")
		}
		e = &earlyStdio{}
		a.early[id] = e
	}
	return e, nil
}

// dropEarly takes a stream off whose client is gone.
func (a *Agent) dropEarly(id string, s *stream) {
	a.mu.Lock()
	defer a.mu.Unlock()
	e := a.early[id]
	if e == nil {
		return
	}
	for i := range e.streams {
		if e.streams[i].stream == s {
			e.streams = append(e.streams[:i], e.streams[i+1:]...)
			break
		}
	}
	if len(e.streams) == 0 && e.height == 0 && e.width == 0 {
		delete(a.early, id)
	}
}

func (a *Agent) attachRequest(_ context.Context, m *wire.Attach, f *wire.Frame) (*wire.Frame, error) {
	if err := validID(m.ID); err != nil {
		return nil, err
	}
	file := f.Take(0)
	if file == nil {
		return nil, wire.Errorf(wire.Invalid, "attach without a stream")
	}
	s, err := newStream(a.loop, file, m.Framed)
	if err != nil {
		return nil, err
	}
	s.want = [2]bool{m.Stdout, m.Stderr}
	s.early = true
	if !m.Stream {
		if err := a.replayOnly(s, m); err != nil {
			s.close()
			return nil, err
		}
		return okFrame(), nil
	}
	if err := a.attach(s, m); err != nil {
		s.close()
		return nil, err
	}
	if err := s.start(); err != nil {
		s.close()
		return nil, err
	}
	return okFrame(), nil
}

// attach puts s at its container, now or when it starts.
func (a *Agent) attach(s *stream, m *wire.Attach) error {
	for {
		a.mu.Lock()
		c := a.containers[m.ID]
		if c == nil || c.phase.Load() >= phaseExiting {
			e, err := a.earlyFor(m.ID)
			if err == nil && len(e.streams) >= maxEarlyStreams {
				err = wire.Errorf(wire.Conflict, "too many clients wait for container %s to start", short(m.ID))
			}
			if err == nil {
				e.streams = append(e.streams, earlyStream{s, m.Stdin, m.DetachKeys, m.Buffered})
				s.onGone = func() { a.dropEarly(m.ID, s) }
			}
			a.mu.Unlock()
			return err
		}
		a.mu.Unlock()
		if c.phase.Load() == phaseStarting {
			// Its start takes milliseconds; what it took from early has been taken, so wait for the outcome.
			<-c.decided
			continue
		}
		if !m.Logs {
			c.main.connect(s, m.Stdin, m.DetachKeys, m.Buffered)
			s.begin()
			return nil
		}
		return a.attachWithLogs(c, s, m)
	}
}

// connect joins a client and a process. Input flows after begin.
func (p *process) connect(s *stream, stdin bool, keys, buffered []byte) {
	if p.join(s, stdin, keys, buffered) {
		p.out.attach(s)
	}
}

// join gives s its process; false if the client is gone already.
func (p *process) join(s *stream, stdin bool, keys, buffered []byte) bool {
	var in *stdinEnd
	if stdin {
		in = p.in
	}
	out := p.out
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		in.sourceEnded()
		return false
	}
	if in != nil {
		s.input = in
		s.pending = append(s.pending, buffered...)
		if in.tty {
			s.detach = keys
		}
	}
	s.wokenOut = out.task.kick
	s.onGone = func() {
		out.detach(s)
		in.sourceEnded()
	}
	return true
}

// attachWithLogs replays the log and then follows: no byte is missing or doubled where the two meet.
func (a *Agent) attachWithLogs(c *container, s *stream, m *wire.Attach) error {
	q := &wire.Logs{ID: m.ID, Stdout: m.Stdout, Stderr: m.Stderr, Framed: m.Framed, Tail: -1}
	s.hold()
	if !c.main.join(s, m.Stdin, m.DetachKeys, m.Buffered) {
		return nil
	}
	out := c.main.out
	out.mu.Lock()
	// Under the output's lock the log, and the unfinished lines that wait in the spools, are all that has come out.
	var files []*os.File
	var err error
	limit := int64(-1)
	if out.log != nil {
		files, limit, err = out.log.follow(nil)
	} else {
		files, err = openLogs(a.logPath(m.ID))
	}
	tails := [2][]byte{out.unfinished(0), out.unfinished(1)}
	ended := out.ended
	if err == nil && !ended {
		out.sinks = append(out.sinks, s)
	}
	out.mu.Unlock()
	if err != nil {
		return fmt.Errorf("reading the log of container %s: %w", short(m.ID), err)
	}
	if ended {
		s.finish()
	}
	go func() {
		r := &logReader{q: q, out: s.replay(), files: files, limit: limit}
		err := r.run()
		for i, t := range tails {
			if err == nil && len(t) > 0 && s.want[i] {
				_, err = s.replay().Write(append(s.header(i, len(t)), t...))
			}
		}
		if err != nil {
			s.close()
			return
		}
		s.release()
		s.begin()
	}()
	return nil
}

// replayOnly writes the log to the client and ends the stream.
func (a *Agent) replayOnly(s *stream, m *wire.Attach) error {
	if !m.Logs {
		s.close()
		return nil
	}
	q := &wire.Logs{ID: m.ID, Stdout: m.Stdout, Stderr: m.Stderr, Framed: m.Framed, Tail: -1}
	files, err := openLogs(a.logPath(m.ID))
	if err != nil {
		return fmt.Errorf("reading the log of container %s: %w", short(m.ID), err)
	}
	s.hold()
	if err := s.start(); err != nil {
		closeAll(files)
		return err
	}
	go func() {
		r := &logReader{q: q, out: s.replay(), files: files, limit: -1}
		if err := r.run(); err != nil {
			a.logf("replaying the log of container %s: %v", short(m.ID), err)
		}
		s.close()
	}()
	return nil
}
