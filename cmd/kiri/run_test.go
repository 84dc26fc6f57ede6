package main

import (
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// aContainer makes the fake daemon run a container that prints and ends with a code.
func aContainer(f *fakeDaemon, print string, code string) (started chan struct{}) {
	started = make(chan struct{})
	f.answer("POST /containers/create", 201, `{"Id":"c1","Warnings":["careful"]}`)
	f.hijack("POST /containers/c1/attach", func(conn net.Conn, _ io.Reader) {
		<-started
		io.WriteString(conn, print)
	})
	f.mux.HandleFunc("POST /containers/c1/wait", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.(http.Flusher).Flush()
		<-started
		io.WriteString(w, code)
	})
	f.mux.HandleFunc("POST /containers/c1/start", func(w http.ResponseWriter, _ *http.Request) {
		close(started)
		w.WriteHeader(204)
	})
	return started
}

func TestRun(t *testing.T) {
	f := newFake(t)
	aContainer(f, frame(1, "out\n")+frame(2, "err\n"), `{"StatusCode":42}`)
	want(t, f.run("run", "--rm", "alpine", "sh", "-c", "exit 42"), 42, "out\n", "WARNING: careful\nerr\n")
	calls := f.called()
	start := slices.Index(calls, "POST /containers/c1/start")
	attach := slices.Index(calls, "POST /containers/c1/attach?stderr=1&stdout=1&stream=1")
	wait := slices.Index(calls, "POST /containers/c1/wait?condition=removed")
	if attach < 0 || wait < 0 || start < attach || start < wait {
		t.Errorf("attach and wait are not both before start: %q", calls)
	}
}

func TestRunKept(t *testing.T) {
	f := newFake(t)
	aContainer(f, "", `{"StatusCode":0}`)
	want(t, f.run("run", "--name", "n", "-a", "stdout", "alpine"), 0, "", "WARNING: careful\n")
	calls := f.called()
	if !slices.Contains(calls, "POST /containers/create?name=n") || !slices.Contains(calls, "POST /containers/c1/wait?condition=next-exit") ||
		!slices.Contains(calls, "POST /containers/c1/attach?stdout=1&stream=1") {
		t.Errorf("%q", calls)
	}
}

func TestRunWaitError(t *testing.T) {
	f := newFake(t)
	aContainer(f, "", `{"StatusCode":0,"Error":{"Message":"it was lost"}}`)
	got := f.run("run", "alpine")
	if got.code != 125 || !strings.Contains(got.err, "it was lost") {
		t.Errorf("%+v", got)
	}
}

// TestRunInput checks that input reaches the container, that its end closes only that half, and that output after it is still read.
func TestRunInput(t *testing.T) {
	f := newFake(t)
	f.answer("POST /containers/create", 201, `{"Id":"c1"}`)
	started := make(chan struct{})
	f.hijack("POST /containers/c1/attach", func(conn net.Conn, r io.Reader) {
		<-started
		b, err := io.ReadAll(r)
		if err != nil {
			t.Error(err)
		}
		io.WriteString(conn, frame(1, strings.ToUpper(string(b))))
	})
	f.answer("POST /containers/c1/wait", 200, `{"StatusCode":0}`)
	f.mux.HandleFunc("POST /containers/c1/start", func(w http.ResponseWriter, _ *http.Request) {
		close(started)
		w.WriteHeader(204)
	})
	want(t, f.runWith(stdin(t, "hello\n"), "run", "-i", "alpine", "cat"), 0, "HELLO\n", "")
}

// TestRunNeverWaitsForInput: a container that ends while standard input stays open ends the command.
func TestRunNeverWaitsForInput(t *testing.T) {
	f := newFake(t)
	aContainer(f, frame(1, "bye\n"), `{"StatusCode":7}`)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close() // never written to, never closed before the command has ended
	want(t, f.runWith(r, "run", "-i", "alpine"), 7, "bye\n", "WARNING: careful\n")
}

func TestRunDetached(t *testing.T) {
	f := newFake(t)
	aContainer(f, "", "")
	want(t, f.run("run", "-d", "alpine"), 0, "c1\n", "WARNING: careful\n")
	if calls := f.called(); len(calls) != 2 {
		t.Errorf("%q", calls)
	}
	want(t, f.run("run", "-d", "-a", "stdout", "alpine"), 1, "", "conflicting options: cannot specify both --attach and --detach\n")
}

func TestRunStartFails(t *testing.T) {
	for _, c := range []struct {
		message string
		code    int
	}{
		{`failed to create task for container: exec: "nope": executable file not found in $PATH`, 127},
		{`exec: "/nope": stat /nope: no such file or directory`, 127},
		{`exec: "/etc/passwd": permission denied`, 126},
		{`exec: "/bin": is a directory`, 126},
		{`something else`, 125},
	} {
		f := newFake(t)
		f.answer("POST /containers/create", 201, `{"Id":"c1"}`)
		f.hijack("POST /containers/c1/attach", func(_ net.Conn, r io.Reader) { io.ReadAll(r) })
		f.answer("POST /containers/c1/wait", 200, `{"StatusCode":127}`)
		f.fail("POST /containers/c1/start", 400, c.message)
		want(t, f.run("run", "--rm", "alpine", "nope"), c.code, "", "kiri: Error response from daemon: "+c.message+"\n\nRun 'kiri run --help' for more information\n")
	}
}

func TestRunCreateFails(t *testing.T) {
	f := newFake(t)
	// The words of a failed create do not make it a failed start.
	f.fail("POST /containers/create", 400, "invalid mount: no such file or directory")
	got := f.run("run", "alpine")
	if got.code != 125 {
		t.Errorf("%+v", got)
	}
	want(t, f.run("create", "alpine"), 1, "", "Error response from daemon: invalid mount: no such file or directory\n")
}

func TestRunPullsWhatIsMissing(t *testing.T) {
	f := newFake(t)
	pulled := false
	f.mux.HandleFunc("POST /containers/create", func(w http.ResponseWriter, _ *http.Request) {
		if !pulled {
			w.WriteHeader(404)
			io.WriteString(w, `{"message":"No such image: localhost:5000/a:latest"}`)
			return
		}
		w.WriteHeader(201)
		io.WriteString(w, `{"Id":"c1"}`)
	})
	f.mux.HandleFunc("POST /images/create", func(w http.ResponseWriter, r *http.Request) {
		pulled = true
		if got := r.Header.Get("X-Registry-Auth"); got != "" {
			t.Errorf("credentials out of nowhere: %q", got)
		}
		io.WriteString(w, `{"status":"Pulling from a","id":"latest"}`+"\r\n"+`{"status":"Downloading","progressDetail":{"current":1,"total":2},"id":"abc"}`+"\r\n"+`{"status":"Pull complete","progressDetail":{},"id":"abc"}`+"\r\n")
	})
	f.answer("POST /containers/c1/start", 204, "")
	got := f.run("run", "-d", "--platform", "linux/ARM64", "localhost:5000/a")
	want(t, got, 0, "c1\n", "Unable to find image 'localhost:5000/a:latest' locally\nlatest: Pulling from a\nabc: Pull complete\n")
	if calls := f.called(); !slices.Contains(calls, "POST /images/create?fromImage=localhost%3A5000%2Fa&platform=linux%2Farm64") {
		t.Errorf("%q", calls)
	}
	pulled = false
	want(t, f.run("run", "-d", "-q", "localhost:5000/a"), 0, "c1\n", "Unable to find image 'localhost:5000/a:latest' locally\n")
	pulled = false
	got = f.run("run", "--pull", "never", "localhost:5000/a")
	want(t, got, 125, "", "kiri: Error response from daemon: No such image: localhost:5000/a:latest\n\nRun 'kiri run --help' for more information\n")
}

func TestRunPullFails(t *testing.T) {
	f := newFake(t)
	f.fail("POST /containers/create", 404, "No such image: a:latest")
	f.answer("POST /images/create", 200, `{"errorDetail":{"message":"manifest unknown"},"error":"manifest unknown"}`)
	want(t, f.run("run", "a"), 125, "", "Unable to find image 'a:latest' locally\nkiri: manifest unknown\n\nRun 'kiri run --help' for more information\n")
}

func TestCidfile(t *testing.T) {
	f := newFake(t)
	file := filepath.Join(t.TempDir(), "id")
	f.fail("POST /containers/create", 409, "in use")
	f.run("create", "--cidfile", file, "alpine")
	if _, err := os.Stat(file); err == nil {
		t.Error("a cidfile is left of a container that was not made")
	}
	g := newFake(t)
	g.answer("POST /containers/create", 201, `{"Id":"c1"}`)
	want(t, g.run("create", "--cidfile", file, "alpine"), 0, "c1\n", "")
	if b, err := os.ReadFile(file); err != nil || string(b) != "c1" {
		t.Errorf("%q, %v", b, err)
	}
	got := g.run("create", "--cidfile", file, "alpine")
	if got.code != 1 || !strings.Contains(got.err, "container ID file found") || len(g.called()) != 1 {
		t.Errorf("%+v, %q", got, g.called())
	}
}

func TestExec(t *testing.T) {
	f := newFake(t)
	f.answer("POST /containers/web/exec", 201, `{"Id":"e1"}`)
	f.hijack("POST /exec/e1/start", func(conn net.Conn, _ io.Reader) { io.WriteString(conn, frame(1, "o")+frame(2, "e")) })
	f.answer("GET /exec/e1/json", 200, `{"ExitCode":3,"Running":false}`)
	want(t, f.run("exec", "-e", "A=b", "-w", "/w", "-u", "1:2", "--privileged", "web", "ls", "-l", "--rm"), 3, "o", "e")
	const body = `{"User":"1:2","Privileged":true,"AttachStdout":true,"AttachStderr":true,"Env":["A=b"],"WorkingDir":"/w","Cmd":["ls","-l","--rm"]}`
	if got := f.bodyOf("POST /containers/web/exec"); got != body {
		t.Errorf("asked for %s", got)
	}
	g := newFake(t)
	g.answer("POST /containers/web/exec", 201, `{"Id":"e1"}`)
	g.fail("POST /exec/e1/start", 400, `exec: "nope": executable file not found in $PATH`)
	want(t, g.run("exec", "web", "nope"), 127, "", "Error response from daemon: exec: \"nope\": executable file not found in $PATH\n")
}
