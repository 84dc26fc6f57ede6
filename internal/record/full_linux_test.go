package record

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDiskFull fills a real file system: Put fails, the old record stands, and with space it works again.
func TestDiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("KIRI_MUST") == "1" {
			t.Fatal("needs root to mount a tmpfs")
		}
		t.Skip("needs root to mount a tmpfs")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s, err := Open[thing](dir, Options{Delay: never})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Put("x", &thing{N: 1}); err != nil {
		t.Fatal(err)
	}
	if err := s.Put("synced", &thing{N: 1}); err != nil {
		t.Fatal(err)
	}
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := s.Put("x", &thing{N: 2}); err != nil {
		t.Fatal(err)
	}
	big := &thing{3, strings.Repeat("z", 200<<10)}
	for _, name := range []string{"x", "synced", "fresh"} { // over a .new, over a .json, and out of nothing
		if err := s.Put(name, big); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("Put %s on a full disk: %v", name, err)
		}
	}
	if got := files(t, dir); !slices.Equal(got, []string{"synced.json", "x.json", "x.json.new"}) {
		t.Errorf("left: %v", got)
	}
	again, err := Open[thing](dir, Options{Delay: never})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if m := again.Load(); len(m) != 2 || m["x"].N != 2 || m["synced"].N != 1 {
		t.Errorf("found %+v", m)
	}
	filler := filepath.Join(dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	if err := s.Delete("synced"); err != nil { // deleting needs no space
		t.Error(err)
	}
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	if err := s.Put("fresh", &thing{N: 4}); err != nil {
		t.Error(err)
	}
}
