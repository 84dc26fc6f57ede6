package rootfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Overlay options that are always given, whatever the kernel's configuration makes their default.
//
//   - index=off: no bookkeeping across mounts; with it a layer that is mounted twice would be refused.
//   - metacopy=off, redirect_dir=nofollow: what they mean is written in extended attributes of the layers, which
//     come from strangers; and a writable layer can be read as a difference by itself (Changes, commit).
//
// userxattr is never given: whiteouts and opaque marks are in trusted.*, which a container cannot write.
var overlayOptions = [][2]string{{"index", "off"}, {"metacopy", "off"}, {"redirect_dir", "nofollow"}}

// maxFsconfig is the longest string fsconfig takes, in bytes with the final NUL (fs/fsopen.c).
const maxFsconfig = 256

// MountOptions say how a container's root is mounted.
type MountOptions struct {
	// ReadOnly makes the mount read-only. Mount targets cannot be created on it any more: create them first on a
	// writable one and call ReadOnly.
	ReadOnly bool
	// Volatile leaves out the sync of the data root's whole file system that overlayfs does at the last unmount (see
	// "Volatile mount" in the kernel's overlayfs documentation), and every sync a program in the container asks for on
	// this layer. For containers that nobody will look at again (wire.Run.Remove).
	Volatile bool
	// MountPoints puts a layer with the places that the engine mounts things on under all others (see makeMountPoints).
	MountPoints bool
}

func (opt *MountOptions) lower(layers []layerInfo) []string {
	l := lowerNames(layers)
	if opt.MountPoints {
		l = append(l, mountPoints)
	}
	return l
}

// Mount makes the container's directories if they are not there and returns a detached overlay mount of the layers
// (lowest first, possibly none) under its writable layer. See MountWith.
func (s *Store) Mount(id string, layers []string, readonly bool) (*os.File, error) {
	return s.MountWith(id, layers, MountOptions{ReadOnly: readonly})
}

// MountWith is Mount with all options. The mount lives as long as the descriptor, or as it is attached somewhere.
//
// Errors: wire.NotFound for a layer that is not here, else the kernel's with what it logged about it.
func (s *Store) MountWith(id string, layers []string, opt MountOptions) (*os.File, error) {
	if err := validID(id); err != nil {
		return nil, err
	}
	infos, err := s.lookup(layers)
	if err != nil {
		return nil, fmt.Errorf("mounting the root of container %s: %w", id, err)
	}
	if err := s.makeContainer(id, infos); err != nil {
		return nil, fmt.Errorf("mounting the root of container %s: %w", id, err)
	}
	o := overlay{store: s, lower: opt.lower(infos), upper: "containers/" + id, volatile: opt.Volatile, readonly: opt.ReadOnly}
	mnt, err := o.mount()
	if err != nil {
		return nil, fmt.Errorf("mounting the root of container %s: %w", id, err)
	}
	return mnt, nil
}

// ReadOnly makes a detached mount read-only, once its mount targets are there.
func ReadOnly(mnt *os.File) error {
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
	if err := unix.MountSetattr(fdOf(mnt), "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("making the root read-only: %w", err)
	}
	return nil
}

// makeContainer makes containers/ID with upper and work.
func (s *Store) makeContainer(id string, layers []layerInfo) error {
	dir := s.ContainerDir(id)
	err := retry(func() error { return unix.Mkdir(dir, 0o710) })
	if err != nil && err != unix.EEXIST {
		return &os.PathError{Op: "mkdir", Path: dir, Err: err}
	}
	if err := retry(func() error { return unix.Mkdir(dir+"/work", 0o700) }); err != nil && err != unix.EEXIST {
		return &os.PathError{Op: "mkdir", Path: dir + "/work", Err: err}
	}
	// upper comes last: if it is there, a mount that was volatile and not cleanly ended may have left its mark, which
	// forbids to use the layer again; what a crash has cost the programs in it is not for the mount to judge.
	upper := dir + "/upper"
	err = retry(func() error { return unix.Mkdir(upper, 0o755) })
	if err == unix.EEXIST {
		return s.clearVolatile(dir)
	}
	if err != nil {
		return &os.PathError{Op: "mkdir", Path: upper, Err: err}
	}
	for i := len(layers) - 1; i >= 0; i-- { // the root looks as the uppermost layer that speaks of it says
		l := &layers[i]
		if !l.HasRoot {
			continue
		}
		if l.UID != 0 || l.GID != 0 {
			if err := os.Lchown(upper, int(l.UID), int(l.GID)); err != nil {
				return err
			}
		}
		if l.Mode != 0o755 {
			if err := retry(func() error { return unix.Chmod(upper, l.Mode) }); err != nil {
				return &os.PathError{Op: "chmod", Path: upper, Err: err}
			}
		}
		break
	}
	return nil
}

func (s *Store) clearVolatile(dir string) error {
	fd, err := openat(unix.AT_FDCWD, dir+"/work/work", unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err == unix.ENOENT {
		return nil // never mounted
	}
	if err != nil {
		return &os.PathError{Op: "open", Path: dir + "/work/work", Err: err}
	}
	defer unix.Close(fd)
	if err := removeTree(fd, "incompat"); err != nil {
		return fmt.Errorf("removing the mark of a volatile mount: %w", err)
	}
	return nil
}

// mountBelow returns a detached read-only view of layers alone.
func (s *Store) mountBelow(layers []string) (*os.File, error) {
	infos, err := s.lookup(layers)
	if err != nil {
		return nil, err
	}
	o := overlay{store: s, lower: lowerNames(infos), readonly: true}
	return o.mount()
}

// lowerNames returns the directories of the layers relative to the data root, uppermost first as overlayfs wants it.
func lowerNames(layers []layerInfo) []string {
	out := make([]string, 0, len(layers)+1)
	for i := len(layers) - 1; i >= 0; i-- {
		out = append(out, "layers/"+layers[i].name+"/fs")
	}
	return out
}

// overlay is an overlay mount to be made. Paths are relative to the data root.
type overlay struct {
	store    *Store
	lower    []string // uppermost first
	upper    string   // the directory that holds upper and work; "" for a read-only view
	volatile bool
	readonly bool
}

// noLowerAdd is set once the kernel has been seen to lack "lowerdir+" (it came with Linux 6.5).
var noLowerAdd atomic.Bool

func (o *overlay) mount() (*os.File, error) {
	if len(o.lower) == 0 || len(o.lower) == 1 && o.upper == "" {
		// overlayfs wants one lower layer, two if there is no upper.
		o.lower = append(o.lower, "layers/"+emptyLayer)
	}
	longest := len(o.upper) + len("/upper")
	for _, l := range o.lower {
		longest = max(longest, len(l))
	}
	// A path with a backslash would have to be escaped in some of the options and not in others, by kernel version.
	if noLowerAdd.Load() || len(o.store.root)+1+longest+1 > maxFsconfig || strings.ContainsAny(o.store.root, `\:`) {
		return o.mountClassic()
	}
	mnt, err := o.mountNew()
	if errors.Is(err, errNoLowerAdd) {
		noLowerAdd.Store(true)
		return o.mountClassic()
	}
	return mnt, err
}

var errNoLowerAdd = errors.New("this kernel has no lowerdir+")

// mountNew uses fsopen and one fsconfig for each layer, so that there is no limit on all of them together.
func (o *overlay) mountNew() (*os.File, error) {
	fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("opening overlayfs: %w", err)
	}
	defer unix.Close(fd)
	set := func(key, value string) error {
		if err := retry(func() error { return unix.FsconfigSetString(fd, key, value) }); err != nil {
			return o.failed(fd, key+"="+value, err)
		}
		return nil
	}
	if err := set("source", "overlay"); err != nil {
		return nil, err
	}
	root := o.store.root + "/"
	for i, l := range o.lower {
		err := retry(func() error { return unix.FsconfigSetString(fd, "lowerdir+", root+l) })
		if err == unix.EINVAL && i == 0 && o.there(l) {
			return nil, errNoLowerAdd
		}
		if err != nil {
			return nil, o.failed(fd, "lowerdir+="+root+l, err)
		}
	}
	if o.upper != "" {
		if err := set("upperdir", root+o.upper+"/upper"); err != nil {
			return nil, err
		}
		if err := set("workdir", root+o.upper+"/work"); err != nil {
			return nil, err
		}
		if o.volatile {
			if err := retry(func() error { return unix.FsconfigSetFlag(fd, "volatile") }); err != nil {
				return nil, o.failed(fd, "volatile", err)
			}
		}
	}
	for _, kv := range overlayOptions {
		if err := set(kv[0], kv[1]); err != nil {
			return nil, err
		}
	}
	if err := retry(func() error { return unix.FsconfigCreate(fd) }); err != nil {
		return nil, o.failed(fd, fmt.Sprintf("%d layers", len(o.lower)), err)
	}
	attr := 0
	if o.readonly {
		attr = unix.MOUNT_ATTR_RDONLY
	}
	mnt, err := unix.Fsmount(fd, unix.FSMOUNT_CLOEXEC, attr)
	if err != nil {
		return nil, fmt.Errorf("mounting overlay: %w", err)
	}
	return os.NewFile(uintptr(mnt), "overlay"), nil
}

// there tells whether a directory below the data root exists.
func (o *overlay) there(name string) bool {
	st, err := os.Stat(filepath.Join(o.store.root, name))
	return err == nil && st.IsDir()
}

// failed makes an error with what the kernel wrote into the mount's own log (fsopen(2), "retrieving messages").
func (o *overlay) failed(fd int, what string, err error) error {
	var said []string
	buf := make([]byte, 512)
	for range 8 {
		n, readErr := unix.Read(fd, buf)
		if readErr != nil || n <= 0 {
			break
		}
		said = append(said, strings.TrimPrefix(strings.TrimSpace(string(buf[:n])), "e "))
	}
	if len(said) == 0 {
		return fmt.Errorf("mounting overlay (%s): %w", what, err)
	}
	return fmt.Errorf("mounting overlay (%s): %w (%s)", what, err, strings.Join(said, "; "))
}

// mountClassic is for kernels before 6.5, and for data roots with a name that does not fit fsconfig: mount(2), whose
// options are one page together, with paths relative to layers/ so that they are short. It runs in a thread
// with a working directory and a mount namespace of its own, which ends with it; the mount is detached from there.
func (o *overlay) mountClassic() (*os.File, error) {
	var mnt *os.File
	var err error
	inNewThread(func() { mnt, err = o.classicThread() })
	return mnt, err
}

// inNewThread runs do in a thread that ends afterwards, whatever do has made of it.
func inNewThread(do func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() { // the main thread is kept by Go for ever; while it is held here, do runs in another
			inNewThread(do)
			runtime.UnlockOSThread()
			return
		}
		do() // locked until the goroutine's end, and so the thread's
	}()
	<-done
}

// classicThread runs in a thread that will not be used again.
func (o *overlay) classicThread() (*os.File, error) {
	// The working directory before the namespace: it is carried over into it, a descriptor's mount is not.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return nil, fmt.Errorf("taking a working directory of its own: %w", err)
	}
	if err := unix.Fchdir(o.store.syncer.fd); err != nil {
		return nil, fmt.Errorf("entering layers: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("making a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("making mounts private: %w", err)
	}
	options := o.classicOptions()
	if len(options) >= os.Getpagesize() {
		return nil, wire.Errorf(wire.Unsupported, "mounting overlay: %d layers are too many for mount(2) on this kernel; Linux 6.5 has no such limit", len(o.lower))
	}
	at := emptyLayer
	var flags uintptr
	if o.readonly {
		flags = unix.MS_RDONLY
	}
	if err := unix.Mount("overlay", at, "overlay", flags, options); err != nil {
		return nil, fmt.Errorf("mounting overlay (%d layers, %.300s): %w", len(o.lower), options, err)
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, at, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	mnt, err := fileOf(fd, "overlay", err)
	if err != nil {
		return nil, fmt.Errorf("detaching the overlay: %w", err)
	}
	if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
		mnt.Close()
		return nil, fmt.Errorf("detaching the overlay: %w", err)
	}
	return mnt, nil
}

func (o *overlay) classicOptions() string {
	var b strings.Builder
	b.WriteString("lowerdir=")
	for i, l := range o.lower {
		if i > 0 {
			b.WriteByte(':')
		}
		if rest, ok := strings.CutPrefix(l, "layers/"); ok {
			b.WriteString(rest)
		} else {
			b.WriteString("../" + l)
		}
	}
	if o.upper != "" {
		fmt.Fprintf(&b, ",upperdir=../%s/upper,workdir=../%s/work", o.upper, o.upper)
		if o.volatile {
			b.WriteString(",volatile")
		}
	}
	for _, kv := range overlayOptions {
		fmt.Fprintf(&b, ",%s=%s", kv[0], kv[1])
	}
	return b.String()
}
