package engine

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
)

// listFilter is ContainerList's filters, read.
type listFilter struct {
	Filters
	exited          []int
	before, since   *ctr
	images          map[string]bool // of ancestor, by id; nil without one
	publish, expose map[string]bool
	byTask, isTask  bool
}

// ContainerList lists containers, the newest first.
func (e *Engine) ContainerList(ctx context.Context, opts ListOptions) ([]container.Summary, error) {
	f, err := e.listFilter(opts.Filters)
	if err != nil {
		return nil, err
	}
	all := opts.All || opts.Limit > 0 || f.has("status")
	type item struct {
		rec    containerRecord
		status container.ContainerState
	}
	var items []*item
	for _, c := range e.containers.all() {
		c.mu.Lock()
		it := &item{c.rec, c.status()}
		gone := c.removed
		c.mu.Unlock()
		if !gone {
			items = append(items, it)
		}
	}
	slices.SortFunc(items, func(a, b *item) int { return b.rec.Created.Compare(a.rec.Created) })
	l := []container.Summary{}
	skip := f.before != nil
	for i := range items {
		rec := &items[i].rec
		if skip {
			skip = rec.ID != f.before.id
			continue
		}
		if f.since != nil && rec.ID == f.since.id || opts.Limit > 0 && len(l) == opts.Limit {
			break
		}
		if !rec.State.Running && !all || !f.includes(rec, items[i].status) {
			continue
		}
		s := e.summary(rec, items[i].status)
		if !f.ports(s.Ports) {
			continue
		}
		if opts.Size {
			s.SizeRw = e.sizeRw(ctx, rec)
			s.SizeRootFs = s.SizeRw + e.imageSize(rec)
		}
		l = append(l, s)
	}
	return l, nil
}

func (e *Engine) listFilter(filters Filters) (*listFilter, error) {
	f := &listFilter{Filters: filters}
	err := filters.validate("ancestor", "before", "exited", "id", "isolation", "label", "name", "status", "health", "since", "volume",
		"network", "is-task", "publish", "expose")
	if err != nil {
		return nil, err
	}
	for _, v := range filters.get("exited") {
		code, err := strconv.Atoi(v)
		if err != nil {
			return nil, invalid("invalid filter 'exited=%s': %w", v, err)
		}
		f.exited = append(f.exited, code)
	}
	for _, v := range filters.get("status") {
		if err := container.ValidateContainerState(container.ContainerState(v)); err != nil {
			return nil, invalid("invalid filter 'status=%s': %w", v, err)
		}
	}
	for _, v := range filters.get("health") {
		if err := container.ValidateHealthStatus(container.HealthStatus(v)); err != nil {
			return nil, invalid("invalid filter 'health=%s': %w", v, err)
		}
	}
	f.byTask = filters.has("is-task")
	if f.isTask, err = filters.boolean("is-task", false); err != nil {
		return nil, err
	}
	for _, edge := range []struct {
		name string
		c    **ctr
	}{{"before", &f.before}, {"since", &f.since}} {
		for _, v := range filters.get(edge.name) {
			if *edge.c, err = e.containers.get(v); err != nil {
				return nil, err
			}
		}
	}
	if filters.has("ancestor") {
		f.images = map[string]bool{}
		for _, v := range filters.get("ancestor") {
			if img, err := e.images.resolve(v, ""); err == nil {
				f.images[img.ID] = true
			}
		}
	}
	for _, p := range []struct {
		name string
		set  *map[string]bool
	}{{"publish", &f.publish}, {"expose", &f.expose}} {
		*p.set = map[string]bool{}
		for _, v := range filters.get(p.name) {
			if strings.Contains(v, ":") {
				return nil, invalid("filter for '%s' should not contain ':': %s", p.name, v)
			}
			r, err := network.ParsePortRange(v)
			if err != nil {
				return nil, invalid("error while looking up for %s %s: %w", p.name, v, err)
			}
			for port := range r.All() {
				(*p.set)[port.String()] = true
			}
		}
	}
	return f, nil
}

func (f *listFilter) includes(rec *containerRecord, status container.ContainerState) bool {
	if len(f.Filters) == 0 {
		return true
	}
	s := &rec.State
	if !f.match("name", rec.Name) && !f.match("name", "/"+rec.Name) || !f.idPrefix(rec.ID) || !f.labels("label", rec.Config.Labels) {
		return false
	}
	if f.byTask && f.isTask || !f.exact("isolation", string(rec.Host.Isolation)) && !f.Filters["isolation"]["default"] {
		return false // no container is a swarm's task
	}
	if len(f.exited) > 0 && (s.Running || s.StartedAt.IsZero() || !slices.Contains(f.exited, s.ExitCode)) {
		return false
	}
	health := container.NoHealthcheck
	if s.Health != nil {
		health = s.Health.Status
	}
	if !f.exact("status", string(status)) || !f.exact("health", string(health)) {
		return false
	}
	if f.has("volume") && !slices.ContainsFunc(rec.Mounts, func(m mountPoint) bool {
		want := f.Filters["volume"]
		return want[m.Destination] || m.Name != "" && want[m.Name] || m.Name == "" && want[m.Source]
	}) {
		return false
	}
	if f.images != nil && !f.images[rec.Image] {
		return false
	}
	if f.has("network") {
		id, name := networkOf(rec)
		found := false
		for v := range f.Filters["network"] {
			found = found || v == name || v != "" && strings.HasPrefix(id, v)
		}
		return found
	}
	return true
}

func (f *listFilter) idPrefix(id string) bool {
	if !f.has("id") {
		return true
	}
	for v := range f.Filters["id"] {
		if v != "" && strings.HasPrefix(id, v) {
			return true
		}
	}
	return false
}

func (f *listFilter) ports(ports []container.PortSummary) bool {
	if len(f.publish)+len(f.expose) == 0 {
		return true
	}
	return slices.ContainsFunc(ports, func(p container.PortSummary) bool {
		return f.publish[fmt.Sprintf("%d/%s", p.PublicPort, p.Type)] || f.expose[fmt.Sprintf("%d/%s", p.PrivatePort, p.Type)]
	})
}

func (e *Engine) summary(rec *containerRecord, status container.ContainerState) container.Summary {
	s := container.Summary{
		ID: rec.ID, Names: []string{"/" + rec.Name}, Image: e.imageName(rec), ImageID: rec.Image, Command: command(rec),
		Created: rec.Created.Unix(), Ports: portSummaries(rec), Labels: rec.Config.Labels, State: status,
		Status: statusText(rec, status, time.Now()), Mounts: apiMounts(rec),
		Health:          &container.HealthSummary{Status: container.NoHealthcheck},
		NetworkSettings: &container.NetworkSettingsSummary{Networks: rec.Networks},
	}
	if h := rec.State.Health; h != nil {
		s.Health = &container.HealthSummary{Status: h.Status, FailingStreak: h.FailingStreak}
	}
	s.HostConfig.NetworkMode, s.HostConfig.Annotations = string(rec.Host.NetworkMode), rec.Host.Annotations
	return s
}

// imageName is the image as it was named at create, or its id if that name means another image by now.
func (e *Engine) imageName(rec *containerRecord) string {
	img, err := e.images.resolve(rec.Config.Image, "")
	if err != nil || img.ID != rec.Image {
		return rec.Image
	}
	return rec.Config.Image
}

func command(rec *containerRecord) string {
	var b strings.Builder
	b.WriteString(rec.Path)
	for _, a := range rec.Args {
		if strings.Contains(a, " ") {
			a = "'" + a + "'"
		}
		b.WriteString(" " + a)
	}
	return b.String()
}

func portSummaries(rec *containerRecord) []container.PortSummary {
	l := []container.PortSummary{}
	for p, bindings := range portMap(rec) {
		if len(bindings) == 0 {
			l = append(l, container.PortSummary{PrivatePort: p.Num(), Type: string(p.Proto())})
		}
		for _, b := range bindings {
			n, _ := strconv.ParseUint(b.HostPort, 10, 16)
			l = append(l, container.PortSummary{IP: b.HostIP, PrivatePort: p.Num(), PublicPort: uint16(n), Type: string(p.Proto())})
		}
	}
	slices.SortFunc(l, func(a, b container.PortSummary) int {
		if a.PrivatePort != b.PrivatePort {
			return int(a.PrivatePort) - int(b.PrivatePort)
		}
		if a.Type != b.Type {
			return strings.Compare(a.Type, b.Type)
		}
		return netip.Addr.Compare(a.IP, b.IP)
	})
	return l
}

// statusText is the state in words, as `docker ps` shows it.
func statusText(rec *containerRecord, status container.ContainerState, now time.Time) string {
	s := &rec.State
	up := "Up " + units.HumanDuration(now.Sub(s.StartedAt))
	switch status {
	case container.StatePaused:
		return up + " (Paused)"
	case container.StateRestarting:
		return fmt.Sprintf("Restarting (%d) %s ago", s.ExitCode, units.HumanDuration(now.Sub(s.FinishedAt)))
	case container.StateRunning:
		if s.Health == nil {
			return up
		}
		if s.Health.Status == container.Starting {
			return up + " (health: starting)"
		}
		return up + " (" + string(s.Health.Status) + ")"
	case container.StateRemoving:
		return "Removal In Progress"
	case container.StateDead:
		return "Dead"
	case container.StateCreated:
		return "Created"
	}
	if s.FinishedAt.IsZero() {
		return ""
	}
	return fmt.Sprintf("Exited (%d) %s ago", s.ExitCode, units.HumanDuration(now.Sub(s.FinishedAt)))
}
