package dockerapi

import (
	"strconv"
	"strings"
)

// The range of Engine API versions this package answers, each in its own form. MaxVersion is that of the
// github.com/moby/moby/api module it is built with.
const (
	MinVersion = "1.24"
	MaxVersion = "1.57"

	minVersion version = 24
	maxVersion version = 57
)

// A version is the minor number of an Engine API version; all that are answered begin with "1.".
type version uint16

func (v version) String() string { return "1." + strconv.Itoa(int(v)) }

// splitVersion takes a leading "/v1.41" off a path. text is the version as the client wrote it, "" if there is none.
func splitVersion(path string) (text, rest string) {
	if len(path) < 3 || path[1] != 'v' || path[2] < '0' || path[2] > '9' {
		return "", path
	}
	i := 2
	for i < len(path) && (path[i] >= '0' && path[i] <= '9' || path[i] == '.') {
		i++
	}
	if i == len(path) || path[i] != '/' {
		return "", path
	}
	return path[2:i], path[i:]
}

// parseVersion checks a version as the client wrote it against the range. Docker compares number by number, so that
// "1.41.3" is above 1.41; here what follows the second number does not matter.
func parseVersion(text string) (version, error) {
	if text == "" {
		return maxVersion, nil
	}
	major, rest, _ := strings.Cut(text, ".")
	minor, _, _ := strings.Cut(rest, ".")
	a, _ := strconv.ParseUint(major, 10, 16) // out of range gives the largest value, which is too new
	b, _ := strconv.ParseUint(minor, 10, 16)
	switch {
	case a < 1 || a == 1 && b < uint64(minVersion):
		return 0, invalidf("client version %s is too old. Minimum supported API version is %s, please upgrade your client to a newer version", text, MinVersion)
	case a > 1 || b > uint64(maxVersion):
		return 0, invalidf("client version %s is too new. Maximum supported API version is %s", text, MaxVersion)
	}
	return version(b), nil
}
