//go:build linux

package agent

import (
	"fmt"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/rootfs"
	"runkiri.com/kiri/internal/wire"
)

// A container that does not run gets its root with its volumes and binds in it, in both ways that kernels have for it,
// and nothing of that shows on the host or is left behind.
func TestArchiveStopped(t *testing.T) {
	r := newRig(t)
	r.start()
	s := r.spec("true")
	bind := t.TempDir()
	if err := os.WriteFile(bind+"/f", []byte("bound"), 0o644); err != nil {
		t.Fatal(err)
	}
	s.Mounts = []wire.Mount{
		{Type: "bind", Source: bind, Target: "/mnt/vol/bound"}, {Type: "volume", Source: "avol", Target: "/mnt/vol"},
		{Type: "tmpfs", Target: "/mem"}, {Type: "bind", Source: bind + "/f", Target: "/etc/one", ReadOnly: true},
	}
	defer r.conn.Call(r.ctx(), &wire.Remove{ID: s.ID})
	defer r.conn.Call(r.ctx(), &wire.RemoveVolume{Name: "avol"})
	store, err := rootfs.OpenStore(r.dataRoot())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	a := &Agent{store: store}
	for _, old := range []bool{false, true} {
		t.Run(fmt.Sprintf("old kernel %v", old), func(t *testing.T) {
			noNesting.Store(old)
			defer noNesting.Store(false)
			f, err := a.mountFiles(s, true)
			if err != nil {
				t.Fatal(err)
			}
			if f.ns == nil && old {
				t.Error("no mount namespace was made")
			}
			mounts, err := os.ReadFile("/proc/self/mountinfo")
			if err != nil || strings.Contains(string(mounts), s.ID) || strings.Contains(string(mounts), bind) {
				t.Errorf("seen on the host, %v:\n%s", err, mounts)
			}
			for _, p := range []string{"/mnt/vol/bound/f", "/etc/one", "/mnt/vol/bound/../bound/f"} {
				fd, err := unix.Openat2(fdOf(f.dir), p, &unix.OpenHow{Flags: unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
				if err != nil {
					t.Errorf("%s: %v", p, err)
					continue
				}
				file := os.NewFile(uintptr(fd), p)
				if text, err := io.ReadAll(file); err != nil || string(text) != "bound" {
					t.Errorf("%s holds %q, %v", p, text, err)
				}
				file.Close()
			}
			if err := f.checkWritable("/etc/one"); wire.ClassOf(err) != wire.Invalid {
				t.Errorf("a read-only mount: %v", err)
			}
			if err := f.checkWritable("/mnt/vol"); err != nil {
				t.Error(err)
			}
			f.close()
		})
	}
	// Without a spec there is nothing to mount; with one of another container neither.
	for _, spec := range []*wire.Run{nil, r.spec("true")} {
		if _, err := r.conn.Call(r.ctx(), &wire.Archive{ID: s.ID, Spec: spec, Path: "/", Stat: true}); wire.ClassOf(err) != wire.Conflict {
			t.Errorf("%v", err)
		}
	}
	reply, err := wire.CallFor[*wire.ArchiveReply](r.ctx(), r.conn, &wire.Archive{ID: s.ID, Spec: s, Path: "/mnt/vol/bound/f", Stat: true})
	if err != nil || reply.Size != 5 {
		t.Errorf("%+v, %v", reply, err)
	}
}
