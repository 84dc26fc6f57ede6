//go:build linux

package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"runkiri.com/kiri/internal/wire"
)

// tryDevices runs, in the cgroup, opens and mknods and tells which were not permitted. The process is root with all
// capabilities, so that only the device rules can forbid.
func tryDevices(t *testing.T, c *Cgroup) string {
	t.Helper()
	dir := t.TempDir()
	script := fmt.Sprintf(`
try() { what=$1; shift; if "$@" 2>&1 >/dev/null | grep -q "not permitted"; then echo -n "$what "; fi; }
try r:null dd if=/dev/null of=%[1]s/x count=0
try w:null dd if=/dev/zero of=/dev/null count=1
try r:urandom dd if=/dev/urandom of=%[1]s/x bs=1 count=1
try r:kmsg dd if=/dev/kmsg of=%[1]s/x count=0
try w:kmsg dd if=%[1]s/empty of=/dev/kmsg conv=notrunc count=0
try m:kmsg mknod %[1]s/node c 1 11
try m:disk mknod %[1]s/disk b 259 77
try r:disk dd if=%[1]s/disk of=%[1]s/x count=0
`, dir)
	if err := os.WriteFile(filepath.Join(dir, "empty"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	cmd := startWith(t, c, func(cmd *exec.Cmd) { cmd.Stdout, cmd.Stderr = &out, &out }, "/bin/sh", "-c", script)
	if err := cmd.Wait(); err != nil {
		t.Fatalf("%v: %s", err, out.String())
	}
	return strings.TrimSpace(out.String())
}

func TestDeviceRules(t *testing.T) {
	for _, bpf := range []bool{true, false} {
		t.Run(fmt.Sprintf("bpf=%v", bpf), func(t *testing.T) {
			if !bpf {
				needV1Devices(t)
			}
			m := managerWith(t, bpf)
			for _, c := range []struct {
				what       string
				rules      []string
				privileged bool
				refused    string
			}{
				{"default", nil, false, "r:kmsg w:kmsg r:disk"},
				{"one read", []string{"c 1:11 r"}, false, "w:kmsg r:disk"},
				{"two rules that add up", []string{"c 1:11 r", "c 1:11 w"}, false, "r:disk"},
				{"any minor", []string{"b 259:* rwm"}, false, "r:kmsg w:kmsg"},
				{"all kinds", []string{"a *:* rw"}, false, ""},
				{"everything, then more", []string{"a *:* rwm", "c 1:11 r", "a *:* rwm"}, false, ""},
				{"privileged", nil, true, ""},
			} {
				cg := make1(t, m)
				before := cg.Path()
				if err := cg.SetDevices(c.rules, c.privileged); err != nil {
					t.Errorf("%s: %v", c.what, err)
					continue
				}
				if moved := cg.Path() != before; moved != (c.refused != "r:kmsg w:kmsg r:disk") {
					t.Errorf("%s: from %s to %s", c.what, before, cg.Path())
				}
				if got := tryDevices(t, cg); got != c.refused {
					t.Errorf("%s: refused %q, want %q", c.what, got, c.refused)
				}
				limit := int64(9)
				if err := cg.Apply(&wire.Resources{PidsLimit: &limit}); err != nil {
					t.Errorf("%s: limits after the move: %v", c.what, err)
				}
			}
			at, err := m.NewAt(m.def.path+"-parent", "x")
			if err != nil {
				t.Fatal(err)
			}
			if got := tryDevices(t, at); got != "r:kmsg w:kmsg r:disk" {
				t.Errorf("other parent: refused %q", got)
			}
			if err := at.SetDevices([]string{"c 1:11 r"}, false); err != nil {
				t.Fatal(err)
			}
			if got := tryDevices(t, at); got != "w:kmsg r:disk" {
				t.Errorf("other parent with a rule: refused %q", got)
			}
			if err := at.Remove(); err != nil {
				t.Error(err)
			}
			for _, tree := range append([]*hierarchy{&m.h.v2}, m.trees...) {
				if err := os.Remove(tree.mount + "/" + m.def.path + "-parent"); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// needV1Devices skips what cannot be where all is v2: there the BPF program is the only way.
func needV1Devices(t *testing.T) {
	t.Helper()
	h, err := Detect()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if h.devices == nil {
		t.Skip("no v1 devices hierarchy on this host")
	}
}

// A restarted agent attaches its rules and takes the earlier ones away: never two, never none.
func TestDeviceProgramIsReplaced(t *testing.T) {
	m := manager(t)
	ids := func() []uint32 {
		out, err := programsOn(m.def.v2)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	first := ids()
	again, err := m.h.Open(m.def.path)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if second := ids(); len(first) != 1 || len(second) != 1 || first[0] == second[0] {
		t.Errorf("programs %v, then %v; want one and another", first, second)
	}
	again.Close()
	if left := ids(); len(left) != 1 {
		t.Errorf("programs %v after the agent's end, want one", left)
	}
}

func TestParseRule(t *testing.T) {
	for text, want := range map[string]string{
		"c 10:229 rwm": "c 10:229 mrw", "b 8:* r": "b 8:* r", "a *:* m": "a *:* m", "c 1:3 mm": "c 1:3 m",
	} {
		if r, err := parseRule(text); err != nil || r.String() != want {
			t.Errorf("parseRule(%q): %q, %v; want %q", text, r, err, want)
		}
	}
	for _, text := range []string{"", "c", "c 1:3", "x 1:3 r", "c 1 r", "c 1:3 x", "c 1:3 rwmr", "c -1:3 r", "c 1:3  r", "c 4096:0 r", "c 1:1048576 r", "c 1:3 r\nc 1:4", "c a:b r"} {
		if r, err := parseRule(text); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("parseRule(%q): %v, %v; want Invalid", text, r, err)
		}
	}
}

func TestDefaultRulesAreTheKernelsForm(t *testing.T) {
	needV1Devices(t)
	m := managerWith(t, false)
	list, err := read(m.def.v1[len(m.def.v1)-1], "devices.list")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range defaultRules {
		var found bool
		for line := range strings.SplitSeq(list, "\n") {
			p, err := parseRule(line)
			found = found || err == nil && p == r
		}
		if !found {
			t.Errorf("%q is not in\n%s", r, list)
		}
	}
	if n := strings.Count(list, "\n") + 1; n != len(defaultRules) {
		t.Errorf("%d rules, want %d:\n%s", n, len(defaultRules), list)
	}
}
