package engine

import (
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
)

// validate answers a filter that is not in accepted with an error, before anything is done.
func (f Filters) validate(accepted ...string) error {
	for name := range f {
		if !slices.Contains(accepted, name) {
			return invalid("invalid filter '%s'", name)
		}
	}
	return nil
}

func (f Filters) has(name string) bool { return len(f[name]) > 0 }

// get returns the values of name, sorted.
func (f Filters) get(name string) []string { return slices.Sorted(maps.Keys(f[name])) }

// exact tells whether s is one of the values of name, or there are none.
func (f Filters) exact(name, s string) bool { return len(f[name]) == 0 || f[name][s] }

// boolean returns the value of name as a boolean; both values, or another word, is an error.
func (f Filters) boolean(name string, preset bool) (bool, error) {
	values := f[name]
	if len(values) == 0 {
		return preset, nil
	}
	yes := values["1"] || values["true"]
	no := values["0"] || values["false"]
	if yes == no {
		return preset, invalid("invalid filter '%s=%s'", name, strings.Join(f.get(name), ","))
	}
	return yes, nil
}

// labels tells whether labels hold every value of name, each KEY or KEY=VALUE.
func (f Filters) labels(name string, labels map[string]string) bool {
	for want := range f[name] {
		k, v, valued := strings.Cut(want, "=")
		have, ok := labels[k]
		if !ok || valued && have != v {
			return false
		}
	}
	return true
}

// pruneLabels is labels for prune: with label! as well, which leaves out whatever it matches.
func (f Filters) pruneLabels(labels map[string]string) bool {
	if !f.labels("label", labels) {
		return false
	}
	for not := range f["label!"] {
		if (Filters{"": {not: true}}).labels("", labels) {
			return false
		}
	}
	return true
}

// until returns the time before which objects are pruned, zero if there is no such filter.
func (f Filters) until() (time.Time, error) {
	if len(f["until"]) == 0 {
		return time.Time{}, nil
	}
	if len(f["until"]) > 1 {
		return time.Time{}, invalid("more than one until filter specified")
	}
	return ParseTimestamp(f.get("until")[0], time.Now())
}

// ParseTimestamp reads a time in any of the forms that Docker's API takes: Unix seconds with a fraction, a Go
// duration before now, RFC 3339, or RFC 3339 cut short, in local time if no zone is given.
func ParseTimestamp(s string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(s); err == nil {
		return now.Add(-d), nil
	}
	if sec, frac, ok := unixParts(s); ok {
		return time.Unix(sec, frac), nil
	}
	zoned := strings.ContainsAny(s, "zZ+") || strings.Count(s, "-") == 3
	for _, layout := range []string{"2006-01-02T15:04:05.999999999", "2006-01-02T15:04:05", "2006-01-02T15:04", "2006-01-02T15", "2006-01-02"} {
		loc := now.Location()
		if zoned {
			layout += "Z07:00"
		}
		if t, err := time.ParseInLocation(layout, s, loc); err == nil {
			return t, nil
		}
	}
	return time.Time{}, &failure{class: cerrdefs.ErrInvalidArgument, text: "failed to parse value as time or duration: " + strconv.Quote(s)}
}

// unixParts reads SECONDS[.FRACTION], the fraction to nanoseconds.
func unixParts(s string) (sec, nanos int64, ok bool) {
	whole, frac, dotted := strings.Cut(s, ".")
	sec, err := strconv.ParseInt(whole, 10, 64)
	if err != nil {
		return 0, 0, false
	}
	if dotted {
		if len(frac) > 9 {
			frac = frac[:9]
		}
		frac += strings.Repeat("0", 9-len(frac))
		if nanos, err = strconv.ParseInt(frac, 10, 64); err != nil || nanos < 0 {
			return 0, 0, false
		}
	}
	return sec, nanos, true
}
