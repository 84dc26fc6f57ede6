package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// openPTY gives both ends of a terminal of 40 rows and 120 columns.
func openPTY(t *testing.T) (master, slave *os.File) {
	t.Helper()
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	master = os.NewFile(uintptr(m), "ptmx")
	t.Cleanup(func() { master.Close() })
	if err := unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetUint32(m, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	s, err := unix.Open(fmt.Sprintf("/dev/pts/%d", n), unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	slave = os.NewFile(uintptr(s), "pts")
	t.Cleanup(func() { slave.Close() })
	resize(t, master, 40, 120)
	return master, slave
}

func resize(t *testing.T, master *os.File, rows, cols uint16) {
	t.Helper()
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols}); err != nil {
		t.Fatal(err)
	}
}

// lflag tells whether the terminal echoes and gathers lines, or is raw.
func lflag(t *testing.T, f *os.File) bool {
	t.Helper()
	tio, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	return tio.Lflag&(unix.ICANON|unix.ECHO|unix.ISIG) != 0
}

// TestTerminal runs an interactive container: the size is in the request, resizes follow, the terminal is raw meanwhile and as before
// afterwards, and the detach keys end the command but not the container.
func TestTerminal(t *testing.T) {
	master, slave := openPTY(t)
	f := newFake(t)
	sizes := make(chan string, 8)
	typed := make(chan string, 1)
	f.answer("POST /containers/create", 201, `{"Id":"c1"}`)
	started := make(chan struct{})
	f.hijack("POST /containers/c1/attach", func(conn net.Conn, r io.Reader) {
		<-started
		if got := <-sizes; got != "40x120" {
			t.Errorf("the first size is %s", got)
		}
		// The size and the mode are set side by side; the mode has to be there before anybody can type.
		for end := time.Now().Add(10 * time.Second); lflag(t, slave); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Error("the terminal is not raw")
				break
			}
		}
		resize(t, master, 50, 100)
		// The kernel tells the terminal's foreground processes; this test has none, so it says so itself.
		if err := unix.Kill(os.Getpid(), unix.SIGWINCH); err != nil {
			t.Error(err)
		}
		if got := <-sizes; got != "50x100" {
			t.Errorf("the size after the change is %s", got)
		}
		io.WriteString(conn, "prompt# ")
		for shown := ""; !strings.Contains(shown, "prompt# "); {
			buf := make([]byte, 256)
			n, err := master.Read(buf)
			if err != nil {
				t.Error(err)
				return
			}
			shown += string(buf[:n])
		}
		// A control key is for the container, not for this process; the sequence that breaks off is passed on.
		io.WriteString(master, "ls\x03\x10x\x10\x11")
		b, _ := io.ReadAll(r)
		typed <- string(b)
	})
	f.mux.HandleFunc("POST /containers/c1/resize", func(w http.ResponseWriter, r *http.Request) {
		sizes <- r.FormValue("h") + "x" + r.FormValue("w")
	})
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	f.mux.HandleFunc("POST /containers/c1/wait", func(w http.ResponseWriter, r *http.Request) {
		w.(http.Flusher).Flush()
		<-hang // the container goes on
	})
	f.mux.HandleFunc("POST /containers/c1/start", func(w http.ResponseWriter, _ *http.Request) {
		close(started)
		w.WriteHeader(204)
	})
	t.Setenv("KIRI_HOST", "unix://"+f.socket)
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	var errs bytes.Buffer
	c := &cli{in: slave, out: slave, err: &errs}
	if code := c.exit(c.dispatch([]string{"run", "-it", "alpine", "sh"})); code != 0 || errs.Len() != 0 {
		t.Errorf("code %d, %q", code, errs.String())
	}
	if got := <-typed; got != "ls\x03\x10x" {
		t.Errorf("the container got %q", got)
	}
	if !lflag(t, slave) {
		t.Error("the terminal was left raw")
	}
	var body struct {
		HostConfig struct{ ConsoleSize [2]int }
		Tty        bool
		OpenStdin  bool
	}
	if err := json.Unmarshal([]byte(f.bodyOf("POST /containers/create")), &body); err != nil || body.HostConfig.ConsoleSize != [2]int{40, 120} || !body.Tty || !body.OpenStdin {
		t.Errorf("%+v, %v", body, err)
	}
}

func TestDetachKeys(t *testing.T) {
	for in, want := range map[string]string{"ctrl-p,ctrl-q": "\x10\x11", "a": "a", "ctrl-@,ctrl-[": "\x00\x1b", "ctrl-_": "\x1f", "Ctrl-A,b": "\x01b"} {
		if got, err := parseKeys(in); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", in, got, err)
		}
	}
	for _, in := range []string{"", "ab", "ctrl-", "ctrl-1", "a,,b", "ctrl-ab"} {
		if got, err := parseKeys(in); err == nil {
			t.Errorf("%q was read as %q", in, got)
		}
	}
	for _, c := range []struct {
		in, keys, out string
		detached      bool
	}{
		{"abc", "\x10\x11", "abc", false},
		{"ab\x10\x11cd", "\x10\x11", "ab", true},
		{"\x10a\x10\x10\x11", "\x10\x11", "\x10a\x10", true},
		{"\x10", "\x10\x11", "\x10", false},
		{"xqy", "q", "x", true},
	} {
		for size := 1; size <= len(c.in); size++ {
			got, err := io.ReadAll(&escapeReader{r: &pieces{c.in, size}, keys: []byte(c.keys)})
			if string(got) != c.out || (err == errDetached) != c.detached {
				t.Errorf("%q in pieces of %d: %q, %v", c.in, size, got, err)
			}
		}
	}
}

// pieces reads a string a few bytes at a time.
type pieces struct {
	s string
	n int
}

func (p *pieces) Read(b []byte) (int, error) {
	if p.s == "" {
		return 0, io.EOF
	}
	n := copy(b, p.s[:min(p.n, len(p.s))])
	p.s = p.s[n:]
	return n, nil
}
