package dockerapi

import (
	"net/http"

	"github.com/moby/moby/api/types/container"

	"runkiri.com/kiri/internal/engine"
)

func execCreate(c *call) error {
	var body struct {
		container.ExecCreateRequest
		Cmd words
	}
	if err := c.readJSON(&body); err != nil {
		return err
	}
	req := &body.ExecCreateRequest
	if req.Cmd = body.Cmd; len(req.Cmd) == 0 {
		return invalidf("No exec command specified")
	}
	if c.version < 42 {
		req.ConsoleSize = nil
	}
	if c.version < 35 {
		req.WorkingDir = ""
	}
	if c.version < 25 {
		req.Env = nil
	}
	id, err := c.s.engine.ExecCreate(c.ctx, c.name, req)
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, container.ExecCreateResponse{ID: id})
}

func execStart(c *call) error {
	var req container.ExecStartRequest
	if err := c.readJSON(&req); err != nil {
		return err
	}
	if c.version < 42 || !req.Tty {
		req.ConsoleSize = nil
	}
	opts := engine.ExecStartOptions{Detach: req.Detach, Tty: req.Tty, ConsoleSize: req.ConsoleSize}
	if err := c.s.engine.ExecStart(c.ctx, c.name, opts, c.takeOver); err != nil {
		return err
	}
	if c.conn == nil {
		return c.empty(http.StatusOK)
	}
	return nil
}

func execInspect(c *call) error {
	v, err := c.s.engine.ExecInspect(c.ctx, c.name)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}

func execResize(c *call) error {
	height, width, err := c.size()
	if err != nil {
		return err
	}
	if err := c.s.engine.ExecResize(c.ctx, c.name, height, width); err != nil {
		return err
	}
	return c.empty(http.StatusOK)
}
