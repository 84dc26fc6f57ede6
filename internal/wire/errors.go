package wire

import (
	"context"
	"errors"
	"fmt"
	"syscall"
)

// Class sorts the errors that cross the wire by what the caller should do about them. The daemon maps a class to
// an errdefs sentinel (engine.fromAgent) and only the HTTP edge maps that to a status code.
type Class uint8

const (
	Internal      Class = iota // the agent or the kernel failed
	Invalid                    // the request asks for something that cannot be
	NotFound                   // the object named does not exist
	Conflict                   // the object is in a state that forbids it
	Unsupported                // this agent cannot do it (kernel, transport, not built yet)
	NoCommand                  // the entrypoint is not there: Docker's exit code 127
	NotExecutable              // the entrypoint is there but cannot be executed: Docker's exit code 126
	Unavailable                // the connection to the agent is gone; whether the request was done is unknown
)

// Error is how a failure crosses the wire: the errno travels beside the text, so that errors.Is still finds it.
type Error struct {
	Class Class
	Errno uint32 // 0 if no system call failed
	Text  string // "doing x to y: cause", whole: it already holds the errno's words
}

// Error returns the whole text.
func (e *Error) Error() string { return e.Text }

// Unwrap returns the errno, nil if there is none.
func (e *Error) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return syscall.Errno(e.Errno)
}

// Errorf makes an Error of class c. The errno of a wrapped syscall.Errno is kept.
func Errorf(c Class, format string, args ...any) *Error {
	return classed(c, fmt.Errorf(format, args...))
}

// ClassOf returns the class of err: that of the outermost Error in its chain, else Internal.
func ClassOf(err error) Class {
	var e *Error
	if errors.As(err, &e) {
		return e.Class
	}
	return Internal
}

// AsError turns any error into one that can cross the wire, keeping the class and errno found in its chain.
func AsError(err error) *Error {
	c := ClassOf(err)
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		c = Unavailable
	}
	return classed(c, err)
}

func classed(c Class, err error) *Error {
	e := &Error{Class: c, Text: err.Error()}
	var no syscall.Errno
	if errors.As(err, &no) {
		e.Errno = uint32(no)
	}
	return e
}

// Kind implements Message.
func (*Error) Kind() Kind { return KindError }

// Fields implements Message.
func (e *Error) Fields(c *Coder) {
	c.U8((*uint8)(&e.Class))
	c.U32(&e.Errno)
	c.Str(&e.Text)
}
