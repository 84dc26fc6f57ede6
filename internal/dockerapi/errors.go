package dockerapi

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	cerrdefs "github.com/containerd/errdefs"
)

// statuses is the one place where errors become status codes: by the method that an errdefs sentinel, or an error
// type of the API module, carries to say what it is. Compare moby's daemon/server/httpstatus.
var statuses = []struct {
	is   func(error) bool
	code int
}{
	{is[interface{ NotFound() }], http.StatusNotFound},
	{is[interface{ InvalidParameter() }], http.StatusBadRequest},
	{is[interface{ Conflict() }], http.StatusConflict},
	{is[interface{ AlreadyExists() }], http.StatusConflict},
	{is[interface{ Unauthorized() }], http.StatusUnauthorized},
	{is[interface{ Unavailable() }], http.StatusServiceUnavailable},
	{is[interface{ Forbidden() }], http.StatusForbidden},
	{is[interface{ NotModified() }], http.StatusNotModified},
	{is[interface{ NotImplemented() }], http.StatusNotImplemented},
	{is[interface{ FailedPrecondition() }], http.StatusPreconditionFailed},
	{is[interface{ ResourceExhausted() }], http.StatusTooManyRequests},
	{is[*http.MaxBytesError], http.StatusRequestEntityTooLarge},
	{is[interface{ System() }], http.StatusInternalServerError},
	{is[interface{ Unknown() }], http.StatusInternalServerError},
	{is[interface{ DataLoss() }], http.StatusInternalServerError},
}

func is[T any](err error) bool {
	_, ok := err.(T)
	return ok
}

// status returns the code and the text that the client gets for err. The outermost error of the chain that has a
// class decides. The words of an errdefs sentinel that was wrapped at the end of the text are left out: Docker's
// clients compare its texts.
func status(err error) (code int, text string) {
	code, class := classify(err)
	text = err.Error()
	if class != nil && class != err {
		text = strings.TrimSuffix(text, ": "+class.Error())
	}
	return code, text
}

func classify(err error) (code int, class error) {
	for _, s := range statuses {
		if s.is(err) {
			return s.code, err
		}
	}
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		if inner := e.Unwrap(); inner != nil {
			return classify(inner)
		}
	case interface{ Unwrap() []error }:
		for _, inner := range e.Unwrap() {
			if code, class := classify(inner); class != nil {
				return code, class
			}
		}
	}
	return http.StatusInternalServerError, nil
}

// failure is an error of this package: its whole text and the errdefs sentinel that sorts it.
type failure struct {
	text  string
	class error
}

func (f *failure) Error() string { return f.text }
func (f *failure) Unwrap() error { return f.class }

func invalidf(format string, args ...any) error {
	return &failure{fmt.Sprintf(format, args...), cerrdefs.ErrInvalidArgument}
}

var (
	errPageNotFound = &failure{"page not found", cerrdefs.ErrNotFound}

	// errCut ends a response that has begun: the connection is closed, so that the client cannot take what it got
	// for the whole.
	errCut = errors.New("response cut short")
)

// notBuilt is the answer for an endpoint of Docker's that kiri does not have.
func notBuilt(what string) error {
	return &failure{what + " is not supported by kiri yet", cerrdefs.ErrNotImplemented}
}
