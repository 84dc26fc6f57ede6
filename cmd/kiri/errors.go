package main

import (
	"errors"
	"io/fs"
	"strings"
)

// Exit codes of `docker run` and of `docker exec`, which scripts know.
const (
	exitEngine        = 125 // the engine, or a flag, failed
	exitNotExecutable = 126 // the command is there and cannot be run
	exitNotFound      = 127 // the command is not there
)

// A status is an error with an exit code of its own. An empty message prints nothing.
type status struct {
	code int
	msg  string
}

func (s *status) Error() string { return s.msg }

// exitWith is a status without words.
func exitWith(code int) error {
	if code == 0 {
		return nil
	}
	return &status{code: code}
}

func isPermission(err error) bool { return errors.Is(err, fs.ErrPermission) }

func isStatus(err error, code int) bool {
	var e *apiError
	return errors.As(err, &e) && e.Status == code
}

// runError is an error that `run` reports in Docker's form, with the exit code for "the engine failed".
func runError(err error) error { return runStatus(exitEngine, err) }

func runStatus(code int, err error) error {
	return &status{code, prog + ": " + strings.TrimPrefix(err.Error(), prog+": ") + "\n\nRun '" + prog + " run --help' for more information"}
}

// startError is runError for a failed start: its exit code tells a missing command from one that cannot be run. Like Docker's CLI it can
// only read that from the words of the answer.
func startError(err error) error {
	msg := err.Error()
	code := exitEngine
	switch {
	case strings.Contains(msg, "executable file not found"), strings.Contains(msg, "no such file or directory"),
		strings.Contains(msg, "system cannot find the file specified"):
		code = exitNotFound
	case strings.Contains(msg, "permission denied"), strings.Contains(msg, "is a directory"), strings.Contains(msg, "exec format error"):
		code = exitNotExecutable
	}
	return runStatus(code, err)
}
