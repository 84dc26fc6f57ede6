//go:build linux

package agent

import (
	"context"

	"runkiri.com/kiri/internal/wire"
)

// Why each request is safe. The daemon is trusted with what the host's root may do, as Docker's is; what is not
// trusted are the names, trees, bytes and processes of containers that a request makes us touch.
//
//	Hello        No effect but on the connection itself. Anything else is refused before it.
//	Retire       The agent ends; containers have all they need to go on.
//	Ack          Forgets an exit that the daemon has recorded; a run number keeps it from hitting a later run.
//	Adopt        The descriptors' kind is not believed: pipes and pidfds are compared with the state file.
//	Run          The id is checked to be 64 hex digits before it becomes a file name. The image's tree is only seen
//	             through descriptors resolved inside its root; bind sources are descriptors from the moment they are
//	             opened; until execve the child is in a PID namespace that nobody hostile is in.
//	Exec         Made by the template process, which shares no memory with us, with the container's rights.
//	Signal       Goes through a pidfd: a pid that has been given to another process is never hit.
//	Freeze, Update, Stats, Top
//	             Only touch the cgroup made for the container, by descriptor.
//	Resize       One ioctl on a terminal that we opened ourselves.
//	Attach, Logs Only move bytes. What a client or a container keeps waiting is bounded (maxQueue, maxEarly).
//	Plan         Text.
//	Remove       Deletes below the container's own directory, by descriptors that follow no link; refused while it runs.
//	Archive, Changes
//	             Resolve inside the root by descriptor (rootfs). The root of a container that does not run is mounted
//	             for the request alone, detached from everything.
//	Unpack       In a child that has nothing but the layer's directory (rootfs).
//	Layers, RemoveLayer, Volume, RemoveVolume
//	             Names are checked by rootfs before they become file names.

// session is one connection from a daemon. It implements wire.Handler.
type session struct {
	a     *Agent
	conn  *wire.Conn
	ready chan struct{} // closed when conn is set
}

// Request answers one request.
func (s *session) Request(ctx context.Context, f *wire.Frame) (*wire.Frame, error) {
	<-s.ready
	a := s.a
	if m, ok := f.Msg.(*wire.Hello); ok {
		return a.hello(s, m)
	}
	if _, ok := f.Msg.(*wire.Retire); ok {
		return a.retire() // also from a daemon of another version, which cannot say Hello
	}
	if !a.isDaemon(s.conn) {
		return nil, wire.Errorf(wire.Conflict, "%T before Hello", f.Msg)
	}
	switch m := f.Msg.(type) {
	case *wire.Ack:
		return a.ack(m)
	case *wire.Adopt:
		return a.adoptRequest(ctx, m, f)
	case *wire.Run:
		return a.runRequest(ctx, m)
	case *wire.Exec:
		return a.execRequest(ctx, m, f)
	case *wire.Signal:
		return a.signalRequest(m)
	case *wire.Freeze:
		return a.freeze(m)
	case *wire.Update:
		return a.update(m)
	case *wire.Resize:
		return a.resize(m)
	case *wire.Attach:
		return a.attachRequest(ctx, m, f)
	case *wire.Logs:
		return a.logsRequest(ctx, m, f)
	case *wire.Stats:
		return a.stats(m)
	case *wire.Top:
		return a.top(m)
	case *wire.Plan:
		return a.plan(m)
	case *wire.Remove:
		return a.remove(m)
	case *wire.Archive:
		return a.archiveRequest(ctx, m, f)
	case *wire.Changes:
		return a.changes(ctx, m, f)
	case *wire.Unpack:
		return a.unpack(ctx, m, f)
	case *wire.Layers:
		return a.layers()
	case *wire.RemoveLayer:
		a.roots.drain()
		return okOr(a.store.RemoveLayer(m.DiffID))
	case *wire.Volume:
		return a.volume(m)
	case *wire.RemoveVolume:
		return okOr(a.store.RemoveVolume(m.Name))
	}
	return nil, wire.Errorf(wire.Unsupported, "%T: this agent does not know it", f.Msg)
}

// Event takes an unasked frame. Ack may come as one: nobody waits for it.
func (s *session) Event(f *wire.Frame) {
	f.Close()
	if m, ok := f.Msg.(*wire.Ack); ok {
		go func() {
			<-s.ready
			if s.a.isDaemon(s.conn) {
				s.a.ack(m)
			}
		}()
	}
}

func okFrame() *wire.Frame { return &wire.Frame{Msg: &wire.OK{}} }

func okOr(err error) (*wire.Frame, error) {
	if err != nil {
		return nil, err
	}
	return okFrame(), nil
}
