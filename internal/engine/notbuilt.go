package engine

import (
	"context"
	"io"

	"github.com/moby/moby/api/types/container"
)

// What the API names and comes with the containers issue. Each still finds its container first, so that a wrong name is
// told as such.

// ContainerChanges lists what a container changed against its image.
func (e *Engine) ContainerChanges(ctx context.Context, ref string) ([]container.FilesystemChange, error) {
	return nil, e.notBuilt(ref, "listing a container's changes (diff)")
}

// ContainerExport returns a container's root as a tar.
func (e *Engine) ContainerExport(ctx context.Context, ref string) (io.ReadCloser, error) {
	return nil, e.notBuilt(ref, "exporting a container")
}

// ContainerArchiveStat describes a file in a container.
func (e *Engine) ContainerArchiveStat(ctx context.Context, ref, path string) (*container.PathStat, error) {
	return nil, e.notBuilt(ref, "looking at files in a container (cp)")
}

// ContainerArchiveGet returns a file or a tree of a container as a tar.
func (e *Engine) ContainerArchiveGet(ctx context.Context, ref, path string) (io.ReadCloser, *container.PathStat, error) {
	return nil, nil, e.notBuilt(ref, "copying files out of a container (cp)")
}

// ContainerArchivePut unpacks a tar in a container.
func (e *Engine) ContainerArchivePut(ctx context.Context, ref, path string, opts ArchivePutOptions, r io.Reader) error {
	return e.notBuilt(ref, "copying files into a container (cp)")
}

// ContainerCommit makes an image of a container.
func (e *Engine) ContainerCommit(ctx context.Context, ref string, opts CommitOptions, cfg *container.Config) (id string, err error) {
	return "", e.notBuilt(ref, "committing a container")
}

func (e *Engine) notBuilt(ref, what string) error {
	if _, err := e.containers.get(ref); err != nil {
		return err
	}
	return NotBuilt(what)
}
