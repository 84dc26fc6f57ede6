package dockerapi

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/moby/moby/api/types"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/engine"
)

// legacyEvent has the fields that were at the top of an event before it had an actor. The API dropped them in 1.52;
// until then tools wait for "status".
type legacyEvent struct {
	Status string `json:"status,omitempty"`
	ID     string `json:"id,omitempty"`
	From   string `json:"from,omitempty"`
	events.Message
}

func legacyForm(m events.Message) legacyEvent {
	e := legacyEvent{Message: m}
	switch m.Type {
	case events.ContainerEventType:
		e.Status, e.ID, e.From = string(m.Action), m.Actor.ID, m.Actor.Attributes["image"]
	case events.ImageEventType:
		e.Status, e.ID = string(m.Action), m.Actor.ID
	}
	return e
}

// eventTypes are the content types of the stream that a client may choose from; without a choice it is the first.
var eventTypes = []struct {
	since version
	name  string
}{
	{52, types.MediaTypeNDJSON},
	{53, types.MediaTypeJSONLines},
	{52, types.MediaTypeJSONSequence},
}

// eventType negotiates the content type of the stream.
func (c *call) eventType() string {
	if c.version < 52 {
		return types.MediaTypeJSON
	}
	best, quality := eventTypes[0].name, 0.0
	for _, header := range c.r.Header["Accept"] {
		for _, part := range strings.Split(header, ",") {
			name, params, _ := strings.Cut(part, ";")
			name = strings.ToLower(strings.TrimSpace(name))
			q := 1.0
			for _, p := range strings.Split(params, ";") {
				if v, ok := strings.CutPrefix(strings.TrimSpace(p), "q="); ok {
					q, _ = strconv.ParseFloat(v, 64)
				}
			}
			for _, t := range eventTypes {
				if t.name == name && c.version >= t.since && q > quality {
					best, quality = name, q
				}
			}
		}
	}
	return best
}

func systemEvents(c *call) error {
	filters, err := c.filters()
	if err != nil {
		return err
	}
	opts := engine.EventsOptions{Filters: filters}
	if opts.Since, err = c.moment("since"); err != nil {
		return err
	}
	if opts.Until, err = c.moment("until"); err != nil {
		return err
	}
	if !opts.Until.IsZero() && opts.Until.Before(opts.Since) {
		return invalidf("`since` time (%s) cannot be after `until` time (%s)", c.arg("since"), c.arg("until"))
	}
	ch, err := c.s.engine.Events(c.ctx, opts)
	if err != nil {
		return err
	}
	kind := c.eventType()
	c.begin(kind)
	for {
		select {
		case m, ok := <-ch:
			if !ok {
				return nil
			}
			line, err := c.eventLine(m, kind)
			if err != nil {
				return err
			}
			if err := c.send(line); err != nil {
				return nil // the client is gone
			}
		case <-c.ctx.Done():
			return nil
		}
	}
}

func (c *call) eventLine(m events.Message, kind string) ([]byte, error) {
	var v any = m
	if c.version < 52 {
		v = legacyForm(m)
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encoding an event: %w", err)
	}
	if kind == types.MediaTypeJSONSequence { // RFC 7464: a record separator before each text
		b = append([]byte{0x1e}, b...)
	}
	return append(b, '\n'), nil
}
