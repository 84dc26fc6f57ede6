//go:build linux

package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// TestStreams attaches clients in all ways to containers and execs.
func TestStreams(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()

	t.Run("stdin once", func(t *testing.T) {
		m := r.spec("cat")
		m.OpenStdin, m.StdinOnce = true, true
		c := r.attach(m, &wire.Attach{Stdin: true, Stdout: true, Stderr: true, Framed: true, Stream: true, Buffered: []byte("first ")})
		big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // 1 MiB: more than any pipe or socket holds
		go func() {
			c.conn.Write(big)
			c.conn.CloseWrite()
		}()
		r.run(m)
		out, _ := c.readAll(true)
		if out != "first "+string(big) {
			t.Errorf("cat gave %d bytes back of %d", len(out), len(big)+6)
		}
		if e := r.wait(m.ID); e.Code != 0 {
			t.Errorf("cat ended with %+v", e)
		}
	})

	t.Run("stdin kept open", func(t *testing.T) {
		m := r.spec("sh", "-c", "read a; echo got $a; read b; echo got $b")
		m.OpenStdin = true
		one := r.attach(m, &wire.Attach{Stdin: true, Stream: true})
		all := r.attach(m, &wire.Attach{Stdout: true, Stream: true})
		r.run(m)
		one.conn.Write([]byte("one\n"))
		one.conn.Close()
		two := r.attach(m, &wire.Attach{Stdin: true, Stream: true})
		two.conn.Write([]byte("two\n"))
		if out, _ := all.readAll(false); out != "got one\ngot two\n" {
			t.Errorf("got %q", out)
		}
		r.wait(m.ID)
	})

	t.Run("several clients", func(t *testing.T) {
		m := r.spec("sh", "-c", "read x; seq 1 20000")
		m.OpenStdin = true
		var clients []*client
		for range 5 {
			clients = append(clients, r.attach(m, &wire.Attach{Stdout: true, Stderr: true, Framed: true, Stream: true}))
		}
		in := r.attach(m, &wire.Attach{Stdin: true, Stream: true})
		r.run(m)
		in.conn.Write([]byte("go\n"))
		want := numbers(1, 20000)
		for i, c := range clients {
			if out, _ := c.readAll(true); out != want {
				t.Errorf("client %d got %d bytes of %d", i, len(out), len(want))
			}
		}
		out, _ := r.logs(allLogs(m.ID))
		if out != want {
			t.Errorf("the log has %d bytes of %d", len(out), len(want))
		}
	})

	t.Run("slow client", func(t *testing.T) {
		slow := r.spec("sh", "-c", "yes 0123456789 | head -c 8000000")
		c := r.attach(slow, &wire.Attach{Stdout: true, Stream: true})
		r.run(slow)
		// Another container is not held up by the one that waits for its client.
		if out, _, _ := r.output(r.spec("echo", "quick")); out != "quick\n" {
			t.Errorf("got %q", out)
		}
		r.mu.Lock()
		e := r.exits[slow.ID]
		r.mu.Unlock()
		if e != nil {
			t.Error("a container wrote 8 MB to a client that reads nothing")
		}
		if out, _ := c.readAll(false); len(out) != 8000000 {
			t.Errorf("client got %d bytes", len(out))
		}
		r.wait(slow.ID)
	})

	t.Run("terminal", func(t *testing.T) {
		m := r.spec("sh", "-c", "stty size; tty; ls -l /dev/console | head -c 1; echo; read x; echo [$x]; stty size")
		m.TTY, m.OpenStdin, m.Height, m.Width = true, true, 40, 120
		c := r.attach(m, &wire.Attach{Stdin: true, Stdout: true, Stream: true, DetachKeys: []byte{16, 17}})
		r.run(m)
		got := c.until("\nc\r\n")
		if !strings.HasPrefix(got, "40 120\r\n/dev/pts/0\r\n") {
			t.Errorf("got %q", got)
		}
		if _, err := r.conn.Call(r.ctx(), &wire.Resize{ID: m.ID, Height: 50, Width: 200}); err != nil {
			t.Error(err)
		}
		c.conn.Write([]byte("typed\n"))
		rest, _ := c.readAll(false)
		if !strings.Contains(rest, "[typed]\r\n50 200\r\n") {
			t.Errorf("got %q", rest)
		}
		if e := r.wait(m.ID); e.Code != 0 {
			t.Errorf("ended with %+v", e)
		}
	})

	t.Run("detach", func(t *testing.T) {
		m := r.spec("sh", "-c", "read x; echo [$x]; read y; echo [$y]")
		m.TTY, m.OpenStdin = true, true
		c := r.attach(m, &wire.Attach{Stdin: true, Stdout: true, Stream: true, DetachKeys: []byte{16, 17}})
		r.run(m)
		c.conn.Write([]byte("a\x10b\n")) // the first key alone is input
		c.until("[a")
		c.conn.Write([]byte{16})
		c.conn.Write([]byte{17})
		c.readAll(false)
		again := r.attach(m, &wire.Attach{Stdin: true, Stdout: true, Stream: true})
		again.conn.Write([]byte("second\n"))
		if rest, _ := again.readAll(false); !strings.Contains(rest, "[second]") {
			t.Errorf("got %q", rest)
		}
	})

	t.Run("early resize", func(t *testing.T) {
		m := r.spec("stty", "size")
		m.TTY = true
		if _, err := r.conn.Call(r.ctx(), &wire.Resize{ID: m.ID, Height: 33, Width: 77}); err != nil {
			t.Fatal(err)
		}
		if out, _, _ := r.output(m); out != "33 77\r\n" {
			t.Errorf("got %q", out)
		}
	})

	t.Run("attach with logs", func(t *testing.T) {
		m := r.spec("sh", "-c", "seq 1 1000; printf unfinished; read x; echo; seq 1001 2000")
		m.OpenStdin = true
		first := r.attach(m, &wire.Attach{Stdout: true, Stream: true})
		r.run(m)
		first.until("unfinished")
		c := r.attach(m, &wire.Attach{Stdin: true, Stdout: true, Stderr: true, Framed: true, Stream: true, Logs: true})
		c.conn.Write([]byte("go\n"))
		if out, _ := c.readAll(true); out != numbers(1, 1000)+"unfinished\n"+numbers(1001, 2000) {
			t.Errorf("got %d bytes, ending %q", len(out), tailOf([]byte(out)))
		}
		r.wait(m.ID)
	})

	t.Run("fast ones", func(t *testing.T) {
		for i := range 100 {
			out, errs, code := r.output(r.spec("sh", "-c", "echo out; echo err >&2; exit 42"))
			if out != "out\n" || errs != "err\n" || code != 42 {
				t.Fatalf("run %d: %q, %q, %d", i, out, errs, code)
			}
		}
	})
}

func numbers(from, to int) string {
	var b strings.Builder
	for i := from; i <= to; i++ {
		fmt.Fprintln(&b, i)
	}
	return b.String()
}

// until reads until the output ends with what.
func (c *client) until(what string) string {
	c.t.Helper()
	c.conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	var got []byte
	buf := make([]byte, 1024)
	for !bytes.Contains(got, []byte(what)) {
		n, err := c.conn.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil {
			c.t.Fatalf("reading up to %q: got %q: %v", what, got, err)
		}
	}
	return string(got)
}

// TestExec starts processes in running containers.
func TestExec(t *testing.T) {
	r := newRig(t)
	r.start()
	r.image()
	m := r.spec("sleep", "1000")
	m.Groups, m.User = []string{"4321"}, "web"
	r.run(m)
	exec := func(t *testing.T, e *wire.Exec) (string, string, int) {
		t.Helper()
		e.ID, e.Exec, e.Stdout, e.Stderr, e.Framed = m.ID, newID(), true, true, !e.TTY
		c, file := socketpair(t)
		defer file.Close()
		if _, err := r.conn.Call(r.ctx(), e, file); err != nil {
			t.Fatalf("exec: %v", err)
		}
		file.Close()
		out, errs := c.readAll(e.Framed)
		code := r.wait(e.Exec).Code
		r.conn.Notify(&wire.Ack{ID: m.ID, Run: m.Run, Exec: e.Exec})
		return out, errs, code
	}
	t.Run("code", func(t *testing.T) {
		out, errs, code := exec(t, &wire.Exec{Args: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}})
		if out != "out\n" || errs != "err\n" || code != 7 {
			t.Errorf("got %q, %q, %d", out, errs, code)
		}
	})
	t.Run("user", func(t *testing.T) {
		out, _, _ := exec(t, &wire.Exec{Args: []string{"id"}})
		if !strings.Contains(out, "uid=1000(web)") || !strings.Contains(out, "4321") {
			t.Errorf("without a user: %q", out)
		}
		out, _, _ = exec(t, &wire.Exec{Args: []string{"id"}, User: "0"})
		if !strings.Contains(out, "uid=0(root)") {
			t.Errorf("as root: %q", out)
		}
	})
	t.Run("same container", func(t *testing.T) {
		out, _, _ := exec(t, &wire.Exec{Args: []string{"sh", "-c", "hostname; cat /proc/1/cmdline | tr '\\0' ' '; cat /proc/self/cgroup | tail -n 1; cat /proc/1/cgroup | tail -n 1"}, User: "0"})
		l := strings.Split(out, "\n")
		if len(l) < 4 || l[0] != "box" || !strings.HasPrefix(l[1], "sleep 1000") {
			t.Errorf("got %q", out)
		}
	})
	t.Run("terminal", func(t *testing.T) {
		out, _, code := exec(t, &wire.Exec{Args: []string{"sh", "-c", "stty size; tty; exit 3"}, TTY: true, Height: 40, Width: 120, User: "0"})
		if out != "40 120\r\n/dev/pts/0\r\n" || code != 3 {
			t.Errorf("got %q, %d", out, code)
		}
	})
	t.Run("open stdin", func(t *testing.T) {
		// A client that keeps its input open does not keep the exec.
		start := time.Now()
		_, _, code := exec(t, &wire.Exec{Args: []string{"true"}, Stdin: true})
		if code != 0 {
			t.Errorf("code %d", code)
		}
		t.Logf("%v", time.Since(start))
	})
	t.Run("stdin", func(t *testing.T) {
		e := &wire.Exec{ID: m.ID, Exec: newID(), Args: []string{"cat"}, Stdin: true, Stdout: true, Framed: true}
		c, file := socketpair(t)
		if _, err := r.conn.Call(r.ctx(), e, file); err != nil {
			t.Fatal(err)
		}
		file.Close()
		io.WriteString(c.conn, "through cat")
		c.conn.CloseWrite()
		if out, _ := c.readAll(true); out != "through cat" {
			t.Errorf("got %q", out)
		}
		r.wait(e.Exec)
	})
	t.Run("no command", func(t *testing.T) {
		_, file := socketpair(t)
		_, err := r.conn.Call(r.ctx(), &wire.Exec{ID: m.ID, Exec: newID(), Args: []string{"nope"}, Stdout: true}, file)
		file.Close()
		if wire.ClassOf(err) != wire.NoCommand {
			t.Errorf("got %v", err)
		}
	})
	t.Run("no working directory", func(t *testing.T) {
		// Found out by the process itself. The connection stays whole: its other holder says on it what went wrong.
		c, file := socketpair(t)
		defer file.Close()
		_, err := r.conn.Call(r.ctx(), &wire.Exec{ID: m.ID, Exec: newID(), Args: []string{"true"}, Cwd: "/none", Stdout: true, Stdin: true}, file)
		if !errors.Is(err, unix.ENOENT) {
			t.Errorf("got %v", err)
		}
		if _, err := io.WriteString(file, "why"); err != nil {
			t.Errorf("telling the client: %v", err)
		}
		file.Close()
		if out, _ := c.readAll(false); out != "why" {
			t.Errorf("the client got %q", out)
		}
	})
	t.Run("killed with its children", func(t *testing.T) {
		e := &wire.Exec{ID: m.ID, Exec: newID(), Args: []string{"sh", "-c", "sleep 1000 & echo $!; wait"}, Stdout: true}
		c, file := socketpair(t)
		if _, err := r.conn.Call(r.ctx(), e, file); err != nil {
			t.Fatal(err)
		}
		file.Close()
		line := make([]byte, 20)
		n, _ := c.conn.Read(line)
		child := strings.TrimSpace(string(line[:n]))
		if _, err := r.conn.Call(r.ctx(), &wire.Signal{ID: m.ID, Exec: e.Exec, Signal: 9}); err != nil {
			t.Fatal(err)
		}
		if x := r.wait(e.Exec); x.Code != 137 {
			t.Errorf("ended with %+v", x)
		}
		out, _, _ := exec(t, &wire.Exec{Args: []string{"sh", "-c", "grep -v Z /proc/" + child + "/stat || echo gone"}, User: "0"})
		if !strings.Contains(out, "gone") {
			t.Errorf("its child %q: %q", child, out)
		}
	})
	t.Run("detached", func(t *testing.T) {
		e := &wire.Exec{ID: m.ID, Exec: newID(), Args: []string{"sh", "-c", "echo unheard; exit 5"}, Detach: true}
		if _, err := r.conn.Call(r.ctx(), e); err != nil {
			t.Fatal(err)
		}
		if x := r.wait(e.Exec); x.Code != 5 {
			t.Errorf("ended with %+v", x)
		}
	})
	t.Run("dies with the container", func(t *testing.T) {
		e := &wire.Exec{ID: m.ID, Exec: newID(), Args: []string{"sleep", "1000"}, Stdout: true, Framed: true}
		c, file := socketpair(t)
		if _, err := r.conn.Call(r.ctx(), e, file); err != nil {
			t.Fatal(err)
		}
		file.Close()
		r.conn.Call(r.ctx(), &wire.Signal{ID: m.ID, Signal: 9})
		c.readAll(true)
		if x := r.wait(e.Exec); x.Code != 137 {
			t.Errorf("ended with %+v", x)
		}
		r.wait(m.ID)
	})
}
