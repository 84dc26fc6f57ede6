package reference

import (
	"strings"
	"testing"

	theirs "github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
)

const hex64 = "6de487b0e14dc685ae97e6c465eae60389a411a209fdce08371230a5c1f49d2a"

// seeds are names of all shapes, good and bad.
var seeds = []string{
	"", "/", ":", "@", "a", "alpine", "alpine:3", "alpine:3@sha256:" + hex64, "alpine@sha256:" + hex64, "library/alpine", "docker.io/alpine",
	"docker.io/library/alpine", "index.docker.io/alpine", "index.docker.io/a/b", "localhost/x", "localhost:5000/x:y", "localhost:5000", "foo:5000/bar",
	"foo/bar/baz", "foo.bar/baz", "FOO/bar", "Foo", "foo/BAR", "foo.com/BAR", "a_b", "a__b", "a___b", "a--b", "a-", "-a", "a.b", "a..b", ".a", "a_.b",
	"[::1]:5000/x", "[::1]/x", "[]/x", "[::1/x", "[zz]/x", "[::1]x/y", "127.0.0.1:80/x", "a:b:c", "a:", "a:.b", "a:-b", "a:b/c", "a@b", "a@sha256:",
	"a@sha256:" + hex64[:63], "a@sha512:" + hex64 + hex64, "a@md5:" + hex64, "a@sha256:" + strings.ToUpper(hex64), "a@sha256+b64:" + hex64, "a@x..y:" + hex64,
	"sha256:" + hex64, hex64, hex64 + ":tag", strings.ToUpper(hex64), strings.Repeat("a", 255), strings.Repeat("a", 256), "x/" + strings.Repeat("a", 254),
	"a:" + strings.Repeat("t", 128), "a:" + strings.Repeat("t", 129), "a b", "a\n", "a:b\n", "ü", "a:ü", "host:x/y", "host:/y", "h-.x/y", "-h.x/y", "a/", "/a", "a//b",
	"a@sha256:" + hex64 + "@sha256:" + hex64, "a:b@c:d", "A.B/c", "xn--n3h.com/x", "a:5000/b:6000/c", "docker.io/a/b/c:d",
}

func FuzzSameAsDistribution(f *testing.F) {
	for _, s := range seeds {
		f.Add(s, "tag")
	}
	f.Fuzz(func(t *testing.T, s, tag string) {
		ours, err := ParseNormalizedNamed(s)
		want, wantErr := theirs.ParseNormalizedNamed(s)
		if text(err) != text(wantErr) {
			t.Fatalf("ParseNormalizedNamed(%q): error %v, want %v", s, err, wantErr)
		}
		_, err = ParseNamed(s)
		_, wantErr = theirs.ParseNamed(s)
		if text(err) != text(wantErr) {
			t.Fatalf("ParseNamed(%q): error %v, want %v", s, err, wantErr)
		}
		anyOurs, err := ParseAnyReference(s)
		anyTheirs, wantErr := theirs.ParseAnyReference(s)
		if text(err) != text(wantErr) || err == nil && (anyOurs.String() != anyTheirs.String() || FamiliarString(anyOurs) != theirs.FamiliarString(anyTheirs)) {
			t.Fatalf("ParseAnyReference(%q): %v, %v; want %v, %v", s, anyOurs, err, anyTheirs, wantErr)
		}
		if ours == nil {
			return
		}
		same(t, ours, want)
		same(t, TrimNamed(ours), theirs.TrimNamed(want))
		same(t, TagNameOnly(ours), theirs.TagNameOnly(want))
		a, err := WithTag(ours, tag)
		b, wantErr := theirs.WithTag(want, tag)
		if text(err) != text(wantErr) {
			t.Fatalf("WithTag(%q, %q): error %v, want %v", s, tag, err, wantErr)
		}
		if err == nil {
			same(t, a, b)
		}
		d := digest.FromString(s)
		c, err := WithDigest(ours, d)
		e, wantErr := theirs.WithDigest(want, d)
		if err != nil || wantErr != nil {
			t.Fatalf("WithDigest(%q, %q): %v, %v", s, d, err, wantErr)
		}
		same(t, c, e)
	})
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func same(t *testing.T, ours Named, want theirs.Named) {
	t.Helper()
	if ours.String() != want.String() || ours.Name() != want.Name() || Domain(ours) != theirs.Domain(want) || Path(ours) != theirs.Path(want) {
		t.Fatalf("%s (%s, %s), want %s (%s, %s)", ours, Domain(ours), Path(ours), want, theirs.Domain(want), theirs.Path(want))
	}
	if FamiliarString(ours) != theirs.FamiliarString(want) || FamiliarName(ours) != theirs.FamiliarName(want) || IsNameOnly(ours) != theirs.IsNameOnly(want) {
		t.Fatalf("familiar %s, want %s", FamiliarString(ours), theirs.FamiliarString(want))
	}
	_, ok := ours.(Tagged)
	_, wantOK := want.(theirs.Tagged)
	if ok != wantOK {
		t.Fatalf("%s: tagged %v, want %v", ours, ok, wantOK)
	}
	_, ok = ours.(Digested)
	_, wantOK = want.(theirs.Digested)
	if ok != wantOK {
		t.Fatalf("%s: digested %v, want %v", ours, ok, wantOK)
	}
	for _, p := range []string{"alpine*", "*", "*/*", "[", FamiliarName(ours)} {
		m, err := FamiliarMatch(p, ours)
		wm, wantErr := theirs.FamiliarMatch(p, want)
		if m != wm || text(err) != text(wantErr) {
			t.Fatalf("FamiliarMatch(%q, %s) = %v, %v; want %v, %v", p, ours, m, err, wm, wantErr)
		}
	}
}
