package dockerapi

import (
	"context"
	"io"

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

// Engine is what the HTTP edge needs of *engine.Engine, where the methods are described. Tests of the edge put
// something simpler in its place.
type Engine interface {
	ContainerCreate(ctx context.Context, name string, req *container.CreateRequest, platform string) (container.CreateResponse, error)
	ContainerStart(ctx context.Context, ref string) error
	ContainerStop(ctx context.Context, ref, signal string, timeout *int) error
	ContainerRestart(ctx context.Context, ref, signal string, timeout *int) error
	ContainerKill(ctx context.Context, ref, signal string) error
	ContainerPause(ctx context.Context, ref string) error
	ContainerUnpause(ctx context.Context, ref string) error
	ContainerRename(ctx context.Context, ref, name string) error
	ContainerRemove(ctx context.Context, ref string, opts engine.RemoveOptions) error
	ContainerInspect(ctx context.Context, ref string, size bool) (*container.InspectResponse, error)
	ContainerList(ctx context.Context, opts engine.ListOptions) ([]container.Summary, error)
	ContainerWait(ctx context.Context, ref string, condition container.WaitCondition) (<-chan container.WaitResponse, error)
	ContainerAttach(ctx context.Context, ref string, opts engine.AttachOptions, open engine.StreamOpener) error
	ContainerLogs(ctx context.Context, ref string, opts engine.LogsOptions) (stream io.ReadCloser, tty bool, err error)
	ContainerResize(ctx context.Context, ref string, height, width uint32) error
	ContainerUpdate(ctx context.Context, ref string, req *container.UpdateConfig) (container.UpdateResponse, error)
	ContainerTop(ctx context.Context, ref, psArgs string) (*container.TopResponse, error)
	ContainerStats(ctx context.Context, ref string, oneShot bool) (*container.StatsResponse, error)
	ContainerStatsStream(ctx context.Context, ref string, emit func(*container.StatsResponse) error) error
	ContainerChanges(ctx context.Context, ref string) ([]container.FilesystemChange, error)
	ContainerExport(ctx context.Context, ref string) (io.ReadCloser, error)
	ContainerArchiveStat(ctx context.Context, ref, path string) (*container.PathStat, error)
	ContainerArchiveGet(ctx context.Context, ref, path string) (io.ReadCloser, *container.PathStat, error)
	ContainerArchivePut(ctx context.Context, ref, path string, opts engine.ArchivePutOptions, r io.Reader) error
	ContainerCommit(ctx context.Context, ref string, opts engine.CommitOptions, cfg *container.Config) (id string, err error)
	ContainersPrune(ctx context.Context, filters engine.Filters) (*container.PruneReport, error)

	ExecCreate(ctx context.Context, ref string, req *container.ExecCreateRequest) (id string, err error)
	ExecStart(ctx context.Context, id string, opts engine.ExecStartOptions, open engine.StreamOpener) error
	ExecInspect(ctx context.Context, id string) (*container.ExecInspectResponse, error)
	ExecResize(ctx context.Context, id string, height, width uint32) error

	ImagePull(ctx context.Context, ref string, opts engine.PullOptions, progress func(jsonstream.Message)) error
	ImageImport(ctx context.Context, opts engine.ImportOptions, r io.Reader, progress func(jsonstream.Message)) (id string, err error)
	ImageTag(ctx context.Context, ref, target string) error
	ImageRemove(ctx context.Context, ref string, opts engine.ImageRemoveOptions) ([]image.DeleteResponse, error)
	ImageInspect(ctx context.Context, ref string, opts engine.ImageInspectOptions) (*image.InspectResponse, error)
	ImageList(ctx context.Context, opts engine.ImageListOptions) ([]image.Summary, error)
	ImageHistory(ctx context.Context, ref string, platform *ocispec.Platform) ([]image.HistoryResponseItem, error)
	ImagesPrune(ctx context.Context, filters engine.Filters) (*image.PruneReport, error)

	VolumeCreate(ctx context.Context, req *volume.CreateRequest) (*volume.Volume, error)
	VolumeInspect(ctx context.Context, name string) (*volume.Volume, error)
	VolumeList(ctx context.Context, filters engine.Filters) (*volume.ListResponse, error)
	VolumeRemove(ctx context.Context, name string, force bool) error
	VolumesPrune(ctx context.Context, filters engine.Filters, all bool) (*volume.PruneReport, error)

	NetworkCreate(ctx context.Context, req *network.CreateRequest) (*network.CreateResponse, error)
	NetworkList(ctx context.Context, filters engine.Filters) ([]network.Summary, error)
	NetworkInspect(ctx context.Context, ref, scope string, verbose bool) (*network.Inspect, error)
	NetworkRemove(ctx context.Context, ref string) error
	NetworkConnect(ctx context.Context, ref string, req *network.ConnectRequest) error
	NetworkDisconnect(ctx context.Context, ref string, req *network.DisconnectRequest) error
	NetworksPrune(ctx context.Context, filters engine.Filters) (*network.PruneReport, error)

	Events(ctx context.Context, opts engine.EventsOptions) (<-chan events.Message, error)
	Info(ctx context.Context) (*system.Info, error)
	Version(ctx context.Context) (*system.VersionResponse, error)
	DiskUsage(ctx context.Context, opts engine.DiskUsageOptions) (*system.DiskUsage, error)
	Auth(ctx context.Context, auth *registry.AuthConfig) (*registry.AuthResponse, error)
	Plan(ctx context.Context, ref string) (string, error)
}

var _ Engine = (*engine.Engine)(nil)
