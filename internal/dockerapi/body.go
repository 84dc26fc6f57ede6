package dockerapi

import (
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"

	cerrdefs "github.com/containerd/errdefs"
)

// maxBody is the largest JSON request body in bytes. The largest honest one, a create with thousands of published
// ports, has some hundred kilobytes.
const maxBody = 8 << 20

// hasBody tells whether the client sends a body: its length is known and not zero, or not known.
func (c *call) hasBody() bool { return c.r.ContentLength != 0 }

// readJSON decodes the request's body into v. A request without a body leaves v as it is and is no error; there, a
// few endpoints have rules of their own. The content type must be JSON if there is a body.
func (c *call) readJSON(v any) error {
	kind := c.r.Header.Get("Content-Type")
	if !c.hasBody() {
		if kind == "" {
			return nil
		}
		return checkJSON(kind)
	}
	if err := checkJSON(kind); err != nil {
		return err
	}
	dec := json.NewDecoder(http.MaxBytesReader(c.w, c.r.Body, maxBody))
	if err := dec.Decode(v); err != nil {
		return bodyError(err)
	}
	if dec.More() {
		return invalidf("unexpected content after JSON")
	}
	return nil
}

func bodyError(err error) error {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return err
	case errors.Is(err, io.EOF):
		return invalidf("invalid JSON: got EOF while reading request body")
	}
	return &failure{"invalid JSON: " + err.Error(), cerrdefs.ErrInvalidArgument}
}

func checkJSON(kind string) error {
	if kind == "application/json" {
		return nil
	}
	media, _, err := mime.ParseMediaType(kind)
	if err != nil {
		return invalidf("malformed Content-Type header (%s): %v", kind, err)
	}
	if media != "application/json" {
		return invalidf("unsupported Content-Type header (%s): must be 'application/json'", kind)
	}
	return nil
}

// words is a list of strings that old clients may send as one string: API 1.24 documents both for Cmd and Entrypoint.
type words []string

func (w *words) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*w = words{s}
		return nil
	}
	return json.Unmarshal(b, (*[]string)(w))
}
