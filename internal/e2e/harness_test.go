package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/client"
	"github.com/vishvananda/netlink"
)

// bin is where TestMain put the programs under test and the payloads: kiri, kiri-init, probe.
var bin string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Getuid() != 0 {
			fmt.Println("e2e: needs root: containers are made for real")
			if os.Getenv("KIRI_MUST") != "" {
				return 1
			}
			return 0
		}
		dir, err := os.MkdirTemp("", "kiri-e2e-")
		if err != nil {
			fmt.Println("e2e:", err)
			return 1
		}
		defer os.RemoveAll(dir)
		bin = dir
		for _, pkg := range []string{"./cmd/kiri", "./cmd/kiri-init", "./internal/e2e/probe"} {
			c := exec.Command("go", "build", "-o", dir+"/", pkg)
			c.Dir = "../.."
			c.Env = append(os.Environ(), "CGO_ENABLED=0")
			if out, err := c.CombinedOutput(); err != nil {
				fmt.Printf("e2e: building %s: %v\n%s", pkg, err, out)
				return 1
			}
		}
		code := m.Run()
		stopRegistry()
		return code
	}())
}

// daemon is a kiri daemon with a home of its own. Its bridge, sockets and records are nobody else's.
type daemon struct {
	t      *testing.T
	Home   string // temporary; data root is Home/data, exec root Home/run
	Socket string
	Bridge string
	args   []string
	cmd    *exec.Cmd
}

var bridges atomic.Int32

// startDaemon starts a daemon and, at the end of the test, removes all containers, ends it cleanly and checks that
// nothing of it is left on the machine: no process, mount, cgroup, interface or nftables table.
func startDaemon(t *testing.T, args ...string) *daemon {
	t.Helper()
	home, err := os.MkdirTemp("", "kiri-home-")
	if err != nil {
		t.Fatal(err)
	}
	d := &daemon{
		t: t, Home: home, Socket: filepath.Join(home, "run", "docker.sock"),
		Bridge: fmt.Sprintf("kt%d-%d", os.Getpid()%100000, bridges.Add(1)), args: args,
	}
	before := snapshot()
	d.start()
	t.Cleanup(func() {
		if t.Failed() {
			d.dumpLogs()
		}
		d.removeAll()
		d.stop()
		d.checkNothingLeft(before)
		os.RemoveAll(home)
	})
	return d
}

// start starts the daemon's process and waits until it answers.
func (d *daemon) start() {
	d.t.Helper()
	log, err := os.OpenFile(filepath.Join(d.Home, "daemon.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		d.t.Fatal(err)
	}
	d.cmd = exec.Command(filepath.Join(bin, "kiri"), append([]string{
		"daemon", "--data-root", filepath.Join(d.Home, "data"), "--exec-root", filepath.Join(d.Home, "run"),
		"--pidfile", filepath.Join(d.Home, "run", "kiri.pid"),
		"-H", "unix://" + d.Socket, "--bridge", d.Bridge,
	}, d.args...)...)
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if err := d.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	log.Close()
	died := make(chan error, 1)
	go func(c *exec.Cmd) { died <- c.Wait() }(d.cmd)
	deadline := time.After(20 * time.Second)
	for {
		c, err := net.Dial("unix", d.Socket)
		if err == nil {
			c.Close()
			return
		}
		select {
		case err := <-died:
			d.dumpLogs()
			d.t.Fatalf("daemon ended at its start: %v", err)
		case <-deadline:
			d.dumpLogs()
			d.t.Fatal("daemon does not answer after 20 s")
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// stop ends the daemon with SIGTERM and waits for its end.
func (d *daemon) stop() {
	d.t.Helper()
	if d.cmd == nil {
		return
	}
	d.cmd.Process.Signal(syscall.SIGTERM)
	if err := waitGone(d.cmd.Process.Pid, 30*time.Second); err != nil {
		d.t.Errorf("daemon after SIGTERM: %v", err)
		d.cmd.Process.Kill()
	}
	d.cmd = nil
}

// kill ends the daemon with SIGKILL.
func (d *daemon) kill() {
	d.t.Helper()
	pid := d.cmd.Process.Pid
	if err := d.cmd.Process.Kill(); err != nil {
		d.t.Fatal(err)
	}
	if err := waitGone(pid, 10*time.Second); err != nil {
		d.t.Fatal(err)
	}
}

// agents lists the PIDs of this daemon's agent processes (the template process among them).
func (d *daemon) agents() []int {
	var pids []int
	for pid, cmdline := range processes() {
		if strings.Contains(cmdline, d.Home) && strings.HasPrefix(filepath.Base(strings.Fields(cmdline)[0]), "kiri-init") {
			pids = append(pids, pid)
		}
	}
	return pids
}

func (d *daemon) dumpLogs() {
	for _, p := range []string{"daemon.log", "run/agent.log"} {
		b, err := os.ReadFile(filepath.Join(d.Home, p))
		if err != nil {
			continue
		}
		if len(b) > 8<<10 {
			b = b[len(b)-8<<10:]
		}
		d.t.Logf("%s:\n%s", p, b)
	}
}

// removeAll removes every container, by force.
func (d *daemon) removeAll() {
	c := d.client()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	l, err := c.ContainerList(ctx, client.ContainerListOptions{All: true})
	if err != nil {
		d.t.Errorf("listing containers at the end: %v", err)
		return
	}
	for _, s := range l.Items {
		if _, err := c.ContainerRemove(ctx, s.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true}); err != nil {
			d.t.Errorf("removing %v at the end: %v", s.Names, err)
		}
	}
}

// client returns an SDK client of this daemon.
func (d *daemon) client() *client.Client {
	d.t.Helper()
	c, err := client.New(client.WithHost("unix://" + d.Socket))
	if err != nil {
		d.t.Fatal(err)
	}
	d.t.Cleanup(func() { c.Close() })
	return c
}

// result is what a command did.
type result struct {
	Out, Err string
	Code     int
}

// docker runs the docker command against this daemon.
func (d *daemon) docker(args ...string) result {
	d.t.Helper()
	return d.command("", "docker", args...)
}

// kiri runs the kiri command against this daemon.
func (d *daemon) kiri(args ...string) result {
	d.t.Helper()
	return d.command("", filepath.Join(bin, "kiri"), args...)
}

// must runs docker and fails the test unless it exits with 0; it returns the output without the last newline.
func (d *daemon) must(args ...string) string {
	d.t.Helper()
	r := d.docker(args...)
	if r.Code != 0 {
		d.t.Fatalf("docker %s: exit %d\n%s%s", strings.Join(args, " "), r.Code, r.Out, r.Err)
	}
	return strings.TrimSuffix(r.Out, "\n")
}

func (d *daemon) command(stdin, program string, args ...string) result {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, program, args...)
	c.Env = d.env()
	if stdin != "" {
		c.Stdin = strings.NewReader(stdin)
	}
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	c.WaitDelay = time.Second
	err := c.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		d.t.Fatalf("%s %s: %v", program, strings.Join(args, " "), err)
	}
	if ctx.Err() != nil {
		d.t.Fatalf("%s %s: still running after 2 minutes\n%s%s", program, strings.Join(args, " "), out.String(), errs.String())
	}
	return result{out.String(), errs.String(), c.ProcessState.ExitCode()}
}

func (d *daemon) env() []string {
	env := slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "DOCKER_") })
	return append(env, "DOCKER_HOST=unix://"+d.Socket, "KIRI_HOST=unix://"+d.Socket, "HOME="+d.Home)
}

// state is what a machine holds that an engine could leave behind.
type state struct{ orphans []int }

func snapshot() state { return state{orphanTemplates()} }

// orphanTemplates lists the template processes whose agent is gone and that have not noticed.
func orphanTemplates() []int {
	var pids []int
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		b, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil || !bytes.Contains(b, []byte("(kiri-template)")) {
			continue
		}
		f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
		pid, _ := strconv.Atoi(e.Name())
		if f[0] != "Z" && f[1] == "1" {
			pids = append(pids, pid)
		}
	}
	return pids
}

// cgroupParent is the name of a daemon's place in the cgroup trees: kiri- and the FNV-1a hash of its exec root.
func (d *daemon) cgroupParent() string {
	h := fnv.New32a()
	h.Write([]byte(filepath.Join(d.Home, "run")))
	return fmt.Sprintf("kiri-%08x", h.Sum32())
}

// checkNothingLeft waits up to 10 s for what is given back after the answer, then names what is still there.
func (d *daemon) checkNothingLeft(before state) {
	d.t.Helper()
	var left []string
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if left = d.left(before); len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}
	for _, l := range left {
		d.t.Errorf("left behind: %s", l)
	}
}

func (d *daemon) left(before state) []string {
	var left []string
	for pid, cmdline := range processes() {
		if strings.Contains(cmdline, d.Home) {
			left = append(left, fmt.Sprintf("process %d: %s", pid, cmdline))
		}
	}
	if b, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		for l := range strings.Lines(string(b)) {
			if strings.Contains(l, d.Home) {
				left = append(left, "mount "+strings.TrimSpace(l))
			}
		}
	}
	// Other tests may run beside this one: only what carries this daemon's bridge is certainly its own.
	if links, err := netlink.LinkList(); err == nil {
		var bridge int
		for _, l := range links {
			if l.Attrs().Name == d.Bridge {
				bridge = l.Attrs().Index
				left = append(left, "interface "+d.Bridge)
			}
		}
		for _, l := range links {
			if bridge != 0 && l.Attrs().MasterIndex == bridge {
				left = append(left, "interface "+l.Attrs().Name)
			}
		}
	}
	for _, pid := range orphanTemplates() {
		if !slices.Contains(before.orphans, pid) {
			left = append(left, fmt.Sprintf("template process %d without an agent", pid))
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/%s*", "/sys/fs/cgroup/*/%s*"} {
		dirs, _ := filepath.Glob(fmt.Sprintf(pattern, d.cgroupParent()))
		for _, dir := range dirs {
			left = append(left, "cgroup "+dir)
		}
	}
	if out, err := exec.Command("nft", "list", "tables").Output(); err == nil && strings.Contains(string(out), d.Bridge+"\n") {
		left = append(left, "an nftables table of "+d.Bridge)
	}
	if entries, err := os.ReadDir(filepath.Join(d.Home, "run", "containers")); err == nil {
		for _, e := range entries {
			left = append(left, "state of "+e.Name())
		}
	}
	if entries, err := os.ReadDir(filepath.Join(d.Home, "data", "containers")); err == nil {
		for _, e := range entries {
			left = append(left, "directory of "+e.Name())
		}
	}
	return left
}

// processes maps every process to its command line, arguments separated by spaces. Kernel threads are left out.
func processes() map[int]string {
	out := map[int]string{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if err != nil || len(b) == 0 || pid == os.Getpid() {
			continue
		}
		out[pid] = string(bytes.ReplaceAll(bytes.TrimRight(b, "\x00"), []byte{0}, []byte{' '}))
	}
	return out
}

// waitGone waits until pid is no process any more; a zombie that only waits for this test counts as gone.
func waitGone(pid int, limit time.Duration) error {
	for deadline := time.Now().Add(limit); ; time.Sleep(2 * time.Millisecond) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil || bytes.Contains(b, []byte(") Z ")) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d is still there after %v", pid, limit)
		}
	}
}

// eventually waits up to limit for cond and fails the test with what if it never holds.
func eventually(t *testing.T, limit time.Duration, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			_, file, line, _ := runtime.Caller(1)
			t.Fatalf("%s:%d: not within %v: %s", filepath.Base(file), line, limit, what)
		}
	}
}
