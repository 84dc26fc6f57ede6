package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
)

// execDocker runs the docker CLI and ends with its code: Windows cannot replace a process.
func execDocker(path string, args, env []string) error {
	cmd := exec.Command(path, args...)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, os.Stdin, os.Stdout, os.Stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exitWith(exit.ExitCode())
	}
	if err != nil {
		return fmt.Errorf("running %s: %w", path, err)
	}
	return nil
}
