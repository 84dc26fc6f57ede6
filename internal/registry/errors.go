package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"syscall"
	"time"

	cerrdefs "github.com/containerd/errdefs"

	"runkiri.com/kiri/internal/reference"
)

// ResponseError is an answer that is no success.
type ResponseError struct {
	Status     int           // HTTP status
	Code       string        // the distribution specification's, "MANIFEST_UNKNOWN"; "" if the body has none
	Message    string        // the registry's own
	RetryAfter time.Duration // 0 if it did not say

	body string // its beginning
}

// Error has the form of Docker's own: "manifest unknown: <message>".
func (e *ResponseError) Error() string {
	if e.Code == "" {
		return fmt.Sprintf("received unexpected HTTP status: %d %s", e.Status, http.StatusText(e.Status))
	}
	code := strings.ToLower(strings.ReplaceAll(e.Code, "_", " "))
	if e.Message == "" {
		return code
	}
	return code + ": " + e.Message
}

// responseError reads an answer that is no success; the body stays the caller's to close.
func responseError(resp *http.Response) *ResponseError {
	e := &ResponseError{Status: resp.StatusCode}
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 && s < 1<<20 {
		e.RetryAfter = time.Duration(s) * time.Second
	}
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 16<<10))
	e.body = string(b)
	var doc struct {
		Errors []struct {
			Code    string `json:"code"`
			Message string `json:"message"`
		} `json:"errors"`
		Details string `json:"details"` // token servers' own form
	}
	if json.Unmarshal(b, &doc) == nil {
		if len(doc.Errors) > 0 {
			e.Code, e.Message = printable(doc.Errors[0].Code), printable(doc.Errors[0].Message)
		} else if doc.Details != "" && (e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden) {
			e.Code, e.Message = "UNAUTHORIZED", printable(doc.Details)
		}
	}
	if e.Code == "" && e.Status == http.StatusTooManyRequests {
		e.Code, e.Message = "TOOMANYREQUESTS", "the registry's rate limit is reached"
	}
	return e
}

// printable makes a registry's words fit for a terminal and a log.
func printable(s string) string {
	if len(s) > 1024 {
		s = s[:1024]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}

// Explain gives an error of a pull of ref Docker's text and class.
func (r *Repository) Explain(ref reference.Named, err error) error {
	name := reference.FamiliarName(ref)
	var re *ResponseError
	if !errors.As(err, &re) {
		return err
	}
	denied := cerrdefs.ErrNotFound.WithMessage(fmt.Sprintf("pull access denied for %s, repository does not exist or may require 'docker login': %s", name, re.Error()))
	switch {
	case re.Code == "TOOMANYREQUESTS" || re.Status == http.StatusTooManyRequests:
		return cerrdefs.ErrResourceExhausted.WithMessage(re.Error())
	case re.Code == "DENIED" || re.Status == http.StatusForbidden:
		return denied
	case re.Code == "UNAUTHORIZED" || re.Status == http.StatusUnauthorized:
		if !r.hasCreds {
			return denied
		}
		return cerrdefs.ErrUnauthenticated.WithMessage(err.Error())
	case re.Code == "NAME_UNKNOWN":
		return cerrdefs.ErrNotFound.WithMessage(fmt.Sprintf("repository %s not found: %s", name, re.Error()))
	case re.Code == "MANIFEST_UNKNOWN" || re.Status == http.StatusNotFound:
		msg := re.Error()
		if re.Code == "" {
			msg = "manifest unknown"
		}
		return cerrdefs.ErrNotFound.WithMessage(fmt.Sprintf("manifest for %s not found: %s", reference.FamiliarString(ref), msg))
	}
	return err
}

// transient tells whether the same request may succeed later.
func transient(err error) bool {
	var re *ResponseError
	if errors.As(err, &re) {
		switch re.Status {
		case http.StatusRequestTimeout, http.StatusInternalServerError, http.StatusBadGateway,
			http.StatusServiceUnavailable, http.StatusGatewayTimeout:
			return true
		case http.StatusTooManyRequests:
			return re.RetryAfter > 0 && re.RetryAfter <= maxRetryAfter
		}
		return false
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return dns.IsTemporary
	}
	var cut *interrupted
	var op *net.OpError
	if errors.As(err, &cut) || errors.As(err, &op) || isTimeout(err) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EPIPE) {
		return true
	}
	// net/http keeps its HTTP/2 errors to itself. A certificate, a redirect or credentials do not get better by waiting.
	var ue *url.Error
	return errors.As(err, &ue) && (strings.HasPrefix(ue.Err.Error(), "http2: ") || strings.HasPrefix(ue.Err.Error(), "stream error: "))
}

// interrupted is an error of reading a body: the answer was good so far.
type interrupted struct{ error }

func (e *interrupted) Unwrap() error { return e.error }

// maxRetryAfter is the longest pause a registry may ask for; beyond it its answer is passed on.
const maxRetryAfter = 10 * time.Second
