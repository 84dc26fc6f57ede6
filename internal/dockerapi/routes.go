package dockerapi

import (
	"strings"
)

// route is one endpoint. {name} in a pattern stands for anything that is not empty, slashes too: image and plugin
// names have them.
type route struct {
	method, pattern string
	since           version           // the first API version that has it; 0 for all
	handle          func(*call) error // nil: not built
	what            string            // what is not built, for the message
	finish          bool              // goes on when the client hangs up, so that no half of it is left
}

// routes is every endpoint of the Engine API from 1.24 on, as the API module's swagger.yaml lists them by tag;
// a test compares the two.
var routes = []route{
	{method: "GET", pattern: "/containers/json", handle: containerList},
	{method: "POST", pattern: "/containers/create", handle: containerCreate, finish: true},
	{method: "GET", pattern: "/containers/{id}/json", handle: containerInspect},
	{method: "GET", pattern: "/containers/{id}/top", handle: containerTop},
	{method: "GET", pattern: "/containers/{id}/logs", handle: containerLogs},
	{method: "GET", pattern: "/containers/{id}/changes", handle: containerDiff},
	{method: "GET", pattern: "/containers/{id}/export", handle: containerExport},
	{method: "GET", pattern: "/containers/{id}/stats", handle: containerStats},
	{method: "POST", pattern: "/containers/{id}/resize", handle: containerResize},
	{method: "POST", pattern: "/containers/{id}/start", handle: containerStart, finish: true},
	{method: "POST", pattern: "/containers/{id}/stop", handle: containerStop, finish: true},
	{method: "POST", pattern: "/containers/{id}/restart", handle: containerRestart, finish: true},
	{method: "POST", pattern: "/containers/{id}/kill", handle: containerKill, finish: true},
	{method: "POST", pattern: "/containers/{id}/update", handle: containerUpdate, finish: true},
	{method: "POST", pattern: "/containers/{id}/rename", handle: containerRename, finish: true},
	{method: "POST", pattern: "/containers/{id}/pause", handle: containerPause, finish: true},
	{method: "POST", pattern: "/containers/{id}/unpause", handle: containerUnpause, finish: true},
	{method: "POST", pattern: "/containers/{id}/attach", handle: containerAttach, finish: true},
	{method: "GET", pattern: "/containers/{id}/attach/ws", handle: containerAttachWS},
	{method: "POST", pattern: "/containers/{id}/wait", handle: containerWait},
	{method: "DELETE", pattern: "/containers/{id}", handle: containerRemove, finish: true},
	{method: "HEAD", pattern: "/containers/{id}/archive", handle: containerArchiveStat},
	{method: "GET", pattern: "/containers/{id}/archive", handle: containerArchiveGet},
	{method: "PUT", pattern: "/containers/{id}/archive", handle: containerArchivePut},
	{method: "POST", pattern: "/containers/prune", since: 25, handle: containersPrune, finish: true},
	{method: "GET", pattern: "/containers/{id}/checkpoints", since: 25, what: "checkpoint"},
	{method: "POST", pattern: "/containers/{id}/checkpoints", since: 25, what: "checkpoint"},
	{method: "POST", pattern: "/commit", handle: containerCommit, finish: true},

	{method: "POST", pattern: "/containers/{id}/exec", handle: execCreate, finish: true},
	{method: "POST", pattern: "/exec/{id}/start", handle: execStart, finish: true},
	{method: "POST", pattern: "/exec/{id}/resize", handle: execResize},
	{method: "GET", pattern: "/exec/{id}/json", handle: execInspect},

	{method: "GET", pattern: "/images/json", handle: imageList},
	{method: "POST", pattern: "/images/create", handle: imageCreate},
	{method: "GET", pattern: "/images/{name}/json", handle: imageInspect},
	{method: "GET", pattern: "/images/{name}/attestations", since: 55, what: "image attestations"},
	{method: "GET", pattern: "/images/{name}/history", handle: imageHistory},
	{method: "POST", pattern: "/images/{name}/push", what: "image push"},
	{method: "POST", pattern: "/images/{name}/tag", handle: imageTag, finish: true},
	{method: "DELETE", pattern: "/images/{name}", handle: imageRemove, finish: true},
	{method: "GET", pattern: "/images/search", what: "image search"},
	{method: "POST", pattern: "/images/prune", since: 25, handle: imagesPrune, finish: true},
	{method: "GET", pattern: "/images/{name}/get", what: "image save"},
	{method: "GET", pattern: "/images/get", what: "image save"},
	{method: "POST", pattern: "/images/load", what: "image load"},
	{method: "GET", pattern: "/distribution/{name}/json", since: 30, what: "distribution inspect"},

	{method: "POST", pattern: "/build", what: "build"},
	{method: "POST", pattern: "/build/prune", since: 31, handle: buildPrune},
	{method: "POST", pattern: "/build/cancel", since: 39, what: "build cancel"},
	{method: "POST", pattern: "/session", since: 31, what: "build session"},
	{method: "POST", pattern: "/grpc", since: 31, what: "build over grpc"},

	{method: "GET", pattern: "/volumes", handle: volumeList},
	{method: "POST", pattern: "/volumes/create", handle: volumeCreate, finish: true},
	{method: "GET", pattern: "/volumes/{name}", handle: volumeInspect},
	{method: "PUT", pattern: "/volumes/{name}", since: 42, what: "cluster volume update"},
	{method: "DELETE", pattern: "/volumes/{name}", handle: volumeRemove, finish: true},
	{method: "POST", pattern: "/volumes/prune", since: 25, handle: volumesPrune, finish: true},

	{method: "GET", pattern: "/networks", handle: networkList},
	{method: "GET", pattern: "/networks/", handle: networkList},
	{method: "GET", pattern: "/networks/{id}", handle: networkInspect},
	{method: "DELETE", pattern: "/networks/{id}", handle: networkRemove, finish: true},
	{method: "POST", pattern: "/networks/create", handle: networkCreate, finish: true},
	{method: "POST", pattern: "/networks/{id}/connect", handle: networkConnect, finish: true},
	{method: "POST", pattern: "/networks/{id}/disconnect", handle: networkDisconnect, finish: true},
	{method: "POST", pattern: "/networks/prune", since: 25, handle: networksPrune, finish: true},

	{method: "POST", pattern: "/auth", handle: systemAuth},
	{method: "GET", pattern: "/info", handle: systemInfo},
	{method: "GET", pattern: "/version", handle: systemVersion},
	{method: "GET", pattern: "/_ping", handle: systemPing},
	{method: "HEAD", pattern: "/_ping", handle: systemPing},
	{method: "GET", pattern: "/events", handle: systemEvents},
	{method: "GET", pattern: "/system/df", since: 25, handle: systemDiskUsage},
	{method: "OPTIONS", pattern: "/{path}", handle: func(c *call) error { return c.empty(200) }},

	{method: "GET", pattern: "/plugins", since: 25, what: "plugins"},
	{method: "GET", pattern: "/plugins/privileges", since: 25, what: "plugins"},
	{method: "POST", pattern: "/plugins/pull", since: 25, what: "plugins"},
	{method: "GET", pattern: "/plugins/{name}/json", since: 25, what: "plugins"},
	{method: "DELETE", pattern: "/plugins/{name}", since: 25, what: "plugins"},
	{method: "POST", pattern: "/plugins/{name}/enable", since: 25, what: "plugins"},
	{method: "POST", pattern: "/plugins/{name}/disable", since: 25, what: "plugins"},
	{method: "POST", pattern: "/plugins/{name}/upgrade", since: 26, what: "plugins"},
	{method: "POST", pattern: "/plugins/create", since: 25, what: "plugins"},
	{method: "POST", pattern: "/plugins/{name}/push", since: 25, what: "plugins"},
	{method: "POST", pattern: "/plugins/{name}/set", since: 25, what: "plugins"},

	{method: "GET", pattern: "/nodes", what: "swarm"},
	{method: "GET", pattern: "/nodes/{id}", what: "swarm"},
	{method: "DELETE", pattern: "/nodes/{id}", what: "swarm"},
	{method: "POST", pattern: "/nodes/{id}/update", what: "swarm"},
	{method: "GET", pattern: "/swarm", what: "swarm"},
	{method: "POST", pattern: "/swarm/init", what: "swarm"},
	{method: "POST", pattern: "/swarm/join", what: "swarm"},
	{method: "POST", pattern: "/swarm/leave", what: "swarm"},
	{method: "POST", pattern: "/swarm/update", what: "swarm"},
	{method: "GET", pattern: "/swarm/unlockkey", what: "swarm"},
	{method: "POST", pattern: "/swarm/unlock", what: "swarm"},
	{method: "GET", pattern: "/services", what: "swarm"},
	{method: "POST", pattern: "/services/create", what: "swarm"},
	{method: "GET", pattern: "/services/{id}", what: "swarm"},
	{method: "DELETE", pattern: "/services/{id}", what: "swarm"},
	{method: "POST", pattern: "/services/{id}/update", what: "swarm"},
	{method: "GET", pattern: "/services/{id}/logs", since: 25, what: "swarm"},
	{method: "GET", pattern: "/tasks", what: "swarm"},
	{method: "GET", pattern: "/tasks/{id}", what: "swarm"},
	{method: "GET", pattern: "/tasks/{id}/logs", since: 29, what: "swarm"},
	{method: "GET", pattern: "/secrets", since: 25, what: "swarm secrets"},
	{method: "POST", pattern: "/secrets/create", since: 25, what: "swarm secrets"},
	{method: "GET", pattern: "/secrets/{id}", since: 25, what: "swarm secrets"},
	{method: "DELETE", pattern: "/secrets/{id}", since: 25, what: "swarm secrets"},
	{method: "POST", pattern: "/secrets/{id}/update", since: 25, what: "swarm secrets"},
	{method: "GET", pattern: "/configs", since: 30, what: "swarm configs"},
	{method: "POST", pattern: "/configs/create", since: 30, what: "swarm configs"},
	{method: "GET", pattern: "/configs/{id}", since: 30, what: "swarm configs"},
	{method: "DELETE", pattern: "/configs/{id}", since: 30, what: "swarm configs"},
	{method: "POST", pattern: "/configs/{id}/update", since: 30, what: "swarm configs"},

	// kiri's own: the printed launch program of a running container, for `kiri debug plan`.
	{method: "GET", pattern: "/kiri/containers/{id}/plan", handle: containerPlan},
}

// routeIndex finds routes without allocating. Patterns without a name are looked up whole, the others by their
// method and first segment.
type routeIndex struct {
	exact map[routeKey]*route
	named map[routeKey][]namedRoute
}

type routeKey struct{ method, path string }

type namedRoute struct {
	prefix, suffix string // around the name
	route          *route
}

func indexRoutes(table []route) *routeIndex {
	x := &routeIndex{exact: map[routeKey]*route{}, named: map[routeKey][]namedRoute{}}
	for i := range table {
		rt := &table[i]
		prefix, rest, named := strings.Cut(rt.pattern, "{")
		if !named {
			x.exact[routeKey{rt.method, rt.pattern}] = rt
			continue
		}
		_, suffix, _ := strings.Cut(rest, "}")
		key := routeKey{rt.method, firstSegment(prefix)}
		x.named[key] = append(x.named[key], namedRoute{prefix, suffix, rt})
	}
	return x
}

func firstSegment(path string) string {
	if i := strings.IndexByte(path[1:], '/'); i >= 0 {
		return path[:i+1]
	}
	return path
}

// find returns the route for a path without its version, and what stands for the name. A known path with another
// method is not found either, as in Docker.
func (x *routeIndex) find(method, path string) (*route, string) {
	if len(path) == 0 || path[0] != '/' {
		return nil, ""
	}
	if rt := x.exact[routeKey{method, path}]; rt != nil {
		return rt, ""
	}
	if rt, name := longest(x.named[routeKey{method, firstSegment(path)}], path); rt != nil {
		return rt, name
	}
	return longest(x.named[routeKey{method, "/"}], path)
}

// longest returns the route whose suffix is the longest that path has: GET /containers/x/attach/ws is no inspect.
func longest(routes []namedRoute, path string) (best *route, name string) {
	suffix := -1
	for i := range routes {
		n := &routes[i]
		if len(n.suffix) > suffix && len(path) > len(n.prefix)+len(n.suffix) &&
			strings.HasPrefix(path, n.prefix) && strings.HasSuffix(path, n.suffix) {
			best, name, suffix = n.route, path[len(n.prefix):len(path)-len(n.suffix)], len(n.suffix)
		}
	}
	return best, name
}
