package main

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

func TestReadResponse(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	for _, c := range []struct {
		name, in string
		method   string
		status   int
		body     string
		err      bool // of the head
		bodyErr  bool
		rest     string // what stays on the connection
	}{
		{name: "length", in: ok + "Content-Length: 2\r\n\r\nhiNEXT", status: 200, body: "hi", rest: "NEXT"},
		{name: "no body", in: "HTTP/1.1 204 No Content\r\n\r\nNEXT", status: 204, rest: "NEXT"},
		{name: "not modified", in: "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\nNEXT", status: 304, rest: "NEXT"},
		{name: "head", in: ok + "Content-Length: 2\r\n\r\nNEXT", method: "HEAD", status: 200, rest: "NEXT"},
		{name: "chunked", in: ok + "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n3;x=y\r\n me\r\n0\r\nTrailer: x\r\n\r\nNEXT", status: 200, body: "hi me", rest: "NEXT"},
		{name: "chunked empty", in: ok + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nNEXT", status: 200, rest: "NEXT"},
		{name: "until close", in: ok + "\r\nall of it", status: 200, body: "all of it"},
		{name: "continue", in: "HTTP/1.1 100 Continue\r\n\r\n" + ok + "Content-Length: 2\r\n\r\nhi", status: 200, body: "hi"},
		{name: "upgrade", in: "HTTP/1.1 101 UPGRADED\r\nUpgrade: tcp\r\n\r\nraw", status: 101, rest: "raw"},
		{name: "cut body", in: ok + "Content-Length: 5\r\n\r\nhi", status: 200, body: "hi", bodyErr: true},
		{name: "cut chunk", in: ok + "Transfer-Encoding: chunked\r\n\r\n5\r\nhi", status: 200, body: "hi", bodyErr: true},
		{name: "cut after chunk", in: ok + "Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n", status: 200, body: "hi", bodyErr: true},
		{name: "bad chunk", in: ok + "Transfer-Encoding: chunked\r\n\r\nzz\r\nhi", status: 200, bodyErr: true},
		{name: "empty", in: "", err: true},
		{name: "cut head", in: "HTTP/1.1 200 OK\r\nContent-", err: true},
		{name: "not http", in: "SSH-2.0-OpenSSH\r\n\r\n", err: true},
		{name: "bad status", in: "HTTP/1.1 abc OK\r\n\r\n", err: true},
		{name: "bad header", in: ok + "nonsense\r\n\r\n", err: true},
		{name: "bad length", in: ok + "Content-Length: -1\r\n\r\n", err: true},
		{name: "huge length", in: ok + "Content-Length: 99999999999999999999\r\n\r\n", err: true},
		{name: "endless header", in: ok + "X: " + strings.Repeat("a", maxHeaderBytes+1), err: true},
		{name: "endless headers", in: ok + strings.Repeat("X: a\r\n", maxHeaderBytes/6+1), err: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			br := bufio.NewReaderSize(strings.NewReader(c.in), 64)
			r, err := readResponse(br, c.method)
			if c.err {
				if err == nil {
					t.Fatalf("read as %d", r.Status)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(r)
			if r.Status != c.status || string(body) != c.body || (err != nil) != c.bodyErr {
				t.Fatalf("status %d, body %q, error %v", r.Status, body, err)
			}
			if c.rest != "" {
				if rest, _ := io.ReadAll(br); string(rest) != c.rest {
					t.Fatalf("left on the connection: %q, want %q", rest, c.rest)
				}
			}
		})
	}
}

// TestCutEverywhere cuts an answer at every length: each is an error but the whole, and none hangs.
func TestCutEverywhere(t *testing.T) {
	for _, whole := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n{\"a\": true}",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"a\":\r\n6\r\n true}\r\n0\r\n\r\n",
	} {
		for n := range len(whole) + 1 {
			r, err := readResponse(bufio.NewReader(strings.NewReader(whole[:n])), "GET")
			if err == nil {
				_, err = io.ReadAll(r)
			}
			if (err == nil) != (n == len(whole)) {
				t.Fatalf("cut at %d of %d: %v", n, len(whole), err)
			}
		}
	}
}

func FuzzReadResponse(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"))
	f.Add([]byte("HTTP/1.0 500 x\r\n\r\n{\"message\":\"m\"}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := readResponse(bufio.NewReader(bytes.NewReader(b)), "GET")
		if err != nil {
			return
		}
		body, _ := io.ReadAll(r)
		if len(body) > len(b) {
			t.Fatalf("%d bytes read of %d", len(body), len(b))
		}
	})
}

func FuzzDemux(f *testing.F) {
	f.Add([]byte(frame(1, "out") + frame(2, "err") + frame(1, "")))
	f.Add([]byte(frame(3, "broken")))
	f.Fuzz(func(t *testing.T, b []byte) {
		var out, errs bytes.Buffer
		_ = demux(&out, &errs, bytes.NewReader(b)) // most inputs are errors; none may panic or make bytes up
		if out.Len()+errs.Len() > len(b) {
			t.Fatalf("%d bytes from %d", out.Len()+errs.Len(), len(b))
		}
	})
}

func TestDemux(t *testing.T) {
	long := strings.Repeat("x", 100<<10)
	whole := frame(1, "a\n") + frame(2, "b\n") + frame(1, "") + frame(1, long) + frame(0, "c")
	var out, errs bytes.Buffer
	if err := demux(&out, &errs, strings.NewReader(whole)); err != nil || out.String() != "a\n"+long+"c" || errs.String() != "b\n" {
		t.Fatalf("%v; out %d bytes, err %q", err, out.Len(), errs.String())
	}
	short := frame(1, "abc") + frame(2, "de")
	for n := range len(short) {
		err := demux(io.Discard, io.Discard, strings.NewReader(short[:n]))
		if clean := n == 0 || n == len(frame(1, "abc")); (err == nil) != clean {
			t.Errorf("cut at %d: %v", n, err)
		}
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut at %d: %v is not an unexpected EOF", n, err)
		}
	}
	if err := demux(io.Discard, io.Discard, strings.NewReader(frame(3, "it broke"))); err == nil || !strings.Contains(err.Error(), "it broke") {
		t.Errorf("error stream: %v", err)
	}
	if err := demux(io.Discard, io.Discard, strings.NewReader(frame(9, "?"))); err == nil {
		t.Error("unknown stream was taken")
	}
}

// TestConnectionReuse counts connections: one after the other needs one.
func TestConnectionReuse(t *testing.T) {
	f := newFake(t)
	f.answer("POST /containers/{id}/stop", 204, "")
	f.fail("POST /containers/missing/stop", 404, "No such container: missing")
	f.answer("GET /containers/json", 200, "[]")
	conns := 0
	cl := &client{host: "unix://" + f.socket, network: "unix", addr: f.socket, name: "docker", prefix: "/v" + apiVersion}
	for range 5 {
		if len(cl.idle) == 0 {
			conns++
		}
		if err := cl.call("POST", "/containers/a/stop", nil, nil, nil); err != nil {
			t.Fatal(err)
		}
		if err := cl.call("POST", "/containers/missing/stop", nil, nil, nil); !isStatus(err, 404) {
			t.Fatal(err)
		}
		var v []any
		if err := cl.call("GET", "/containers/json", nil, nil, &v); err != nil {
			t.Fatal(err)
		}
	}
	if conns != 1 || len(cl.idle) != 1 {
		t.Errorf("%d connections made, %d idle; want one", conns, len(cl.idle))
	}
}

// TestErrorAnswers checks what a user sees of answers that are not what they should be.
func TestErrorAnswers(t *testing.T) {
	f := newFake(t)
	for name, body := range map[string]string{
		"json": `{"message":"the reason\n"}`, "text": "the reason", "html": "<html>the reason</html>", "other": `{"error":"the reason"}`,
	} {
		f.answer("POST /containers/"+name+"/stop", 500, body)
		got := f.run("stop", name)
		if got.code != 1 || !strings.HasPrefix(got.err, "Error response from daemon: ") || !strings.Contains(got.err, "the reason") {
			t.Errorf("%s: %+v", name, got)
		}
	}
	f.answer("POST /containers/empty/stop", 503, "")
	want(t, f.run("stop", "empty"), 1, "", "Error response from daemon: request returned status 503\n")
	f.answer("GET /containers/json", 200, "{not json")
	if got := f.run("ps"); got.code != 1 || !strings.Contains(got.err, "decoding the answer") {
		t.Errorf("%+v", got)
	}
}

func TestNoDaemon(t *testing.T) {
	t.Setenv("KIRI_HOST", "unix:///nonexistent/docker.sock")
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	for _, c := range []struct {
		args []string
		code int
		err  string
	}{
		{[]string{"ps"}, 1, "Cannot connect to the kiri daemon at unix:///nonexistent/docker.sock. Is the kiri daemon running?\n"},
		{[]string{"run", "a"}, 125, "kiri: Cannot connect to the kiri daemon at unix:///nonexistent/docker.sock. Is the kiri daemon running?\n\nRun 'kiri run --help' for more information\n"},
		{[]string{"-H", "ftp://x", "ps"}, 1, "kiri: cannot talk to ftp://x: unix:// and tcp:// are what this command speaks; for ftp use docker --host ftp://x\n"},
		{[]string{"-H", "relative", "ps"}, 1, "unable to parse docker host `relative`\n"},
	} {
		var out, errs bytes.Buffer
		cl := &cli{out: &out, err: &errs, args: c.args}
		code := cl.exit(cl.dispatch(c.args))
		want(t, result{code, out.String(), errs.String()}, c.code, "", c.err)
	}
	// A user's own daemon is not started when that is forbidden.
	t.Setenv("KIRI_HOST", "")
	t.Setenv("HOME", t.TempDir())
	var out, errs bytes.Buffer
	cl := &cli{out: &out, err: &errs}
	if code := cl.exit(cl.dispatch([]string{"--no-start", "ps"})); code != 1 || !strings.Contains(errs.String(), "kiri daemon") {
		t.Errorf("code %d, %q", code, errs.String())
	}
}

// TestServerHangsUp checks that a daemon that dies in the middle is an error, and at once.
func TestServerHangsUp(t *testing.T) {
	l, err := net.Listen("unix", t.TempDir()+"/s")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Read(make([]byte, 4096))
			io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Le")
			c.Close()
		}
	}()
	t.Setenv("KIRI_HOST", "unix://"+l.Addr().String())
	t.Setenv("DOCKER_CONFIG", t.TempDir())
	var out, errs bytes.Buffer
	cl := &cli{out: &out, err: &errs}
	begin := time.Now()
	if code := cl.exit(cl.dispatch([]string{"ps"})); code != 1 || !strings.Contains(errs.String(), "unexpected EOF") {
		t.Errorf("code %d, %q", code, errs.String())
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
}
