package dockerapi

import (
	"net/http"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/network"
)

// networkChanges tell how a network differed, in the list as well as alone.
var networkChanges = []change{
	{below: 52, drop: []string{"Status"}},
	{below: 48, drop: []string{"EnableIPv4"}},
}

func networkList(c *call) error {
	filters, err := c.filters()
	if err != nil {
		return err
	}
	l, err := c.s.engine.NetworkList(c.ctx, filters)
	if err != nil {
		return err
	}
	if c.version >= 28 {
		return c.shaped(list(l), networkChanges)
	}
	// Up to API 1.27 the list told each network's containers too.
	whole := make([]*network.Inspect, 0, len(l))
	for _, n := range l {
		v, err := c.s.engine.NetworkInspect(c.ctx, n.ID, "", false)
		switch {
		case cerrdefs.IsNotFound(err): // removed since
		case err != nil:
			return err
		default:
			whole = append(whole, v)
		}
	}
	return c.shaped(whole, networkChanges)
}

func networkInspect(c *call) error {
	scope := ""
	if c.version >= 31 {
		scope = c.arg("scope")
	}
	v, err := c.s.engine.NetworkInspect(c.ctx, c.name, scope, c.version >= 28 && c.flag("verbose"))
	if err != nil {
		return err
	}
	return c.shaped(v, networkChanges)
}

func networkCreate(c *call) error {
	var req network.CreateRequest
	if !c.hasBody() {
		return invalidf("invalid JSON: got EOF while reading request body")
	}
	if err := c.readJSON(&req); err != nil {
		return err
	}
	if c.version < 48 {
		req.EnableIPv4 = nil
	}
	v, err := c.s.engine.NetworkCreate(c.ctx, &req)
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, v)
}

func networkRemove(c *call) error {
	if err := c.s.engine.NetworkRemove(c.ctx, c.name); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

func networkConnect(c *call) error {
	var req network.ConnectRequest
	if err := c.readJSON(&req); err != nil {
		return err
	}
	if ep := req.EndpointConfig; ep != nil {
		if c.version < 44 {
			ep.MacAddress = nil
		}
		if c.version < 48 {
			ep.GwPriority = 0
		}
	}
	if err := c.s.engine.NetworkConnect(c.ctx, c.name, &req); err != nil {
		return err
	}
	return c.empty(http.StatusOK)
}

func networkDisconnect(c *call) error {
	var req network.DisconnectRequest
	if err := c.readJSON(&req); err != nil {
		return err
	}
	if err := c.s.engine.NetworkDisconnect(c.ctx, c.name, &req); err != nil {
		return err
	}
	return c.empty(http.StatusOK)
}

func networksPrune(c *call) error {
	filters, err := c.filters()
	if err != nil {
		return err
	}
	v, err := c.s.engine.NetworksPrune(c.ctx, filters)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}
