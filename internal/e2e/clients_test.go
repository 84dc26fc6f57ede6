package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
)

// TestSDKWait waits by all three conditions with the Go SDK (BR-12).
func TestSDKWait(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	c := d.client()
	ctx := context.Background()
	for _, cond := range []container.WaitCondition{container.WaitConditionNextExit, container.WaitConditionRemoved} {
		r, err := c.ContainerCreate(ctx, client.ContainerCreateOptions{
			Name: "ww", Config: &container.Config{Image: ref, Cmd: []string{"sh", "-c", "exit 37"}},
			HostConfig: &container.HostConfig{AutoRemove: cond == container.WaitConditionRemoved},
		})
		if err != nil {
			t.Fatal(err)
		}
		w := c.ContainerWait(ctx, r.ID, client.ContainerWaitOptions{Condition: cond})
		if _, err := c.ContainerStart(ctx, r.ID, client.ContainerStartOptions{}); err != nil {
			t.Fatal(err)
		}
		select {
		case got := <-w.Result:
			if got.StatusCode != 37 {
				t.Errorf("%s: code %d, want 37", cond, got.StatusCode)
			}
		case err := <-w.Error:
			t.Fatalf("%s: %v", cond, err)
		}
		if cond == container.WaitConditionRemoved {
			// The name is free the moment that wait has answered.
			if _, err := c.ContainerCreate(ctx, client.ContainerCreateOptions{Name: "ww", Config: &container.Config{Image: ref, Cmd: []string{"true"}}}); err != nil {
				t.Errorf("name after removed: %v", err)
			}
			continue
		}
		not := c.ContainerWait(ctx, r.ID, client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
		if got := <-not.Result; got.StatusCode != 37 {
			t.Errorf("not-running of an exited one: code %d, want 37", got.StatusCode)
		}
		if _, err := c.ContainerRemove(ctx, r.ID, client.ContainerRemoveOptions{}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHundredAtOnce starts 100 `run --rm` at once through the API.
func TestHundredAtOnce(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	d.must("pull", ref)
	c := d.client()
	ctx := context.Background()
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			err := func() error {
				r, err := c.ContainerCreate(ctx, client.ContainerCreateOptions{
					Config:     &container.Config{Image: ref, Cmd: []string{"sh", "-c", fmt.Sprintf("exit %d", i)}},
					HostConfig: &container.HostConfig{AutoRemove: true},
				})
				if err != nil {
					return err
				}
				w := c.ContainerWait(ctx, r.ID, client.ContainerWaitOptions{Condition: container.WaitConditionRemoved})
				if _, err := c.ContainerStart(ctx, r.ID, client.ContainerStartOptions{}); err != nil {
					return err
				}
				select {
				case got := <-w.Result:
					if got.StatusCode != int64(i) {
						return fmt.Errorf("code %d, want %d", got.StatusCode, i)
					}
					return nil
				case err := <-w.Error:
					return err
				}
			}()
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if out := d.must("ps", "-aq"); out != "" {
		t.Errorf("containers left: %q", out)
	}
}

// TestCompose takes a two-service file up and down with docker compose.
func TestCompose(t *testing.T) {
	compose, err := findCompose()
	if err != nil {
		if os.Getenv("KIRI_MUST") != "" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	ref := busybox(t)
	d := startDaemon(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "compose.yaml")
	text := fmt.Sprintf(`services:
  web:
    image: %[1]s
    network_mode: bridge
    command: ["sh", "-c", "echo web is up; exec sleep 1000"]
    init: true
  job:
    image: %[1]s
    network_mode: bridge
    command: ["sh", "-c", "echo job is up; exec sleep 1000"]
    init: true
    volumes: ["data:/data"]
    depends_on: [web]
volumes:
  data:
`, ref)
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) result {
		t.Helper()
		r := d.command("", compose, append([]string{"-p", "two", "-f", file}, args...)...)
		if r.Code != 0 {
			t.Fatalf("compose %s: %+v", strings.Join(args, " "), r)
		}
		return r
	}
	run("up", "-d")
	if out := run("ps", "--format", "{{.Service}} {{.State}}").Out; !strings.Contains(out, "web running") || !strings.Contains(out, "job running") {
		t.Errorf("ps: %q", out)
	}
	eventually(t, 10e9, "both services in compose logs", func() bool {
		out := run("logs").Out
		return strings.Contains(out, "web is up") && strings.Contains(out, "job is up")
	})
	before := d.must("ps", "-q", "--no-trunc")
	run("up", "-d")
	if after := d.must("ps", "-q", "--no-trunc"); after != before {
		t.Errorf("a second up made containers anew:\n%s\n%s", before, after)
	}
	run("down", "-v", "-t", "1")
	if out := d.must("ps", "-aq"); out != "" {
		t.Errorf("containers after down: %q", out)
	}
	if out := d.must("volume", "ls", "-q"); out != "" {
		t.Errorf("volumes after down -v: %q", out)
	}
}

func findCompose() (string, error) {
	if p := os.Getenv("KIRI_COMPOSE"); p != "" {
		return p, nil
	}
	if p, err := exec.LookPath("docker-compose"); err == nil {
		return p, nil
	}
	return "", errors.New("no docker-compose on PATH (make test installs it)")
}

// TestKiriCommand drives the native commands: what Docker's print, with Docker's exit codes.
func TestKiriCommand(t *testing.T) {
	ref := busybox(t)
	d := startDaemon(t)
	if r := d.kiri("pull", ref); r.Code != 0 || !strings.Contains(r.Out, "Status: Downloaded newer image for "+ref) {
		t.Fatalf("pull: %+v", r)
	}
	for _, c := range []struct {
		args []string
		code int
		out  string
		err  string
	}{
		{[]string{"run", "--rm", ref, "echo", "hi"}, 0, "hi\n", ""},
		{[]string{"run", "--rm", ref, "sh", "-c", "echo out; echo err >&2; exit 42"}, 42, "out\n", "err\n"},
		{[]string{"run", "--rm", ref, "nosuch"}, 127, "", "executable file not found in $PATH"},
		{[]string{"run", "--rm", ref, "/bin/notexec"}, 126, "", "permission denied"},
		{[]string{"run", "--rm", "--pull", "never", "nosuch:1"}, 125, "", "nosuch:1"},
		{[]string{"inspect", "nosuch"}, 1, "", "nosuch"},
	} {
		r := d.kiri(c.args...)
		if r.Code != c.code || r.Out != c.out && c.out != "" || !strings.Contains(r.Err, c.err) {
			t.Errorf("kiri %s: %+v; want code %d, %q, %q", strings.Join(c.args, " "), r, c.code, c.out, c.err)
		}
	}
	if r := d.command("through\n", filepath.Join(bin, "kiri"), "run", "-i", "--rm", ref, "cat"); r.Out != "through\n" {
		t.Errorf("stdin through cat: %+v", r)
	}
	id := strings.TrimSpace(d.kiri("run", "-d", "--name", "one", ref, "sleep", "1000").Out)
	if r := d.kiri("ps", "--no-trunc", "-q"); strings.TrimSpace(r.Out) != id {
		t.Errorf("ps: %+v, want %s", r, id)
	}
	if r := d.kiri("exec", "one", "sh", "-c", "echo in; exit 7"); r.Out != "in\n" || r.Code != 7 {
		t.Errorf("exec: %+v", r)
	}
	if r := d.kiri("debug", "plan", "one"); r.Code != 0 || !strings.Contains(r.Out, "move_mount(") || !strings.Contains(r.Out, "execve") {
		t.Errorf("debug plan: %+v", r)
	}
	if r := d.kiri("rm", "-f", "one"); r.Code != 0 {
		t.Errorf("rm: %+v", r)
	}
	if r := d.kiri("volume", "ls"); r.Code != 0 || !strings.Contains(r.Out, "VOLUME NAME") {
		t.Errorf("a command that is docker's: %+v", r)
	}
}
