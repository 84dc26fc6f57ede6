package dockerapi

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/image"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/api/types/registry"
	"github.com/moby/moby/api/types/system"
	"github.com/moby/moby/api/types/volume"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/engine"
)

const fakeID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// fakeEngine answers everything with something plausible. Tests replace what they look at.
type fakeEngine struct {
	Engine // what is not below panics, which the tests see as a 500

	created   *container.CreateRequest
	platform  string
	filters   engine.Filters
	pruneAll  bool
	signal    string
	timeout   *int
	pulled    string
	pullOpts  engine.PullOptions
	execReq   *container.ExecCreateRequest
	execStart engine.ExecStartOptions
	logsOpts  engine.LogsOptions

	start      func(ctx context.Context, ref string) error
	wait       func(ctx context.Context) (<-chan container.WaitResponse, error)
	attach     func(ctx context.Context, open engine.StreamOpener) error
	logs       func(ctx context.Context) (io.ReadCloser, bool, error)
	pull       func(ctx context.Context, progress func(jsonstream.Message)) error
	statsTicks func(ctx context.Context, emit func(*container.StatsResponse) error) error
	eventFeed  func(ctx context.Context) (<-chan events.Message, error)
}

func (f *fakeEngine) ContainerCreate(_ context.Context, _ string, req *container.CreateRequest, platform string) (container.CreateResponse, error) {
	f.created, f.platform = req, platform
	return container.CreateResponse{ID: fakeID}, nil
}
func (f *fakeEngine) ContainerStart(ctx context.Context, ref string) error {
	if f.start != nil {
		return f.start(ctx, ref)
	}
	return nil
}
func (f *fakeEngine) ContainerStop(_ context.Context, _, signal string, timeout *int) error {
	f.signal, f.timeout = signal, timeout
	return fmt.Errorf("already stopped: %w", cerrdefs.ErrNotModified)
}
func (f *fakeEngine) ContainerRestart(_ context.Context, _, signal string, timeout *int) error {
	f.signal, f.timeout = signal, timeout
	return nil
}
func (f *fakeEngine) ContainerKill(context.Context, string, string) error                 { return nil }
func (f *fakeEngine) ContainerPause(context.Context, string) error                        { return nil }
func (f *fakeEngine) ContainerUnpause(context.Context, string) error                      { return nil }
func (f *fakeEngine) ContainerRename(context.Context, string, string) error               { return nil }
func (f *fakeEngine) ContainerRemove(context.Context, string, engine.RemoveOptions) error { return nil }

func (f *fakeEngine) ContainerInspect(_ context.Context, ref string, _ bool) (*container.InspectResponse, error) {
	switch ref {
	case "nope":
		return nil, fmt.Errorf("No such container: %s: %w", ref, cerrdefs.ErrNotFound)
	case "panic":
		panic("asked for")
	}
	addr := &network.EndpointSettings{EndpointID: "e1", IPPrefixLen: 16, DNSNames: []string{"web"}, GwPriority: 3}
	addr.IPAddress.UnmarshalText([]byte("172.17.0.2"))
	user := &network.EndpointSettings{Aliases: []string{"db"}, DNSNames: []string{"web"}}
	return &container.InspectResponse{
		ID: fakeID, Driver: "overlayfs", Created: "2026-01-02T03:04:05.123456789Z",
		ImageManifestDescriptor: &ocispec.Descriptor{Size: 9007199254740993}, // not a float64
		Config:                  &container.Config{Image: "a&b", Healthcheck: &container.HealthConfig{StartInterval: 5}},
		HostConfig:              &container.HostConfig{Annotations: map[string]string{"a": "b"}, CgroupnsMode: "private"},
		NetworkSettings:         &container.NetworkSettings{Networks: map[string]*network.EndpointSettings{"bridge": addr, "mine": user}},
	}, nil
}
func (f *fakeEngine) ContainerList(_ context.Context, opts engine.ListOptions) ([]container.Summary, error) {
	f.filters = opts.Filters
	return []container.Summary{{ID: fakeID, Health: &container.HealthSummary{Status: "healthy"}}}, nil
}
func (f *fakeEngine) ContainerWait(ctx context.Context, _ string, _ container.WaitCondition) (<-chan container.WaitResponse, error) {
	if f.wait != nil {
		return f.wait(ctx)
	}
	ch := make(chan container.WaitResponse, 1)
	ch <- container.WaitResponse{StatusCode: 37}
	return ch, nil
}
func (f *fakeEngine) ContainerAttach(ctx context.Context, _ string, _ engine.AttachOptions, open engine.StreamOpener) error {
	if f.attach != nil {
		return f.attach(ctx, open)
	}
	return echo(open, false)
}

// echo takes the connection over, sends back what comes until the client closes its side, and says goodbye.
func echo(open engine.StreamOpener, tty bool) error {
	conn, buffered, err := open(tty)
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.Write(buffered)
	if _, err := io.Copy(conn, conn); err != nil {
		return err
	}
	io.WriteString(conn, "bye")
	return nil
}

func (f *fakeEngine) ContainerLogs(ctx context.Context, _ string, opts engine.LogsOptions) (io.ReadCloser, bool, error) {
	f.logsOpts = opts
	if f.logs != nil {
		return f.logs(ctx)
	}
	return io.NopCloser(strings.NewReader("log")), false, nil
}
func (f *fakeEngine) ContainerResize(context.Context, string, uint32, uint32) error { return nil }
func (f *fakeEngine) ContainerUpdate(context.Context, string, *container.UpdateConfig) (container.UpdateResponse, error) {
	return container.UpdateResponse{}, nil
}
func (f *fakeEngine) ContainerTop(context.Context, string, string) (*container.TopResponse, error) {
	return &container.TopResponse{Titles: []string{"PID"}}, nil
}
func (f *fakeEngine) ContainerStats(context.Context, string, bool) (*container.StatsResponse, error) {
	return &container.StatsResponse{ID: fakeID, OSType: "linux"}, nil
}
func (f *fakeEngine) ContainerStatsStream(ctx context.Context, _ string, emit func(*container.StatsResponse) error) error {
	if f.statsTicks != nil {
		return f.statsTicks(ctx, emit)
	}
	return emit(&container.StatsResponse{ID: fakeID})
}
func (f *fakeEngine) ContainerChanges(context.Context, string) ([]container.FilesystemChange, error) {
	return nil, engine.NotBuilt("container diff")
}
func (f *fakeEngine) ContainerExport(context.Context, string) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader("tar")), nil
}
func (f *fakeEngine) ContainerArchiveStat(context.Context, string, string) (*container.PathStat, error) {
	return &container.PathStat{Name: "x"}, nil
}
func (f *fakeEngine) ContainerArchiveGet(context.Context, string, string) (io.ReadCloser, *container.PathStat, error) {
	return io.NopCloser(strings.NewReader("tar")), &container.PathStat{Name: "x"}, nil
}
func (f *fakeEngine) ContainerArchivePut(context.Context, string, string, engine.ArchivePutOptions, io.Reader) error {
	return nil
}
func (f *fakeEngine) ContainerCommit(context.Context, string, engine.CommitOptions, *container.Config) (string, error) {
	return "sha256:1", nil
}
func (f *fakeEngine) ContainersPrune(_ context.Context, filters engine.Filters) (*container.PruneReport, error) {
	f.filters = filters
	return &container.PruneReport{}, nil
}

func (f *fakeEngine) ExecCreate(_ context.Context, _ string, req *container.ExecCreateRequest) (string, error) {
	f.execReq = req
	return "exec1", nil
}
func (f *fakeEngine) ExecStart(_ context.Context, id string, opts engine.ExecStartOptions, open engine.StreamOpener) error {
	f.execStart = opts
	switch {
	case id == "nope":
		return fmt.Errorf("No such exec instance: %s: %w", id, cerrdefs.ErrNotFound)
	case opts.Detach:
		return nil
	}
	return echo(open, opts.Tty)
}
func (f *fakeEngine) ExecInspect(context.Context, string) (*container.ExecInspectResponse, error) {
	return &container.ExecInspectResponse{ID: "exec1"}, nil
}
func (f *fakeEngine) ExecResize(context.Context, string, uint32, uint32) error { return nil }

func (f *fakeEngine) ImagePull(ctx context.Context, ref string, opts engine.PullOptions, progress func(jsonstream.Message)) error {
	f.pulled, f.pullOpts = ref, opts
	if f.pull != nil {
		return f.pull(ctx, progress)
	}
	progress(jsonstream.Message{Status: "Pulling"})
	return nil
}
func (f *fakeEngine) ImageImport(_ context.Context, opts engine.ImportOptions, r io.Reader, progress func(jsonstream.Message)) (string, error) {
	f.pulled = opts.Ref
	_, err := io.Copy(io.Discard, r)
	return "sha256:1", err
}
func (f *fakeEngine) ImageTag(_ context.Context, ref, target string) error {
	f.pulled = ref + " " + target
	return nil
}
func (f *fakeEngine) ImageRemove(_ context.Context, ref string, _ engine.ImageRemoveOptions) ([]image.DeleteResponse, error) {
	f.pulled = ref
	return nil, nil
}
func (f *fakeEngine) ImageInspect(_ context.Context, ref string, _ engine.ImageInspectOptions) (*image.InspectResponse, error) {
	f.pulled = ref
	return &image.InspectResponse{ID: "sha256:1", Size: 9007199254740993, Config: &dockerspec.DockerOCIImageConfig{},
		Descriptor: &ocispec.Descriptor{}, Identity: &image.Identity{}}, nil
}
func (f *fakeEngine) ImageList(_ context.Context, opts engine.ImageListOptions) ([]image.Summary, error) {
	f.filters = opts.Filters
	return []image.Summary{{ID: "sha256:1", Size: 5, Containers: 2, Descriptor: &ocispec.Descriptor{}}}, nil
}
func (f *fakeEngine) ImageHistory(context.Context, string, *ocispec.Platform) ([]image.HistoryResponseItem, error) {
	return nil, nil
}
func (f *fakeEngine) ImagesPrune(context.Context, engine.Filters) (*image.PruneReport, error) {
	return &image.PruneReport{}, nil
}

func (f *fakeEngine) VolumeCreate(context.Context, *volume.CreateRequest) (*volume.Volume, error) {
	return &volume.Volume{Name: "v"}, nil
}
func (f *fakeEngine) VolumeInspect(context.Context, string) (*volume.Volume, error) {
	return &volume.Volume{Name: "v"}, nil
}
func (f *fakeEngine) VolumeList(context.Context, engine.Filters) (*volume.ListResponse, error) {
	return &volume.ListResponse{}, nil
}
func (f *fakeEngine) VolumeRemove(context.Context, string, bool) error { return nil }
func (f *fakeEngine) VolumesPrune(_ context.Context, filters engine.Filters, all bool) (*volume.PruneReport, error) {
	f.filters, f.pruneAll = filters, all
	return &volume.PruneReport{}, nil
}

func (f *fakeEngine) NetworkCreate(context.Context, *network.CreateRequest) (*network.CreateResponse, error) {
	return nil, engine.NotBuilt("network create")
}
func (f *fakeEngine) NetworkList(context.Context, engine.Filters) ([]network.Summary, error) {
	return []network.Summary{{Network: network.Network{ID: "n1", EnableIPv4: true}}, {Network: network.Network{ID: "gone"}}}, nil
}
func (f *fakeEngine) NetworkInspect(_ context.Context, ref, _ string, _ bool) (*network.Inspect, error) {
	if ref == "gone" {
		return nil, fmt.Errorf("network gone not found: %w", cerrdefs.ErrNotFound)
	}
	return &network.Inspect{Network: network.Network{ID: "n1"}, Status: &network.Status{}}, nil
}
func (f *fakeEngine) NetworkRemove(context.Context, string) error { return nil }
func (f *fakeEngine) NetworkConnect(context.Context, string, *network.ConnectRequest) error {
	return nil
}
func (f *fakeEngine) NetworkDisconnect(context.Context, string, *network.DisconnectRequest) error {
	return nil
}
func (f *fakeEngine) NetworksPrune(context.Context, engine.Filters) (*network.PruneReport, error) {
	return &network.PruneReport{}, nil
}

func (f *fakeEngine) Events(ctx context.Context, opts engine.EventsOptions) (<-chan events.Message, error) {
	f.filters = opts.Filters
	if f.eventFeed != nil {
		return f.eventFeed(ctx)
	}
	ch := make(chan events.Message, 1)
	ch <- events.Message{Type: "container", Action: "start", Actor: events.Actor{ID: fakeID, Attributes: map[string]string{"image": "bb"}}}
	close(ch)
	return ch, nil
}
func (f *fakeEngine) Info(context.Context) (*system.Info, error) {
	return &system.Info{ID: "x", CgroupVersion: "2", SecurityOptions: []string{"name=seccomp,profile=builtin", "name=cgroupns"},
		RegistryConfig: &registry.ServiceConfig{}, RuncCommit: system.Commit{ID: "r1"}, PidsLimit: true,
		Runtimes: map[string]system.RuntimeWithStatus{"kiri": {Status: map[string]string{"a": "b"}}}, Containerd: &system.ContainerdInfo{}}, nil
}
func (f *fakeEngine) Version(context.Context) (*system.VersionResponse, error) {
	return &system.VersionResponse{Version: "1", Components: []system.ComponentVersion{{Name: "Engine", Details: map[string]string{}}}}, nil
}
func (f *fakeEngine) DiskUsage(_ context.Context, opts engine.DiskUsageOptions) (*system.DiskUsage, error) {
	du := &system.DiskUsage{}
	all := !opts.Containers && !opts.Images && !opts.Volumes && !opts.BuildCache
	if all || opts.Images {
		du.ImageUsage = &image.DiskUsage{TotalSize: 7, TotalCount: 1}
		if opts.Verbose {
			du.ImageUsage.Items = []image.Summary{{ID: "sha256:1", Size: 7, Containers: 3}}
		}
	}
	if all || opts.Containers {
		du.ContainerUsage = &container.DiskUsage{}
	}
	return du, nil
}
func (f *fakeEngine) Auth(context.Context, *registry.AuthConfig) (*registry.AuthResponse, error) {
	return &registry.AuthResponse{Status: "Login Succeeded"}, nil
}
func (f *fakeEngine) Plan(context.Context, string) (string, error) { return "0 clone3\n", nil }

// serveUnix answers on a unix socket as the daemon does, and returns its path and a client for it.
func serveUnix(t testing.TB, e Engine) (path string, client *http.Client) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "docker.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(New(e, "1.2.3", slog.New(slog.DiscardHandler)))
	server.Listener.Close()
	server.Listener = l
	server.Start()
	t.Cleanup(server.Close)
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", path)
	}}
	t.Cleanup(transport.CloseIdleConnections)
	return path, &http.Client{Transport: transport, Timeout: 20 * time.Second}
}

// dial opens a raw connection that fails rather than hangs.
func dial(t testing.TB, path string) *net.UnixConn {
	t.Helper()
	conn, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	t.Cleanup(func() { conn.Close() })
	return conn.(*net.UnixConn)
}

// do makes one request and reads the whole answer. body "" is none.
func do(t testing.TB, c *http.Client, method, path, body string) (*http.Response, string) {
	t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequest(method, "http://docker"+path, r)
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: reading the body: %v", method, path, err)
	}
	return resp, string(b)
}
