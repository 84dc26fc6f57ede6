package engine

import (
	"context"
	"io"
	"os"

	"github.com/moby/moby/api/types/events"
	"github.com/moby/moby/api/types/image"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/moby/moby/api/types/registry"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/wire"
)

// LayerStore is where layers are unpacked and kept: an agent, reached over wire.
type LayerStore interface {
	// Unpack makes a layer of a tar that may be compressed; see wire.Unpack. stream stays the caller's.
	Unpack(ctx context.Context, m *wire.Unpack, stream *os.File) (*wire.UnpackReply, error)
	Layers(ctx context.Context) ([]wire.UnpackReply, error)
	RemoveLayer(ctx context.Context, diffID string) error
}

// PullOptions are those of POST /images/create with fromImage.
type PullOptions struct {
	Platform string // "os[/arch[/variant]]", "" is the agent's
	AllTags  bool   // the reference names a repository and every tag of it is meant; else a missing tag is latest
	Auth     registry.AuthConfig
}

// ImportOptions are those of POST /images/create with fromSrc.
type ImportOptions struct {
	Ref      string // the name the image gets, "" none
	Message  string // its comment
	Platform string
	Changes  []string // Dockerfile instructions that shape its configuration
}

// ImageRemoveOptions are those of DELETE /images/{name}.
type ImageRemoveOptions struct {
	Force     bool
	NoPrune   bool
	Platforms []ocispec.Platform // remove only these of a multi-platform image
}

// ImageInspectOptions are those of GET /images/{name}/json.
type ImageInspectOptions struct {
	Platform  *ocispec.Platform // nil: the agent's, else any that is there
	Manifests bool
}

// ImageListOptions are those of GET /images/json.
type ImageListOptions struct {
	All        bool // also images that only other images refer to; kiri has none
	SharedSize bool
	Manifests  bool
	Filters    Filters
}

// ImagePull pulls ref, telling of its progress as Docker's clients expect it. progress is called from several
// goroutines, one call at a time, and never after the return. An error before the first progress is the request's own.
func (e *Engine) ImagePull(ctx context.Context, ref string, opts PullOptions, progress func(jsonstream.Message)) error {
	return e.images.pull(ctx, ref, opts, progress)
}

// ImageImport makes an image of one layer from the tar r, and returns its id.
func (e *Engine) ImageImport(ctx context.Context, opts ImportOptions, r io.Reader, progress func(jsonstream.Message)) (id string, err error) {
	return e.images.importTar(ctx, opts, r, progress)
}

// ImageTag gives the image ref one more name, taking it from the image that had it.
func (e *Engine) ImageTag(ctx context.Context, ref, target string) error {
	return e.images.tag(ctx, ref, target)
}

// ImageRemove takes a name from an image and deletes the image with its last one.
func (e *Engine) ImageRemove(ctx context.Context, ref string, opts ImageRemoveOptions) ([]image.DeleteResponse, error) {
	return e.images.remove(ctx, ref, opts)
}

// ImageInspect tells everything about one image.
func (e *Engine) ImageInspect(ctx context.Context, ref string, opts ImageInspectOptions) (*image.InspectResponse, error) {
	return e.images.inspect(ref, opts)
}

// ImageList lists images, the newest first.
func (e *Engine) ImageList(ctx context.Context, opts ImageListOptions) ([]image.Summary, error) {
	return e.images.list(opts)
}

// ImageHistory lists the steps an image was made in, the newest first. platform nil is the agent's.
func (e *Engine) ImageHistory(ctx context.Context, ref string, platform *ocispec.Platform) ([]image.HistoryResponseItem, error) {
	return e.images.history(ref, platform)
}

// ImagesPrune deletes unused images: without a name, or all of them with the filter dangling=false.
func (e *Engine) ImagesPrune(ctx context.Context, filters Filters) (*image.PruneReport, error) {
	report, err := e.images.prune(ctx, filters)
	if err == nil {
		e.pruneEvent(events.ImageEventType, report.SpaceReclaimed)
	}
	return report, err
}
