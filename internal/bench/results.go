package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Results is the form of bench/results.json and of `kiri bench --json`: what was measured where, on which day, with
// every figure in the unit that its name says.
type Results struct {
	Updated    string      `json:"updated"` // YYYY-MM-DD
	Machine    string      `json:"machine"`
	Note       string      `json:"note"`
	Primitives RowSet      `json:"kernel_primitives"`
	Floor      RowSet      `json:"floor"`
	Lifecycle  LifecycleOf `json:"lifecycle"`
	Together   *TogetherOf `json:"together,omitempty"`
}

// RowSet is a list of single figures with a note on how they were taken.
type RowSet struct {
	Note string  `json:"note"`
	Rows []Value `json:"rows"`
}

// Value is one figure.
type Value struct {
	Metric string  `json:"metric"`
	P50    float64 `json:"value_ms"`
	P99    float64 `json:"p99_ms,omitempty"`
}

// LifecycleOf holds the lifecycle rows of one run.
type LifecycleOf struct {
	Test string         `json:"test"`
	Runs int            `json:"runs"`
	Rows []LifecycleRow `json:"rows"`
}

// LifecycleRow is one engine on one path.
type LifecycleRow struct {
	Engine  string  `json:"engine"`
	Path    string  `json:"path"`
	Network string  `json:"network"`
	P50     float64 `json:"p50_ms"`
	P99     float64 `json:"p99_ms"`
	Mean    float64 `json:"mean_ms"`
	Times   float64 `json:"times_kiri,omitempty"`  // how many times kiri's p50 on the same path
	Floors  float64 `json:"times_floor,omitempty"` // how many times the floor's p50; kiri's rows only
	Status  string  `json:"status"`                // "measured", or "failed: why"
}

// TogetherOf tells how many containers a second an engine runs when many are started at once.
type TogetherOf struct {
	Containers int             `json:"containers"`
	Rows       []TogetherValue `json:"rows"`
}

// TogetherValue is one engine's figure.
type TogetherValue struct {
	Engine    string  `json:"engine"`
	PerSecond float64 `json:"per_second"`
	Status    string  `json:"status"`
}

// LifecycleRows makes the printable rows of a run. floor is the floor that belongs to the network, 0 if unknown.
func LifecycleRows(rows []*Row, network string, floor Samples) []LifecycleRow {
	own := map[Path]*Row{}
	for _, r := range rows {
		if r.Engine.Key == "kiri" && len(r.Samples) > 0 {
			own[r.Path] = r
		}
	}
	var out []LifecycleRow
	for _, r := range rows {
		l := LifecycleRow{
			Engine: r.Engine.Name, Path: string(r.Path), Network: network, Status: "measured",
			P50: ms(r.Samples.P50()), P99: ms(r.Samples.P99()), Mean: ms(r.Samples.Mean()),
		}
		if r.Failed != nil {
			l.Status = "failed: " + r.Failed.Error()
		}
		if k := own[r.Path]; k != nil && len(r.Samples) > 0 {
			l.Times = ratio(l.P50, ms(k.Samples.P50()))
		}
		if r.Engine.Key == "kiri" && len(floor) > 0 && len(r.Samples) > 0 {
			l.Floors = ratio(l.P50, ms(floor.P50()))
		}
		out = append(out, l)
	}
	return out
}

// Values makes the printable form of named samples, in the order given.
func Values(names []string, samples map[string]Samples) []Value {
	var out []Value
	for _, n := range names {
		if s, ok := samples[n]; ok {
			out = append(out, Value{Metric: n, P50: ms(s.P50()), P99: ms(s.P99())})
		}
	}
	return out
}

func ratio(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return float64(int(a/b*100+0.5)) / 100
}

// Write puts r into the file path, whole or not at all.
func (r *Results) Write(path string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".results-*")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	defer os.Remove(f.Name())
	_, err = f.Write(append(b, '\n'))
	if e := f.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = os.Chmod(f.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return nil
}
