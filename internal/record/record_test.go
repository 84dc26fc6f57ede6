//go:build unix

package record

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

type thing struct {
	N    int
	Text string
}

// never is a delay within which no test waits for the background.
const never = time.Hour

func open(t testing.TB, dir string, o Options) *Store[thing] {
	t.Helper()
	if o.Log == nil {
		o.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	s, err := Open[thing](dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func files(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	list := []string{}
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

func TestLife(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	s := open(t, dir, Options{Delay: never})
	for i := range 3 { // the last one is in x.json.new again
		if err := s.Put("x", &thing{i, "<&>"}); err != nil {
			t.Fatal(err)
		}
		if got := open(t, dir, Options{Delay: never}).Load()["x"]; got == nil || *got != (thing{i, "<&>"}) {
			t.Errorf("after Put %d another finds %+v", i, got)
		}
	}
	if got := files(t, dir); !slices.Equal(got, []string{"x.json.new"}) {
		t.Errorf("before the sync: %v", got)
	}
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if got := files(t, dir); !slices.Equal(got, []string{"x.json"}) {
		t.Errorf("after the sync: %v", got)
	}
	if err := s.Put("x", &thing{N: 9}); err != nil {
		t.Fatal(err)
	}
	if got := files(t, dir); !slices.Equal(got, []string{"x.json", "x.json.new"}) {
		t.Errorf("before the second sync: %v", got)
	}
	if got := open(t, dir, Options{Delay: never}).Load()["x"]; got.N != 9 {
		t.Errorf("the old record is found: %+v", got)
	}
	for range 2 { // the second time there is nothing
		if err := s.Delete("x"); err != nil {
			t.Fatal(err)
		}
	}
	if got := files(t, dir); len(got) != 0 {
		t.Errorf("after Delete: %v", got)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Put("x", &thing{}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Put after Close: %v", err)
	}
	if err := s.Delete("x"); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Delete after Close: %v", err)
	}
}

func TestBackground(t *testing.T) {
	dir := t.TempDir()
	synced := make(chan string, 10)
	s := open(t, dir, Options{Delay: time.Millisecond, Fault: func(point, name string) error {
		if point == PointSyncDir {
			synced <- point
		}
		return nil
	}})
	if err := s.Put("x", &thing{N: 1}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-synced:
	case <-time.After(10 * time.Second):
		t.Fatal("nothing was synced")
	}
	if err := s.Sync(); err != nil { // waits for the flush under way
		t.Fatal(err)
	}
	if got := files(t, dir); !slices.Equal(got, []string{"x.json"}) {
		t.Errorf("after the background's sync: %v", got)
	}
}

// TestShortLived puts and deletes a record before its sync: no fsync is made for it.
func TestShortLived(t *testing.T) {
	var syncs atomic.Int32
	s := open(t, t.TempDir(), Options{Delay: never, Fault: func(point, name string) error {
		if strings.HasPrefix(point, "sync.") {
			syncs.Add(1)
		}
		return nil
	}})
	if err := s.Put("x", &thing{}); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete("x"); err != nil {
		t.Fatal(err)
	}
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if n := syncs.Load(); n != 0 {
		t.Errorf("%d steps of a sync were made", n)
	}
}

// TestIdle checks that a store without work has no goroutine.
func TestIdle(t *testing.T) {
	before := runtime.NumGoroutine()
	s := open(t, t.TempDir(), Options{Delay: never})
	for i := range 100 {
		if err := s.Put(fmt.Sprint(i), &thing{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if n := runtime.NumGoroutine(); n > before {
		t.Errorf("%d goroutines, %d before", n, before)
	}
}

func TestNames(t *testing.T) {
	s := open(t, t.TempDir(), Options{Delay: never})
	for _, name := range []string{"", ".", "..", "a/b", "../x", ".x", "-x", "a b", "ä", "a\x00", strings.Repeat("a", MaxName+1)} {
		if err := s.Put(name, &thing{}); !errors.Is(err, ErrName) {
			t.Errorf("Put %q: %v", name, err)
		}
		if err := s.Delete(name); !errors.Is(err, ErrName) {
			t.Errorf("Delete %q: %v", name, err)
		}
	}
	for _, name := range []string{"a", "A-b_c.d", "0", "x.json", "x.json.new", strings.Repeat("a", MaxName)} {
		if err := s.Put(name, &thing{}); err != nil {
			t.Errorf("Put %q: %v", name, err)
		}
	}
}

// encoded is the whole file of a record.
func encoded(t testing.TB, v *thing, gen uint64) []byte {
	t.Helper()
	b := new(buffer)
	if err := b.encode(v); err != nil {
		t.Fatal(err)
	}
	if err := b.seal(gen); err != nil {
		t.Fatal(err)
	}
	return slices.Clone(b.b)
}

// TestDamaged opens a directory in which every kind of damage lies.
func TestDamaged(t *testing.T) {
	whole := func(n int) []byte { return encoded(t, &thing{N: n}, uint64(n)) }
	flip := func(b []byte) []byte { b[len(b)-4] ^= 1; return b }
	for _, c := range []struct {
		name     string
		old, new []byte
		want     int // N of what is found, -1 for nothing
		left     []string
	}{
		{"torn new", whole(1), whole(2)[:70], 1, []string{"x.json", "x.json.new.damaged"}},
		{"empty new", whole(1), []byte{}, 1, []string{"x.json", "x.json.new.damaged"}},
		{"flipped new", whole(1), flip(whole(2)), 1, []string{"x.json", "x.json.new.damaged"}},
		{"flipped old", flip(whole(1)), whole(2), 2, []string{"x.json", "x.json.new"}},
		{"only torn", nil, whole(2)[:40], -1, []string{"x.json.new.damaged"}},
		{"both", flip(whole(1)), flip(whole(2)), -1, []string{"x.json.damaged", "x.json.new.damaged"}},
		{"other version", bytes.Replace(whole(1), []byte(`"kiri":1`), []byte(`"kiri":7`), 1), nil, -1, []string{"x.json.damaged"}},
		{"longer", append(whole(1), 'x'), nil, -1, []string{"x.json.damaged"}},
		{"no record", []byte("hello\n"), nil, -1, []string{"x.json.damaged"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			for ext, b := range map[string][]byte{extOld: c.old, extNew: c.new} {
				if b != nil {
					if err := os.WriteFile(filepath.Join(dir, "x"+ext), b, 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := os.WriteFile(filepath.Join(dir, "README"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Mkdir(filepath.Join(dir, "d.json"), 0o700); err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			s := open(t, dir, Options{Delay: never, Log: slog.New(slog.NewTextHandler(&log, nil))})
			got := -1
			if v := s.Load()["x"]; v != nil {
				got = v.N
			}
			if got != c.want {
				t.Errorf("found %d, want %d", got, c.want)
			}
			left := slices.DeleteFunc(files(t, dir), func(f string) bool { return f == "README" || strings.HasPrefix(f, "d.json") })
			if !slices.Equal(left, c.left) {
				t.Errorf("left %v, want %v", left, c.left)
			}
			if c.want != 2 && !strings.Contains(log.String(), "a damaged record is set aside") {
				t.Errorf("log: %s", log.String())
			}
			// Life goes on over what was found.
			if err := s.Put("x", &thing{N: 5}); err != nil {
				t.Fatal(err)
			}
			if err := s.Sync(); err != nil {
				t.Fatal(err)
			}
			if v := open(t, dir, Options{Delay: never}).Load()["x"]; v == nil || v.N != 5 {
				t.Errorf("after a Put: %+v", v)
			}
		})
	}
}

// scenario takes a record through every step. It returns what may stand after it was stopped at any point: promised
// is the last value whose Put returned (0 none, -1 deleted), begun the value that was being put.
func scenario(s *Store[thing], told func(begun, promised int)) error {
	promised := 0
	put := func(n int) error {
		told(n, promised)
		if err := s.Put("x", &thing{n, strings.Repeat("y", 5000)}); err != nil {
			return err
		}
		promised = n
		told(n, n)
		return nil
	}
	for _, step := range []func() error{
		func() error { return put(1) }, func() error { return put(2) }, s.Sync, func() error { return put(3) },
		func() error { return put(4) }, s.Sync, func() error { return put(5) },
		func() error {
			told(-1, promised)
			if err := s.Delete("x"); err != nil {
				return err
			}
			promised = -1
			told(-1, -1)
			return nil
		},
		s.Sync, func() error { return put(6) }, s.Sync,
		func() error { told(-1, 6); err := s.Delete("x"); promised = -1; return err }, s.Sync,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// check opens dir anew and compares.
func check(t *testing.T, dir string, begun, promised int) {
	t.Helper()
	s := open(t, dir, Options{Delay: never})
	got := -1
	if v := s.Load()["x"]; v != nil {
		got = v.N
		if v.Text != strings.Repeat("y", 5000) {
			t.Errorf("a torn record was taken: %d bytes of text", len(v.Text))
		}
	}
	ok := got == promised || got == begun
	if promised == 0 && got == -1 { // nothing was ever there
		ok = true
	}
	if !ok {
		t.Errorf("found %d; %d was promised, %d begun", got, promised, begun)
	}
	if f := files(t, dir); slices.Contains(f, "x.json.new") && slices.Contains(f, "x.json.new2") {
		t.Errorf("left behind: %v", f)
	}
}

// TestFaults fails each operation, each time it comes.
func TestFaults(t *testing.T) {
	for _, point := range Points() {
		hit := 0
		for nth := 1; ; nth++ {
			dir := t.TempDir()
			count := 0
			failed := false
			boom := errors.New("boom")
			s := open(t, dir, Options{Delay: never, Fault: func(p, name string) error {
				if p != point {
					return nil
				}
				if count++; count == nth {
					failed = true
					return boom
				}
				return nil
			}})
			var begun, promised int
			err := scenario(s, func(b, p int) { begun, promised = b, p })
			if !failed {
				break
			}
			hit++
			if !errors.Is(err, boom) {
				t.Errorf("%s #%d: the error is lost: %v", point, nth, err)
			}
			check(t, dir, begun, promised)
			// The same store goes on, and what was pending is not forgotten.
			if err := s.Put("x", &thing{7, strings.Repeat("y", 5000)}); err != nil {
				t.Errorf("%s #%d: Put afterwards: %v", point, nth, err)
			}
			if err := s.Sync(); err != nil {
				t.Errorf("%s #%d: Sync afterwards: %v", point, nth, err)
			}
			if got := files(t, dir); !slices.Equal(got, []string{"x.json"}) {
				t.Errorf("%s #%d: afterwards: %v", point, nth, got)
			}
			check(t, dir, 7, 7)
		}
		if hit == 0 {
			t.Errorf("%s is never met", point)
		}
	}
}

// TestKill runs the scenario in a process of its own that kills itself, really, at each operation.
func TestKill(t *testing.T) {
	if spec := os.Getenv("KIRI_RECORD_KILL"); spec != "" {
		killed(t, spec)
		return
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, point := range Points() {
		for nth := 1; ; nth++ {
			dir := t.TempDir()
			cmd := exec.Command(exe, "-test.run=^TestKill$")
			cmd.Env = append(os.Environ(), fmt.Sprintf("KIRI_RECORD_KILL=%s %d %s", point, nth, dir))
			out, err := cmd.Output()
			var begun, promised int
			for line := range strings.Lines(string(out)) {
				fmt.Sscanf(line, "told %d %d", &begun, &promised)
			}
			var exit *exec.ExitError
			if err == nil {
				if nth == 1 {
					t.Errorf("%s is never met", point)
				}
				break
			}
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("%s #%d: %v\n%s", point, nth, err, out)
			}
			check(t, dir, begun, promised)
		}
	}
}

func killed(t *testing.T, spec string) {
	var point, dir string
	var nth int
	if _, err := fmt.Sscan(spec, &point, &nth, &dir); err != nil {
		t.Fatal(err)
	}
	count := 0
	s := open(t, dir, Options{Delay: never, Fault: func(p, name string) error {
		if p == point {
			if count++; count == nth {
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
		return nil
	}})
	if err := scenario(s, func(b, p int) { fmt.Fprintf(os.Stdout, "told %d %d\n", b, p) }); err != nil {
		t.Fatal(err)
	}
}

// TestBackgroundFailure fails the background's sync for a while: it is told, tried again, and nothing is lost.
func TestBackgroundFailure(t *testing.T) {
	dir := t.TempDir()
	var left atomic.Int32
	left.Store(3)
	done := make(chan struct{}, 10)
	var log bytes.Buffer
	s := open(t, dir, Options{Delay: time.Millisecond, Log: slog.New(slog.NewTextHandler(&log, nil)), Fault: func(p, name string) error {
		if p == PointSyncFile && left.Add(-1) >= 0 {
			return syscall.EIO
		}
		if p == PointSyncDir {
			done <- struct{}{}
		}
		return nil
	}})
	if err := s.Put("x", &thing{N: 1}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("it was not tried again")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if got := files(t, dir); !slices.Equal(got, []string{"x.json"}) {
		t.Errorf("afterwards: %v", got)
	}
	if !strings.Contains(log.String(), "input/output error") {
		t.Errorf("log: %s", log.String())
	}
}

// TestConcurrent puts, deletes and syncs from many goroutines; in the end each name holds its last value.
func TestConcurrent(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{Delay: 100 * time.Microsecond})
	const names, rounds = 8, 201
	var wg sync.WaitGroup
	for i := range names {
		wg.Go(func() {
			name := fmt.Sprintf("n%d", i)
			for n := range rounds {
				if err := s.Put(name, &thing{N: n}); err != nil {
					t.Error(err)
				}
				if n%7 == 3 {
					if err := s.Delete(name); err != nil {
						t.Error(err)
					}
				}
			}
			if i%2 == 1 {
				if err := s.Delete(name); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Go(func() {
		for range 20 {
			if err := s.Sync(); err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	got := open(t, dir, Options{Delay: never}).Load()
	if len(got) != names/2 {
		t.Errorf("%d records", len(got))
	}
	for name, v := range got {
		if v.N != rounds-1 {
			t.Errorf("%s holds %d", name, v.N)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(encoded(f, &thing{1, "x"}, 3))
	f.Add([]byte(`{"kiri":1,"put":         1,"length":         2,"crc32c":"00000000"}` + "\n{}\n"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, in []byte) {
		var v thing
		gen, err := decode(in, &v)
		if err != nil {
			if !errors.Is(err, errDamaged) {
				t.Errorf("not called damaged: %v", err)
			}
			return
		}
		if gen > 9999999999 {
			return
		}
		var again thing
		if n, err := decode(encoded(t, &v, gen), &again); err != nil || again != v || n != gen {
			t.Errorf("%+v became %+v: %v", v, again, err)
		}
	})
}

// record4k has the size of a container's record.
type record4k struct {
	ID, Name, Image string
	Env             []string
	Labels          map[string]string
	HostConfig      json.RawMessage
}

func newRecord() *record4k {
	r := &record4k{ID: strings.Repeat("a", 64), Name: "quick_fox", Image: "sha256:" + strings.Repeat("b", 64), Labels: map[string]string{}}
	for i := range 10 {
		r.Env = append(r.Env, fmt.Sprintf("NAME_%d=value %d", i, i))
		r.Labels[fmt.Sprintf("com.example.label%d", i)] = "some value"
	}
	r.HostConfig = json.RawMessage(`{"Binds":null,"NetworkMode":"default","PortBindings":{},"RestartPolicy":{"Name":"no","MaximumRetryCount":0},"AutoRemove":true}`)
	return r
}

// BenchmarkPutDelete is a container's record in the life of `run --rm`.
func BenchmarkPutDelete(b *testing.B) {
	s, err := Open[record4k](b.TempDir(), Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	r := newRecord()
	for b.Loop() {
		if err := s.Put("x", r); err != nil {
			b.Fatal(err)
		}
		if err := s.Delete("x"); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPut is a first Put: a name that has no record.
func BenchmarkPut(b *testing.B) {
	s, err := Open[record4k](b.TempDir(), Options{Log: slog.New(slog.DiscardHandler), Delay: never})
	if err != nil {
		b.Fatal(err)
	}
	r := newRecord()
	n := 0
	for b.Loop() {
		n++
		if err := s.Put(fmt.Sprint(n), r); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPutAgain replaces a record that waits for its sync.
func BenchmarkPutAgain(b *testing.B) {
	s, err := Open[record4k](b.TempDir(), Options{Log: slog.New(slog.DiscardHandler), Delay: never})
	if err != nil {
		b.Fatal(err)
	}
	r := newRecord()
	for b.Loop() {
		if err := s.Put("x", r); err != nil {
			b.Fatal(err)
		}
	}
}
