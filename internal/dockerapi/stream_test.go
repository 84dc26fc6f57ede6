package dockerapi

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/jsonstream"
	"golang.org/x/net/websocket"

	"runkiri.com/kiri/internal/engine"
)

type halfCloser interface{ CloseWrite() error }

// head reads an answer's first line and header.
func head(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	var b strings.Builder
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatalf("reading the header after %q: %v", b.String(), err)
		}
		b.WriteString(line)
		if line == "\r\n" {
			return b.String()
		}
	}
}

// hijack sends request and talks to the echo behind it, ending with a half-close.
func hijack(t *testing.T, conn net.Conn, request, status, contentType string) {
	t.Helper()
	r := bufio.NewReader(conn)
	io.WriteString(conn, request)
	h := head(t, r)
	if !strings.HasPrefix(h, status+"\r\n") || !strings.Contains(h, "\r\nContent-Type: "+contentType+"\r\n") {
		t.Errorf("header %q, want %s and %s", h, status, contentType)
	}
	if !strings.Contains(h, "\r\nApi-Version: "+MaxVersion+"\r\n") || strings.Contains(h, "Content-Length") || strings.Contains(h, "Transfer-Encoding") {
		t.Errorf("header %q", h)
	}
	if up := strings.Contains(h, "\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"); up != strings.Contains(request, "Upgrade") {
		t.Errorf("upgrade: %v in %q", up, h)
	}
	io.WriteString(conn, "later")
	want := "later"
	if strings.HasSuffix(request, "early") {
		want = "earlylater"
	}
	got := make([]byte, len(want))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != want {
		t.Fatalf("echo %q, want %q: %v", got, want, err)
	}
	if err := conn.(halfCloser).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(r); err != nil || string(rest) != "bye" {
		t.Errorf("after the half-close: %q %v", rest, err)
	}
}

var hijacks = []struct{ name, request, status, contentType string }{
	{"attach upgraded", "POST /v1.44/containers/x/attach?stream=1 HTTP/1.1\r\nHost: d\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n",
		"HTTP/1.1 101 UPGRADED", "application/vnd.docker.multiplexed-stream"},
	{"attach before 1.42", "POST /v1.41/containers/x/attach?stream=1 HTTP/1.1\r\nHost: d\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n",
		"HTTP/1.1 101 UPGRADED", "application/vnd.docker.raw-stream"},
	{"attach plain", "POST /v1.44/containers/x/attach HTTP/1.1\r\nHost: d\r\n\r\n",
		"HTTP/1.1 200 OK", "application/vnd.docker.raw-stream"},
	{"attach with early input", "POST /v1.44/containers/x/attach HTTP/1.1\r\nHost: d\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\nearly",
		"HTTP/1.1 101 UPGRADED", "application/vnd.docker.multiplexed-stream"},
	{"exec with terminal", "POST /v1.44/exec/x/start HTTP/1.1\r\nHost: d\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{\"Tty\":true}early",
		"HTTP/1.1 101 UPGRADED", "application/vnd.docker.raw-stream"},
	{"exec plain", "POST /exec/x/start HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}early",
		"HTTP/1.1 200 OK", "application/vnd.docker.raw-stream"},
}

func TestHijack(t *testing.T) {
	path, _ := serveUnix(t, &fakeEngine{})
	for _, c := range hijacks {
		t.Run(c.name, func(t *testing.T) { hijack(t, dial(t, path), c.request, c.status, c.contentType) })
	}
}

// certificates makes an authority, and a key pair that it signed for both ends.
func certificates(t *testing.T) (*x509.CertPool, tls.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(cert)
	return pool, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func TestHijackOverTLS(t *testing.T) {
	pool, pair := certificates(t)
	server := httptest.NewUnstartedServer(New(&fakeEngine{}, "1", slog.New(slog.DiscardHandler)))
	server.TLS = &tls.Config{Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	defer server.Close()
	for _, c := range hijacks {
		t.Run(c.name, func(t *testing.T) {
			conn, err := tls.Dial("tcp", server.Listener.Addr().String(), &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			conn.SetDeadline(time.Now().Add(20 * time.Second))
			hijack(t, conn, c.request, c.status, c.contentType)
		})
	}
	conn, err := tls.Dial("tcp", server.Listener.Addr().String(), &tls.Config{RootCAs: pool})
	if err == nil { // in TLS 1.3 the refusal comes with the first read
		defer conn.Close()
		io.WriteString(conn, "GET /_ping HTTP/1.1\r\nHost: d\r\n\r\n")
		if n, err := conn.Read(make([]byte, 1)); err == nil {
			t.Errorf("a client without certificate read %d bytes", n)
		}
	}
}

// An error before the stream is an ordinary answer, and the connection stays good.
func TestHijackRefused(t *testing.T) {
	f := &fakeEngine{attach: func(context.Context, engine.StreamOpener) error {
		return fmt.Errorf("No such container: x: %w", cerrdefs.ErrNotFound)
	}}
	path, _ := serveUnix(t, f)
	conn := dial(t, path)
	r := bufio.NewReader(conn)
	for range 2 {
		io.WriteString(conn, hijacks[0].request)
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != 404 || message(t, string(b)) != "No such container: x" {
			t.Errorf("%s %s", resp.Status, b)
		}
	}
}

// The header of an attach is there although nothing else is, for as long as the container is not started (BR-11).
func TestAttachHeaderAtOnce(t *testing.T) {
	release := make(chan struct{})
	f := &fakeEngine{attach: func(_ context.Context, open engine.StreamOpener) error {
		conn, _, err := open(false)
		if err != nil {
			return err
		}
		<-release
		return conn.Close()
	}}
	path, _ := serveUnix(t, f)
	conn := dial(t, path)
	r := bufio.NewReader(conn)
	io.WriteString(conn, hijacks[0].request)
	head(t, r)
	close(release)
	if b, err := io.ReadAll(r); err != nil || len(b) != 0 {
		t.Errorf("%q %v", b, err)
	}
}

// The engine fails, or panics, after it took the connection: the client sees it closed, the daemon lives.
func TestTrouble(t *testing.T) {
	for _, trouble := range []func() error{func() error { return errors.New("broken") }, func() error { panic("broken") }} {
		f := &fakeEngine{
			attach: func(_ context.Context, open engine.StreamOpener) error {
				if _, _, err := open(false); err != nil {
					return err
				}
				return trouble()
			},
			logs: func(context.Context) (io.ReadCloser, bool, error) {
				r, w := io.Pipe()
				go func() { io.WriteString(w, "half"); w.CloseWithError(trouble2(trouble)) }()
				return r, false, nil
			},
		}
		path, client := serveUnix(t, f)
		conn := dial(t, path)
		r := bufio.NewReader(conn)
		io.WriteString(conn, hijacks[0].request)
		head(t, r)
		if b, err := io.ReadAll(r); err != nil || len(b) != 0 {
			t.Errorf("%q %v", b, err)
		}
		resp, err := client.Get("http://docker/containers/x/logs?stdout=1")
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		if string(b) != "half" || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("a log that was cut reads as whole: %q %v", b, err)
		}
		if resp, _ := do(t, client, "GET", "/_ping", ""); resp.StatusCode != 200 {
			t.Errorf("after that: %s", resp.Status)
		}
	}
}

// trouble2 turns either kind of trouble into an error.
func trouble2(trouble func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v", p)
		}
	}()
	return trouble()
}

func TestWaitHeaderFirst(t *testing.T) {
	ch := make(chan container.WaitResponse, 1)
	f := &fakeEngine{wait: func(context.Context) (<-chan container.WaitResponse, error) { return ch, nil }}
	path, _ := serveUnix(t, f)
	conn := dial(t, path)
	r := bufio.NewReader(conn)
	io.WriteString(conn, "POST /v1.44/containers/x/wait?condition=removed HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n")
	if h := head(t, r); !strings.HasPrefix(h, "HTTP/1.1 200 OK\r\n") || !strings.Contains(h, "Content-Type: application/json\r\n") {
		t.Errorf("%q", h)
	}
	ch <- container.WaitResponse{StatusCode: 137}
	if b, _ := io.ReadAll(r); !strings.Contains(string(b), `{"StatusCode":137}`) {
		t.Errorf("%q", b)
	}
}

// hangUp makes a request, waits for its header, closes the connection, and wants ended to be closed.
func hangUp(t *testing.T, path, request string, ended <-chan struct{}) {
	t.Helper()
	conn := dial(t, path)
	io.WriteString(conn, request)
	head(t, bufio.NewReader(conn))
	conn.Close()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Errorf("%q goes on without its client", request)
	}
}

func TestHangUp(t *testing.T) {
	ended := make(chan struct{}, 1)
	end := func(ctx context.Context) {
		context.AfterFunc(ctx, func() { ended <- struct{}{} })
	}
	f := &fakeEngine{
		wait: func(ctx context.Context) (<-chan container.WaitResponse, error) {
			end(ctx)
			return nil, nil
		},
		logs: func(context.Context) (io.ReadCloser, bool, error) {
			return &endless{make(chan struct{}), ended}, false, nil
		},
		eventFeed: func(ctx context.Context) (<-chan events.Message, error) {
			end(ctx)
			return nil, nil
		},
		statsTicks: func(ctx context.Context, emit func(*container.StatsResponse) error) error {
			emit(&container.StatsResponse{})
			<-ctx.Done()
			ended <- struct{}{}
			return ctx.Err()
		},
		pull: func(ctx context.Context, progress func(jsonstream.Message)) error {
			progress(jsonstream.Message{Status: "x"})
			<-ctx.Done()
			ended <- struct{}{}
			return ctx.Err()
		},
	}
	path, _ := serveUnix(t, f)
	for _, request := range []string{
		"POST /containers/x/wait HTTP/1.1\r\nHost: d\r\n\r\n",
		"GET /containers/x/logs?stdout=1&follow=1 HTTP/1.1\r\nHost: d\r\n\r\n",
		"GET /events HTTP/1.1\r\nHost: d\r\n\r\n",
		"GET /containers/x/stats HTTP/1.1\r\nHost: d\r\n\r\n",
		"POST /images/create?fromImage=bb&tag=1 HTTP/1.1\r\nHost: d\r\n\r\n",
	} {
		hangUp(t, path, request, ended)
	}
}

// endless blocks a read until it is closed.
type endless struct {
	closed chan struct{}
	told   chan struct{}
}

func (e *endless) Read([]byte) (int, error) { <-e.closed; return 0, io.ErrClosedPipe }
func (e *endless) Close() error             { close(e.closed); e.told <- struct{}{}; return nil }

// A start goes on although its client has hung up.
func TestStartIsFinished(t *testing.T) {
	began, release, result := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	f := &fakeEngine{start: func(ctx context.Context, _ string) error {
		close(began)
		<-release
		result <- ctx.Err()
		return nil
	}}
	path, client := serveUnix(t, f)
	conn := dial(t, path)
	io.WriteString(conn, "POST /containers/x/start HTTP/1.1\r\nHost: d\r\n\r\n")
	<-began
	conn.Close()
	do(t, client, "GET", "/_ping", "") // the server has had the time to see it
	close(release)
	if err := <-result; err != nil {
		t.Errorf("the start was cancelled: %v", err)
	}
}

func TestContentTypes(t *testing.T) {
	tty := false
	f := &fakeEngine{logs: func(context.Context) (io.ReadCloser, bool, error) {
		return io.NopCloser(strings.NewReader("x")), tty, nil
	}}
	_, client := serveUnix(t, f)
	for _, c := range []struct {
		path string
		tty  bool
		want string
	}{
		{"/v1.41/containers/x/logs?stderr=1", false, "application/vnd.docker.raw-stream"},
		{"/v1.42/containers/x/logs?stderr=1", false, "application/vnd.docker.multiplexed-stream"},
		{"/v1.42/containers/x/logs?stderr=1", true, "application/vnd.docker.raw-stream"},
		{"/v1.51/events", false, "application/json"},
		{"/v1.52/events", false, "application/x-ndjson"},
		{"/containers/x/export", false, "application/x-tar"},
	} {
		tty = c.tty
		if resp, _ := do(t, client, "GET", c.path, ""); resp.Header.Get("Content-Type") != c.want {
			t.Errorf("%s: %q, want %q", c.path, resp.Header.Get("Content-Type"), c.want)
		}
	}
	// Until 1.34 logs had no until.
	do(t, client, "GET", "/v1.34/containers/x/logs?stdout=1&until=5", "")
	if !f.logsOpts.Until.IsZero() {
		t.Error("until before 1.35")
	}
	do(t, client, "GET", "/v1.35/containers/x/logs?stdout=1&until=5.000000001&since=3&tail=7", "")
	if f.logsOpts.Until != time.Unix(5, 1) || f.logsOpts.Since != time.Unix(3, 0) || f.logsOpts.Tail != "7" {
		t.Errorf("%+v", f.logsOpts)
	}
}

func TestEventForms(t *testing.T) {
	_, client := serveUnix(t, &fakeEngine{})
	for path, want := range map[string]string{
		"/v1.51/events": `{"status":"start","id":"` + fakeID + `","from":"bb","Type":"container","Action":"start",`,
		"/v1.52/events": `{"Type":"container","Action":"start",`,
	} {
		if _, body := do(t, client, "GET", path, ""); !strings.HasPrefix(body, want) || !strings.HasSuffix(body, "}\n") {
			t.Errorf("%s: %q", path, body)
		}
	}
	for accept, want := range map[string]string{
		"":                     "application/x-ndjson",
		"*/*":                  "application/x-ndjson",
		"application/jsonl":    "application/jsonl",
		"application/json-seq": "application/json-seq",
		"application/jsonl;q=0.1, application/json-seq;q=0.5": "application/json-seq",
		"application/json-seq;q=0":                            "application/x-ndjson",
	} {
		req, _ := http.NewRequest("GET", "http://docker/v1.53/events", nil)
		req.Header.Set("Accept", accept)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.Header.Get("Content-Type") != want || (b[0] == 0x1e) != (want == "application/json-seq") {
			t.Errorf("Accept %q: %q, %q", accept, resp.Header.Get("Content-Type"), b)
		}
	}
}

func TestPullStream(t *testing.T) {
	f := &fakeEngine{}
	_, client := serveUnix(t, f)
	f.pull = func(_ context.Context, progress func(jsonstream.Message)) error {
		progress(jsonstream.Message{ID: "abc", Status: "Downloading", Progress: &jsonstream.Progress{Current: 1_000_000, Total: 2_000_000}})
		return errors.New("layer is <broken>")
	}
	resp, body := do(t, client, "POST", "/v1.44/images/create?fromImage=bb&tag=1", "")
	lines := strings.Split(body, "\r\n")
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/json" || len(lines) != 3 || lines[2] != "" {
		t.Fatalf("%s %q", resp.Status, body)
	}
	if want := `"progress":"[=========================\u003e                         ]      1MB/2MB"`; !strings.Contains(lines[0], want) {
		t.Errorf("%s, want %s", lines[0], want)
	}
	if !strings.Contains(lines[1], `"errorDetail":{"message":"layer is \u003cbroken\u003e"}`) || !strings.Contains(lines[1], `"error":"layer is`) {
		t.Errorf("%s", lines[1])
	}
	f.pull = func(context.Context, func(jsonstream.Message)) error {
		return fmt.Errorf("manifest for bb:1 not found: %w", cerrdefs.ErrNotFound)
	}
	if resp, body := do(t, client, "POST", "/images/create?fromImage=bb&tag=1", ""); resp.StatusCode != 404 || message(t, body) != "manifest for bb:1 not found" {
		t.Errorf("%s %s", resp.Status, body)
	}
	f.pull = func(context.Context, func(jsonstream.Message)) error { return nil }
	if resp, body := do(t, client, "POST", "/images/create?fromImage=bb&tag=1", ""); resp.StatusCode != 200 || body != "" {
		t.Errorf("%s %s", resp.Status, body)
	}
	// Credentials arrive; a header that is no header is as good as none.
	for header, user := range map[string]string{"eyJ1c2VybmFtZSI6ImJvYiJ9": "bob", "!!": "", "": ""} {
		req, _ := http.NewRequest("POST", "http://docker/images/create?fromImage=bb&tag=1", nil)
		req.Header.Set("X-Registry-Auth", header)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if f.pullOpts.Auth.Username != user {
			t.Errorf("%q: user %q", header, f.pullOpts.Auth.Username)
		}
	}
}

func TestAttachWebsocket(t *testing.T) {
	frame := func(stream byte, text string) string {
		return string([]byte{stream, 0, 0, 0, 0, 0, 0, byte(len(text))}) + text
	}
	tty := false
	f := &fakeEngine{attach: func(_ context.Context, open engine.StreamOpener) error {
		conn, _, err := open(tty)
		if err != nil {
			return err
		}
		defer conn.Close()
		buf := make([]byte, 100)
		n, err := conn.Read(buf)
		if err != nil {
			return err
		}
		out := "raw " + string(buf[:n])
		if !tty {
			out = frame(1, "out "+string(buf[:n])) + frame(2, "") + frame(2, "err")
		}
		for i := 0; i < len(out); i += 3 { // frames do not come in one piece
			if _, err := io.WriteString(conn, out[i:min(len(out), i+3)]); err != nil {
				return err
			}
		}
		return nil
	}}
	path, client := serveUnix(t, f)
	for _, c := range []struct {
		tty  bool
		want string
	}{{false, "out helloerr"}, {true, "raw hello"}} {
		tty = c.tty
		config, err := websocket.NewConfig("ws://docker/v1.44/containers/x/attach/ws?stream=1&stdin=1&stdout=1&stderr=1", "http://docker")
		if err != nil {
			t.Fatal(err)
		}
		ws, err := websocket.NewClient(config, dial(t, path))
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(ws, "hello")
		if b, err := io.ReadAll(ws); string(b) != c.want {
			t.Errorf("%q %v, want %q", b, err, c.want)
		}
	}
	// A request that is no websocket's is answered, not hung up on.
	if resp, _ := do(t, client, "GET", "/containers/x/attach/ws", ""); resp.StatusCode != 400 {
		t.Errorf("plain request: %s", resp.Status)
	}
	f.attach = func(context.Context, engine.StreamOpener) error {
		return fmt.Errorf("No such container: x: %w", cerrdefs.ErrNotFound)
	}
	if resp, body := do(t, client, "GET", "/containers/x/attach/ws", ""); resp.StatusCode != 404 {
		t.Errorf("nothing to attach to: %s %s", resp.Status, body)
	}
}
