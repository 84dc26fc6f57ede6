package bench

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestPercentiles(t *testing.T) {
	var s Samples
	for i := 100; i >= 1; i-- {
		s = append(s, time.Duration(i)*time.Millisecond)
	}
	if got := s.P50(); got != 51*time.Millisecond {
		t.Errorf("p50 of 1..100 = %v, want 51ms", got)
	}
	if got := s.P99(); got != 100*time.Millisecond {
		t.Errorf("p99 of 1..100 = %v, want 100ms", got)
	}
	if got := s.Mean(); got != 50500*time.Microsecond {
		t.Errorf("mean of 1..100 = %v, want 50.5ms", got)
	}
	if s[0] != 100*time.Millisecond {
		t.Error("samples were reordered")
	}
	var none Samples
	if none.P50() != 0 || none.Mean() != 0 {
		t.Error("no samples: want zeros")
	}
}

// TestRows checks the ratios: each engine against kiri on the same path, kiri against the floor.
func TestRows(t *testing.T) {
	kiri, docker := Engine{Name: "kiri", Key: "kiri"}, Engine{Name: "Docker Engine", Key: "docker"}
	rows := LifecycleRows([]*Row{
		{Engine: kiri, Path: PathAPI, Samples: Samples{2 * time.Millisecond}},
		{Engine: docker, Path: PathAPI, Samples: Samples{200 * time.Millisecond}},
		{Engine: docker, Path: PathCLI, Samples: Samples{250 * time.Millisecond}},
		{Engine: docker, Path: PathCLI, Failed: os.ErrNotExist},
	}, "none", Samples{time.Millisecond})
	if rows[0].Floors != 2 || rows[0].Times != 1 {
		t.Errorf("kiri: %v floors, %v times kiri; want 2 and 1", rows[0].Floors, rows[0].Times)
	}
	if rows[1].Times != 100 || rows[1].Floors != 0 {
		t.Errorf("docker: %v times kiri, %v floors; want 100 and none", rows[1].Times, rows[1].Floors)
	}
	if rows[2].Times != 0 {
		t.Errorf("docker by CLI: %v times kiri, want none: kiri was not measured on that path", rows[2].Times)
	}
	if rows[3].Status == "measured" {
		t.Error("a failed row says measured")
	}
}

func TestWriteIsWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "r.json")
	want := Results{Updated: "2026-11-30", Lifecycle: LifecycleOf{Runs: 3}}
	if err := want.Write(path); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got Results
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got.Updated != want.Updated || got.Lifecycle.Runs != 3 {
		t.Errorf("read back %+v", got)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".results-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
