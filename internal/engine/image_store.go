package engine

import (
	"context"
	"io"
	"log/slog"

	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	"github.com/moby/moby/api/types/image"
	"github.com/moby/moby/api/types/jsonstream"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// imagesConfig is what the image store is opened with.
type imagesConfig struct {
	DataRoot           string
	Layers             LayerStore
	Log                *slog.Logger
	InsecureRegistries []string
	RegistryMirrors    []string
	Version            string // of kiri, for the User-Agent
	Concurrent         int    // layers fetched at a time in one pull; 0 is 3, as dockerd
	Architecture       string // of the agent, as GOARCH has it; "" is the daemon's own

	// Event is told what happens to images: action is one of events.ActionPull, ...Tag, ...UnTag, ...Delete, ...Import;
	// actor is the event's Actor.ID, name its attribute "name", labels the image's. Nil drops them.
	Event func(action, actor, name string, labels map[string]string)
	// Running tells whether the container (a full id, as given to use) runs or is paused. Nil: none does.
	Running func(container string) bool
}

// images is the store of images. Its methods are safe for concurrent use.
type images struct{}

// resolved is an image as a container needs it. What it points to is shared and never written.
type resolved struct {
	ID       string   // "sha256:<hex>" of the manifest or index that the name points at: Docker's image id
	Manifest string   // of the manifest chosen for the platform
	Layers   []string // DiffIDs, lowest first
	Names    []string // "alpine:latest", sorted; none for a dangling image
	Config   *dockerspec.DockerOCIImage
}

// openImages reads the store. The caller then tells the containers it knows by use, and calls sweep once.
func openImages(ctx context.Context, cfg imagesConfig) (*images, error) {
	return nil, NotBuilt("images")
}

// resolve finds an image by name, id, id's prefix or name@digest. platform "" is the agent's. The error for one that
// is not here is a NotFound "No such image: x". It costs a map look-up.
func (s *images) resolve(ref, platform string) (*resolved, error) { return nil, NotBuilt("images") }

// acquire is resolve and use at once, so that the image cannot be removed in between.
func (s *images) acquire(ref, platform, container string) (*resolved, error) {
	return nil, NotBuilt("images")
}

// use records that a container, by its full id, uses an image and its layers; both are kept in the container's record.
// In memory only: it is called for each container after a start of the daemon.
func (s *images) use(container, imageID string, layers []string) {}

// unuse ends use. Layers of an image that was removed in the meantime are given back.
func (s *images) unuse(container string) {}

// users lists the containers that use an image, sorted.
func (s *images) users(imageID string) []string { return nil }

// sweep gives back what a crash left: half-fetched blobs older than a week, blobs and layers that nothing refers to.
func (s *images) sweep(ctx context.Context) error { return nil }

// count is the number of images, for info.
func (s *images) count() int { return 0 }

// diskUsage is the images' part of system df; the items are only listed if verbose.
func (s *images) diskUsage(verbose bool) (*image.DiskUsage, error) { return nil, NotBuilt("images") }

// close syncs the records; pulls under way are cancelled.
func (s *images) close() error { return nil }

func (s *images) pull(ctx context.Context, ref string, opts PullOptions, progress func(jsonstream.Message)) error {
	return NotBuilt("images")
}

func (s *images) importTar(ctx context.Context, opts ImportOptions, r io.Reader, progress func(jsonstream.Message)) (string, error) {
	return "", NotBuilt("images")
}
func (s *images) tag(ctx context.Context, ref, target string) error { return NotBuilt("images") }
func (s *images) remove(ctx context.Context, ref string, opts ImageRemoveOptions) ([]image.DeleteResponse, error) {
	return nil, NotBuilt("images")
}
func (s *images) inspect(ref string, opts ImageInspectOptions) (*image.InspectResponse, error) {
	return nil, NotBuilt("images")
}
func (s *images) list(opts ImageListOptions) ([]image.Summary, error) { return nil, NotBuilt("images") }
func (s *images) history(ref string, platform *ocispec.Platform) ([]image.HistoryResponseItem, error) {
	return nil, NotBuilt("images")
}
func (s *images) prune(ctx context.Context, filters Filters) (*image.PruneReport, error) {
	return nil, NotBuilt("images")
}
