package bench

import (
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

// TestPrimitives measures each building block for real and checks that nothing of it is left on the machine.
func TestPrimitives(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("KIRI_MUST") != "" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	got, err := Primitives(3)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{PrimCgroup, PrimOverlay, PrimVethCreate, PrimVethDelete} {
		if len(got[name]) != 3 {
			t.Errorf("%s: %d samples, want 3", name, len(got[name]))
		}
		for _, d := range got[name] {
			if d <= 0 {
				t.Errorf("%s: took %v", name, d)
			}
		}
	}
	if after, _ := os.ReadFile("/proc/self/mountinfo"); strings.Contains(string(after), "kiri-bench") {
		t.Errorf("a mount is left:\n%s\nbefore:\n%s", after, mounts)
	}
	if _, err := netlink.LinkByName("v0"); err == nil {
		t.Error("a veth is left on the host")
	}
}
