//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// archivePipe is the size in bytes asked for a stream that is a pipe: with the usual 64 KiB each filling is a change
// of process.
const archivePipe = 1 << 20

// archiveRequest copies files in and out of a container, running or not, and answers when it is done.
func (a *Agent) archiveRequest(ctx context.Context, m *wire.Archive, f *wire.Frame) (*wire.Frame, error) {
	if err := validID(m.ID); err != nil {
		return nil, err
	}
	stream := f.Take(0)
	if stream == nil && !m.Stat {
		return nil, wire.Errorf(wire.Invalid, "archive without a stream")
	}
	if stream != nil {
		defer stream.Close()
		defer a.active()
		unix.FcntlInt(stream.Fd(), unix.F_SETPIPE_SZ, archivePipe) // it may be no pipe, or refuse: no matter
	}
	if m.Layer {
		run, err := a.runOf(m.ID, m.Spec)
		if err != nil {
			return nil, err
		}
		if err := a.store.Layer(ctx, m.ID, run.Layers, mountTargets(run), stream); err != nil {
			return nil, err
		}
		return &wire.Frame{Msg: &wire.ArchiveReply{}}, nil
	}
	r, err := a.openFiles(m)
	if err != nil {
		return nil, err
	}
	defer r.close()
	reply := &wire.ArchiveReply{}
	switch {
	case m.Stat:
		reply, err = rootfs.Stat(r.dir, m.Path)
	case m.Export:
		err = rootfs.Export(ctx, r.dir, stream)
	case m.Put:
		err = r.put(ctx, m, stream)
	default:
		reply, err = rootfs.Get(ctx, r.dir, m.Path, stream)
	}
	if err != nil {
		return nil, err
	}
	return &wire.Frame{Msg: reply}, nil
}

// changes lists what a container changed, or counts it.
func (a *Agent) changes(ctx context.Context, m *wire.Changes, f *wire.Frame) (*wire.Frame, error) {
	if m.Size {
		n, err := a.store.Size(m.ID)
		if err != nil {
			return nil, err
		}
		return &wire.Frame{Msg: &wire.ChangesReply{Size: n}}, nil
	}
	out := f.Take(0)
	if out == nil {
		return nil, wire.Errorf(wire.Invalid, "changes without a stream")
	}
	defer out.Close()
	defer a.active()
	run, err := a.runOf(m.ID, m.Spec)
	if err != nil {
		return nil, err
	}
	list, err := a.store.Changes(ctx, m.ID, run.Layers, mountTargets(run))
	if err != nil {
		return nil, err
	}
	const chunk = 64 << 10
	var buf []byte
	for i, p := range list {
		buf = append(append(buf, p...), 0)
		if len(buf) < chunk && i < len(list)-1 {
			continue
		}
		if _, err := out.Write(buf); err != nil {
			return nil, fmt.Errorf("listing changes: %w", err)
		}
		buf = buf[:0]
	}
	return &wire.Frame{Msg: &wire.ChangesReply{}}, nil
}

func mountTargets(run *wire.Run) []string {
	var l []string
	for i := range run.Mounts {
		l = append(l, run.Mounts[i].Target)
	}
	return l
}

// running returns the container if its main process runs; one that is being started is waited for. Nil, and no error,
// says that it has ended and that nothing of it is left mounted.
func (a *Agent) running(id string) (*container, error) {
	for {
		c, _ := a.find(id)
		if c == nil {
			return nil, nil
		}
		<-c.decided
		switch p := c.phase.Load(); {
		case p == phaseRunning:
			return c, nil
		case p == phaseStarting: // the start has failed, and the container leaves the list once all is undone
			time.Sleep(time.Millisecond)
		default:
			if c.run.Remove {
				return nil, wire.Errorf(wire.Conflict, "container %s is marked for removal", short(id))
			}
			<-c.cleaned
			return nil, nil
		}
	}
}

// runOf is how a container was started, or spec if it does not run.
func (a *Agent) runOf(id string, spec *wire.Run) (*wire.Run, error) {
	c, err := a.running(id)
	if err != nil {
		return nil, err
	}
	if c != nil {
		return c.run, nil
	}
	if spec == nil || spec.ID != id {
		return nil, wire.Errorf(wire.Conflict, "container %s is not running", short(id))
	}
	return spec, nil
}

// files is a container's root with all that is mounted in it. All look-ups start at dir and stay below it.
type files struct {
	dir *os.File
	run *wire.Run
	ns  *os.File // the mount namespace it is kept in; nil if it needs none
}

func (r *files) close() { closeAll([]*os.File{r.dir, r.ns}) }

// openFiles opens the root of a container: that of its processes while it runs, else one mounted for this request
// alone, which nobody else sees and which ends with it.
func (a *Agent) openFiles(m *wire.Archive) (*files, error) {
	c, err := a.running(m.ID)
	if err != nil {
		return nil, err
	}
	if c != nil {
		dir, err := c.rootDir()
		if err != nil {
			return nil, err
		}
		return &files{dir: dir, run: c.run}, nil
	}
	if m.Spec == nil || m.Spec.ID != m.ID {
		return nil, wire.Errorf(wire.Conflict, "container %s is not running", short(m.ID))
	}
	return a.mountFiles(m.Spec, !m.Export)
}

// mountFiles mounts the root of a container that does not run, with its volumes and binds in it. File systems in
// memory are not there while it does not run.
func (a *Agent) mountFiles(spec *wire.Run, nested bool) (_ *files, err error) {
	run := *spec
	run.Mounts = nil
	for _, w := range spec.Mounts {
		if w.Type != "tmpfs" && nested {
			w.Propagation = "" // what is mounted for us shall show nowhere
			run.Mounts = append(run.Mounts, w)
		}
	}
	// Without volatile the end of this mount would write all that is dirty on the disk.
	mnt, err := a.store.MountWith(run.ID, run.Layers, rootfs.MountOptions{Volatile: true, MountPoints: true})
	if err != nil {
		return nil, err
	}
	r := &files{dir: mnt, run: spec}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if len(run.Mounts) > 0 {
		mounts := &mounter{a: a, c: &container{a: a, id: run.ID, run: &run}, root: &root{mount: mnt}}
		defer mounts.close()
		if err := mounts.user(); err != nil {
			return nil, err
		}
		slices.SortStableFunc(mounts.list, func(x, y mountEntry) int { return depth(x.target) - depth(y.target) })
		if err := r.attach(mounts.list, a.store.ContainerDir(run.ID)); err != nil {
			return nil, err
		}
	}
	if run.ReadOnly {
		if err := setAttr(r.dir, false, unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// noNesting is set once the kernel has been seen to attach nothing to a detached mount (it does since Linux 6.15).
var noNesting atomic.Bool

var errNoNesting = errors.New("this kernel attaches nothing to a detached mount")

// attach puts mounts in their places below r.dir.
func (r *files) attach(list []mountEntry, at string) error {
	if !noNesting.Load() {
		err := r.nest(list)
		if !errors.Is(err, errNoNesting) {
			return err
		}
		noNesting.Store(true)
	}
	// In a mount namespace then, which nobody is in.
	return inNewThread(func() error { return r.nestInNamespace(list, at) })
}

// inNewThread runs do in a thread that ends afterwards, whatever do has made of it.
func inNewThread(do func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the main thread never ends; while it is held here, do gets another
			err := inNewThread(do)
			runtime.UnlockOSThread()
			done <- err
			return
		}
		done <- do() // locked until the goroutine's end, and so the thread's
	}()
	return <-done
}

// nest attaches each mount at its target. The targets are resolved below r.dir, one after the other, so that one may
// lie in another.
func (r *files) nest(list []mountEntry) error {
	for i, e := range list {
		if e.target == "/" {
			return wire.Errorf(wire.Invalid, "invalid mount: destination can't be '/'")
		}
		at, err := rootfs.CreateTarget(r.dir, e.target, !e.file)
		if err != nil {
			return err
		}
		err = unix.MoveMount(fdOf(e.mount), "", fdOf(at), "", unix.MOVE_MOUNT_F_EMPTY_PATH|unix.MOVE_MOUNT_T_EMPTY_PATH)
		at.Close()
		if err == unix.EINVAL && i == 0 && r.ns == nil {
			return errNoNesting
		}
		if err != nil {
			return fmt.Errorf("mounting %s: %w", e.desc, err)
		}
	}
	return nil
}

// nestInNamespace makes a mount namespace in which r.dir is all there is, but for the mounts attached to it. It runs in
// a thread that ends afterwards; at is any directory.
func (r *files) nestInNamespace(list []mountEntry, at string) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("making mounts private: %w", err)
	}
	ns, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return fmt.Errorf("opening a mount namespace: %w", err)
	}
	r.ns = ns
	if err := unix.MoveMount(fdOf(r.dir), "", unix.AT_FDCWD, at, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mounting the container's root: %w", err)
	}
	if err := r.nest(list); err != nil {
		return err
	}
	if err := unix.Fchdir(fdOf(r.dir)); err != nil {
		return fmt.Errorf("entering the container's root: %w", err)
	}
	// The host's mounts go, or they would be busy for as long as this lasts. An initramfs cannot be pivoted away.
	if err := unix.PivotRoot(".", "."); err == nil {
		err = unix.Unmount(".", unix.MNT_DETACH)
		if err != nil {
			return fmt.Errorf("detaching the host's root: %w", err)
		}
	} else if err != unix.EINVAL {
		return fmt.Errorf("changing to the container's root: %w", err)
	}
	return nil
}

// put unpacks the stream.
func (r *files) put(ctx context.Context, m *wire.Archive, stream *os.File) error {
	if err := r.checkWritable(m.Path); err != nil {
		return err
	}
	var owner *rootfs.User
	if m.CopyUIDGID && r.run.User != "" {
		var err error
		if owner, err = rootfs.LookupUser(r.dir, r.run.User, nil); err != nil {
			return err
		}
	}
	return rootfs.Put(ctx, r.dir, m.Path, stream, m.NoOverwriteDirNonDir, owner)
}

// checkWritable refuses what is mounted read-only, with Docker's words.
func (r *files) checkWritable(p string) error {
	if p == "" {
		p = "/"
	}
	fd, err := unix.Openat2(fdOf(r.dir), p, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return nil // Put tells it
	}
	defer unix.Close(fd)
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil {
		return fmt.Errorf("looking at %s: %w", p, err)
	}
	if fs.Flags&unix.ST_RDONLY == 0 {
		return nil
	}
	var at, root unix.Statx_t
	err = unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &at)
	if err == nil {
		err = unix.Statx(fdOf(r.dir), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &root)
	}
	if err != nil {
		return fmt.Errorf("finding the mount of %s: %w", p, err)
	}
	if at.Mnt_id == root.Mnt_id {
		return wire.Errorf(wire.Invalid, "container rootfs is marked read-only")
	}
	return wire.Errorf(wire.Invalid, "mounted volume is marked read-only")
}
