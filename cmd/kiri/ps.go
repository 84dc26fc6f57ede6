package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"
)

func cmdPs() *command {
	return &command{
		name: "ps", long: []string{"container ls", "container list", "container ps"}, use: "[OPTIONS]", short: "List containers",
		example: "  kiri ps -a\n  kiri ps --filter label=app=web --format '{{.Names}}: {{.Status}}'", max: 0,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			o := &psFlags{filters: filters{}}
			f.BoolVarP(&o.all, "all", "a", false, "Show all containers (default shows just running)")
			f.VarP(filterValue{o.filters}, "filter", "f", "Filter output based on conditions provided")
			f.StringVar(&o.format, "format", "", formatHelp)
			f.IntVarP(&o.last, "last", "n", -1, "Show n last created containers (includes all states)")
			f.BoolVarP(&o.latest, "latest", "l", false, "Show the latest created container (includes all states)")
			f.BoolVar(&o.noTrunc, "no-trunc", false, "Don't truncate output")
			f.BoolVarP(&o.quiet, "quiet", "q", false, "Only display container IDs")
			f.BoolVarP(&o.size, "size", "s", false, "Display total file sizes")
			return func([]string) error { return c.ps(o) }
		},
	}
}

const formatHelp = "Format output: 'table', 'table TEMPLATE', 'json', or a Go TEMPLATE"

type psFlags struct {
	all, latest, noTrunc, quiet, size bool
	last                              int
	format                            string
	filters                           filters
}

// psItem is what `ps` shows of a container, in the words of the API.
type psItem struct {
	ID      string `json:"Id"`
	Names   []string
	Image   string
	ImageID string
	Command string
	Created int64
	State   string
	Status  string
	Labels  map[string]string
	SizeRw  int64
	SizeFs  int64 `json:"SizeRootFs"`
	Ports   []psPort
	Mounts  []struct{ Type, Name, Source string }

	NetworkSettings struct {
		Networks map[string]struct{}
	}
	ImageManifestDescriptor *struct {
		Platform *struct {
			Architecture string `json:"architecture"`
			OS           string `json:"os"`
			Variant      string `json:"variant"`
		} `json:"platform"`
	}
}

type psPort struct {
	IP          string
	PrivatePort uint16
	PublicPort  uint16
	Type        string
}

func (f filters) query() string {
	m := map[string]map[string]bool{}
	for k, vals := range f {
		m[k] = map[string]bool{}
		for _, v := range vals {
			m[k][v] = true
		}
	}
	b, err := json.Marshal(m)
	if err != nil {
		return "" // strings and booleans always encode
	}
	return string(b)
}

func (c *cli) ps(o *psFlags) error {
	cl, err := c.client()
	if err != nil {
		return err
	}
	format := o.format
	if format == "" && c.config.PsFormat != "" && !o.quiet {
		format = c.config.PsFormat
	}
	// A template that shows the whole row shows the size; asking for it costs the engine a walk, so nobody else does.
	size := o.size || strings.Contains(format, ".Size") || strings.Contains(format, "json .}}") || strings.Contains(format, "json . }}")
	q := url.Values{}
	if o.all {
		q.Set("all", "1")
	}
	switch {
	case o.latest && o.last == -1:
		q.Set("limit", "1")
	case o.last > 0:
		q.Set("limit", strconv.Itoa(o.last))
	}
	if size {
		q.Set("size", "1")
	}
	if len(o.filters) > 0 {
		q.Set("filters", o.filters.query())
	}
	var items []*psItem
	if err := cl.call("GET", "/containers/json", q, nil, &items); err != nil {
		return err
	}
	rows := make([]*psRow, len(items))
	for i, it := range items {
		rows[i] = &psRow{it, o.noTrunc, time.Now()}
	}
	if format == "" || format == "table" {
		format = psTable(o.quiet, o.size)
	}
	return printRows(c, format, psFields(), rows, func(r *psRow) any { return r })
}

func psTable(quiet, size bool) string {
	if quiet {
		return "{{.ID}}"
	}
	t := "table {{.ID}}\t{{.Image}}\t{{.Command}}\t{{.RunningFor}}\t{{.Status}}\t{{.Ports}}\t{{.Names}}"
	if size {
		t += "\t{{.Size}}"
	}
	return t
}

// psFields are in the order of their names, which is the order of `ps --format json`.
func psFields() []field[psRow] {
	return []field[psRow]{
		{"Command", "COMMAND", func(r *psRow) any { return r.Command() }},
		{"CreatedAt", "CREATED AT", func(r *psRow) any { return r.CreatedAt() }},
		{"ID", "CONTAINER ID", func(r *psRow) any { return r.ID() }},
		{"Image", "IMAGE", func(r *psRow) any { return r.Image() }},
		{"Labels", "LABELS", func(r *psRow) any { return r.Labels() }},
		{"LocalVolumes", "LOCAL VOLUMES", func(r *psRow) any { return r.LocalVolumes() }},
		{"Mounts", "MOUNTS", func(r *psRow) any { return r.Mounts() }},
		{"Names", "NAMES", func(r *psRow) any { return r.Names() }},
		{"Networks", "NETWORKS", func(r *psRow) any { return r.Networks() }},
		{"Platform", "PLATFORM", func(r *psRow) any { return r.Platform() }},
		{"Ports", "PORTS", func(r *psRow) any { return r.Ports() }},
		{"RunningFor", "CREATED", func(r *psRow) any { return r.RunningFor() }},
		{"Size", "SIZE", func(r *psRow) any { return r.Size() }},
		{"State", "STATE", func(r *psRow) any { return r.State() }},
		{"Status", "STATUS", func(r *psRow) any { return r.Status() }},
	}
}

// MarshalJSON makes {{json .}} the same as --format json.
func (r *psRow) MarshalJSON() ([]byte, error) { return rowJSON(psFields(), r) }

// psRow is one line of `ps`. Its methods are what templates call.
type psRow struct {
	it    *psItem
	whole bool
	now   time.Time
}

func (r *psRow) short(s string, n int) string {
	if r.whole {
		return s
	}
	return shorten(s, n)
}

// shorten cuts to n characters with an ellipsis as the last.
func shorten(s string, n int) string {
	runes := []rune(s)
	if len(runes) <= n {
		return s
	}
	return string(runes[:n-1]) + "…"
}

func shortID(id string) string {
	if _, hex, ok := strings.Cut(id, ":"); ok {
		id = hex
	}
	return truncate(id, 12)
}

func (r *psRow) ID() string {
	if r.whole {
		return r.it.ID
	}
	return shortID(r.it.ID)
}

func (r *psRow) Names() string {
	var out []string
	for _, n := range r.it.Names {
		n = strings.TrimPrefix(n, "/")
		// Links show as /other/name; without --no-trunc only the container's own name counts.
		if r.whole || !strings.Contains(n, "/") {
			out = append(out, n)
		}
	}
	return strings.Join(out, ",")
}

func (r *psRow) Image() string {
	switch {
	case r.it.Image == "":
		return "<no image>"
	case r.whole:
		return r.it.Image
	case truncate(strings.TrimPrefix(r.it.ImageID, "sha256:"), 12) == truncate(strings.TrimPrefix(r.it.Image, "sha256:"), 12):
		return shortID(r.it.Image)
	}
	if name, _, ok := strings.Cut(r.it.Image, "@"); ok && name != "" {
		return name
	}
	return r.it.Image
}

func (r *psRow) Command() string       { return strconv.Quote(r.short(r.it.Command, 20)) }
func (r *psRow) CreatedAt() string     { return time.Unix(r.it.Created, 0).String() }
func (r *psRow) RunningFor() string    { return ago(r.now, r.it.Created) }
func (r *psRow) State() string         { return r.it.State }
func (r *psRow) Status() string        { return r.it.Status }
func (r *psRow) Ports() string         { return portsText(r.it.Ports) }
func (r *psRow) Label(n string) string { return r.it.Labels[n] }

func ago(now time.Time, created int64) string {
	return units.HumanDuration(now.Sub(time.Unix(created, 0))) + " ago"
}

func (r *psRow) Labels() string {
	var out []string
	for _, k := range slices.Sorted(mapKeys(r.it.Labels)) {
		out = append(out, k+"="+r.it.Labels[k])
	}
	return strings.Join(out, ",")
}

func (r *psRow) LocalVolumes() string {
	n := 0
	for _, m := range r.it.Mounts {
		if m.Type == "volume" {
			n++
		}
	}
	return strconv.Itoa(n)
}

func (r *psRow) Mounts() string {
	var out []string
	for _, m := range r.it.Mounts {
		name := m.Name
		if name == "" {
			name = m.Source
		}
		out = append(out, r.short(name, 15))
	}
	return strings.Join(out, ",")
}

func (r *psRow) Networks() string {
	return strings.Join(slices.Sorted(mapKeys(r.it.NetworkSettings.Networks)), ",")
}

func (r *psRow) Platform() any {
	d := r.it.ImageManifestDescriptor
	if d == nil || d.Platform == nil {
		return nil
	}
	return d.Platform
}

func (r *psRow) Size() string {
	s := units.HumanSizeWithPrecision(float64(r.it.SizeRw), 3)
	if r.it.SizeFs > 0 {
		s += " (virtual " + units.HumanSizeWithPrecision(float64(r.it.SizeFs), 3) + ")"
	}
	return s
}

// portsText writes published ports as IP:8000-8002->80-82/tcp, neighbours joined into ranges, and the exposed ones as 80/tcp.
func portsText(ports []psPort) string {
	ports = slices.Clone(ports)
	sort.Slice(ports, func(i, j int) bool {
		a, b := ports[i], ports[j]
		if a.PrivatePort != b.PrivatePort {
			return a.PrivatePort < b.PrivatePort
		}
		if a.IP != b.IP {
			return a.IP < b.IP
		}
		if a.PublicPort != b.PublicPort {
			return a.PublicPort < b.PublicPort
		}
		return a.Type < b.Type
	})
	type span struct {
		ip, proto     string
		priv, privEnd uint16
		equal         bool
	}
	var spans []*span
	var mapped []string
	for _, p := range ports {
		if p.PublicPort != 0 && p.PublicPort != p.PrivatePort {
			// A mapping to another number stands alone.
			mapped = append(mapped, fmt.Sprintf("%s:%d->%d/%s", bracket(p.IP), p.PublicPort, p.PrivatePort, p.Type))
			continue
		}
		joined := false
		for _, s := range spans {
			if s.ip == p.IP && s.proto == p.Type && s.equal == (p.PublicPort != 0) && s.privEnd+1 == p.PrivatePort {
				s.privEnd, joined = p.PrivatePort, true
				break
			}
		}
		if !joined {
			spans = append(spans, &span{ip: p.IP, proto: p.Type, priv: p.PrivatePort, privEnd: p.PrivatePort, equal: p.PublicPort != 0})
		}
	}
	var out []string
	sort.SliceStable(spans, func(i, j int) bool { return spans[i].proto < spans[j].proto })
	for _, s := range spans {
		r := strconv.Itoa(int(s.priv))
		if s.privEnd != s.priv {
			r += "-" + strconv.Itoa(int(s.privEnd))
		}
		if s.equal {
			r = bracket(s.ip) + ":" + r + "->" + r
		}
		out = append(out, r+"/"+s.proto)
	}
	return strings.Join(append(out, mapped...), ", ")
}

func bracket(ip string) string {
	if a, err := netip.ParseAddr(ip); err == nil && a.Is6() {
		return "[" + ip + "]"
	}
	return ip
}
