//go:build linux

package cgroup

import "math"

// cpuWeight turns v1's cpu shares (2 to 262144, default 1024) into v2's cpu.weight (1 to 10000, default 100). The curve
// goes through (2, 1), (1024, 100) and (262144, 10000); it is the one that runc and crun use since 2025. The straight line
// before it made 39 of the default.
func cpuWeight(shares uint64) uint64 {
	switch {
	case shares <= 2:
		return 1
	case shares >= 262144:
		return 10000
	}
	l := math.Log2(float64(shares))
	return uint64(math.Ceil(math.Pow(10, (l*l+125*l)/612-7.0/34)))
}

// ioWeight turns a blkio weight (10 to 1000) into io.weight (1 to 10000), as runc does.
func ioWeight(w uint64) uint64 {
	if w <= 10 {
		return 1
	}
	return 1 + (w-10)*9999/990
}
