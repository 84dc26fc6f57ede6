// Package engine holds what must be remembered: containers, images, volumes, networks and events, their state
// machines and rules. It knows no HTTP and no Linux: effects happen in an agent, reached through package wire.
//
// Errors are errdefs sentinels wrapped with context; only package dockerapi turns them into status codes.
package engine

import (
	"context"
	"fmt"

	cerrdefs "github.com/containerd/errdefs"
)

// Filters are Docker's list filters: name, then the set of values. All values of one name are or-ed (labels are
// and-ed), names are and-ed. The form on the wire, both old and new, is dockerapi's to decode.
type Filters map[string]map[string]bool

// NotBuilt is the error of a request that Docker knows and kiri does not serve yet: status 501, naming what.
func NotBuilt(what string) error {
	return fmt.Errorf("%s is not supported by kiri yet: %w", what, cerrdefs.ErrNotImplemented)
}

var _ = context.Background
