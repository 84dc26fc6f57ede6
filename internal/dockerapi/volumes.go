package dockerapi

import (
	"net/http"

	"github.com/moby/moby/api/types/volume"
)

func volumeList(c *call) error {
	filters, err := c.filters()
	if err != nil {
		return err
	}
	v, err := c.s.engine.VolumeList(c.ctx, filters)
	if err != nil {
		return err
	}
	v.Volumes = list(v.Volumes)
	return c.json(http.StatusOK, v)
}

func volumeInspect(c *call) error {
	v, err := c.s.engine.VolumeInspect(c.ctx, c.name)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}

func volumeCreate(c *call) error {
	if !c.hasBody() {
		return invalidf("invalid JSON: got EOF while reading request body")
	}
	var req volume.CreateRequest
	if err := c.readJSON(&req); err != nil {
		return err
	}
	if req.ClusterVolumeSpec != nil {
		return notBuilt("cluster volume")
	}
	v, err := c.s.engine.VolumeCreate(c.ctx, &req)
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, v)
}

func volumeRemove(c *call) error {
	if err := c.s.engine.VolumeRemove(c.ctx, c.name, c.flag("force")); err != nil {
		return err
	}
	return c.empty(http.StatusNoContent)
}

// volumesPrune: named volumes are meant too before API 1.42, and from then on only with the filter "all".
func volumesPrune(c *call) error {
	filters, err := c.filters()
	if err != nil {
		return err
	}
	all := true
	if c.version >= 42 {
		if all, err = takeBool(filters, "all", false); err != nil {
			return err
		}
	}
	v, err := c.s.engine.VolumesPrune(c.ctx, filters, all)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}
