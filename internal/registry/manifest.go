package registry

import (
	"encoding/json"
	"fmt"
	"mime"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Limits on what a registry may make us keep in memory.
const (
	MaxManifest = 4 << 20 // bytes of a manifest or index: the distribution specification's own limit
	MaxConfig   = 4 << 20 // bytes of an image's configuration
	maxLayers   = 512     // layers of one image: what overlayfs mounts at most
	maxEntries  = 4096    // manifests of one index
)

// Docker's media types; those of OCI are in package ocispec.
const (
	MediaTypeDockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	MediaTypeDockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	MediaTypeDockerConfig   = "application/vnd.docker.container.image.v1+json"
	MediaTypeDockerLayer    = "application/vnd.docker.image.rootfs.diff.tar"
	mediaTypeDockerForeign  = "application/vnd.docker.image.rootfs.foreign.diff.tar"
	mediaTypeSchema1        = "application/vnd.docker.distribution.manifest.v1+json"
	mediaTypeSchema1Signed  = "application/vnd.docker.distribution.manifest.v1+prettyjws"
)

// accept is the Accept header of a manifest request: what ParseManifest reads.
var accept = []string{ocispec.MediaTypeImageIndex, ocispec.MediaTypeImageManifest, MediaTypeDockerList, MediaTypeDockerManifest}

// Manifest is a parsed manifest or index. Exactly one of Image and Index is set.
type Manifest struct {
	Descriptor ocispec.Descriptor // media type, digest and size of Raw
	Raw        []byte             // as the registry sent it
	Image      *ocispec.Manifest
	Index      *ocispec.Index
}

// ParseManifest reads a manifest or an index of Docker's or OCI's form and checks all that can be checked without
// its blobs. contentType is the registry's word, "" if it gave none; the document's own mediaType must not contradict
// it. What is no container image is an InvalidArgument that names the type.
func ParseManifest(contentType string, raw []byte) (*Manifest, error) {
	if len(raw) > MaxManifest {
		return nil, bad("manifest of %d bytes is over the limit of %d", len(raw), MaxManifest)
	}
	var doc struct {
		SchemaVersion int                   `json:"schemaVersion"`
		MediaType     string                `json:"mediaType"`
		Config        *ocispec.Descriptor   `json:"config"`
		Layers        *[]ocispec.Descriptor `json:"layers"`
		Manifests     *[]ocispec.Descriptor `json:"manifests"`
		FSLayers      json.RawMessage       `json:"fsLayers"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		return nil, bad("manifest is no valid JSON: %v", err)
	}
	kind, _, err := mime.ParseMediaType(contentType)
	if err != nil || kind == "application/json" || kind == "text/plain" || kind == "application/octet-stream" {
		kind = ""
	}
	if doc.SchemaVersion == 1 || kind == mediaTypeSchema1 || kind == mediaTypeSchema1Signed || doc.FSLayers != nil {
		return nil, bad("Docker Image Format v1 and Docker Image manifest version 2, schema 1 are not supported: the author of the image must publish it in the OCI format")
	}
	// One digest must never mean two things (CVE-2021-41190): neither by two media types nor by the fields of both.
	if doc.MediaType != "" && kind != "" && doc.MediaType != kind {
		return nil, bad("manifest says it is %q, the registry says it is %q", doc.MediaType, kind)
	}
	if doc.Manifests != nil && (doc.Layers != nil || doc.Config != nil) {
		return nil, bad("manifest is both an index and an image")
	}
	if doc.MediaType != "" {
		kind = doc.MediaType
	}
	if kind == "" {
		switch {
		case doc.Manifests != nil:
			kind = ocispec.MediaTypeImageIndex
		case doc.Config != nil && doc.Config.MediaType == MediaTypeDockerConfig:
			kind = MediaTypeDockerManifest
		default:
			kind = ocispec.MediaTypeImageManifest
		}
	}
	m := &Manifest{Raw: raw, Descriptor: ocispec.Descriptor{MediaType: kind, Digest: digest.FromBytes(raw), Size: int64(len(raw))}}
	switch {
	case IsIndex(kind):
		if doc.Manifests == nil {
			return nil, bad("index without manifests")
		}
		m.Index = new(ocispec.Index)
		err = json.Unmarshal(raw, m.Index)
		if err == nil {
			err = checkIndex(m.Index)
		}
	case IsImage(kind):
		if doc.Config == nil || doc.Layers == nil {
			return nil, bad("manifest without config or layers")
		}
		m.Image = new(ocispec.Manifest)
		err = json.Unmarshal(raw, m.Image)
		if err == nil {
			err = checkImage(m.Image)
		}
	default:
		return nil, bad("unsupported media type %s", kind)
	}
	if err != nil {
		return nil, err
	}
	return m, nil
}

func checkIndex(x *ocispec.Index) error {
	if len(x.Manifests) > maxEntries {
		return bad("index of %d manifests is over the limit of %d", len(x.Manifests), maxEntries)
	}
	for i := range x.Manifests {
		if err := CheckDescriptor(&x.Manifests[i], MaxManifest); err != nil {
			return fmt.Errorf("index entry %d: %w", i, err)
		}
	}
	return nil
}

func checkImage(m *ocispec.Manifest) error {
	if m.Config.MediaType != MediaTypeDockerConfig && m.Config.MediaType != ocispec.MediaTypeImageConfig || m.ArtifactType != "" {
		kind := m.ArtifactType
		if kind == "" {
			kind = m.Config.MediaType
		}
		return bad("unsupported media type %s: not a container image", kind)
	}
	if err := CheckDescriptor(&m.Config, MaxConfig); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	if len(m.Layers) > maxLayers {
		return bad("image of %d layers is over the limit of %d", len(m.Layers), maxLayers)
	}
	for i := range m.Layers {
		l := &m.Layers[i]
		if isForeign(l.MediaType) {
			return bad("layer %s is of type %s, which registries do not distribute: foreign layers are not supported", l.Digest, l.MediaType)
		}
		if !IsLayer(l.MediaType) {
			return bad("unsupported media type %s of layer %s", l.MediaType, l.Digest)
		}
		if err := CheckDescriptor(l, 0); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
	}
	return nil
}

// CheckDescriptor checks a descriptor from outside: a sha256 digest and a size from 0 to limit bytes, 0 for no limit.
func CheckDescriptor(d *ocispec.Descriptor, limit int64) error {
	if err := d.Digest.Validate(); err != nil || d.Digest.Algorithm() != digest.SHA256 {
		return bad("digest %.100q is not a supported one", string(d.Digest))
	}
	if d.Size < 0 || limit > 0 && d.Size > limit {
		return bad("%s: size of %d bytes is out of bounds", d.Digest, d.Size)
	}
	return nil
}

// IsIndex tells whether a media type is one of an index: several images behind one name.
func IsIndex(mediaType string) bool {
	return mediaType == ocispec.MediaTypeImageIndex || mediaType == MediaTypeDockerList
}

// IsImage tells whether a media type is one of an image's manifest.
func IsImage(mediaType string) bool {
	return mediaType == ocispec.MediaTypeImageManifest || mediaType == MediaTypeDockerManifest
}

// IsLayer tells whether a media type is one of a layer. Which compression it names is not trusted: the first bytes tell.
func IsLayer(mediaType string) bool {
	switch mediaType {
	case ocispec.MediaTypeImageLayer, ocispec.MediaTypeImageLayerGzip, ocispec.MediaTypeImageLayerZstd,
		MediaTypeDockerLayer, MediaTypeDockerLayer + ".gzip", MediaTypeDockerLayer + ".zstd":
		return true
	}
	return false
}

func isForeign(mediaType string) bool {
	switch mediaType {
	case mediaTypeDockerForeign, mediaTypeDockerForeign + ".gzip", mediaTypeDockerForeign + ".zstd",
		"application/vnd.oci.image.layer.nondistributable.v1.tar",
		"application/vnd.oci.image.layer.nondistributable.v1.tar+gzip",
		"application/vnd.oci.image.layer.nondistributable.v1.tar+zstd":
		return true
	}
	return false
}

// IsAttestation tells whether an index entry describes another entry (provenance, SBOM) and is no image to run.
// The annotation is BuildKit's; what it writes has the platform unknown/unknown besides.
func IsAttestation(d *ocispec.Descriptor) bool {
	if d.Annotations["vnd.docker.reference.type"] != "" {
		return true
	}
	return d.Platform != nil && d.Platform.OS == "unknown" && d.Platform.Architecture == "unknown"
}

// Candidates sorts an index's entries for one platform: those that name a platform that runs there, the best first
// (nested indexes count by their platform too), then those that name none, whose configuration has to tell.
func Candidates(x *ocispec.Index, want ocispec.Platform) []ocispec.Descriptor {
	var fit [8][]ocispec.Descriptor // by rank
	var none []ocispec.Descriptor
	for _, d := range x.Manifests {
		if IsAttestation(&d) || !IsImage(d.MediaType) && !IsIndex(d.MediaType) {
			continue
		}
		if d.Platform == nil || d.Platform.OS == "" && d.Platform.Architecture == "" {
			none = append(none, d)
			continue
		}
		if r := Rank(want, *d.Platform); r >= 0 {
			fit[r] = append(fit[r], d)
		}
	}
	var list []ocispec.Descriptor
	for _, f := range fit {
		list = append(list, f...)
	}
	return append(list, none...)
}

// bad is an InvalidArgument: what was asked for is not something we can take.
func bad(format string, args ...any) error {
	return cerrdefs.ErrInvalidArgument.WithMessage(fmt.Sprintf(format, args...))
}
