package engine

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

// ContainerChanges lists what a container changed against its image.
func (e *Engine) ContainerChanges(ctx context.Context, ref string) ([]container.FilesystemChange, error) {
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, err
	}
	rec := c.snapshot()
	s, err := e.openArchive(ctx, &wire.Changes{ID: c.id, Spec: filesSpec(&rec)}, nil)
	if err != nil {
		return nil, err
	}
	defer s.Close()
	kinds := map[byte]container.ChangeType{'C': container.ChangeModify, 'A': container.ChangeAdd, 'D': container.ChangeDelete}
	l := []container.FilesystemChange{}
	for r := bufio.NewReader(s); ; {
		p, err := r.ReadString(0)
		if err == io.EOF {
			return l, nil
		}
		if err != nil {
			return nil, err
		}
		if len(p) < len("A /\x00") {
			return nil, internal("the agent lists a change as %q", p)
		}
		l = append(l, container.FilesystemChange{Kind: kinds[p[0]], Path: p[2 : len(p)-1]})
	}
}

// ContainerExport returns a container's root as a tar, without what is mounted in it. The reader must close it.
func (e *Engine) ContainerExport(ctx context.Context, ref string) (io.ReadCloser, error) {
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, err
	}
	f, err := e.openFiles(ctx, c)
	if err != nil {
		return nil, err
	}
	s, err := e.openArchive(ctx, &wire.Archive{ID: c.id, Spec: f.spec, Export: true}, f.release)
	if err != nil {
		return nil, err
	}
	e.containerEvent(c, events.ActionExport)
	return s, nil
}

// ContainerArchiveStat describes a file in a container: a link itself, and where in the container it leads.
func (e *Engine) ContainerArchiveStat(ctx context.Context, ref, path string) (*container.PathStat, error) {
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, err
	}
	f, stat, err := e.statFiles(ctx, c, path)
	if err != nil {
		return nil, fileError(err, ref, path)
	}
	f.release()
	return stat, nil
}

// ContainerArchiveGet returns a file or a tree of a container as a tar. The reader must close it.
func (e *Engine) ContainerArchiveGet(ctx context.Context, ref, path string) (io.ReadCloser, *container.PathStat, error) {
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, nil, err
	}
	// The description goes into the answer's header and the agent's reply comes behind the tar: two requests.
	f, stat, err := e.statFiles(ctx, c, path)
	if err != nil {
		return nil, nil, fileError(err, ref, path)
	}
	s, err := e.openArchive(ctx, &wire.Archive{ID: c.id, Spec: f.spec, Path: path}, f.release)
	if err != nil {
		return nil, nil, err
	}
	e.containerEvent(c, events.ActionArchivePath)
	return s, stat, nil
}

// ContainerArchivePut unpacks a tar, which may be compressed, in a directory of a container.
func (e *Engine) ContainerArchivePut(ctx context.Context, ref, path string, opts ArchivePutOptions, r io.Reader) error {
	c, err := e.containers.get(ref)
	if err != nil {
		return err
	}
	f, err := e.openFiles(ctx, c)
	if err != nil {
		return err
	}
	defer f.release()
	pr, pw, err := os.Pipe()
	if err != nil {
		return internal("making a pipe for the archive: %w", err)
	}
	broken := make(chan error, 1)
	go func() {
		defer pw.Close()
		broken <- feed(pw, r)
	}()
	m := &wire.Archive{
		ID: c.id, Spec: f.spec, Path: path, Put: true,
		CopyUIDGID: opts.CopyUIDGID, NoOverwriteDirNonDir: opts.NoOverwriteDirNonDir,
	}
	// A client that goes away ends the stream, and the agent with it; it is waited for in any case.
	reply, err := e.agent.call(context.WithoutCancel(ctx), m, pr)
	pr.Close() // from here on a write fails
	if err := done(reply, err); err != nil {
		return fileError(err, ref, path)
	}
	select {
	case err := <-broken:
		if err != nil {
			return invalid("reading the archive: %w", err)
		}
	default: // what a client sends behind the archive's end is nobody's
	}
	e.containerEvent(c, events.ActionExtractToDir)
	return nil
}

// feed copies r to a pipe. An error is one of reading: who reads the pipe may stop when it likes. The pieces of a
// request's body are small, so they are gathered.
func feed(w *os.File, r io.Reader) error {
	buf := make([]byte, 256<<10)
	for {
		n := 0
		var err error
		for n < len(buf) && err == nil {
			var m int
			m, err = r.Read(buf[n:])
			n += m
		}
		if _, werr := w.Write(buf[:n]); werr != nil {
			return nil
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// filesSpec is what the agent needs to know to mount the root of a container that does not run.
func filesSpec(rec *containerRecord) *wire.Run {
	r := &wire.Run{ID: rec.ID, Name: rec.Name, Layers: rec.Layers, ReadOnly: rec.Host.ReadonlyRootfs, User: rec.Config.User}
	for i := range rec.Mounts {
		r.Mounts = append(r.Mounts, rec.Mounts[i].wire())
	}
	return r
}

// openedFiles is the right to work on a container's files.
type openedFiles struct {
	spec    *wire.Run // nil: it runs, and its own root is meant
	release func()
}

// openFiles finds out how to get at the container's files. While it runs nothing is held: its root stays for who has
// it open. If it does not, it is kept from being started or removed until release, as two mounts of one writable layer
// would not see each other's changes.
func (e *Engine) openFiles(ctx context.Context, c *ctr) (*openedFiles, error) {
	f, _, err := e.statFiles(ctx, c, "/")
	return f, err
}

// statFiles is openFiles, and describes a path. After an error nothing is held.
func (e *Engine) statFiles(ctx context.Context, c *ctr, path string) (*openedFiles, *container.PathStat, error) {
	c.mu.Lock()
	running := c.rec.State.Running && !c.rec.State.Restarting
	c.mu.Unlock()
	if running {
		stat, err := e.statPath(ctx, &wire.Archive{ID: c.id, Path: path, Stat: true})
		if err == nil || wire.ClassOf(err) != wire.Conflict {
			return &openedFiles{release: func() {}}, stat, err
		}
		// It has just ended, and its exit may not have been handled yet.
	}
	c.op.Lock()
	f := &openedFiles{release: sync.OnceFunc(c.op.Unlock)}
	c.mu.Lock()
	rec, gone := c.rec, c.removing || c.removed || c.rec.Dead
	c.mu.Unlock()
	if gone {
		f.release()
		return nil, nil, conflict("container %s is marked for removal", c.id)
	}
	f.spec = filesSpec(&rec)
	stat, err := e.statPath(ctx, &wire.Archive{ID: c.id, Spec: f.spec, Path: path, Stat: true})
	if err != nil {
		f.release()
		return nil, nil, err
	}
	if !running && rec.State.Running && !rec.State.Restarting { // started before we had the lock
		f.release()
		f.spec = nil
	}
	return f, stat, nil
}

func (e *Engine) statPath(ctx context.Context, m *wire.Archive) (*container.PathStat, error) {
	f, err := e.agent.call(ctx, m)
	r, err := reply[*wire.ArchiveReply](f, err)
	if err != nil {
		return nil, err
	}
	return &container.PathStat{Name: r.Name, Size: r.Size, Mode: fs.FileMode(r.Mode), Mtime: time.Unix(0, r.ModTime), LinkTarget: r.LinkTarget}, nil
}

// fileError finishes the text of what is not there, as the agent does not know what the client calls the container.
func fileError(err error, ref, path string) error {
	var we *wire.Error
	if errors.As(err, &we) && we.Class == wire.NotFound && strings.HasPrefix(we.Text, "Could not find the file ") {
		return notFound("Could not find the file %s in container %s", path, ref)
	}
	return err
}

// archiveStream is a stream that the agent writes. Its end is only told once the agent has said that it is whole.
type archiveStream struct {
	*os.File
	done chan struct{} // closed when err is final
	err  error
}

// openArchive sends m with the far end of a stream; release, if there is one, is called when the agent is done.
func (e *Engine) openArchive(ctx context.Context, m wire.Message, release func()) (*archiveStream, error) {
	if release == nil {
		release = func() {}
	}
	r, w, err := os.Pipe()
	if err != nil {
		release()
		return nil, internal("making a pipe for the archive: %w", err)
	}
	s := &archiveStream{File: r, done: make(chan struct{})}
	go func() {
		defer release()
		// Closing the near end is what stops the agent; it is waited for in any case.
		f, err := e.agent.call(context.WithoutCancel(ctx), m, w)
		s.err = done(f, err)
		close(s.done)
		w.Close() // only now can there be an end to read
	}()
	return s, nil
}

// Read is the pipe's; at its end comes the agent's error, if there is one.
func (s *archiveStream) Read(p []byte) (int, error) {
	n, err := s.File.Read(p)
	if err == io.EOF {
		<-s.done
		if s.err != nil {
			err = s.err
		}
	}
	return n, err
}
