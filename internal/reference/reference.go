// Package reference reads and writes image names: registry.example:5000/team/app:1.2@sha256:... and the short forms that users type.
//
// It has the rules and the words of github.com/distribution/reference and, where kiri uses them, its names; a test holds the two against
// each other. What it has not is that library's regular expressions, which every process pays for before main: 0.6 to 1.1 ms, half of
// what `kiri run` adds to the engine's own time, and memory in the daemon for as long as it lives.
package reference

import (
	"errors"
	"fmt"
	"path"
	"strings"

	"github.com/opencontainers/go-digest"
)

// The errors of names. Their texts are what Docker's users see.
var (
	ErrInvalidFormat    = errors.New("invalid reference format")
	ErrTagInvalid       = errors.New("invalid tag format")
	ErrDigestInvalid    = errors.New("invalid digest format")
	ErrNameUppercase    = errors.New("repository name must be lowercase")
	ErrNameTooLong      = fmt.Errorf("repository name must not be more than %d characters", maxPath)
	ErrNameNotCanonical = errors.New("repository name must be canonical")
)

const (
	hub       = "docker.io"
	hubLegacy = "index.docker.io" // the same registry, by the name it once had
	official  = "library/"
	latest    = "latest"

	maxPath = 255 // characters of a repository's path
	maxTag  = 128
)

// Reference is an image's name, or a bare digest.
type Reference interface {
	String() string
}

// Named is a reference that has a repository's name.
type Named interface {
	Reference
	Name() string
}

// Tagged is a reference with a tag.
type Tagged interface {
	Reference
	Tag() string
}

// Digested is a reference with a digest.
type Digested interface {
	Reference
	Digest() digest.Digest
}

// NamedTagged is a name with a tag.
type NamedTagged interface {
	Named
	Tag() string
}

// Canonical is a name with a digest, which therefore means one image for ever.
type Canonical interface {
	Named
	Digest() digest.Digest
}

// repository is a name alone: docker.io/library/alpine.
type repository struct{ domain, path string }

func (r repository) repo() repository { return r }
func (r repository) String() string   { return r.Name() }
func (r repository) Name() string {
	if r.domain == "" {
		return r.path
	}
	return r.domain + "/" + r.path
}

type tagged struct {
	repository
	tag string
}

func (t tagged) String() string { return t.Name() + ":" + t.tag }
func (t tagged) Tag() string    { return t.tag }

type canonical struct {
	repository
	digest digest.Digest
}

func (c canonical) String() string        { return c.Name() + "@" + c.digest.String() }
func (c canonical) Digest() digest.Digest { return c.digest }

// full has a tag and a digest; the digest decides, the tag is for people.
type full struct {
	tagged
	digest digest.Digest
}

func (f full) String() string        { return f.tagged.String() + "@" + f.digest.String() }
func (f full) Digest() digest.Digest { return f.digest }

type bareDigest digest.Digest

func (d bareDigest) String() string        { return string(d) }
func (d bareDigest) Digest() digest.Digest { return digest.Digest(d) }

// build makes the narrowest type that holds the parts.
func build(r repository, tag string, d digest.Digest) Named {
	switch {
	case tag != "" && d != "":
		return full{tagged{r, tag}, d}
	case tag != "":
		return tagged{r, tag}
	case d != "":
		return canonical{r, d}
	}
	return r
}

// parts takes a reference apart again.
func parts(ref Reference) (r repository, tag string, d digest.Digest) {
	if n, ok := ref.(interface{ repo() repository }); ok {
		r = n.repo()
	}
	if t, ok := ref.(Tagged); ok {
		tag = t.Tag()
	}
	if g, ok := ref.(Digested); ok {
		d = g.Digest()
	}
	return r, tag, d
}

// ParseNormalizedNamed reads a name as users write it: alpine is docker.io/library/alpine.
func ParseNormalizedNamed(s string) (Named, error) {
	if isID(s) {
		return nil, fmt.Errorf("invalid repository name (%s), cannot specify 64-byte hexadecimal strings", s)
	}
	domain, rest := withDomain(s)
	remote, _, _ := strings.Cut(rest, ":")
	if strings.ToLower(remote) != remote {
		return nil, fmt.Errorf("invalid reference format: repository name (%s) must be lowercase", remote)
	}
	return parse(domain + "/" + rest)
}

// ParseNamed reads a name that must be whole already, with registry and path as kiri stores them.
func ParseNamed(s string) (Named, error) {
	named, err := ParseNormalizedNamed(s)
	if err != nil {
		return nil, err
	}
	if named.String() != s {
		return nil, ErrNameNotCanonical
	}
	return named, nil
}

// ParseAnyReference reads a name, a digest, or 64 hexadecimal digits as the digest they are.
func ParseAnyReference(s string) (Reference, error) {
	if isID(s) {
		return bareDigest("sha256:" + s), nil
	}
	if d, err := digest.Parse(s); err == nil {
		return bareDigest(d), nil
	}
	return ParseNormalizedNamed(s)
}

// withDomain separates the registry, which is Docker Hub unless the first part looks like a host: it has a dot, a port or a capital, or
// is localhost.
func withDomain(s string) (domain, rest string) {
	first, after, ok := strings.Cut(s, "/")
	switch {
	case !ok:
		return hub, official + s
	case first == hubLegacy:
		domain, rest = hub, after
	case first == "localhost", strings.ContainsAny(first, ".:"), strings.ToLower(first) != first:
		domain, rest = first, after
	default:
		domain, rest = hub, s
	}
	if domain == hub && !strings.Contains(rest, "/") {
		rest = official + rest
	}
	return domain, rest
}

// parse reads [domain/]path[:tag][@digest].
func parse(s string) (Named, error) {
	rest, hex, hasDigest := strings.Cut(s, "@")
	name, tag := rest, ""
	// A colon before the last slash belongs to a port.
	if i := strings.LastIndexByte(rest, ':'); i > strings.LastIndexByte(rest, '/') {
		name, tag = rest[:i], rest[i+1:]
		if !isTag(tag) {
			return nil, wrongFormat(s)
		}
	}
	if hasDigest && !isDigest(hex) {
		return nil, wrongFormat(s)
	}
	r, ok := splitName(name)
	if !ok {
		return nil, wrongFormat(s)
	}
	if len(r.path) > maxPath {
		return nil, ErrNameTooLong
	}
	var d digest.Digest
	if hasDigest {
		var err error
		if d, err = digest.Parse(hex); err != nil {
			return nil, err
		}
	}
	return build(r, tag, d), nil
}

// wrongFormat tells capitals from other faults, because they are the common one.
func wrongFormat(s string) error {
	if lower := strings.ToLower(s); lower != s {
		if _, err := parse(lower); !errors.Is(err, ErrInvalidFormat) {
			return ErrNameUppercase
		}
	}
	return ErrInvalidFormat
}

func splitName(name string) (repository, bool) {
	if domain, p, ok := strings.Cut(name, "/"); ok && isDomain(domain) && isPath(p) {
		return repository{domain, p}, true
	}
	return repository{"", name}, isPath(name)
}

// isPath: components of small letters and digits, joined inside by one dot, one or two underscores, or any number of dashes.
func isPath(s string) bool {
	for c := range strings.SplitSeq(s, "/") {
		if !isComponent(c) {
			return false
		}
	}
	return true
}

func isComponent(s string) bool {
	if s == "" || !isLowerNum(s[0]) || !isLowerNum(s[len(s)-1]) {
		return false
	}
	for i := 0; i < len(s); {
		if isLowerNum(s[i]) {
			i++
			continue
		}
		start := i
		for i < len(s) && !isLowerNum(s[i]) {
			i++
		}
		if sep := s[start:i]; sep != "." && sep != "_" && sep != "__" && strings.Trim(sep, "-") != "" {
			return false
		}
	}
	return true
}

// isDomain: a host name, an address, or an IPv6 address in brackets, and a port.
func isDomain(s string) bool {
	host, port, hasPort := s, "", false
	if strings.HasPrefix(s, "[") {
		end := strings.IndexByte(s, ']')
		if end < 2 || strings.Trim(s[1:end], "0123456789abcdefABCDEF:") != "" {
			return false
		}
		host = ""
		if s[end+1:] != "" {
			if s[end+1] != ':' {
				return false
			}
			port, hasPort = s[end+2:], true
		}
	} else {
		host, port, hasPort = strings.Cut(s, ":")
		for label := range strings.SplitSeq(host, ".") {
			if !isLabel(label) {
				return false
			}
		}
	}
	return !hasPort || port != "" && strings.Trim(port, "0123456789") == ""
}

func isLabel(s string) bool {
	if s == "" || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		if !isAlphaNum(s[i]) && s[i] != '-' {
			return false
		}
	}
	return true
}

func isTag(s string) bool {
	if s == "" || len(s) > maxTag || s[0] == '.' || s[0] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !isAlphaNum(c) && c != '_' && c != '.' && c != '-' {
			return false
		}
	}
	return true
}

// isDigest: algorithm:hex with at least 32 digits, where the algorithm is words joined by one of - _ + .
func isDigest(s string) bool {
	algorithm, hex, ok := strings.Cut(s, ":")
	if !ok || len(hex) < 32 || strings.Trim(hex, "0123456789abcdefABCDEF") != "" {
		return false
	}
	word := false // inside a word
	for i := range len(algorithm) {
		switch c := algorithm[i]; {
		case isAlphaNum(c) && (word || c > '9'):
			word = true
		case word && strings.IndexByte("-_+.", c) >= 0:
			word = false
		default:
			return false
		}
	}
	return word
}

func isID(s string) bool { return len(s) == 64 && strings.Trim(s, "0123456789abcdef") == "" }

func isLowerNum(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }
func isAlphaNum(c byte) bool { return isLowerNum(c) || c >= 'A' && c <= 'Z' }

// WithTag adds a tag, or replaces the one that is there.
func WithTag(ref Named, tag string) (NamedTagged, error) {
	if !isTag(tag) {
		return nil, ErrTagInvalid
	}
	r, _, d := parts(ref)
	return build(r, tag, d).(NamedTagged), nil
}

// WithDigest adds a digest, or replaces the one that is there.
func WithDigest(ref Named, d digest.Digest) (Canonical, error) {
	if !isDigest(d.String()) {
		return nil, ErrDigestInvalid
	}
	r, tag, _ := parts(ref)
	return build(r, tag, d).(Canonical), nil
}

// TrimNamed takes tag and digest away.
func TrimNamed(ref Named) Named {
	r, _, _ := parts(ref)
	return r
}

// TagNameOnly gives a name that has neither tag nor digest the tag latest.
func TagNameOnly(ref Named) Named {
	if IsNameOnly(ref) {
		r, _, _ := parts(ref)
		return tagged{r, latest}
	}
	return ref
}

// IsNameOnly tells whether there is neither tag nor digest.
func IsNameOnly(ref Named) bool {
	_, tag, d := parts(ref)
	return tag == "" && d == ""
}

// Domain is the registry of a name.
func Domain(ref Named) string {
	r, _, _ := parts(ref)
	return r.domain
}

// Path is a name without its registry.
func Path(ref Named) string {
	r, _, _ := parts(ref)
	return r.path
}

// familiar leaves out what users leave out.
func familiar(r repository) repository {
	if r.domain != hub {
		return r
	}
	if short, ok := strings.CutPrefix(r.path, official); ok && !strings.Contains(short, "/") {
		return repository{"", short}
	}
	return repository{"", r.path}
}

// FamiliarName is the name as users write it: alpine for docker.io/library/alpine.
func FamiliarName(ref Named) string {
	r, _, _ := parts(ref)
	return familiar(r).Name()
}

// FamiliarString is FamiliarName with tag and digest.
func FamiliarString(ref Reference) string {
	r, tag, d := parts(ref)
	if r.path == "" {
		return ref.String()
	}
	return build(familiar(r), tag, d).String()
}

// FamiliarMatch tells whether the familiar string, or the familiar name alone, matches a pattern of path.Match.
func FamiliarMatch(pattern string, ref Reference) (bool, error) {
	matched, err := path.Match(pattern, FamiliarString(ref))
	if named, ok := ref.(Named); ok && !matched {
		matched, _ = path.Match(pattern, FamiliarName(named)) // a bad pattern has been reported above
	}
	return matched, err
}
