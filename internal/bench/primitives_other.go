//go:build !linux || !(amd64 || arm64)

package bench

import "errors"

var errNotHere = errors.New("the kernel's own figures are measured on Linux (amd64, arm64) only")

// Floor is Linux's.
type Floor struct{}

// NewFloor is Linux's: it fails here.
func NewFloor(string) (*Floor, error) { return nil, errNotHere }

// Round is never called: there is no Floor here.
func (*Floor) Round(bool) error { return errNotHere }

// Samples is never called: there is no Floor here.
func (*Floor) Samples() map[string]Samples { return nil }

// Close is never called: there is no Floor here.
func (*Floor) Close() error { return nil }

// Primitives is Linux's: it fails here.
func Primitives(int) (map[string]Samples, error) { return nil, errNotHere }
