//go:build unix

package engine

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/api/types/volume"

	"runkiri.com/kiri/internal/wire"
)

func TestEventOrder(t *testing.T) {
	h := newHarness(t)
	start := time.Now()
	id := h.create("cc", func(c *container.Config, hc *container.HostConfig) {
		c.Labels = map[string]string{"tier": "front"}
		hc.Binds = []string{"data:/data"}
	})
	if err := h.ContainerStart(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	if err := h.ContainerKill(t.Context(), id, ""); err != nil {
		t.Fatal(err)
	}
	if err := h.ContainerRemove(t.Context(), id, RemoveOptions{}); err != nil {
		t.Fatal(err)
	}
	ch, err := h.Events(t.Context(), EventsOptions{Since: start, Until: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	var last int64
	for m := range ch { // ends by itself: Until has passed
		got = append(got, string(m.Type)+" "+string(m.Action))
		if m.TimeNano <= last || m.Scope != "local" || m.Time != m.TimeNano/1e9 {
			t.Errorf("times of %+v after %d", m, last)
		}
		last = m.TimeNano
		a := m.Actor.Attributes
		if m.Type == events.ContainerEventType && (m.Actor.ID != id || a["name"] != "cc" || a["image"] != "bb" || a["tier"] != "front") {
			t.Errorf("attributes of %s: %v", m.Action, a)
		}
		switch m.Action {
		case events.ActionDie:
			if a["exitCode"] != "137" {
				t.Errorf("die: %v", a)
			}
		case events.ActionKill:
			if a["signal"] != "9" {
				t.Errorf("kill: %v", a)
			}
		case events.ActionConnect:
			if a["container"] != id || a["name"] != "bridge" || a["type"] != "bridge" || m.Actor.ID != bridgeNetworkID {
				t.Errorf("connect: %v", a)
			}
		case events.ActionMount:
			if a["container"] != id || a["destination"] != "/data" || a["driver"] != "local" || a["read/write"] != "true" {
				t.Errorf("mount: %v", a)
			}
		}
	}
	// kill is told by who sends the signal, die by who hears of the end: either may be first.
	want := []string{"volume create", "container create", "volume mount", "network connect", "container start", "container die",
		"network disconnect", "volume unmount", "container destroy"}
	if i := slices.Index(got, "container kill"); i < 0 {
		t.Error("no kill")
	} else {
		got = slices.Delete(got, i, i+1)
	}
	if !slices.Equal(got, want) {
		t.Errorf("events %v\nwant   %v", got, want)
	}
}

func TestEventsSinceUntil(t *testing.T) {
	var e Engine
	e.events.subs = map[*subscription]bool{}
	tell := func(action, name string) {
		e.events.publish(events.ContainerEventType, events.Action(action), name, map[string]string{"name": name, "image": "bb:latest", "x": "1"})
	}
	for i := range 300 { // more than are kept
		tell("create", fmt.Sprint("c", i))
	}
	since := time.Unix(0, e.events.last+1)
	tell("start", "a")
	tell("exec_start: sh -c", "a")
	tell("die", "b")
	until := time.Unix(0, e.events.last)
	tell("destroy", "b")
	read := func(o EventsOptions) []string {
		ch, err := e.Events(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		var l []string
		for m := range ch {
			l = append(l, string(m.Action))
		}
		return l
	}
	f := func(kv ...string) Filters {
		f := Filters{}
		for i := 0; i < len(kv); i += 2 {
			if f[kv[i]] == nil {
				f[kv[i]] = map[string]bool{}
			}
			f[kv[i]][kv[i+1]] = true
		}
		return f
	}
	for _, tt := range []struct {
		f    Filters
		want string
	}{
		{nil, "start exec_start: sh -c die"},
		{f("event", "start"), "start"},
		{f("event", "start", "event", "die"), "start die"},
		{f("event", "exec_start"), "exec_start: sh -c"},
		{f("container", "b"), "die"},
		{f("container", "b", "event", "start"), ""},
		{f("type", "network"), ""},
		{f("image", "bb"), "start exec_start: sh -c die"},
		{f("image", "cc"), ""},
		{f("label", "x=1"), "start exec_start: sh -c die"},
		{f("label", "x=1", "label", "y"), ""},
	} {
		if got := strings.Join(read(EventsOptions{Since: since, Until: until, Filters: tt.f}), " "); got != tt.want {
			t.Errorf("%v: %q, want %q", tt.f, got, tt.want)
		}
	}
	if got := read(EventsOptions{Until: until}); len(got) != pastEvents-1 {
		t.Errorf("%d events are kept, want %d", len(got), pastEvents-1)
	}
	if _, err := e.Events(t.Context(), EventsOptions{Since: until.Add(time.Second), Until: until}); !cerrdefs.IsInvalidArgument(err) {
		t.Errorf("since after until: %v", err)
	}
	// One that is to come ends the stream by the clock, with or without events.
	begin := time.Now()
	if got := read(EventsOptions{Since: until.Add(1), Until: begin.Add(200 * time.Millisecond)}); strings.Join(got, " ") != "destroy" {
		t.Errorf("until in the future: %v", got)
	}
	if took := time.Since(begin); took < 200*time.Millisecond || took > 5*time.Second {
		t.Errorf("it ended after %v", took)
	}
	// A reader that sleeps is cut off and never holds up the teller.
	ch, _ := e.Events(t.Context(), EventsOptions{})
	for i := range 3 * subscriberRoom {
		tell("create", fmt.Sprint(i))
	}
	n := 0
	for range ch {
		n++
	}
	if n == 0 || n == 3*subscriberRoom {
		t.Errorf("%d events before the cut", n)
	}
	if e.events.n.Load() != 0 {
		t.Errorf("%d listeners left", e.events.n.Load())
	}
}

func TestVolumes(t *testing.T) {
	h := newHarness(t)
	ctx := t.Context()
	_, err := h.VolumeCreate(ctx, &volume.CreateRequest{Name: "x"})
	wantError(t, err, cerrdefs.IsInvalidArgument, "create x: volume name is too short, names should be at least two alphanumeric characters")
	_, err = h.VolumeCreate(ctx, &volume.CreateRequest{Name: "a/b"})
	wantError(t, err, cerrdefs.IsInvalidArgument, `create a/b: "a/b" includes invalid characters for a local volume name, only "[a-zA-Z0-9][a-zA-Z0-9_.-]" are allowed. If you intended to pass a host directory, use absolute path`)
	_, err = h.VolumeCreate(ctx, &volume.CreateRequest{Name: "ok", Driver: "nfs"})
	wantError(t, err, cerrdefs.IsNotFound, `create ok: error looking up volume plugin nfs: plugin "nfs" not found`)
	_, err = h.VolumeCreate(ctx, &volume.CreateRequest{Name: "ok", DriverOpts: map[string]string{"type": "tmpfs"}})
	if !cerrdefs.IsNotImplemented(err) {
		t.Errorf("driver options: %v", err)
	}
	_, err = h.VolumeInspect(ctx, "none")
	wantError(t, err, cerrdefs.IsNotFound, "get none: no such volume")

	if _, err := h.VolumeCreate(ctx, &volume.CreateRequest{Name: "named", Labels: map[string]string{"keep": "yes"}}); err != nil {
		t.Fatal(err)
	}
	user := h.create("user", func(c *container.Config, hc *container.HostConfig) {
		c.Volumes = map[string]struct{}{"/anon": {}}
		hc.Binds = []string{"named:/named:ro"}
		hc.Mounts = []mount.Mount{{Type: mount.TypeVolume, Target: "/m", VolumeOptions: &mount.VolumeOptions{NoCopy: true}}}
	})
	borrower := h.create("borrower", func(_ *container.Config, hc *container.HostConfig) { hc.VolumesFrom = []string{"user:ro"} })
	wantError(t, h.VolumeRemove(ctx, "named", true), cerrdefs.IsConflict, "remove named: volume is in use - ["+strings.Join(slices.Sorted(slices.Values([]string{user, borrower})), ", ")+"]")
	r, _ := h.ContainerInspect(ctx, borrower, false)
	if len(r.Mounts) != 3 || slices.ContainsFunc(r.Mounts, func(m container.MountPoint) bool { return m.RW }) {
		t.Errorf("mounts by volumes-from: %+v", r.Mounts)
	}
	h.reopen(nil)
	if l, _ := h.VolumeList(ctx, Filters{"dangling": {"false": true}}); len(l.Volumes) != 3 {
		t.Errorf("%d volumes in use after a restart of the daemon, want 3", len(l.Volumes))
	}
	for _, id := range []string{borrower, user} {
		if err := h.ContainerRemove(ctx, id, RemoveOptions{Volumes: true}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the nameless volumes go with their last container", func() bool {
		l, _ := h.VolumeList(ctx, nil)
		return len(l.Volumes) == 1 && l.Volumes[0].Name == "named"
	})
	// What an --rm container made for itself goes with it.
	id := h.run("rm", func(c *container.Config, hc *container.HostConfig) {
		hc.AutoRemove, c.Volumes = true, map[string]struct{}{"/anon": {}}
	})
	removed := h.wait(id, container.WaitConditionRemoved)
	h.agents.exit(id, 0)
	receive(t, "removed", removed)
	eventually(t, "its volume is gone", func() bool {
		l, _ := h.VolumeList(ctx, nil)
		return len(l.Volumes) == 1
	})
}

func TestVolumesPrune(t *testing.T) {
	h := newHarness(t)
	for _, v := range []volume.CreateRequest{
		{Name: "plain"}, {Name: "marked", Labels: map[string]string{"x": "1"}}, {}, {Labels: map[string]string{"x": "1"}},
	} {
		if _, err := h.VolumeCreate(t.Context(), &v); err != nil {
			t.Fatal(err)
		}
	}
	_, err := h.VolumesPrune(t.Context(), Filters{"until": {"1h": true}}, true)
	wantError(t, err, cerrdefs.IsInvalidArgument, "invalid filter 'until'")
	for _, tt := range []struct {
		f    Filters
		all  bool
		want int
	}{
		{Filters{"label": {"x": true}}, false, 1}, // the nameless one with the label
		{nil, false, 1}, // the other nameless one
		{Filters{"label!": {"x": true}}, true, 1},  // plain
		{Filters{"all": {"true": true}}, false, 1}, // marked
	} {
		r, err := h.VolumesPrune(t.Context(), tt.f, tt.all)
		if err != nil || len(r.VolumesDeleted) != tt.want || r.SpaceReclaimed != uint64(5*tt.want) {
			t.Errorf("%v, all %v: %+v, %v", tt.f, tt.all, r, err)
		}
	}
}

func TestNetworks(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	l, err := h.NetworkList(t.Context(), nil)
	if err != nil || len(l) != 3 {
		t.Fatalf("%v, %v", l, err)
	}
	n, err := h.NetworkInspect(t.Context(), bridgeNetworkID[:10], "", false)
	if err != nil || n.Name != "bridge" || n.Containers[id].IPv4Address.String() != "172.17.0.2/16" || n.Containers[id].Name != "cc" {
		t.Errorf("%+v, %v", n, err)
	}
	_, err = h.NetworkInspect(t.Context(), "none-such", "", false)
	wantError(t, err, cerrdefs.IsNotFound, "network none-such not found")
	wantError(t, h.NetworkRemove(t.Context(), "bridge"), cerrdefs.IsPermissionDenied, "bridge is a pre-defined network and cannot be removed")
	_, err = h.NetworkCreate(t.Context(), &network.CreateRequest{Name: "mine"})
	if !cerrdefs.IsNotImplemented(err) {
		t.Errorf("create: %v", err)
	}
	_, err = h.NetworkCreate(t.Context(), &network.CreateRequest{Name: "host"})
	wantError(t, err, cerrdefs.IsPermissionDenied, "operation is not permitted on predefined host network ")
}

func TestSharedNamespaces(t *testing.T) {
	h := newHarness(t)
	web := h.run("web", nil)
	id := h.run("side", func(_ *container.Config, hc *container.HostConfig) {
		hc.NetworkMode, hc.PidMode = "container:web", "container:web"
	})
	runs := sent[*wire.Run](h.agents)
	if r := runs[len(runs)-1]; r.Net.Mode != "container" || r.Net.Container != web || r.PID != web {
		t.Errorf("run %+v", r)
	}
	if r, _ := h.ContainerInspect(t.Context(), id, false); string(r.HostConfig.NetworkMode) != "container:"+web {
		t.Errorf("mode %s", r.HostConfig.NetworkMode)
	}
	h.agents.exit(web, 0)
	h.agents.exit(id, 0)
	receive(t, "exit", h.wait(id, container.WaitConditionNotRunning))
	receive(t, "exit", h.wait(web, container.WaitConditionNotRunning))
	wantError(t, h.ContainerStart(t.Context(), id), cerrdefs.IsConflict, "cannot join network namespace of a non running container: container "+web+" is not running")
	ipc := h.create("", func(_ *container.Config, hc *container.HostConfig) { hc.IpcMode = "container:web" })
	h.ContainerStart(t.Context(), web)
	wantError(t, h.ContainerStart(t.Context(), ipc), cerrdefs.IsInvalidArgument, "failed to join IPC namespace: container "+web+": non-shareable IPC (hint: use IpcMode:shareable for the donor container)")
}

func TestParseBind(t *testing.T) {
	for _, tt := range []struct {
		in, want string
	}{
		{"/a:/b", "bind /a /b rw rprivate"},
		{"/a:/b:ro", "bind /a /b ro rprivate"},
		{"/a/../c:/b/:rslave,ro,z", "bind /c /b ro rslave"},
		{"vol:/b", "volume vol /b rw "},
		{"vol:/b:nocopy", "volume vol /b rw "},
		{"/only", "volume  /only rw "},
		{"vol:/", "!"}, {"vol:rel", "!"}, {":/b", "!"}, {"/a:ro", "!"}, {"/a:/b:ro,rw", "!"}, {"", "!"},
	} {
		m, err := parseBind(tt.in)
		rw := "ro"
		if m.RW {
			rw = "rw"
		}
		got := fmt.Sprintf("%s %s %s %s %s", m.Type, m.Source+m.Name, m.Destination, rw, m.Propagation)
		if err != nil {
			got = "!"
			if !cerrdefs.IsInvalidArgument(err) {
				t.Errorf("%q: %v", tt.in, err)
			}
		}
		if got != tt.want {
			t.Errorf("%q: %q, want %q (%v)", tt.in, got, tt.want, err)
		}
	}
}

func TestCapabilities(t *testing.T) {
	for _, tt := range []struct {
		add, drop []string
		want      func(l []string) bool
	}{
		{nil, nil, func(l []string) bool { return slices.Equal(l, defaultCaps) }},
		{[]string{"net_admin"}, []string{"CAP_CHOWN"}, func(l []string) bool {
			return slices.Contains(l, "CAP_NET_ADMIN") && !slices.Contains(l, "CAP_CHOWN") && len(l) == len(defaultCaps)
		}},
		{[]string{"ALL"}, []string{"SYS_ADMIN"}, func(l []string) bool {
			return len(l) == len(capabilities)-1 && !slices.Contains(l, "CAP_SYS_ADMIN")
		}},
		{[]string{"KILL"}, []string{"all"}, func(l []string) bool { return slices.Equal(l, []string{"CAP_KILL"}) }},
	} {
		if l := capsOf(&container.HostConfig{CapAdd: tt.add, CapDrop: tt.drop}); !tt.want(l) {
			t.Errorf("+%v -%v: %v", tt.add, tt.drop, l)
		}
	}
}

func TestParseTimestamp(t *testing.T) {
	now := time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	for in, want := range map[string]time.Time{
		"10m":                       now.Add(-10 * time.Minute),
		"1700000000":                time.Unix(1700000000, 0),
		"1700000000.5":              time.Unix(1700000000, 5e8),
		"1700000000.000000001":      time.Unix(1700000000, 1),
		"2026-11-30T11:00:00Z":      now.Add(-time.Hour),
		"2026-11-30T11:00:00.5Z":    now.Add(-time.Hour + time.Second/2),
		"2026-11-30T11:00:00":       now.Add(-time.Hour),
		"2026-11-30T13:00:00+02:00": now.Add(-time.Hour),
		"2026-11-30":                now.Add(-12 * time.Hour),
	} {
		if got, err := ParseTimestamp(in, now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, %v, want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "yesterday", "2026-13-01"} {
		if _, err := ParseTimestamp(in, now); !cerrdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestStatsAndTop(t *testing.T) {
	h := newHarness(t)
	id := h.run("cc", nil)
	at := time.Now().UnixNano()
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		if _, ok := f.Msg.(*wire.Stats); ok {
			at += int64(time.Second)
			return &wire.Frame{Msg: &wire.StatsReply{
				At: at, CPUTotal: uint64(at), SystemCPU: 2 * uint64(at), OnlineCPUs: 2, Memory: 100 << 20, MemoryLimit: 1 << 62,
				MemoryStat: map[string]string{"inactive_file": "4096"}, PIDs: 3,
				Interfaces: []wire.InterfaceStats{{Name: "eth0", RxBytes: 11}},
			}}, nil, true
		}
		return nil, nil, false
	})
	one, err := h.ContainerStats(t.Context(), id, true)
	if err != nil || one.PreCPUStats.CPUUsage.TotalUsage != 0 || one.MemoryStats.Limit != 8<<30 || one.MemoryStats.Stats["inactive_file"] != 4096 ||
		one.Networks["eth0"].RxBytes != 11 || one.Name != "/cc" {
		t.Errorf("%+v, %v", one, err)
	}
	two, err := h.ContainerStats(t.Context(), id, false)
	if err != nil || two.CPUStats.CPUUsage.TotalUsage-two.PreCPUStats.CPUUsage.TotalUsage != uint64(time.Second) || two.PreRead.IsZero() {
		t.Errorf("%+v, %v", two, err)
	}
	h.agents.exit(id, 0)
	receive(t, "exit", h.wait(id, container.WaitConditionNotRunning))
	if s, err := h.ContainerStats(t.Context(), id, false); err != nil || !s.Read.IsZero() {
		t.Errorf("of a stopped container: %+v, %v", s, err)
	}
	top, err := parsePS("UID PID CMD\nroot 1 init\nroot 7 sh -c  x\nroot - y\nroot 9 z\n", []int{7})
	if err != nil || fmt.Sprint(top.Processes) != "[[root 7 sh -c x] [root - y]]" {
		t.Errorf("%+v, %v", top, err)
	}
	_, err = h.ContainerTop(t.Context(), id, "-o x=PID")
	if !cerrdefs.IsInvalidArgument(err) {
		t.Errorf("top: %v", err)
	}
}
