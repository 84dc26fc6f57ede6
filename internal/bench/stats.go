// Package bench measures what kiri claims: the life of a container through the Engine API and through the docker
// command, beside the other engines found on the machine, beside the floor that the kernel itself sets, and the
// kernel's building blocks one at a time. Every figure it prints comes out of one run on one machine.
package bench

import (
	"slices"
	"time"
)

// Samples are the durations of one measured thing, in the order they were taken.
type Samples []time.Duration

// Percentile returns the p-th percentile (0 to 100) by the nearest-rank rule, 0 without samples.
func (s Samples) Percentile(p float64) time.Duration {
	if len(s) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(int(float64(len(sorted))*p/100), len(sorted)-1)]
}

// P50 is the median.
func (s Samples) P50() time.Duration { return s.Percentile(50) }

// P99 is the 99th percentile; with fewer than 100 samples that is the largest.
func (s Samples) P99() time.Duration { return s.Percentile(99) }

// Mean is the arithmetic mean, 0 without samples.
func (s Samples) Mean() time.Duration {
	if len(s) == 0 {
		return 0
	}
	var sum time.Duration
	for _, d := range s {
		sum += d
	}
	return sum / time.Duration(len(s))
}

func ms(d time.Duration) float64 {
	return float64(d.Round(time.Microsecond)) / float64(time.Millisecond)
}
