//go:build unix

package main

import (
	"fmt"
	"path/filepath"
	"syscall"
)

// execDocker becomes the docker CLI. It returns only when that fails.
func execDocker(path string, args, env []string) error {
	return fmt.Errorf("running %s: %w", path, syscall.Exec(path, append([]string{filepath.Base(path)}, args...), env))
}
