package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestPullAndRun is the main job: a real client pulls an image from a real registry server and runs a container.
func TestPullAndRun(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	out := d.must("pull", ref)
	for _, want := range []string{"Pull complete", "Digest: sha256:", "Status: Downloaded newer image for " + ref} {
		if !strings.Contains(out, want) {
			t.Errorf("pull does not say %q:\n%s", want, out)
		}
	}
	if out := d.must("pull", ref); !strings.Contains(out, "Status: Image is up to date for "+ref) {
		t.Errorf("second pull:\n%s", out)
	}
	if out := d.must("run", "--rm", ref, "echo", "hello"); out != "hello" {
		t.Errorf("run printed %q", out)
	}
	if out := d.must("images", "--format", "{{.Repository}}:{{.Tag}}"); out != ref {
		t.Errorf("images: %q, want %q", out, ref)
	}
	d.must("tag", ref, "other:1")
	id := d.must("image", "inspect", "--format", "{{.Id}}", ref)
	if got := d.must("image", "inspect", "--format", "{{.Id}}", "other:1"); got != id {
		t.Errorf("tag names %s, want %s", got, id)
	}
	if out := d.must("rmi", "other:1"); out != "Untagged: other:1" {
		t.Errorf("rmi of one of two names: %q", out)
	}
	if out := d.must("rmi", ref); !strings.Contains(out, "Deleted: sha256:") {
		t.Errorf("rmi of the last name: %q", out)
	}
	if out := d.must("images", "-aq"); out != "" {
		t.Errorf("images after rmi: %q", out)
	}
}

// TestImport makes an image of a tar on standard input, as `docker import` does.
func TestImport(t *testing.T) {
	d := startDaemon(t)
	tarball := tarOf(t, file{Name: "bin/", Mode: 0o755, Dir: true}, file{Name: "bin/probe", Mode: 0o755, Body: read(t, bin+"/probe")})
	r := d.command(string(tarball), "docker", "import", "-c", `CMD ["/bin/probe","cwd"]`, "-c", "WORKDIR /made", "-", "probe:1")
	if r.Code != 0 || !strings.HasPrefix(r.Out, "sha256:") {
		t.Fatalf("import: %+v", r)
	}
	if out := d.must("run", "--rm", "probe:1"); out != "/made" {
		t.Errorf("working directory %q, want /made, made though it was missing", out)
	}
}

func TestExitCodes(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	for _, c := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"zero", []string{"true"}, 0, ""},
		{"own code", []string{"sh", "-c", "exit 37"}, 37, ""},

		{"not there", []string{"nosuch"}, 127, `exec: "nosuch": executable file not found in $PATH`},
		{"path not there", []string{"/no/such"}, 127, "no such file or directory"},
		{"not executable", []string{"/bin/notexec"}, 126, "permission denied"},
		{"a directory", []string{"/etc"}, 126, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := d.docker(append([]string{"run", "--rm", ref}, c.args...)...)
			if r.Code != c.code || !strings.Contains(r.Err, c.says) {
				t.Errorf("exit %d, %q; want %d, %q", r.Code, r.Err, c.code, c.says)
			}
		})
	}
	t.Run("by signal", func(t *testing.T) {
		for _, c := range []struct {
			signal string
			code   string
		}{{"KILL", "137"}, {"TERM", "143"}} {
			name := "sig" + c.signal
			d.must("run", "-d", "--init", "--name", name, ref, "sleep", "100")
			d.must("kill", "-s", c.signal, name)
			if got := d.must("wait", name); got != c.code {
				t.Errorf("killed by %s: wait says %s, want %s", c.signal, got, c.code)
			}
			d.must("rm", name)
		}
	})
	t.Run("125", func(t *testing.T) {
		if r := d.docker("run", "--rm", "--pull", "never", "no/such:image"); r.Code != 125 {
			t.Errorf("exit %d: %s", r.Code, r.Err)
		}
	})
	if left := d.must("ps", "-aq"); left != "" {
		t.Errorf("containers left by --rm: %q", left)
	}
}

// TestIsolation looks at the default isolation from inside: equal to Docker's.
func TestIsolation(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	var in map[string]string
	if err := json.Unmarshal([]byte(d.must("run", "--rm", ref, "probe", "status")), &in); err != nil {
		t.Fatal(err)
	}
	for _, ns := range []string{"mnt", "pid", "uts", "ipc", "net", "cgroup"} {
		host, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		if in["ns:"+ns] == host || in["ns:"+ns] == "" {
			t.Errorf("%s namespace %q, the host's is %q", ns, in["ns:"+ns], host)
		}
	}
	for field, want := range map[string]string{
		"CapEff": "00000000a80425fb", "CapBnd": "00000000a80425fb", "CapInh": "0000000000000000", "CapAmb": "0000000000000000",
		"Seccomp": "2", "NoNewPrivs": "0", "Pid": "1", "Uid": "0\t0\t0\t0",
	} {
		if in[field] != want {
			t.Errorf("%s is %q, want %q", field, in[field], want)
		}
	}
	if out := d.must("run", "--rm", ref, "probe", "unshare"); out != "EPERM" {
		t.Errorf("unshare(CLONE_NEWUSER): %s, want EPERM from seccomp", out)
	}
	// ls itself opens the directory; a Go program would open files of its cgroup before main.
	for l := range strings.Lines(d.must("run", "--rm", "-i", ref, "ls", "-l", "/proc/self/fd")) {
		f := strings.Fields(l)
		if at := slices.Index(f, "->"); at > 0 && !slices.Contains([]string{"0", "1", "2"}, f[at-1]) && !strings.HasPrefix(f[at+1], "/proc/") {
			t.Errorf("an open descriptor besides stdio: %s", l)
		}
	}
	access := d.must("run", "--rm", ref, "probe", "access", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/sysrq-trigger", "/proc/sys/kernel/hostname", "/sys/kernel/profiling")
	for _, l := range strings.Split(access, "\n") {
		f := strings.Fields(l)
		masked := strings.HasSuffix(f[0], "kcore") || strings.HasSuffix(f[0], "keys") || strings.HasSuffix(f[0], "timer_list")
		if masked && f[2] != "0" && f[2] != "ENOENT" {
			t.Errorf("masked file can be read: %s", l)
		}
		if !masked && f[4] == "ok" {
			t.Errorf("read-only path can be written: %s", l)
		}
	}
	for dev, want := range map[string]string{"c 1 3": "ok", "c 1 5": "ok", "c 10 229": "open EPERM", "b 254 0": "open EPERM", "c 1 1": "open EPERM"} {
		if out := d.must(append([]string{"run", "--rm", ref, "probe", "mknod"}, strings.Fields(dev)...)...); out != want {
			t.Errorf("mknod and open of %s: %s, want %s", dev, out, want)
		}
	}
	if out := d.must("run", "--rm", "--security-opt", "no-new-privileges", ref, "probe", "status"); !strings.Contains(out, `"NoNewPrivs":"1"`) {
		t.Errorf("no-new-privileges is not set: %s", out)
	}
	if out := d.must("run", "--rm", "--cap-drop", "ALL", "--cap-add", "NET_RAW", ref, "probe", "status"); !strings.Contains(out, `"CapEff":"0000000000002000"`) {
		t.Errorf("cap-drop ALL, cap-add NET_RAW: %s", out)
	}
}

func TestUserAndFiles(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	run := func(args ...string) string { t.Helper(); return d.must(append([]string{"run", "--rm"}, args...)...) }
	for user, want := range map[string]string{
		"app": "uid=1000(app) gid=1000(app) groups=1000(app),2000(extra)", "1000:0": "uid=1000(app) gid=0(root)", "4242": "uid=4242 gid=0(root)",
	} {
		if out := run("-u", user, ref, "id"); !strings.HasPrefix(out, want) {
			t.Errorf("-u %s: %s, want %s", user, out, want)
		}
	}
	if r := d.docker("run", "--rm", "-u", "nobody", ref, "id"); r.Code != 126 && r.Code != 125 || !strings.Contains(r.Err, "unable to find user nobody: no matching entries in passwd file") {
		t.Errorf("unknown user: exit %d, %s", r.Code, r.Err)
	}
	if out := run("-w", "/a/b/c", ref, "pwd"); out != "/a/b/c" {
		t.Errorf("-w: %q", out)
	}
	if out := run("-h", "box", ref, "sh", "-c", "hostname; cat /etc/hostname; grep box /etc/hosts | wc -l"); out != "box\nbox\n1" {
		t.Errorf("-h box: %q", out)
	}
	if out := run("--dns", "10.1.2.3", "--dns-search", "corp.test", "--add-host", "x:1.2.3.4", ref, "sh", "-c", "cat /etc/resolv.conf; grep 1.2.3.4 /etc/hosts"); !strings.Contains(out, "nameserver 10.1.2.3") ||
		!strings.Contains(out, "search corp.test") || !strings.Contains(out, "1.2.3.4\tx") {
		t.Errorf("resolver files: %q", out)
	}
	if out := run(ref, "sh", "-c", "df -k /dev/shm | tail -1 | awk '{print $2}'; stat -c %a /dev/shm /tmp"); out != "65536\n1777\n1777" {
		t.Errorf("/dev/shm: %q", out)
	}
	dir := t.TempDir()
	os.WriteFile(dir+"/f", []byte("of the host\n"), 0o644)
	if out := run("-v", dir+":/mnt", ref, "sh", "-c", "cat /mnt/f; echo back >/mnt/g"); out != "of the host" || string(read(t, dir+"/g")) != "back\n" {
		t.Errorf("bind: %q", out)
	}
	if r := d.docker("run", "--rm", "-v", dir+":/mnt:ro", ref, "touch", "/mnt/h"); r.Code != 1 || !strings.Contains(r.Err, "Read-only file system") {
		t.Errorf("read-only bind: %+v", r)
	}
	d.must("volume", "create", "v1")
	run("-v", "v1:/data", ref, "sh", "-c", "echo kept >/data/x")
	if out := run("-v", "v1:/data", ref, "cat", "/data/x"); out != "kept" {
		t.Errorf("named volume: %q", out)
	}
	d.must("volume", "rm", "v1")
	if out := run("--tmpfs", "/t:size=1m", ref, "sh", "-c", "df -k /t | tail -1 | awk '{print $2}'"); out != "1024" {
		t.Errorf("tmpfs: %q", out)
	}
	if r := d.docker("run", "--rm", "--read-only", ref, "touch", "/x"); r.Code != 1 {
		t.Errorf("--read-only: %+v", r)
	}
}

func TestStreams(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	if r := d.command("to and fro\n", "docker", "run", "-i", "--rm", ref, "cat"); r.Out != "to and fro\n" || r.Code != 0 {
		t.Errorf("stdin through cat: %+v", r)
	}
	r := d.docker("run", "--rm", ref, "sh", "-c", "echo out; echo err >&2; exit 42")
	if r.Out != "out\n" || r.Err != "err\n" || r.Code != 42 {
		t.Errorf("both streams: %+v", r)
	}
	if r := d.docker("run", "--rm", ref, "probe", "flood", "33554432"); len(r.Out) != 33554432 {
		t.Errorf("flood of 32 MiB: %d bytes arrived", len(r.Out))
	}
	d.must("run", "-d", "--name", "cc", ref, "sleep", "1000")
	if r := d.command("in\n", "docker", "exec", "-i", "cc", "cat"); r.Out != "in\n" {
		t.Errorf("exec -i: %+v", r)
	}
	if r := d.docker("exec", "cc", "sh", "-c", "exit 7"); r.Code != 7 {
		t.Errorf("exec exit code: %+v", r)
	}
	if r := d.docker("exec", "cc", "nosuch"); r.Code != 127 {
		t.Errorf("exec of nothing: %+v", r)
	}
	if r := d.docker("exec", "-u", "app", "-w", "/tmp", "-e", "A=b", "cc", "sh", "-c", "id -u; pwd; echo $A"); r.Out != "1000\n/tmp\nb\n" {
		t.Errorf("exec -u -w -e: %+v", r)
	}
	if r := d.command("stty size\nexit 3\n", "script", "-qec", "stty rows 40 cols 120; docker run -it --rm "+ref+" sh", "/dev/null"); r.Code != 3 || !strings.Contains(r.Out, "40 120") {
		t.Errorf("terminal: %+v", r)
	}
	d.must("rm", "-f", "cc")
}

// TestNoHang runs short commands many times in a row and at once: every output and code, each time (BR-11).
func TestNoHang(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	one := func() error {
		r := d.docker("run", "--rm", ref, "sh", "-c", "echo out; echo err >&2; exit 42")
		if r.Out != "out\n" || r.Err != "err\n" || r.Code != 42 {
			return fmt.Errorf("%+v", r)
		}
		return nil
	}
	for i := range 50 {
		if err := one(); err != nil {
			t.Fatalf("run %d: %v", i, err)
		}
	}
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if err := one(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestLogs(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	d.must("run", "--name", "ll", ref, "probe", "lines", "10")
	if r := d.docker("logs", "ll"); r.Out != "1\n3\n5\n7\n9\n" || r.Err != "2\n4\n6\n8\n10\n" {
		t.Errorf("logs: %+v", r)
	}
	// Two pipes do not tell which of two lines written at once came first, so the tail may hold two lines of one.
	if r := d.docker("logs", "--tail", "2", "ll"); len(strings.Fields(r.Out+r.Err)) != 2 || !strings.Contains(r.Out+r.Err, "10\n") {
		t.Errorf("logs --tail 2: %+v", r)
	}
	if r := d.docker("logs", "-t", "ll"); !strings.Contains(r.Out, "Z 1\n") {
		t.Errorf("logs -t: %+v", r)
	}
	if r := d.docker("logs", "--until", "2001-01-01T00:00:00Z", "ll"); r.Out+r.Err != "" {
		t.Errorf("logs --until the past: %+v", r)
	}
	// BR-04: a line longer than 16 KiB and an unfinished last line come back byte for byte.
	long := "head -c 100003 /dev/zero | tr '\\0' x; echo; echo short; head -c 20480 /dev/zero | tr '\\0' y"
	long = strings.ReplaceAll(long, "tr '\\0' ", "busybox tr '\\0' ")
	d.must("run", "--name", "long", ref, "sh", "-c", long)
	want := strings.Repeat("x", 100003) + "\nshort\n" + strings.Repeat("y", 20480)
	if r := d.docker("logs", "long"); r.Out != want {
		t.Errorf("long lines: %d bytes, want %d", len(r.Out), len(want))
	}
	if r := d.docker("logs", "--tail", "2", "long"); r.Out != "short\n"+strings.Repeat("y", 20480) {
		t.Errorf("tail of long lines: %d bytes", len(r.Out))
	}
	// A follower sees every line of a container that goes on, and ends with it.
	d.must("run", "-d", "--name", "ff", ref, "sh", "-c", "for i in $(seq 1 50); do echo $i; sleep 0.01; done")
	r := d.docker("logs", "-f", "ff")
	if got := strings.Fields(r.Out); len(got) != 50 || got[49] != "50" {
		t.Errorf("follow: %q", got)
	}
	d.must("rm", "ll", "long", "ff")
}

func TestLifecycle(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	id := d.must("create", "--name", "one", ref, "probe", "ignore")
	if out := d.must("ps", "-a", "--no-trunc", "--format", "{{.ID}} {{.Names}} {{.State}}"); out != id+" one created" {
		t.Errorf("after create: %q", out)
	}
	d.must("start", "one")
	if out := d.must("inspect", "-f", "{{.State.Status}} {{.State.Running}}", "one"); out != "running true" {
		t.Errorf("after start: %q", out)
	}
	start := time.Now()
	d.must("stop", "-t", "1", "one")
	if took := time.Since(start); took < time.Second {
		t.Errorf("a process that ignores SIGTERM was killed after %v, before its second was over", took)
	}
	if out := d.must("inspect", "-f", "{{.State.Status}} {{.State.ExitCode}}", "one"); out != "exited 137" {
		t.Errorf("after stop: %q", out)
	}
	d.must("rename", "one", "two")
	d.must("restart", "-t", "0", "two")
	if r := d.docker("rm", "two"); r.Code == 0 || !strings.Contains(r.Err, "is running") && !strings.Contains(r.Err, "container is running") {
		t.Errorf("rm of a running container: %+v", r)
	}
	d.must("pause", "two")
	if out := d.must("ps", "--format", "{{.State}}"); out != "paused" {
		t.Errorf("after pause: %q", out)
	}
	d.must("unpause", "two")
	d.must("rm", "-f", "two")
	if r := d.docker("inspect", "two"); r.Code != 1 || !strings.Contains(strings.ToLower(r.Err), "no such object: two") {
		t.Errorf("inspect of nothing: %+v", r)
	}
}

func TestNetworks(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	d.must("run", "-d", "--name", "web", ref, "sh", "-c", "while :; do echo hi | nc -l -p 80; done")
	ip := d.must("inspect", "-f", "{{.NetworkSettings.Networks.bridge.IPAddress}}", "web")
	gw := d.must("inspect", "-f", "{{.NetworkSettings.Networks.bridge.Gateway}}", "web")
	if out := d.must("exec", "web", "ip", "-4", "addr", "show", "eth0"); !strings.Contains(out, ip+"/") {
		t.Errorf("address inside is not %s: %s", ip, out)
	}
	if r := d.docker("run", "--rm", ref, "ping", "-c", "1", "-W", "2", gw); r.Code != 0 {
		t.Errorf("gateway does not answer: %+v", r)
	}
	if r := d.docker("run", "--rm", ref, "sh", "-c", "nc -w 2 "+ip+" 80"); r.Out != "hi\n" {
		t.Errorf("container to container: %+v", r)
	}
	if out := d.must("run", "--rm", "--network", "container:web", ref, "ip", "-4", "addr", "show", "eth0"); !strings.Contains(out, ip+"/") {
		t.Errorf("container: network is not web's: %s", out)
	}
	if out := d.must("run", "--rm", "--network", "none", ref, "ls", "/sys/class/net"); out != "lo" {
		t.Errorf("none: interfaces %q", out)
	}
	if out := d.must("run", "--rm", "--network", "host", ref, "ls", "/sys/class/net"); !strings.Contains(out, d.Bridge) {
		t.Errorf("host: interfaces %q", out)
	}
	d.must("rm", "-f", "web")
}
