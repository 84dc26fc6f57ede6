package dockerapi

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/moby/moby/api/types/container"

	"runkiri.com/kiri/internal/engine"
)

func containerDiff(c *call) error {
	l, err := c.s.engine.ContainerChanges(c.ctx, c.name)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, list(l))
}

func (c *call) archivePath() (string, error) {
	if p := c.arg("path"); p != "" {
		return p, nil
	}
	return "", invalidf("bad parameter: missing value for path")
}

// statHeader describes the path in a header, as both HEAD and GET of an archive do.
func (c *call) statHeader(stat *container.PathStat) error {
	b, err := json.Marshal(stat)
	if err != nil {
		return fmt.Errorf("encoding the path's description: %w", err)
	}
	c.w.Header().Set("X-Docker-Container-Path-Stat", base64.StdEncoding.EncodeToString(b))
	return nil
}

func containerArchiveStat(c *call) error {
	path, err := c.archivePath()
	if err != nil {
		return err
	}
	stat, err := c.s.engine.ContainerArchiveStat(c.ctx, c.name, path)
	if err != nil {
		return err
	}
	if err := c.statHeader(stat); err != nil {
		return err
	}
	return c.empty(http.StatusOK)
}

func containerArchiveGet(c *call) error {
	path, err := c.archivePath()
	if err != nil {
		return err
	}
	r, stat, err := c.s.engine.ContainerArchiveGet(c.ctx, c.name, path)
	if err != nil {
		return err
	}
	if err := c.statHeader(stat); err != nil {
		r.Close()
		return err
	}
	c.begin("application/x-tar")
	return c.copy(r)
}

func containerArchivePut(c *call) error {
	path, err := c.archivePath()
	if err != nil {
		return err
	}
	opts := engine.ArchivePutOptions{NoOverwriteDirNonDir: c.flag("noOverwriteDirNonDir"), CopyUIDGID: c.flag("copyUIDGID")}
	if err := c.s.engine.ContainerArchivePut(c.ctx, c.name, path, opts, c.r.Body); err != nil {
		return err
	}
	return c.empty(http.StatusOK)
}

func containerCommit(c *call) error {
	var cfg *container.Config
	if c.hasBody() {
		body := CreateRequest{Config: &container.Config{}}
		if err := c.readJSON(&body); err != nil {
			return err
		}
		if cfg = body.Config; cfg != nil {
			cfg.Cmd, cfg.Entrypoint, cfg.Shell = body.Cmd, body.Entrypoint, body.Shell
		}
	}
	opts := engine.CommitOptions{
		Repo:    c.arg("repo"),
		Tag:     c.arg("tag"),
		Comment: c.arg("comment"),
		Author:  c.arg("author"),
		Changes: c.query["changes"],
		NoPause: !c.flagOr("pause", true),
	}
	id, err := c.s.engine.ContainerCommit(c.ctx, c.arg("container"), opts, cfg)
	if err != nil {
		return err
	}
	return c.json(http.StatusCreated, container.CommitResponse{ID: id})
}
