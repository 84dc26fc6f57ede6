package timerslack

import (
	"os"
	"strings"
	"testing"
	"time"
)

// TestRelax checks every thread of this process, the runtime's own among them.
func TestRelax(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("KIRI_MUST") != "" {
			t.Fatal("needs root for threads other than its own")
		}
		t.Skip("needs root for threads other than its own")
	}
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		d    time.Duration
		text string
	}{{time.Millisecond, "1000000"}, {Usual, "50000"}} {
		if err := Relax(c.d); err != nil {
			t.Fatal(err)
		}
		for _, task := range tasks {
			b, err := os.ReadFile("/proc/" + task.Name() + "/timerslack_ns")
			if os.IsNotExist(err) {
				continue
			}
			if err != nil || strings.TrimSpace(string(b)) != c.text {
				t.Errorf("thread %s: %q, %v; want %s", task.Name(), b, err, c.text)
			}
		}
	}
}
