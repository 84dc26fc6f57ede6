package engine

import (
	"encoding/json"
	"fmt"

	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/registry"
)

// parseConfig reads an image's configuration and checks it against the manifest that names it.
func parseConfig(raw []byte, m *ocispec.Manifest) (*dockerspec.DockerOCIImage, error) {
	cfg := new(dockerspec.DockerOCIImage)
	if err := json.Unmarshal(raw, cfg); err != nil {
		return nil, invalid("image configuration %s: %w", m.Config.Digest, err)
	}
	if cfg.RootFS.Type != "layers" {
		return nil, invalid("image configuration %s: root file system of the unknown type %.40q", m.Config.Digest, cfg.RootFS.Type)
	}
	if len(cfg.RootFS.DiffIDs) != len(m.Layers) {
		return nil, invalid("image configuration %s: it names %d layers, the manifest %d", m.Config.Digest, len(cfg.RootFS.DiffIDs), len(m.Layers))
	}
	for _, id := range cfg.RootFS.DiffIDs {
		if id.Validate() != nil || id.Algorithm() != digest.SHA256 {
			return nil, invalid("image configuration %s: %.100q is no DiffID", m.Config.Digest, string(id))
		}
	}
	if cfg.OS == "" { // Docker's first images had none
		cfg.OS = "linux"
	}
	return cfg, nil
}

// readHistory reads the part of a configuration that is not kept in memory.
func (s *images) readHistory(v *variant) ([]ocispec.History, error) {
	raw, err := s.content.read(v.manifest.Config.Digest, registry.MaxConfig)
	if err != nil {
		return nil, err
	}
	var cfg struct {
		History []ocispec.History `json:"history"`
	}
	if err := json.Unmarshal(raw, &cfg); err != nil {
		return nil, fmt.Errorf("reading image configuration %s: %w", v.manifest.Config.Digest, err)
	}
	return cfg.History, nil
}
