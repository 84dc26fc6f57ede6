// Package deptest states which package may import which, each rule with its reason, and checks it on every target that is built.
package deptest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "runkiri.com/kiri/"

// A rule forbids packages to have others among everything they import, directly or not.
type rule struct {
	name   string
	reason string
	from   []string // import paths; a trailing ... matches whatever follows
	never  []string
	// direct looks only at what is imported in so many words
	direct bool
	// optional rules are about packages that come with a later part of the engine
	optional bool
}

var rules = []rule{
	{
		name: "kiri-init speaks no HTTP, no TLS and no JSON of Docker's",
		reason: "it is PID 1 of machines and supervisor of every container: what it does not contain cannot be attacked, does not grow its " +
			"few megabytes, and need not be updated while containers run",
		from:  []string{module + "cmd/kiri-init", module + "internal/agent/..."},
		never: []string{"net/http", "crypto/tls", "github.com/moby/moby/api/...", "github.com/moby/moby/client/...", "github.com/spf13/cobra"},
	},
	{
		name:   "the daemon knows agents only through wire",
		reason: "what must go on when the daemon is killed belongs to the agent, and the agent may be in another machine; a shortcut would hold on the host only",
		from: []string{module + "internal/dockerapi/...", module + "internal/engine/...", module + "internal/record/...", module + "internal/registry/...",
			module + "internal/config/...", module + "internal/reference/..."},
		never: []string{module + "internal/agent/..."},
	},
	{
		name:   "agents do not know the daemon",
		reason: "the agent obeys frames, whoever sends them; it must be able to outlive every daemon and to run where there is none",
		from:   []string{module + "internal/agent/...", module + "cmd/kiri-init"},
		never: []string{module + "internal/engine/...", module + "internal/dockerapi/...", module + "internal/record/...", module + "internal/registry/...",
			module + "internal/config/..."},
	},
	{
		name:   "wire imports nothing of kiri",
		reason: "both ends share it; whatever it pulled in, both would contain",
		from:   []string{module + "internal/wire/..."},
		never:  []string{module + "..."},
	},
	{
		name:   "only the HTTP edge speaks HTTP to clients",
		reason: "status codes and API versions are one package's knowledge; the engine returns errors by their meaning",
		from:   []string{module + "internal/engine/...", module + "internal/record/..."},
		never:  []string{module + "internal/dockerapi/..."},
	},
	{
		name:   "the engine has no HTTP of its own",
		reason: "registries are internal/registry's, clients are internal/dockerapi's",
		from:   []string{module + "internal/engine"},
		never:  []string{"net/http"},
		direct: true,
	},
	{
		name:   "records and registries do not know the engine",
		reason: "imports point down: the engine uses them, and they can be tested alone",
		from:   []string{module + "internal/record/...", module + "internal/registry/..."},
		never:  []string{module + "internal/engine/...", module + "internal/dockerapi/..."},
	},
	{
		name:   "the parts of the agent do not know the agent",
		reason: "imports point down: internal/agent puts launch, rootfs, network and cgroup together",
		from:   []string{module + "internal/agent/launch/...", module + "internal/agent/rootfs/...", module + "internal/agent/network/...", module + "internal/agent/cgroup/..."},
		never:  []string{module + "internal/agent"},
	},
	{
		name: "no regular expressions before main",
		reason: "distribution/reference compiles eleven of them in every process that links it, 0.6 to 1.1 ms of each kiri command; " +
			"internal/reference does its work",
		from:  []string{module + "cmd/..."},
		never: []string{"github.com/distribution/reference"},
	},
	{
		name:     "machines are reached through wire",
		reason:   "nothing above wire asks which kind of agent it talks to",
		from:     []string{module + "internal/vm/..."},
		never:    []string{module + "internal/dockerapi/...", module + "internal/engine/..."},
		optional: true,
	},
}

type pkg struct {
	ImportPath string
	Imports    []string
	Deps       []string
	Standard   bool
	Incomplete bool
}

// list asks the go command for the packages of this module on a target.
func list(t *testing.T, goos, goarch string) []pkg {
	t.Helper()
	c := exec.Command("go", "list", "-e", "-json=ImportPath,Imports,Deps,Standard,Incomplete", "./...")
	c.Dir = "../.."
	c.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, &stderr)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

func matches(pattern, path string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "..."); ok {
		return strings.HasPrefix(path+"/", prefix)
	}
	return pattern == path
}

func matchesAny(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return matches(p, path) })
}

func TestImportRules(t *testing.T) {
	for _, target := range [][2]string{{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "arm64"}, {"windows", "amd64"}} {
		t.Run(target[0]+"/"+target[1], func(t *testing.T) {
			pkgs := list(t, target[0], target[1])
			for _, r := range rules {
				checked := 0
				for _, p := range pkgs {
					if !matchesAny(r.from, p.ImportPath) {
						continue
					}
					checked++
					deps := p.Deps
					if r.direct {
						deps = p.Imports
					}
					for _, d := range deps {
						if d != p.ImportPath && matchesAny(r.never, d) && !within(r, p.ImportPath, d) {
							t.Errorf("%s: %s imports %s\n  because %s\n  %s", r.name, p.ImportPath, d, r.reason, chain(pkgs, p.ImportPath, d))
						}
					}
				}
				if checked == 0 && !r.optional {
					t.Errorf("%s: no package matches %v: the rule checks nothing", r.name, r.from)
				}
			}
		})
	}
}

// within lets packages of one tree import each other where a rule names the tree on both sides.
func within(r rule, from, to string) bool {
	for _, f := range r.from {
		if strings.HasSuffix(f, "...") && matches(f, from) && matches(f, to) {
			return true
		}
	}
	return false
}

// chain finds one way by which a package comes to import another, for the message.
func chain(pkgs []pkg, from, to string) string {
	imports := map[string][]string{}
	for _, p := range pkgs {
		imports[p.ImportPath] = p.Imports
	}
	prev := map[string]string{from: ""}
	for queue := []string{from}; len(queue) > 0; queue = queue[1:] {
		p := queue[0]
		if slices.Contains(imports[p], to) {
			way := to
			for ; p != ""; p = prev[p] {
				way = p + " -> " + way
			}
			return way
		}
		for _, i := range imports[p] {
			if _, seen := prev[i]; !seen {
				prev[i] = p
				queue = append(queue, i)
			}
		}
	}
	return "through a package outside this module"
}

// TestRulesCanFail holds the matcher itself to examples, so that a rule that matches nothing is not taken for one that holds.
func TestRulesCanFail(t *testing.T) {
	for _, c := range []struct {
		pattern, path string
		want          bool
	}{
		{module + "internal/agent/...", module + "internal/agent", true},
		{module + "internal/agent/...", module + "internal/agent/launch", true},
		{module + "internal/agent/...", module + "internal/agents", false},
		{module + "internal/agent", module + "internal/agent/launch", false},
		{"net/http", "net/http", true},
		{"net/http", "net/http/httputil", false},
	} {
		if got := matches(c.pattern, c.path); got != c.want {
			t.Errorf("matches(%q, %q) = %v, want %v", c.pattern, c.path, got, c.want)
		}
	}
}
