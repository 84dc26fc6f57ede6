package engine

import (
	"context"
	"errors"
	"fmt"

	cerrdefs "github.com/containerd/errdefs"

	"runkiri.com/kiri/internal/wire"
)

// failure is an error whose text is exactly what the API answers, beside the sentinel that sorts it. Clients compare
// Docker's texts, so the sentinel's own words must not be in them.
type failure struct {
	class error
	text  string
	cause error // nil if text is all there is
}

func (f *failure) Error() string { return f.text }

func (f *failure) Unwrap() []error {
	if f.cause == nil {
		return []error{f.class}
	}
	return []error{f.class, f.cause}
}

// errf makes a failure of class; a wrapped error in args stays reachable.
func errf(class error, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	f := &failure{class: class, text: err.Error()}
	if errors.Unwrap(err) != nil {
		f.cause = err
	}
	return f
}

func invalid(format string, args ...any) error {
	return errf(cerrdefs.ErrInvalidArgument, format, args...)
}
func notFound(format string, args ...any) error { return errf(cerrdefs.ErrNotFound, format, args...) }
func conflict(format string, args ...any) error { return errf(cerrdefs.ErrConflict, format, args...) }
func internal(format string, args ...any) error { return errf(cerrdefs.ErrInternal, format, args...) }

// fromAgent sorts an error of the agent: the one place where wire's classes become errdefs'. The text stays.
func fromAgent(err error) error {
	if err == nil {
		return nil
	}
	var we *wire.Error
	if !errors.As(err, &we) {
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return &failure{class: cerrdefs.ErrUnavailable, text: err.Error(), cause: err}
		}
		return &failure{class: cerrdefs.ErrInternal, text: err.Error(), cause: err}
	}
	var class error = cerrdefs.ErrInternal
	switch we.Class {
	case wire.Invalid, wire.NoCommand, wire.NotExecutable:
		class = cerrdefs.ErrInvalidArgument
	case wire.NotFound:
		class = cerrdefs.ErrNotFound
	case wire.Conflict:
		class = cerrdefs.ErrConflict
	case wire.Unsupported:
		class = cerrdefs.ErrNotImplemented
	case wire.Unavailable:
		class = cerrdefs.ErrUnavailable
	}
	return &failure{class: class, text: err.Error(), cause: err}
}
