package bench

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Engine is something that answers the Docker Engine API on a unix socket.
type Engine struct {
	Name   string // as printed: "kiri", "Docker Engine", ...
	Key    string // as given to --only: "kiri", "docker", ...
	Socket string // path
}

// known lists the engines by the places where their sockets are found, most telling first. Paths begin with ~ for the
// home directory and may use $XDG_RUNTIME_DIR.
var known = []struct {
	name, key string
	sockets   []string
}{
	{"kiri", "kiri", []string{"~/.kiri/run/docker.sock", "/run/kiri/docker.sock"}},
	{"Docker Engine", "docker", []string{"/var/run/docker.sock", "$XDG_RUNTIME_DIR/docker.sock"}},
	{"Docker Desktop", "desktop", []string{"~/.docker/desktop/docker.sock", "~/.docker/run/docker.sock"}},
	{"OrbStack", "orbstack", []string{"~/.orbstack/run/docker.sock"}},
	{"Podman", "podman", []string{"$XDG_RUNTIME_DIR/podman/podman.sock", "/run/podman/podman.sock"}},
	{"Colima", "colima", []string{"~/.colima/default/docker.sock", "~/.config/colima/default/docker.sock"}},
	{"Rancher Desktop", "rancher", []string{"~/.rd/docker.sock"}},
}

// Find returns the engines whose socket answers, in the order of the known list, followed by those of extra
// ("name=path", which also replaces a known engine of that key). kiriSocket, if not "", is where kiri is looked for.
func Find(kiriSocket string, extra []string) ([]Engine, error) {
	given := map[string]string{}
	var order []string
	for _, e := range extra {
		name, path, ok := strings.Cut(e, "=")
		if !ok || name == "" || path == "" {
			return nil, fmt.Errorf("--socket %q: want name=path, such as podman=/run/podman/podman.sock", e)
		}
		given[name] = path
		order = append(order, name)
	}
	home, _ := os.UserHomeDir()
	var found []Engine
	real := map[string]bool{} // one engine may be reachable by several paths
	for _, k := range known {
		paths := k.sockets
		if k.key == "kiri" && kiriSocket != "" {
			paths = []string{kiriSocket}
		}
		if p, ok := given[k.key]; ok {
			paths = []string{p}
			delete(given, k.key)
		}
		for _, p := range paths {
			p = os.ExpandEnv(p)
			if rest, ok := strings.CutPrefix(p, "~/"); ok {
				p = filepath.Join(home, rest)
			}
			target, err := filepath.EvalSymlinks(p)
			if err != nil || real[target] || !answers(p) {
				continue
			}
			real[target] = true
			found = append(found, Engine{Name: k.name, Key: k.key, Socket: p})
			break
		}
	}
	for _, name := range order {
		p, ok := given[name]
		if !ok {
			continue
		}
		if !answers(p) {
			return nil, fmt.Errorf("--socket %s=%s: nothing answers there", name, p)
		}
		found = append(found, Engine{Name: name, Key: name, Socket: p})
	}
	return found, nil
}

func answers(path string) bool {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return false
	}
	c.Close()
	return true
}
