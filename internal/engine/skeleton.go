package engine

import (
	"context"
	"io"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/api/types/registry"
	"github.com/moby/moby/api/types/system"
	"github.com/moby/moby/api/types/volume"
)

// Engine is the daemon's state. All methods are safe for concurrent use.
type Engine struct {
	cfg    Config
	images *images
}

// Open loads the records of cfg.DataRoot, starts or adopts the agent and what runs under it.
func Open(ctx context.Context, cfg Config) (*Engine, error) { return nil, NotBuilt("Open") }

// Close ends the engine as dockerd does at SIGTERM: containers are stopped, unless live-restore says to leave them.
func (e *Engine) Close(ctx context.Context) error { return NotBuilt("Close") }

func (e *Engine) ContainerCreate(ctx context.Context, name string, req *container.CreateRequest, platform string) (container.CreateResponse, error) {
	return container.CreateResponse{}, NotBuilt("ContainerCreate")
}
func (e *Engine) ContainerStart(ctx context.Context, ref string) error { return NotBuilt("") }
func (e *Engine) ContainerStop(ctx context.Context, ref, signal string, timeout *int) error {
	return NotBuilt("")
}
func (e *Engine) ContainerRestart(ctx context.Context, ref, signal string, timeout *int) error {
	return NotBuilt("")
}
func (e *Engine) ContainerKill(ctx context.Context, ref, signal string) error { return NotBuilt("") }
func (e *Engine) ContainerPause(ctx context.Context, ref string) error        { return NotBuilt("") }
func (e *Engine) ContainerUnpause(ctx context.Context, ref string) error      { return NotBuilt("") }
func (e *Engine) ContainerRename(ctx context.Context, ref, name string) error { return NotBuilt("") }
func (e *Engine) ContainerRemove(ctx context.Context, ref string, opts RemoveOptions) error {
	return NotBuilt("")
}
func (e *Engine) ContainerInspect(ctx context.Context, ref string, size bool) (*container.InspectResponse, error) {
	return nil, NotBuilt("")
}
func (e *Engine) ContainerList(ctx context.Context, opts ListOptions) ([]container.Summary, error) {
	return nil, NotBuilt("")
}

// ContainerWait returns once ref is resolved and the wait registered, so that the answer's header can be sent; the
// channel gives one value.
func (e *Engine) ContainerWait(ctx context.Context, ref string, condition container.WaitCondition) (<-chan container.WaitResponse, error) {
	return nil, NotBuilt("")
}
func (e *Engine) ContainerAttach(ctx context.Context, ref string, opts AttachOptions, open StreamOpener) error {
	return NotBuilt("")
}

// ContainerLogs returns the log as a stream, already framed unless tty.
func (e *Engine) ContainerLogs(ctx context.Context, ref string, opts LogsOptions) (stream io.ReadCloser, tty bool, err error) {
	return nil, false, NotBuilt("")
}
func (e *Engine) ContainerResize(ctx context.Context, ref string, height, width uint32) error {
	return NotBuilt("")
}
func (e *Engine) ContainerUpdate(ctx context.Context, ref string, req *container.UpdateConfig) (container.UpdateResponse, error) {
	return container.UpdateResponse{}, NotBuilt("")
}
func (e *Engine) ContainerTop(ctx context.Context, ref, psArgs string) (*container.TopResponse, error) {
	return nil, NotBuilt("")
}

// ContainerStats gives one sample; without oneShot it takes two a second apart so that precpu_stats is filled.
func (e *Engine) ContainerStats(ctx context.Context, ref string, oneShot bool) (*container.StatsResponse, error) {
	return nil, NotBuilt("")
}

// ContainerStatsStream calls emit about once a second until ctx ends, emit fails or the container is removed.
func (e *Engine) ContainerStatsStream(ctx context.Context, ref string, emit func(*container.StatsResponse) error) error {
	return NotBuilt("")
}
func (e *Engine) ContainerChanges(ctx context.Context, ref string) ([]container.FilesystemChange, error) {
	return nil, NotBuilt("")
}
func (e *Engine) ContainerExport(ctx context.Context, ref string) (io.ReadCloser, error) {
	return nil, NotBuilt("")
}
func (e *Engine) ContainerArchiveStat(ctx context.Context, ref, path string) (*container.PathStat, error) {
	return nil, NotBuilt("")
}
func (e *Engine) ContainerArchiveGet(ctx context.Context, ref, path string) (io.ReadCloser, *container.PathStat, error) {
	return nil, nil, NotBuilt("")
}
func (e *Engine) ContainerArchivePut(ctx context.Context, ref, path string, opts ArchivePutOptions, r io.Reader) error {
	return NotBuilt("")
}
func (e *Engine) ContainerCommit(ctx context.Context, ref string, opts CommitOptions, cfg *container.Config) (id string, err error) {
	return "", NotBuilt("")
}
func (e *Engine) ContainersPrune(ctx context.Context, filters Filters) (*container.PruneReport, error) {
	return nil, NotBuilt("")
}

func (e *Engine) ExecCreate(ctx context.Context, ref string, req *container.ExecCreateRequest) (id string, err error) {
	return "", NotBuilt("")
}
func (e *Engine) ExecStart(ctx context.Context, id string, opts ExecStartOptions, open StreamOpener) error {
	return NotBuilt("")
}
func (e *Engine) ExecInspect(ctx context.Context, id string) (*container.ExecInspectResponse, error) {
	return nil, NotBuilt("")
}
func (e *Engine) ExecResize(ctx context.Context, id string, height, width uint32) error {
	return NotBuilt("")
}

func (e *Engine) VolumeCreate(ctx context.Context, req *volume.CreateRequest) (*volume.Volume, error) {
	return nil, NotBuilt("")
}
func (e *Engine) VolumeInspect(ctx context.Context, name string) (*volume.Volume, error) {
	return nil, NotBuilt("")
}
func (e *Engine) VolumeList(ctx context.Context, filters Filters) (*volume.ListResponse, error) {
	return nil, NotBuilt("")
}
func (e *Engine) VolumeRemove(ctx context.Context, name string, force bool) error {
	return NotBuilt("")
}

// VolumesPrune removes unused volumes. all tells whether named ones are meant too: what a request without the filter
// "all" means depends on its API version (before 1.42 true).
func (e *Engine) VolumesPrune(ctx context.Context, filters Filters, all bool) (*volume.PruneReport, error) {
	return nil, NotBuilt("")
}

func (e *Engine) NetworkCreate(ctx context.Context, req *network.CreateRequest) (*network.CreateResponse, error) {
	return nil, NotBuilt("")
}
func (e *Engine) NetworkList(ctx context.Context, filters Filters) ([]network.Summary, error) {
	return nil, NotBuilt("")
}
func (e *Engine) NetworkInspect(ctx context.Context, ref, scope string, verbose bool) (*network.Inspect, error) {
	return nil, NotBuilt("")
}
func (e *Engine) NetworkRemove(ctx context.Context, ref string) error { return NotBuilt("") }
func (e *Engine) NetworkConnect(ctx context.Context, ref string, req *network.ConnectRequest) error {
	return NotBuilt("")
}
func (e *Engine) NetworkDisconnect(ctx context.Context, ref string, req *network.DisconnectRequest) error {
	return NotBuilt("")
}
func (e *Engine) NetworksPrune(ctx context.Context, filters Filters) (*network.PruneReport, error) {
	return nil, NotBuilt("")
}

// Events gives past and coming events in order; the channel is closed when Until is reached, ctx ends, or the
// reader is so slow that events would be lost.
func (e *Engine) Events(ctx context.Context, opts EventsOptions) (<-chan events.Message, error) {
	return nil, NotBuilt("")
}
func (e *Engine) Info(ctx context.Context) (*system.Info, error) { return nil, NotBuilt("") }
func (e *Engine) Version(ctx context.Context) (*system.VersionResponse, error) {
	return nil, NotBuilt("")
}
func (e *Engine) DiskUsage(ctx context.Context, opts DiskUsageOptions) (*system.DiskUsage, error) {
	return nil, NotBuilt("")
}
func (e *Engine) Auth(ctx context.Context, auth *registry.AuthConfig) (*registry.AuthResponse, error) {
	return nil, NotBuilt("")
}

// Plan returns the printed launch program of a running container: kiri debug plan.
func (e *Engine) Plan(ctx context.Context, ref string) (string, error) { return "", NotBuilt("") }
