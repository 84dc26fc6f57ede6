//go:build !linux

package main

// text is this program's own code and constants; only on Linux is anything done about them.
type text struct{}

func findText() (*text, error) { return &text{}, nil }

func (*text) release() error { return nil }
