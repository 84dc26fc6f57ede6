package dockerapi

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/moby/moby/api/types/container"

	"runkiri.com/kiri/internal/engine"
)

// statsChanges tell how a sample of GET /containers/{id}/stats differed.
var statsChanges = []change{
	{below: 52, drop: []string{"os_type"}},
}

// sendJSON writes one line of a stream of JSON values.
func (c *call) sendJSON(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encoding %T: %w", v, err)
	}
	return c.send(append(b, '\n'))
}

func containerAttach(c *call) error {
	opts := engine.AttachOptions{
		Stdin:      c.flag("stdin"),
		Stdout:     c.flag("stdout"),
		Stderr:     c.flag("stderr"),
		Logs:       c.flag("logs"),
		Stream:     c.flag("stream"),
		DetachKeys: c.arg("detachKeys"),
	}
	return c.s.engine.ContainerAttach(c.ctx, c.name, opts, c.takeOver)
}

func containerLogs(c *call) error {
	opts := engine.LogsOptions{
		Stdout:     c.flag("stdout"),
		Stderr:     c.flag("stderr"),
		Follow:     c.flag("follow"),
		Timestamps: c.flag("timestamps"),
		Details:    c.flag("details"),
		Tail:       c.arg("tail"),
	}
	if !opts.Stdout && !opts.Stderr {
		return invalidf("Bad parameters: you must choose at least one stream")
	}
	var err error
	if opts.Since, err = c.moment("since"); err != nil {
		return err
	}
	if c.version >= 35 {
		if opts.Until, err = c.moment("until"); err != nil {
			return err
		}
	}
	stream, tty, err := c.s.engine.ContainerLogs(c.ctx, c.name, opts)
	if err != nil {
		return err
	}
	c.begin(c.streamType(tty))
	return c.copy(stream)
}

func containerStats(c *call) error {
	oneShot := c.version >= 41 && c.flag("one-shot")
	if !c.flagOr("stream", true) {
		v, err := c.s.engine.ContainerStats(c.ctx, c.name, oneShot)
		if err != nil {
			return err
		}
		return c.shaped(v, statsChanges)
	}
	if oneShot {
		return invalidf("cannot have stream=true and one-shot=true")
	}
	err := c.s.engine.ContainerStatsStream(c.ctx, c.name, func(v *container.StatsResponse) error {
		line, err := shape(v, c.version, statsChanges)
		if err != nil {
			return err
		}
		if !c.began {
			c.begin("application/json")
		}
		return c.sendJSON(line)
	})
	if c.ctx.Err() != nil {
		return nil
	}
	if err == nil && !c.began {
		return c.empty(http.StatusOK)
	}
	return err
}

func containerExport(c *call) error {
	r, err := c.s.engine.ContainerExport(c.ctx, c.name)
	if err != nil {
		return err
	}
	c.begin("application/x-tar")
	return c.copy(r)
}
