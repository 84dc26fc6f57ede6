package main

import (
	"errors"
	"fmt"
	"os"
	"strconv"
)

// makeDir makes a directory and what is above it.
func makeDir(path string) error {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return fmt.Errorf("making %s: %w", path, err)
	}
	return nil
}

// lockPidfile writes this process's number to path. Windows keeps others from opening the file to write while it is
// open.
func lockPidfile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the PID file: %w", err)
	}
	if _, err := f.WriteString(strconv.Itoa(os.Getpid())); err != nil {
		f.Close()
		return nil, fmt.Errorf("writing %s: %w", path, err)
	}
	return f, nil
}

func passedFiles() ([]*os.File, error) {
	return nil, errors.New("fd:// needs a service manager with socket activation, which Windows does not have")
}

func notify(string) {}
