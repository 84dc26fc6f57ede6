// Package textpages gives back the resident pages of a program's own code and constants.
package textpages

import (
	"bufio"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Text is this program's own code and constants: file mappings that nothing writes to.
type Text struct{ ranges [][2]uintptr }

// Find reads where they are. They stay there for the life of the process.
func Find() (*Text, error) {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	f, err := os.Open("/proc/self/maps")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	t := &Text{}
	s := bufio.NewScanner(f)
	for s.Scan() {
		// 00400000-00949000 r-xp 00000000 fe:00 9994779    /usr/bin/kiri
		var begin, end uintptr
		var mode string
		if n, _ := fmt.Sscanf(s.Text(), "%x-%x %s", &begin, &end, &mode); n == 3 && mode[1] == '-' && strings.HasSuffix(s.Text(), " "+exe) {
			t.ranges = append(t.ranges, [2]uintptr{begin, end})
		}
	}
	return t, s.Err()
}

// Release unmaps the pages that are in memory. The kernel maps them in runs of sixteen and more around each one that
// is touched, so that after the start nearly all ten megabytes are resident though an idle daemon needs a few hundred
// kilobytes. They stay in the page cache, so that the first request after a quiet time pays about a millisecond for
// faults; mapping all of them at once (MADV_POPULATE_READ) was tried and costs more. Dropping is safe as there is
// nothing in them but the file.
func (t *Text) Release() error {
	for _, r := range t.ranges {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, r[0], r[1]-r[0], unix.MADV_DONTNEED); errno != 0 {
			return fmt.Errorf("madvise of %x-%x: %w", r[0], r[1], errno)
		}
	}
	return nil
}
