//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

// output is what a process prints, readable while it runs.
type output struct {
	mu  sync.Mutex // guards buf
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// The whole program as a service manager runs it: sockets passed, readiness told, TLS beside them, a reload, an end.
func TestDaemonAsService(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("KIRI_MUST") != "" {
			t.Fatal("needs root: the daemon makes a bridge and cgroups")
		}
		t.Skip("needs root: the daemon makes a bridge and cgroups")
	}
	dir := t.TempDir()
	for _, pkg := range []string{"kiri", "kiri-init"} {
		build := exec.Command("go", "build", "-o", dir, "runkiri.com/kiri/cmd/"+pkg)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			t.Fatalf("building %s: %v\n%s", pkg, err, out)
		}
	}
	passed, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "passed.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	defer passed.Close()
	passedFile, err := passed.File()
	if err != nil {
		t.Fatal(err)
	}
	defer passedFile.Close()
	told, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify.sock"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer told.Close()
	tell := func(want string) {
		t.Helper()
		told.SetReadDeadline(time.Now().Add(60 * time.Second))
		buf := make([]byte, 100)
		if n, err := told.Read(buf); err != nil || string(buf[:n]) != want {
			t.Fatalf("told %q %v, want %q", buf[:n], err, want)
		}
	}
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	free.Close()
	cert, key := pemFiles(t, "host")
	file := filepath.Join(dir, "daemon.json")
	bridge := fmt.Sprintf("ksvc%d", os.Getpid()%1000000)
	if err := os.WriteFile(file, []byte(`{"bridge":"`+bridge+`","bip":"172.29.201.1/24"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if link, err := netlink.LinkByName(bridge); err == nil {
			netlink.LinkDel(link)
		}
	})

	cmd := exec.Command("sh", "-c", `LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@"`, dir+"/kiri", "daemon", "--config-file", file,
		"--data-root", dir+"/data", "-H", "fd://", "-H", "tcp://"+address, "--tlsverify", "--tlscacert", cert, "--tlscert", cert, "--tlskey", key)
	cmd.ExtraFiles = []*os.File{passedFile}
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+told.LocalAddr().String(), "HOME="+dir)
	log := &output{}
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		cmd.Process.Kill()
		if t.Failed() {
			t.Log(log)
		}
	})
	tell("READY=1")

	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	get := func(transport *http.Transport, url string) (string, error) {
		defer transport.CloseIdleConnections()
		resp, err := (&http.Client{Transport: transport, Timeout: 20 * time.Second}).Get(url)
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return string(b), err
	}
	unix := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", passed.Addr().String())
	}}
	if body, err := get(unix, "http://docker/_ping"); body != "OK" {
		t.Errorf("through the passed socket: %q %v", body, err)
	}
	if body, err := get(&http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}}}, "https://"+address+"/_ping"); body != "OK" {
		t.Errorf("over TLS: %q %v", body, err)
	}
	if body, err := get(&http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, "https://"+address+"/_ping"); err == nil {
		t.Errorf("without a certificate: %q", body)
	}
	if body, err := get(&http.Transport{}, "http://"+address+"/_ping"); err == nil && body == "OK" {
		t.Errorf("without TLS: %q", body)
	}

	if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	for begin := time.Now(); !strings.Contains(log.String(), "configuration reloaded"); {
		if time.Since(begin) > 20*time.Second {
			t.Fatal("SIGHUP does not reload")
		}
		if body, err := get(unix, "http://docker/_ping"); body != "OK" {
			t.Fatalf("during a reload: %q %v", body, err)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	tell("STOPPING=1")
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("SIGTERM does not end the daemon")
	}
	if _, err := os.Stat(passed.Addr().String()); err != nil {
		t.Errorf("the service manager's socket: %v", err)
	}
	if b, err := os.ReadFile(dir + "/data/run/kiri.pid"); err != nil || len(b) != 0 {
		t.Errorf("PID file: %q %v", b, err)
	}
	// The agent ends on its own once the daemon has told it to.
	for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		left := processesBelow(t, dir)
		if len(left) == 0 {
			break
		}
		if time.Since(begin) > 20*time.Second {
			t.Errorf("left behind: %q", left)
			break
		}
	}
}

// processesBelow lists the processes whose command line names dir.
func processesBelow(t *testing.T, dir string) []string {
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, path := range lines {
		if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, []byte(dir)) {
			found = append(found, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return found
}
