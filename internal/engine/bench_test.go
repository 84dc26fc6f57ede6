//go:build unix

package engine

import (
	"context"
	"io"
	"log/slog"
	"testing"

	"github.com/moby/moby/api/types/container"

	"runkiri.com/kiri/internal/wire"
)

// The daemon's own share of a container's life, over an agent that costs nothing but its frames.
func BenchmarkLife(b *testing.B) {
	h := newHarnessFor(b, slog.New(slog.NewTextHandler(io.Discard, nil)))
	h.agents.take(func(f *wire.Frame) (*wire.Frame, error, bool) {
		if m, ok := f.Msg.(*wire.Run); ok {
			return h.agents.run(m), nil, true
		}
		return nil, nil, false
	})
	request := func() *container.CreateRequest {
		return &container.CreateRequest{
			Config:     &container.Config{Image: "bb", Cmd: []string{"true"}},
			HostConfig: &container.HostConfig{AutoRemove: true},
		}
	}
	ctx := context.Background()
	b.Run("create+remove", func(b *testing.B) {
		for b.Loop() {
			r, err := h.ContainerCreate(ctx, "", request(), "")
			if err != nil {
				b.Fatal(err)
			}
			if err := h.ContainerRemove(ctx, r.ID, RemoveOptions{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("create+start+exit+removed", func(b *testing.B) {
		for b.Loop() {
			r, err := h.ContainerCreate(ctx, "", request(), "")
			if err != nil {
				b.Fatal(err)
			}
			ch, err := h.ContainerWait(ctx, r.ID, container.WaitConditionRemoved)
			if err != nil {
				b.Fatal(err)
			}
			if err := h.ContainerStart(ctx, r.ID); err != nil {
				b.Fatal(err)
			}
			h.agents.exit(r.ID, 0)
			<-ch
		}
	})
	b.Run("list of 1000", func(b *testing.B) {
		for range 1000 {
			if _, err := h.ContainerCreate(ctx, "", request(), ""); err != nil {
				b.Fatal(err)
			}
		}
		for b.Loop() {
			if _, err := h.ContainerList(ctx, ListOptions{All: true}); err != nil {
				b.Fatal(err)
			}
		}
	})
}
