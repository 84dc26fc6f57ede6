package engine

import (
	"strconv"
	"strings"
	"sync"
)

// parseSignal reads a signal of Linux by number or by name, with or without SIG, in any case. The names are those of
// Linux whatever the daemon runs on: the container is a Linux one.
func parseSignal(s string) (int, error) {
	if n, err := strconv.Atoi(s); err == nil {
		if n == 0 {
			return -1, invalid("invalid signal: %s", s)
		}
		return n, nil
	}
	n, ok := signals()[strings.TrimPrefix(strings.ToUpper(s), "SIG")]
	if !ok {
		return -1, invalid("invalid signal: %s", s)
	}
	return n, nil
}

const (
	sigKill = 9
	sigTerm = 15
)

// signals are those of signal(7) on amd64 and arm64, and the real-time ones that the C library leaves to programs.
var signals = sync.OnceValue(func() map[string]int {
	m := map[string]int{
		"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "IOT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "USR1": 10,
		"SEGV": 11, "USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15, "STKFLT": 16, "CHLD": 17, "CLD": 17, "CONT": 18, "STOP": 19,
		"TSTP": 20, "TTIN": 21, "TTOU": 22, "URG": 23, "XCPU": 24, "XFSZ": 25, "VTALRM": 26, "PROF": 27, "WINCH": 28, "IO": 29,
		"POLL": 29, "PWR": 30, "SYS": 31,
	}
	const rtMin, rtMax = 34, 64
	m["RTMIN"], m["RTMAX"] = rtMin, rtMax
	for i := 1; i <= 15; i++ {
		m["RTMIN+"+strconv.Itoa(i)] = rtMin + i
	}
	for i := 1; i <= 14; i++ {
		m["RTMAX-"+strconv.Itoa(i)] = rtMax - i
	}
	return m
})
