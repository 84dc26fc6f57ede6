//go:build unix

package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"runkiri.com/kiri/internal/config"
)

func testDaemon(t *testing.T, cfg *config.Config) *daemon {
	d := &daemon{cfg: cfg, level: new(slog.LevelVar), log: slog.New(slog.DiscardHandler)}
	t.Cleanup(d.closeListeners)
	return d
}

func TestListenUnix(t *testing.T) {
	path := filepath.Join(t.TempDir(), "docker.sock")
	d := testDaemon(t, &config.Config{Hosts: []string{"unix://" + path}, Group: strconv.Itoa(os.Getgid())})
	if err := d.listen(); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode() != fs.ModeSocket|0o660 || st.Sys().(*syscall.Stat_t).Gid != uint32(os.Getgid()) {
		t.Errorf("socket: %v %v", st.Mode(), err)
	}
	// A daemon that answers is left alone.
	second := testDaemon(t, d.cfg)
	if err := second.listen(); err == nil || !strings.Contains(err.Error(), "another daemon answers there") {
		t.Errorf("second daemon: %v", err)
	}
	// What a killed one leaves is replaced.
	d.listeners[0].(*net.UnixListener).SetUnlinkOnClose(false)
	d.closeListeners()
	if _, err := os.Stat(path); err != nil {
		t.Fatal("the test's own socket is gone")
	}
	if err := second.listen(); err != nil {
		t.Fatalf("after a daemon that was killed: %v", err)
	}
	second.closeListeners()
	if _, err := os.Stat(path); err == nil {
		t.Error("the socket is left behind")
	}
	// A file that is none of ours is not touched.
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := testDaemon(t, d.cfg).listen(); err == nil || !strings.Contains(err.Error(), "no socket") {
		t.Errorf("over a file: %v", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "precious" {
		t.Error("the file is gone")
	}
	if err := testDaemon(t, &config.Config{Hosts: []string{"unix://" + path + "2"}, Group: "no-such-group-here"}).listen(); err == nil {
		t.Error("an unknown group is taken")
	}
	if _, err := os.Stat(path + "2"); err == nil {
		t.Error("the socket of a failed start is left behind")
	}
}

func TestPidfile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kiri.pid")
	if err := os.WriteFile(path, []byte("1234567890123\n"), 0o644); err != nil { // stale, and longer
		t.Fatal(err)
	}
	f, err := lockPidfile(path)
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(path); string(b) != strconv.Itoa(os.Getpid())+"\n" {
		t.Errorf("%q", b)
	}
	if _, err := lockPidfile(path); err == nil || !strings.Contains(err.Error(), "a kiri daemon is running already, with process "+strconv.Itoa(os.Getpid())) {
		t.Errorf("second daemon: %v", err)
	}
	f.Close()
	f, err = lockPidfile(path)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

// pemFiles writes a self-signed certificate and its key.
func pemFiles(t *testing.T, name string) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	kder, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, name+".pem"), filepath.Join(dir, name+"-key.pem")
	for path, b := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "EC PRIVATE KEY", Bytes: kder}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

func TestListenTCP(t *testing.T) {
	cert, key := pemFiles(t, "good")
	d := testDaemon(t, &config.Config{TLSCACert: cert, TLSCert: cert, TLSKey: key})
	ls, err := d.listenTCP("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d.listeners = ls
	results := make(chan error, 1)
	accept := func() {
		conn, err := ls[0].Accept()
		if err != nil {
			results <- err
			return
		}
		defer conn.Close()
		results <- conn.(*tls.Conn).Handshake()
	}
	otherCert, otherKey := pemFiles(t, "other")
	for _, c := range []struct {
		name      string
		cert, key string
		ok        bool
	}{{"no certificate", "", "", false}, {"another authority", otherCert, otherKey, false}, {"the right one", cert, key, true}} {
		go accept()
		conf := &tls.Config{InsecureSkipVerify: true}
		if c.cert != "" {
			pair, err := tls.LoadX509KeyPair(c.cert, c.key)
			if err != nil {
				t.Fatal(err)
			}
			conf.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
		}
		conn, err := tls.Dial("tcp", ls[0].Addr().String(), conf)
		if err == nil {
			defer conn.Close()
		}
		if err := <-results; (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	for _, bad := range []config.Config{{TLSCACert: key, TLSCert: cert, TLSKey: key}, {TLSCACert: cert, TLSCert: cert, TLSKey: otherKey}, {TLSCACert: "/nope", TLSCert: cert, TLSKey: key}} {
		if _, err := testDaemon(t, &bad).listenTCP("127.0.0.1:0"); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
}

func TestNoSocketsPassed(t *testing.T) {
	t.Setenv("LISTEN_FDS", "1")
	t.Setenv("LISTEN_PID", "1") // another's
	if _, err := passedFiles(); err == nil {
		t.Error("took another process's sockets")
	}
	if _, there := os.LookupEnv("LISTEN_FDS"); there {
		t.Error("children would see LISTEN_FDS")
	}
}

func TestNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	notify("READY=1")
	buf := make([]byte, 100)
	if n, err := conn.Read(buf); err != nil || string(buf[:n]) != "READY=1" {
		t.Errorf("%q %v", buf[:n], err)
	}
}

func TestReload(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	path := filepath.Join(t.TempDir(), "daemon.json")
	write := func(s string) {
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`{}`)
	args := []string{"--config-file", path}
	cfg, err := config.Load(args)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	d := &daemon{args: args, cfg: cfg, level: new(slog.LevelVar), log: slog.New(slog.NewTextHandler(&out, nil))}
	write(`{"debug":true,"labels":["a=b"]}`)
	d.reload()
	if d.level.Level() != slog.LevelDebug || !strings.Contains(out.String(), "options=labels") {
		t.Errorf("level %v, log %s", d.level.Level(), out.String())
	}
	write(`{"debug":`)
	d.reload()
	if d.level.Level() != slog.LevelDebug || !strings.Contains(out.String(), "configuration not reloaded") {
		t.Errorf("level %v, log %s", d.level.Level(), out.String())
	}
}

func TestColourHandler(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(newColourHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo})).With("a", 1).WithGroup("g")
	log.Warn("careful", "time", "x")
	log.Debug("unseen")
	line := out.String()
	if !strings.Contains(line, " \x1b[33mWARN\x1b[0m msg=careful a=1 g.time=x\n") || strings.Count(line, "\n") != 1 {
		t.Errorf("%q", line)
	}
}

func TestFindInit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kiri-init")
	if _, err := findInit(path); err == nil {
		t.Error("found what is not there")
	}
	if err := os.WriteFile(path, nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := findInit(path); err != nil || got != path {
		t.Errorf("%q %v", got, err)
	}
	if _, err := findInit(""); err == nil || !strings.Contains(err.Error(), "--init-path") {
		t.Errorf("beside the test: %v", err)
	}
}

// A start that fails must say why and leave no socket.
func TestFailedStartLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("HOME", dir)
	err := runDaemon(context.Background(), []string{"--data-root", dir + "/d", "--init-path", "/does/not/exist"})
	if err == nil || !strings.Contains(err.Error(), "finding kiri-init") {
		t.Errorf("%v", err)
	}
	if b, _ := os.ReadFile(dir + "/d/run/kiri.pid"); len(b) != 0 {
		t.Errorf("PID file says %q", b)
	}
	if _, err := os.Stat(dir + "/d/run/docker.sock"); err == nil {
		t.Error("the socket is left behind")
	}
}

// After a quiet time the daemon's memory goes back, code pages included, and it still works.
func TestIdle(t *testing.T) {
	i := newIdle(slog.New(slog.DiscardHandler))
	i.touch()
	if !i.armed.Load() {
		t.Fatal("the first request does not start the timer")
	}
	i.timer.Stop()
	i.touch()
	i.turn() // a request came since the timer was set
	if !i.armed.Load() {
		t.Fatal("given up although there was work")
	}
	i.timer.Stop()
	i.turn()
	if i.armed.Load() {
		t.Fatal("the timer goes on although nobody asks for anything")
	}
	i.touch()
	if !i.armed.Load() {
		t.Fatal("the next request does not start the timer")
	}
	i.timer.Stop()
}
