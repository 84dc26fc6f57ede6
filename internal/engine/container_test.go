//go:build unix

package engine

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"

	"runkiri.com/kiri/internal/wire"
)

func TestRunRemovedWhenDone(t *testing.T) {
	h := newHarness(t)
	for range 200 {
		id := h.create("one", func(_ *container.Config, hc *container.HostConfig) { hc.AutoRemove = true })
		removed := h.wait(id, container.WaitConditionRemoved)
		next := h.wait(id, container.WaitConditionNextExit)
		if err := h.ContainerStart(t.Context(), "one"); err != nil {
			t.Fatal(err)
		}
		select {
		case <-removed:
			t.Fatal("`removed` was answered while the container runs")
		default:
		}
		h.agents.exit(id, 37)
		if r := receive(t, "removed", removed); r.StatusCode != 37 {
			t.Fatalf("code %d, want 37", r.StatusCode)
		}
		// The name is free now, not soon: the next round's create would fail.
		if _, err := h.ContainerInspect(t.Context(), id, false); !cerrdefs.IsNotFound(err) {
			t.Fatalf("after its removal: %v", err)
		}
		if r := receive(t, "next-exit", next); r.StatusCode != 37 {
			t.Fatalf("code %d, want 37", r.StatusCode)
		}
	}
	eventually(t, "every exit is acknowledged", func() bool {
		h.agents.mu.Lock()
		defer h.agents.mu.Unlock()
		return len(h.agents.acked) == 200
	})
	for _, m := range sent[*wire.Run](h.agents) {
		if !m.Remove {
			t.Fatal("the agent was not told to remove the files with the run")
		}
	}
}

func TestRunManyAtOnce(t *testing.T) {
	h := newHarness(t)
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		if m, ok := f.Msg.(*wire.Run); ok {
			r := h.agents.run(m)
			h.agents.exit(m.ID, len(m.Args[1:])) // before the answer to Run is on the wire
			return r, nil, true
		}
		return nil, nil, false
	})
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			id := h.create("", func(c *container.Config, hc *container.HostConfig) {
				c.Cmd = append([]string{"x"}, make([]string, i%50)...)
				hc.AutoRemove = true
			})
			ch, err := h.ContainerWait(t.Context(), id, container.WaitConditionRemoved)
			if err != nil {
				t.Error(err)
				return
			}
			if err := h.ContainerStart(t.Context(), id); err != nil {
				t.Error(err)
				return
			}
			select {
			case r := <-ch:
				if int(r.StatusCode) != i%50 {
					t.Errorf("code %d, want %d", r.StatusCode, i%50)
				}
			case <-time.After(10 * time.Second):
				t.Error("no end")
			}
		})
		if i%20 == 0 { // lists never fail beside it
			if _, err := h.ContainerList(t.Context(), ListOptions{All: true}); err != nil {
				t.Error(err)
			}
		}
	}
	wg.Wait()
	if l, err := h.ContainerList(t.Context(), ListOptions{All: true}); err != nil || len(l) != 0 {
		t.Errorf("left over: %v, %v", l, err)
	}
}

func TestWaitConditions(t *testing.T) {
	h := newHarness(t)
	id := h.create("cc", nil)
	if r := receive(t, "not-running of a created container", h.wait(id, container.WaitConditionNotRunning)); r.StatusCode != 0 {
		t.Errorf("code %d", r.StatusCode)
	}
	_, err := h.ContainerWait(t.Context(), id, "bogus")
	wantError(t, err, cerrdefs.IsInvalidArgument, `invalid condition: "bogus"`)
	ctx, cancel := context.WithCancel(t.Context())
	if _, err := h.ContainerWait(ctx, id, container.WaitConditionRemoved); err != nil {
		t.Fatal(err)
	}
	cancel()
	c, _ := h.containers.get(id)
	eventually(t, "a waiter that goes away is forgotten", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.waiters) == 0
	})
	next := h.wait(id, container.WaitConditionNextExit)
	if err := h.ContainerRemove(t.Context(), id, RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	receive(t, "a removal ends next-exit", next)
}

func TestCreateErrors(t *testing.T) {
	h := newHarness(t)
	taken := h.create("taken", nil)
	for _, tt := range []struct {
		name   string
		change func(*container.Config, *container.HostConfig)
		is     func(error) bool
		want   string
	}{
		{"taken", nil, cerrdefs.IsConflict, `Conflict. The container name "/taken" is already in use by container "` + taken + `". You have to remove (or rename) that container to be able to reuse that name.`},
		{"/taken", nil, cerrdefs.IsConflict, `Conflict. The container name "/taken" is already in use by container "` + taken + `". You have to remove (or rename) that container to be able to reuse that name.`},
		{"x", nil, cerrdefs.IsInvalidArgument, `Invalid container name (x), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed`},
		{"-bad", nil, cerrdefs.IsInvalidArgument, `Invalid container name (-bad), only [a-zA-Z0-9][a-zA-Z0-9_.-] are allowed`},
		{"", func(c *container.Config, _ *container.HostConfig) { c.Image = "nope" }, cerrdefs.IsNotFound, "No such image: nope:latest"},
		{"", func(c *container.Config, _ *container.HostConfig) { c.Entrypoint = []string{""}; c.Cmd = nil }, cerrdefs.IsInvalidArgument, "no command specified"},
		{"", func(c *container.Config, _ *container.HostConfig) { c.WorkingDir = "rel" }, cerrdefs.IsInvalidArgument, "the working directory 'rel' is invalid, it needs to be an absolute path"},
		{"", func(c *container.Config, _ *container.HostConfig) { c.StopSignal = "SIGNOPE" }, cerrdefs.IsInvalidArgument, "invalid signal: SIGNOPE"},
		{"", func(c *container.Config, _ *container.HostConfig) { c.Env = []string{"=x"} }, cerrdefs.IsInvalidArgument, "invalid environment variable: =x"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.Memory = 5 << 20 }, cerrdefs.IsInvalidArgument, "Minimum memory limit allowed is 6MB"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.NanoCPUs = 3e9 }, cerrdefs.IsInvalidArgument, "range of CPUs is from 0.01 to 2.00, as there are only 2 CPUs available"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.CpusetCpus = "0-7" }, cerrdefs.IsInvalidArgument, "Requested CPUs are not available - requested 0-7, available: 0-1"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.CapAdd = []string{"FLY"} }, cerrdefs.IsInvalidArgument, `invalid CapAdd: unknown capability: "CAP_FLY"`},
		{"", func(_ *container.Config, h *container.HostConfig) {
			h.AutoRemove, h.RestartPolicy.Name = true, "always"
		}, cerrdefs.IsInvalidArgument, "can't create 'AutoRemove' container with restart policy"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.RestartPolicy.Name = "sometimes" }, cerrdefs.IsInvalidArgument, "invalid restart policy: unknown policy 'sometimes'; use one of 'no', 'always', 'on-failure', or 'unless-stopped'"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.Binds = []string{"/a:/b:/c:/d"} }, cerrdefs.IsInvalidArgument, "invalid volume specification: '/a:/b:/c:/d'"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.Binds = []string{"/a:/b:wx"} }, cerrdefs.IsInvalidArgument, "invalid mode: wx"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.Binds = []string{"/a:/b", "/c:/b"} }, cerrdefs.IsInvalidArgument, "Duplicate mount point: /b"},
		{"", func(_ *container.Config, h *container.HostConfig) {
			h.Mounts = []mount.Mount{{Type: mount.TypeBind, Source: "/does/not/exist", Target: "/x"}}
		}, cerrdefs.IsInvalidArgument, `invalid mount config for type "bind": bind source path does not exist: /does/not/exist`},
		{"", func(_ *container.Config, h *container.HostConfig) {
			h.Mounts = []mount.Mount{{Type: mount.TypeVolume, Target: "/"}}
		}, cerrdefs.IsInvalidArgument, `invalid mount config for type "volume": invalid specification: destination can't be '/'`},
		{"", func(_ *container.Config, h *container.HostConfig) {
			h.Mounts = []mount.Mount{{Type: mount.TypeImage, Source: "bb", Target: "/x"}}
		}, cerrdefs.IsNotImplemented, `a mount of type "image" is not supported by kiri yet: not implemented`},
		{"", func(_ *container.Config, h *container.HostConfig) { h.Links = []string{"a:b"} }, cerrdefs.IsNotImplemented, "HostConfig.Links (legacy links) is not supported by kiri yet: not implemented"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.LogConfig.Type = "nope" }, cerrdefs.IsInvalidArgument, "logger: no log driver named 'nope' is registered"},
		{"", func(_ *container.Config, h *container.HostConfig) {
			h.LogConfig = container.LogConfig{Config: map[string]string{"color": "red"}}
		}, cerrdefs.IsInvalidArgument, "unknown log opt 'color' for json-file log driver"},
		{"", func(_ *container.Config, h *container.HostConfig) { h.SecurityOpt = []string{"bogus"} }, cerrdefs.IsInvalidArgument, `invalid --security-opt 1: "bogus"`},
		{"", func(_ *container.Config, h *container.HostConfig) { h.Runtime = "nope" }, cerrdefs.IsInvalidArgument, "unknown or invalid runtime name: nope"},
		{"", func(_ *container.Config, h *container.HostConfig) {
			h.DeviceRequests = []container.DeviceRequest{{Capabilities: [][]string{{"gpu"}}}}
		}, cerrdefs.IsInvalidArgument, `could not select device driver "" with capabilities: [[gpu]]`},
	} {
		req := &container.CreateRequest{Config: &container.Config{Image: "bb"}, HostConfig: &container.HostConfig{}}
		if tt.change != nil {
			tt.change(req.Config, req.HostConfig)
		}
		_, err := h.ContainerCreate(t.Context(), tt.name, req, "")
		wantError(t, err, tt.is, tt.want)
	}
	if l, _ := h.ContainerList(t.Context(), ListOptions{All: true}); len(l) != 1 {
		t.Errorf("%d containers after failed creates, want 1", len(l))
	}
	if u := h.images.users; len(u) != 1 {
		t.Errorf("the image has users %v after failed creates", u)
	}
}

func TestCreateMergesImageAndDefaults(t *testing.T) {
	h := newHarness(t)
	id := h.create("cc", func(c *container.Config, hc *container.HostConfig) {
		c.Env = []string{"B=user", "PATH"}
		hc.Memory = 64 << 20
		hc.PortBindings = network.PortMap{network.MustParsePort("80/tcp"): {{HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: "8080"}}}
	})
	if err := h.ContainerStart(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	r, err := h.ContainerInspect(t.Context(), "cc", true)
	if err != nil {
		t.Fatal(err)
	}
	run := sent[*wire.Run](h.agents)[0]
	for _, c := range []struct {
		what      string
		got, want any
	}{
		{"name", r.Name, "/cc"},
		{"path", r.Path, "/bin/sh"},
		{"env", fmt.Sprint(r.Config.Env), "[B=user PATH A=image]"},
		{"label", r.Config.Labels["from"], "image"},
		{"hostname", r.Config.Hostname, id[:12]},
		{"run env", fmt.Sprint(run.Env), "[HOSTNAME=" + id[:12] + " B=user A=image]"},
		{"swap", r.HostConfig.MemorySwap, int64(128 << 20)},
		{"shm", r.HostConfig.ShmSize, int64(64 << 20)},
		{"ipc", string(r.HostConfig.IpcMode), "private"},
		{"network mode", string(r.HostConfig.NetworkMode), "bridge"},
		{"policy", string(r.HostConfig.RestartPolicy.Name), "no"},
		{"log", r.HostConfig.LogConfig.Type, "json-file"},
		{"masked", len(r.HostConfig.MaskedPaths), len(defaultMasked)},
		{"address", r.NetworkSettings.Networks["bridge"].IPAddress.String(), "172.17.0.2"},
		{"network id", r.NetworkSettings.Networks["bridge"].NetworkID, bridgeNetworkID},
		{"port", r.NetworkSettings.Ports[network.MustParsePort("80/tcp")][0].HostPort, "8080"},
		{"size", *r.SizeRw, int64(7)},
		{"caps", fmt.Sprint(run.Caps), fmt.Sprint(defaultCaps)},
		{"layers", len(run.Layers), 1},
		{"memory", run.Resources.Memory, int64(64 << 20)},
	} {
		if c.got != c.want {
			t.Errorf("%s: %v, want %v", c.what, c.got, c.want)
		}
	}
	h.agents.exit(id, 0)
	receive(t, "exit", h.wait(id, container.WaitConditionNotRunning))
	r, _ = h.ContainerInspect(t.Context(), id, false)
	if ep := r.NetworkSettings.Networks["bridge"]; ep.EndpointID != "" || ep.IPAddress.IsValid() || len(ep.MacAddress) != 0 || ep.NetworkID != bridgeNetworkID {
		t.Errorf("the endpoint of a stopped container: %+v", ep)
	}
	if len(r.NetworkSettings.Ports) != 0 || r.NetworkSettings.SandboxID != "" {
		t.Errorf("the network of a stopped container: %+v", r.NetworkSettings)
	}
}

func TestStopTimeouts(t *testing.T) {
	h := newHarness(t)
	second, six, zero, never := 1, 6, 0, -1
	for _, tt := range []struct {
		name        string
		own         *int // the container's stop timeout
		given       *int
		dies        time.Duration // after the stop signal; 0 never
		least, most time.Duration
		code        int
	}{
		{"gone in time", nil, nil, 300 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second, 143},
		{"given timeout", &six, &second, 0, time.Second, 4 * time.Second, 137},
		{"own timeout", &second, nil, 0, time.Second, 4 * time.Second, 137},
		{"at once", nil, &zero, 0, 0, time.Second, 137},
		{"never killed", &second, &never, 1500 * time.Millisecond, 1500 * time.Millisecond, 4 * time.Second, 143},
	} {
		t.Run(tt.name, func(t *testing.T) {
			id := h.run("", func(c *container.Config, _ *container.HostConfig) { c.StopTimeout = tt.own })
			defer h.ContainerRemove(context.Background(), id, RemoveOptions{Force: true})
			h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
				if m, ok := f.Msg.(*wire.Signal); ok && m.ID == id && m.Signal == sigTerm && tt.dies > 0 {
					time.AfterFunc(tt.dies, func() { h.agents.exit(id, 143) })
				}
				return nil, nil, false
			})
			start := time.Now()
			if err := h.ContainerStop(t.Context(), id, "", tt.given); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took < tt.least || took > tt.most {
				t.Errorf("took %v, want %v to %v", took, tt.least, tt.most)
			}
			if s := h.state(id); s.Running || s.ExitCode != tt.code {
				t.Errorf("state %+v, want code %d", s, tt.code)
			}
		})
	}
	id := h.create("still", nil)
	if err := h.ContainerStop(t.Context(), id, "", nil); !cerrdefs.IsNotModified(err) {
		t.Errorf("stopping what does not run: %v", err)
	}
	wantError(t, h.ContainerKill(t.Context(), "still", ""), cerrdefs.IsConflict, "cannot kill container: still: container "+id+" is not running")
	wantError(t, h.ContainerKill(t.Context(), "still", "0"), cerrdefs.IsInvalidArgument, "invalid signal: 0")
	wantError(t, h.ContainerKill(t.Context(), "still", "99"), cerrdefs.IsInvalidArgument, "the linux daemon does not support signal 99")
}

func TestStartErrors(t *testing.T) {
	h := newHarness(t)
	for _, tt := range []struct {
		err  *wire.Error
		code int
		is   func(error) bool
		want string
	}{
		{wire.Errorf(wire.NoCommand, `exec: "x": executable file not found in $PATH`), 127, cerrdefs.IsInvalidArgument, `failed to create task for container: exec: "x": executable file not found in $PATH`},
		{wire.Errorf(wire.NotExecutable, `exec: "/etc": %w`, syscall.EISDIR), 126, cerrdefs.IsInvalidArgument, `failed to create task for container: exec: "/etc": is a directory: permission denied`},
		{wire.Errorf(wire.Invalid, "mounting /x: %w", syscall.ENOENT), 127, cerrdefs.IsInvalidArgument, "failed to create task for container: mounting /x: no such file or directory"},
		{wire.Errorf(wire.Internal, "mount overlay on /: %w", syscall.ENODEV), 128, cerrdefs.IsUnknown, "failed to create task for container: mount overlay on /: no such device"},
	} {
		for _, rm := range []bool{false, true} {
			id := h.create("", func(_ *container.Config, hc *container.HostConfig) { hc.AutoRemove = rm })
			removed := h.wait(id, container.WaitConditionRemoved)
			h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
				_, ok := f.Msg.(*wire.Run)
				return nil, tt.err, ok
			})
			wantError(t, h.ContainerStart(t.Context(), id), tt.is, tt.want)
			if rm {
				if r := receive(t, "removal of an --rm container that did not start", removed); int(r.StatusCode) != tt.code {
					t.Errorf("code %d, want %d", r.StatusCode, tt.code)
				}
				continue
			}
			if s := h.state(id); s.Status != "created" || s.ExitCode != tt.code || s.Error != tt.want {
				t.Errorf("state %+v", s)
			}
		}
	}
}

func TestRestartPolicies(t *testing.T) {
	h := newHarness(t)
	var mu sync.Mutex
	starts := map[string][]time.Time{}
	code := 1
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		m, ok := f.Msg.(*wire.Run)
		if !ok {
			return nil, nil, false
		}
		r := h.agents.run(m)
		mu.Lock()
		starts[m.ID] = append(starts[m.ID], time.Now())
		n := len(starts[m.ID])
		mu.Unlock()
		if n < 5 {
			h.agents.exit(m.ID, code)
		}
		return r, nil, true
	})
	count := func(id string) int {
		mu.Lock()
		defer mu.Unlock()
		return len(starts[id])
	}
	policy := func(p container.RestartPolicyMode, most int) func(*container.Config, *container.HostConfig) {
		return func(_ *container.Config, hc *container.HostConfig) {
			hc.RestartPolicy = container.RestartPolicy{Name: p, MaximumRetryCount: most}
		}
	}
	failing := h.run("failing", policy("on-failure", 2))
	always := h.run("always", policy("always", 0))
	eventually(t, "on-failure:2 gives up", func() bool { return h.state(failing).Status == "exited" })
	if n := count(failing); n != 3 {
		t.Errorf("on-failure:2 was started %d times, want 3", n)
	}
	eventually(t, "always goes on", func() bool { return count(always) == 5 && h.state(always).Status == "running" })
	mu.Lock()
	for i, want := range []time.Duration{100, 200, 400, 800} {
		if gap := starts[always][i+1].Sub(starts[always][i]); gap < want*time.Millisecond || gap > want*time.Millisecond+500*time.Millisecond {
			t.Errorf("restart %d after %v, want %v ms", i+1, gap, int(want))
		}
	}
	mu.Unlock()
	if r, _ := h.ContainerInspect(t.Context(), always, false); r.RestartCount != 4 {
		t.Errorf("restart count %d, want 4", r.RestartCount)
	}
	// A stop by hand ends it for good.
	if err := h.ContainerStop(t.Context(), always, "KILL", nil); err != nil {
		t.Fatal(err)
	}
	if s := h.state(always); s.Status != "exited" || s.ExitCode != 137 {
		t.Errorf("after a stop: %+v", s)
	}
	// Also while it waits for its restart.
	looping := h.run("looping", policy("always", 0))
	eventually(t, "it waits for a restart", func() bool { return h.state(looping).Restarting })
	if err := h.ContainerStop(t.Context(), looping, "", nil); err != nil {
		t.Fatal(err)
	}
	if s := h.state(looping); s.Status != "exited" {
		t.Errorf("after a stop: %+v", s)
	}
	// And a removal does while it waits.
	dying := h.run("dying", policy("always", 0))
	eventually(t, "it waits for a restart", func() bool { return h.state(dying).Restarting })
	if err := h.ContainerRemove(t.Context(), dying, RemoveOptions{}); !cerrdefs.IsConflict(err) {
		t.Errorf("removing a restarting container without force: %v", err)
	}
	if err := h.ContainerRemove(t.Context(), dying, RemoveOptions{Force: true}); err != nil {
		t.Error(err)
	}
}

func TestRestartKeepsRemovableContainer(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", func(_ *container.Config, hc *container.HostConfig) { hc.AutoRemove = true })
	zero := 0
	if err := h.ContainerRestart(t.Context(), "cc", "", &zero); err != nil {
		t.Fatal(err)
	}
	if s := h.state(id); s.Status != "running" {
		t.Errorf("state after restart: %+v", s)
	}
	for _, s := range sent[*wire.Signal](h.agents) {
		if !s.Keep {
			t.Error("the agent was not told to keep the writable layer")
		}
	}
	if n := len(sent[*wire.Run](h.agents)); n != 2 {
		t.Errorf("%d starts, want 2", n)
	}
}

func TestPause(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	if err := h.ContainerPause(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if s := h.state(id); s.Status != "paused" || !s.Running {
		t.Errorf("state %+v", s)
	}
	wantError(t, h.ContainerPause(t.Context(), id), cerrdefs.IsConflict, "container "+id+" is already paused")
	wantError(t, h.ContainerStart(t.Context(), id), cerrdefs.IsConflict, "cannot start a paused container, try unpause instead")
	_, err := h.ExecCreate(t.Context(), id, &container.ExecCreateRequest{Cmd: []string{"true"}})
	wantError(t, err, cerrdefs.IsConflict, "Container "+id+" is paused, unpause the container before exec")
	wantError(t, h.ContainerRemove(t.Context(), "cc", RemoveOptions{}), cerrdefs.IsConflict, `cannot remove container "cc": container is paused and must be unpaused first`)
	// A stop resumes it, so that it can act on the signal.
	zero := 0
	if err := h.ContainerStop(t.Context(), id, "", &zero); err != nil {
		t.Fatal(err)
	}
	freezes := sent[*wire.Freeze](h.agents)
	if len(freezes) != 2 || freezes[1].On {
		t.Errorf("freezes %+v", freezes)
	}
	if err := h.ContainerUnpause(t.Context(), id); err == nil || !strings.HasSuffix(err.Error(), "is not paused") {
		t.Errorf("unpause of a stopped container: %v", err)
	}
}

func TestRenameAndLookUp(t *testing.T) {
	h := newHarness(t)
	a, b := h.create("a1", nil), h.create("b1", nil)
	wantError(t, h.ContainerRename(t.Context(), "a1", "b1"), cerrdefs.IsConflict, `Error when allocating new name: Conflict. The container name "/b1" is already in use by container "`+b+`". You have to remove (or rename) that container to be able to reuse that name.`)
	wantError(t, h.ContainerRename(t.Context(), "a1", "a1"), cerrdefs.IsInvalidArgument, "Renaming a container with the same name as its current name")
	wantError(t, h.ContainerRename(t.Context(), "a1", ""), cerrdefs.IsInvalidArgument, "Neither old nor new names may be empty")
	if err := h.ContainerRename(t.Context(), "a1", "/c1"); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{"c1", "/c1", a, a[:12], a[:40]} {
		if c, err := h.containers.get(ref); err != nil || c.id != a {
			t.Errorf("%s: %v", ref, err)
		}
	}
	_, err := h.containers.get("a1")
	wantError(t, err, cerrdefs.IsNotFound, "No such container: a1")
	_, err = h.containers.get("")
	wantError(t, err, cerrdefs.IsInvalidArgument, `invalid name or ID supplied: ""`)
	if h.create("a1", nil) == "" { // the old name is free
		t.Error("no container")
	}
	h.reopen(nil)
	if c, err := h.containers.get("c1"); err != nil || c.id != a {
		t.Errorf("after a restart of the daemon: %v", err)
	}
}

func TestListFilters(t *testing.T) {
	h := newHarness(t)
	web := h.run("web", func(c *container.Config, hc *container.HostConfig) {
		c.Labels = map[string]string{"tier": "front", "x": "1"}
		c.ExposedPorts = network.PortSet{network.MustParsePort("80/tcp"): {}}
		hc.Binds = []string{"data:/data"}
	})
	db := h.run("db", func(c *container.Config, _ *container.HostConfig) { c.Labels = map[string]string{"tier": "back"} })
	old := h.create("old", nil)
	h.agents.exit(db, 3)
	receive(t, "exit", h.wait(db, container.WaitConditionNotRunning))
	one := func(k, v string) Filters { return Filters{k: {v: true}} }
	for _, tt := range []struct {
		opts ListOptions
		want []string
	}{
		{ListOptions{}, []string{web}},
		{ListOptions{All: true}, []string{old, db, web}},
		{ListOptions{Limit: 2}, []string{old, db}},
		{ListOptions{Filters: one("status", "exited")}, []string{db}},
		{ListOptions{Filters: one("status", "created")}, []string{old}},
		{ListOptions{All: true, Filters: one("exited", "3")}, []string{db}},
		{ListOptions{All: true, Filters: one("label", "tier")}, []string{db, web}},
		{ListOptions{All: true, Filters: one("label", "tier=front")}, []string{web}},
		{ListOptions{All: true, Filters: Filters{"label": {"tier=front": true, "x=1": true}}}, []string{web}},
		{ListOptions{All: true, Filters: Filters{"label": {"tier=front": true, "x=2": true}}}, nil},
		{ListOptions{All: true, Filters: one("name", "^/w")}, []string{web}},
		{ListOptions{All: true, Filters: one("name", "db")}, []string{db}},
		{ListOptions{All: true, Filters: one("id", web[:10])}, []string{web}},
		{ListOptions{All: true, Filters: one("before", "db")}, []string{web}},
		{ListOptions{All: true, Filters: one("since", "web")}, []string{old, db}},
		{ListOptions{All: true, Filters: one("ancestor", "bb")}, []string{old, db, web}},
		{ListOptions{All: true, Filters: one("ancestor", "none")}, nil},
		{ListOptions{All: true, Filters: one("volume", "data")}, []string{web}},
		{ListOptions{All: true, Filters: one("volume", "/data")}, []string{web}},
		{ListOptions{All: true, Filters: one("network", "bridge")}, []string{old, db, web}},
		{ListOptions{All: true, Filters: one("network", "host")}, nil},
		{ListOptions{All: true, Filters: one("expose", "80")}, []string{web}},
		{ListOptions{All: true, Filters: one("publish", "80")}, nil},
		{ListOptions{All: true, Filters: one("health", "none")}, []string{old, db, web}},
		{ListOptions{All: true, Filters: one("is-task", "true")}, nil},
	} {
		l, err := h.ContainerList(t.Context(), tt.opts)
		if err != nil {
			t.Errorf("%+v: %v", tt.opts, err)
		}
		var got []string
		for _, s := range l {
			got = append(got, s.ID)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%+v: %v, want %v", tt.opts, got, tt.want)
		}
	}
	_, err := h.ContainerList(t.Context(), ListOptions{Filters: one("nope", "1")})
	wantError(t, err, cerrdefs.IsInvalidArgument, "invalid filter 'nope'")
	_, err = h.ContainerList(t.Context(), ListOptions{Filters: one("before", "nobody")})
	wantError(t, err, cerrdefs.IsNotFound, "No such container: nobody")
}

func TestUpdate(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", func(_ *container.Config, hc *container.HostConfig) { hc.Memory, hc.MemorySwap = 100<<20, 100<<20 })
	update := func(r container.Resources) error {
		_, err := h.ContainerUpdate(t.Context(), id, &container.UpdateConfig{Resources: r})
		return err
	}
	err := update(container.Resources{Memory: 400 << 20})
	wantError(t, err, cerrdefs.IsConflict, "Cannot update container "+id+": Memory limit should be smaller than already set memoryswap limit, update the memoryswap at the same time")
	for _, r := range []container.Resources{{Memory: 400 << 20, MemorySwap: 800 << 20}, {CPUQuota: 50000}, {CpusetCpus: "0-1"}, {CpusetCpus: "0"}} {
		if err := update(r); err != nil {
			t.Fatal(err)
		}
	}
	limit := int64(50)
	if err := update(container.Resources{PidsLimit: &limit}); err != nil {
		t.Fatal(err)
	}
	all := sent[*wire.Update](h.agents)
	last := all[len(all)-1].Resources
	if last.Memory != 400<<20 || last.MemorySwap != 800<<20 || last.CPUQuota != 50000 || last.CpusetCpus != "0" || *last.PidsLimit != 50 {
		t.Errorf("the cgroup was told %+v", last)
	}
	// What the kernel refuses is not recorded.
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		_, ok := f.Msg.(*wire.Update)
		return nil, wire.Errorf(wire.Invalid, "no"), ok
	})
	if err := update(container.Resources{CPUShares: 99}); !cerrdefs.IsInvalidArgument(err) {
		t.Errorf("refused update: %v", err)
	}
	r, _ := h.ContainerInspect(t.Context(), id, false)
	if r.HostConfig.CPUShares != 0 || r.HostConfig.Memory != 400<<20 {
		t.Errorf("recorded %+v", r.HostConfig.Resources)
	}
}
