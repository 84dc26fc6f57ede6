//go:build linux

package cgroup

import (
	"fmt"
	"math"
	"strconv"

	"runkiri.com/kiri/internal/wire"
)

// The words that Docker's daemon uses when memory and swap do not fit together; users search for them.
const (
	textSwapBelowMemory = "Minimum memoryswap limit should be larger than memory limit, see usage"
	textSwapAlone       = "You should always set the Memory limit when using Memoryswap limit, see usage"
	textSwapInTheWay    = "Memory limit should be smaller than already set memoryswap limit, update the memoryswap at the same time"
)

// ceiling is the largest limit there can be: v1 reports no limit as a number of pages just below 2^63.
const ceiling = math.MaxInt64 &^ 0xffff

func (c *Cgroup) memory(r *wire.Resources) ([]setting, error) {
	dir, prefix, v1, ok := c.files("memory")
	if !ok {
		return nil, nil
	}
	if r.Memory > 0 && r.MemorySwap > 0 && r.MemorySwap < r.Memory {
		return nil, wire.Errorf(wire.Invalid, textSwapBelowMemory)
	}
	if !v1 {
		return c.memoryV2(r)
	}
	var s []setting
	add := func(file string, value int64, what string) {
		s = append(s, setting{dir: dir, file: prefix + file, value: strconv.FormatInt(value, 10), what: fmt.Sprintf("%s %d", what, value)})
	}
	const limit, both = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
	swap := exists(dir, prefix+both)
	memory, memsw := int64(math.MaxInt64), int64(math.MaxInt64)
	if !c.fresh {
		for file, v := range map[string]*int64{limit: &memory, both: &memsw} {
			if file == both && !swap {
				continue
			}
			n, err := number(dir, prefix+file)
			if err != nil {
				return nil, err
			}
			*v = int64(min(n, math.MaxInt64))
		}
	}
	// The kernel holds memory <= memory and swap after every write, so when the sum is raised it goes first.
	newSum := r.MemorySwap
	if newSum < 0 {
		newSum = math.MaxInt64
	}
	switch {
	case !swap || r.MemorySwap == 0:
		if swap && r.Memory > memsw {
			return nil, wire.Errorf(wire.Invalid, textSwapInTheWay)
		}
		if r.Memory < 0 && swap { // Docker's -1 for memory alone means both
			add(both, -1, "memory and swap limit")
		}
		if r.Memory != 0 {
			add(limit, r.Memory, "memory limit")
		}
	case r.Memory == 0:
		if newSum < memory {
			if memory >= ceiling {
				return nil, wire.Errorf(wire.Invalid, textSwapAlone)
			}
			return nil, wire.Errorf(wire.Invalid, textSwapBelowMemory)
		}
		add(both, r.MemorySwap, "memory and swap limit")
	case newSum >= memsw:
		add(both, r.MemorySwap, "memory and swap limit")
		add(limit, r.Memory, "memory limit")
	default:
		add(limit, r.Memory, "memory limit")
		add(both, r.MemorySwap, "memory and swap limit")
	}
	if r.MemoryReservation != 0 {
		add("memory.soft_limit_in_bytes", r.MemoryReservation, "memory reservation")
	}
	if r.MemorySwappiness != nil && *r.MemorySwappiness >= 0 {
		add("memory.swappiness", *r.MemorySwappiness, "memory swappiness")
	}
	if r.OOMKillDisable {
		s = append(s, setting{dir: dir, file: prefix + "memory.oom_control", value: "1", what: "no OOM kill", undo: func(text string) string {
			n, _ := field(text, "oom_kill_disable")
			return strconv.FormatUint(n, 10)
		}})
	}
	return s, nil
}

// memoryV2 turns Docker's sum of memory and swap into v2's limit of swap alone. Swappiness and OOM kill control are not
// in v2; Docker warns and leaves them out.
func (c *Cgroup) memoryV2(r *wire.Resources) ([]setting, error) {
	var s []setting
	add := func(file string, value int64, what string) {
		text := "max"
		if value >= 0 && value < ceiling {
			text = strconv.FormatInt(value, 10)
		}
		s = append(s, setting{dir: c.fd, file: file, value: text, what: what + " " + text})
	}
	// The limits there are, in bytes.
	memory, swap := int64(math.MaxInt64), int64(math.MaxInt64)
	haveSwap := exists(c.fd, "memory.swap.max")
	if !c.fresh {
		n, err := number(c.fd, "memory.max")
		if err != nil {
			return nil, err
		}
		memory = int64(min(n, math.MaxInt64))
		if haveSwap {
			if n, err = number(c.fd, "memory.swap.max"); err != nil {
				return nil, err
			}
			swap = int64(min(n, math.MaxInt64))
		}
	}
	newMemory := memory
	switch {
	case r.Memory > 0:
		newMemory = r.Memory
	case r.Memory < 0:
		newMemory = math.MaxInt64
	}
	newSwap := swap
	switch {
	case r.MemorySwap < 0, r.Memory < 0 && r.MemorySwap == 0:
		newSwap = math.MaxInt64
	case r.MemorySwap > 0 && newMemory >= ceiling:
		return nil, wire.Errorf(wire.Invalid, textSwapAlone)
	case r.MemorySwap > 0 && r.MemorySwap < newMemory:
		return nil, wire.Errorf(wire.Invalid, textSwapBelowMemory)
	case r.MemorySwap > 0:
		newSwap = r.MemorySwap - newMemory
	case r.Memory > 0 && haveSwap && swap < ceiling && memory < ceiling:
		// Only memory is named: the sum stays what it was, as it does in v1.
		if newSwap = memory + swap - r.Memory; newSwap < 0 {
			return nil, wire.Errorf(wire.Invalid, textSwapInTheWay)
		}
	}
	if r.Memory != 0 {
		add("memory.max", newMemory, "memory limit")
	}
	if haveSwap && newSwap != swap || haveSwap && r.MemorySwap != 0 {
		add("memory.swap.max", newSwap, "swap limit")
	}
	if r.MemoryReservation != 0 {
		add("memory.low", r.MemoryReservation, "memory reservation")
	}
	return s, nil
}
