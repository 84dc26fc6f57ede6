package engine

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/moby/moby/api/types/events"
	"runkiri.com/kiri/internal/reference"
)

const (
	pastEvents     = 256  // kept for `since`, as many as Docker keeps
	subscriberRoom = 1024 // events a reader may lag behind before it is cut off
)

// eventLog keeps the last events and hands new ones to those who listen. Publishing never blocks: a reader that does
// not keep up loses its subscription (its channel is closed), not single events.
type eventLog struct {
	mu   sync.Mutex
	past []events.Message // ring of pastEvents
	next int              // where the next one goes, once the ring is full
	subs map[*subscription]bool
	last int64 // TimeNano of the newest: times never go back, so that order in time is order of events
	n    atomic.Int32
}

type subscription struct {
	filters Filters
	ch      chan events.Message
}

// publish tells an event to all who listen.
func (l *eventLog) publish(typ events.Type, action events.Action, id string, attributes map[string]string) {
	m := events.Message{Type: typ, Action: action, Actor: events.Actor{ID: id, Attributes: attributes}, Scope: "local"}
	l.mu.Lock()
	defer l.mu.Unlock()
	at := max(time.Now().UnixNano(), l.last+1)
	l.last = at
	m.Time, m.TimeNano = at/1e9, at
	if len(l.past) < pastEvents {
		l.past = append(l.past, m)
	} else {
		l.past[l.next] = m
		l.next = (l.next + 1) % pastEvents
	}
	for s := range l.subs {
		if !s.filters.event(m) {
			continue
		}
		select {
		case s.ch <- m:
		default:
			l.drop(s)
		}
	}
}

// drop ends a subscription. mu is held.
func (l *eventLog) drop(s *subscription) {
	if l.subs[s] {
		delete(l.subs, s)
		l.n.Add(-1)
		close(s.ch)
	}
}

// subscribe returns the past events from since on that pass the filters and, if live, a subscription to those that
// follow, with none lost or doubled between the two.
func (l *eventLog) subscribe(since, until time.Time, filters Filters, live bool) ([]events.Message, *subscription) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var past []events.Message
	if !since.IsZero() || !until.IsZero() {
		for i := range l.past {
			m := l.past[(l.next+i)%len(l.past)]
			if !since.IsZero() && m.TimeNano < since.UnixNano() || !until.IsZero() && m.TimeNano > until.UnixNano() || !filters.event(m) {
				continue
			}
			past = append(past, m)
		}
	}
	if !live {
		return past, nil
	}
	s := &subscription{filters: filters, ch: make(chan events.Message, subscriberRoom)}
	l.subs[s] = true
	l.n.Add(1)
	return past, s
}

func (l *eventLog) unsubscribe(s *subscription) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(s)
}

// Events gives past and coming events in order; the channel is closed when Until is reached, ctx ends, or the
// reader is so slow that events would be lost.
func (e *Engine) Events(ctx context.Context, opts EventsOptions) (<-chan events.Message, error) {
	now := time.Now()
	if !opts.Until.IsZero() && !opts.Since.IsZero() && opts.Since.After(opts.Until) {
		return nil, invalid("`since` time (%d) cannot be after `until` time (%d)", opts.Since.Unix(), opts.Until.Unix())
	}
	live := opts.Until.IsZero() || opts.Until.After(now)
	past, sub := e.events.subscribe(opts.Since, opts.Until, opts.Filters, live)
	out := make(chan events.Message, 16)
	go func() {
		defer close(out)
		for _, m := range past {
			select {
			case out <- m:
			case <-ctx.Done():
				if sub != nil {
					e.events.unsubscribe(sub)
				}
				return
			}
		}
		if sub == nil {
			return
		}
		defer e.events.unsubscribe(sub)
		var end <-chan time.Time
		if !opts.Until.IsZero() {
			t := time.NewTimer(time.Until(opts.Until))
			defer t.Stop()
			end = t.C
		}
		for {
			select {
			case m, ok := <-sub.ch:
				if !ok {
					return
				}
				select {
				case out <- m:
				case <-ctx.Done():
					return
				}
			case <-end:
				for { // what happened before the end and is still in the channel
					select {
					case m, ok := <-sub.ch:
						if !ok || m.TimeNano > opts.Until.UnixNano() {
							return
						}
						select {
						case out <- m:
						case <-ctx.Done():
							return
						}
					default:
						return
					}
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

// event tells whether m passes: values of one kind are or-ed, kinds are and-ed, labels are and-ed.
func (f Filters) event(m events.Message) bool {
	if len(f) == 0 {
		return true
	}
	if f.has("event") && !f["event"][string(m.Action)] {
		// exec_create, exec_start and health_status carry more behind a colon: the bare word finds them all.
		word, _, more := strings.Cut(string(m.Action), ":")
		if !more || !f["event"][word] {
			return false
		}
	}
	if !f.exact("type", string(m.Type)) || !f.exact("scope", m.Scope) || !f.labels("label", m.Actor.Attributes) {
		return false
	}
	for _, kind := range []events.Type{
		events.ContainerEventType, events.DaemonEventType, events.NetworkEventType, events.VolumeEventType,
		events.PluginEventType, events.ServiceEventType, events.NodeEventType, events.SecretEventType, events.ConfigEventType,
	} {
		if f.has(string(kind)) && (m.Type != kind || !f.nameOrPrefix(string(kind), m.Actor.ID, m.Actor.Attributes["name"])) {
			return false
		}
	}
	return f.eventImage(m)
}

// nameOrPrefix tells whether one of the values is the name or begins the id.
func (f Filters) nameOrPrefix(kind, id, name string) bool {
	for v := range f[kind] {
		if v == name || v != "" && strings.HasPrefix(id, v) || strings.HasPrefix(name, v) {
			return true
		}
	}
	return false
}

// eventImage matches an image's own events and those of containers made of it, with or without the tag.
func (f Filters) eventImage(m events.Message) bool {
	if !f.has("image") {
		return true
	}
	attribute := "image"
	if m.Type == events.ImageEventType {
		attribute = "name"
	}
	name := m.Actor.Attributes[attribute]
	return slices.ContainsFunc([]string{m.Actor.ID, name, withoutTag(m.Actor.ID), withoutTag(name)}, func(s string) bool {
		return s != "" && f["image"][s]
	})
}

func withoutTag(image string) string {
	ref, err := reference.ParseNormalizedNamed(image)
	if err != nil {
		return image
	}
	return reference.FamiliarName(ref)
}

// containerEvent publishes an event of a container with its labels, image and name beside attributes, given as key
// and value in turn.
func (e *Engine) containerEvent(c *ctr, action events.Action, attributes ...string) {
	rec := c.snapshot()
	e.containerEventOf(&rec, action, attributes...)
}

func (e *Engine) containerEventOf(rec *containerRecord, action events.Action, attributes ...string) {
	m := make(map[string]string, len(rec.Config.Labels)+2+len(attributes)/2)
	for i := 0; i+1 < len(attributes); i += 2 {
		m[attributes[i]] = attributes[i+1]
	}
	maps.Copy(m, rec.Config.Labels)
	if rec.Config.Image != "" {
		m["image"] = rec.Config.Image
	}
	m["name"] = rec.Name
	e.events.publish(events.ContainerEventType, action, rec.ID, m)
}
