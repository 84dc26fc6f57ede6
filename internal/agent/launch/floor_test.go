//go:build linux && (amd64 || arm64)

package launch

import (
	"os"
	"testing"
)

func TestFloorRun(t *testing.T) {
	root := os.Getenv("KIRI_FLOOR_ROOT")
	if root == "" {
		root = "/tmp/x/rootfs"
	}
	for p := ForkExec; p <= FloorNet; p++ {
		d, err := MeasurePrimitive(root, p, 300)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%-44s p50 %.3f p99 %.3f", p, float64(d[len(d)/2].Nanoseconds())/1e6, float64(d[len(d)*99/100].Nanoseconds())/1e6)
	}
}
