package dockerapi

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"runkiri.com/kiri/internal/engine"
)

// arg returns a query parameter, "" if it is not there.
func (c *call) arg(name string) string {
	if v := c.query[name]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// flag reads a query parameter as Docker reads booleans: everything is true except "", 0, no, false and none.
func (c *call) flag(name string) bool {
	switch strings.ToLower(strings.TrimSpace(c.arg(name))) {
	case "", "0", "no", "false", "none":
		return false
	}
	return true
}

// flagOr is flag with a value for a parameter that is not given at all.
func (c *call) flagOr(name string, otherwise bool) bool {
	if _, ok := c.query[name]; !ok {
		return otherwise
	}
	return c.flag(name)
}

// integer reads a query parameter as an int, nil if it is not there or empty.
func (c *call) integer(name string) (*int, error) {
	s := c.arg(name)
	if s == "" {
		return nil, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return nil, invalidf("invalid value for %s: %v", name, err)
	}
	return &n, nil
}

// filters reads the query parameter "filters", in the form of all current clients (a map of maps) or in the one of
// clients before Docker 1.10 (a map of lists).
func (c *call) filters() (engine.Filters, error) {
	return parseFilters(c.arg("filters"))
}

func parseFilters(text string) (engine.Filters, error) {
	f := engine.Filters{}
	if text == "" {
		return f, nil
	}
	if err := json.Unmarshal([]byte(text), &f); err == nil {
		if f == nil { // the text was "null"
			f = engine.Filters{}
		}
		return f, nil
	}
	var old map[string][]string
	if err := json.Unmarshal([]byte(text), &old); err != nil {
		return nil, invalidf("invalid filter")
	}
	f = engine.Filters{}
	for name, values := range old {
		f[name] = map[string]bool{}
		for _, v := range values {
			f[name][v] = true
		}
	}
	return f, nil
}

// takeBool removes a filter that may have at most one value, a boolean, and returns it.
func takeBool(f engine.Filters, name string, otherwise bool) (bool, error) {
	values, ok := f[name]
	if !ok {
		return otherwise, nil
	}
	if len(values) != 1 {
		return false, invalidf("invalid filter '%s'", name)
	}
	delete(f, name)
	for v := range values {
		switch v {
		case "1", "true":
			return true, nil
		case "0", "false":
			return false, nil
		}
		return false, invalidf("invalid filter '%s=[%s]'", name, v)
	}
	return otherwise, nil
}

// moment reads a query parameter as a time: "seconds[.nanoseconds]" since 1970, as Docker's clients send it, or RFC
// 3339, or a duration before now. Zero if it is not there, or for "0".
func (c *call) moment(name string) (time.Time, error) {
	return parseMoment(name, c.arg(name), time.Now())
}

func parseMoment(name, s string, now time.Time) (time.Time, error) {
	if s == "" || s == "0" {
		return time.Time{}, nil
	}
	sec, frac, _ := strings.Cut(s, ".")
	if n, err := strconv.ParseInt(sec, 10, 64); err == nil {
		nano, ok := nanoseconds(frac)
		// The bound keeps the time within what UnixNano can tell, some 292 years around 1970.
		if !ok || n > math.MaxInt64/int64(time.Second)-1 || n < math.MinInt64/int64(time.Second)+1 {
			return time.Time{}, invalidf("invalid value for %s: %q is not a timestamp", name, s)
		}
		return time.Unix(n, nano), nil
	}
	if t, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return t, nil
	}
	if d, err := time.ParseDuration(s); err == nil {
		return now.Add(-d), nil
	}
	return time.Time{}, invalidf("invalid value for %s: %q is not a timestamp", name, s)
}

// nanoseconds reads the digits after the point of a timestamp.
func nanoseconds(frac string) (int64, bool) {
	if frac == "" {
		return 0, true
	}
	if len(frac) > 9 {
		frac = frac[:9]
	}
	n, err := strconv.ParseUint(frac, 10, 64)
	if err != nil {
		return 0, false
	}
	for range 9 - len(frac) {
		n *= 10
	}
	return int64(n), true
}

// platforms reads a query parameter that is a list of JSON-encoded OCI platforms.
func (c *call) platforms(name string) ([]ocispec.Platform, error) {
	var list []ocispec.Platform
	for _, s := range c.query[name] {
		if s == "" {
			continue
		}
		var p ocispec.Platform
		if err := json.Unmarshal([]byte(s), &p); err != nil {
			return nil, invalidf("failed to parse platform: %v", err)
		}
		if p.OS == "" || p.Architecture == "" {
			return nil, invalidf("both OS and Architecture must be provided")
		}
		list = append(list, p)
	}
	return list, nil
}

// platform reads a query parameter that is at most one JSON-encoded OCI platform.
func (c *call) platform(name string) (*ocispec.Platform, error) {
	list, err := c.platforms(name)
	switch {
	case err != nil || len(list) == 0:
		return nil, err
	case len(list) > 1:
		return nil, invalidf("only one platform is supported")
	}
	return &list[0], nil
}
