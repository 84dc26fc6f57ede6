package dockerapi

import (
	"net/http"

	"runkiri.com/kiri/internal/engine"
)

// imageListChanges tell how an element of GET /images/json differed.
var imageListChanges = append([]change{
	{below: 51, do: func(img, _ map[string]any) { img["Containers"] = -1 }}, // GET /system/df always counted them
}, imageSummaryChanges...)

// imageSummaryChanges tell how an image differed in any list.
var imageSummaryChanges = []change{
	{below: 48, drop: []string{"Descriptor"}},
	{below: 47, drop: []string{"Manifests"}},
	{below: 44, do: func(img, _ map[string]any) { img["VirtualSize"] = img["Size"] }},
	{below: 43, do: func(img, _ map[string]any) {
		tags, _ := member(img, "RepoTags").([]any)
		digests, _ := member(img, "RepoDigests").([]any)
		if len(tags) == 0 && len(digests) == 0 {
			img["RepoTags"] = []string{"<none>:<none>"}
			img["RepoDigests"] = []string{"<none>@<none>"}
		}
	}},
}

// containerConfig is an empty container configuration: what the fields of an image's that only containers use were
// always answered as.
func containerConfig() map[string]any {
	return map[string]any{
		"Hostname": "", "Domainname": "", "User": "", "AttachStdin": false, "AttachStdout": false, "AttachStderr": false,
		"Tty": false, "OpenStdin": false, "StdinOnce": false, "Env": nil, "Cmd": nil, "Image": "", "Volumes": nil,
		"WorkingDir": "", "Entrypoint": nil, "OnBuild": nil, "Labels": nil,
	}
}

// imageChanges tell how the answer of GET /images/{name}/json differed.
var imageChanges = []change{
	{below: 53, drop: []string{"Identity"}},
	{below: 52, add: map[string]any{
		"Parent": "", "Comment": "", "DockerVersion": "", "Author": "",
		"GraphDriver": map[string]any{"Data": nil, "Name": "overlayfs"},
	}},
	{below: 52, do: func(img, _ map[string]any) {
		if member(img, "Config") == nil {
			img["Config"] = map[string]any{}
		}
	}},
	{below: 52, path: "Config", add: map[string]any{
		"User": "", "Env": nil, "Cmd": nil, "Volumes": nil, "WorkingDir": "", "Entrypoint": nil, "OnBuild": nil, "Labels": nil,
	}},
	{below: 50, path: "Config", add: containerConfig()},
	{below: 48, drop: []string{"Descriptor", "Manifests"}},
	{below: 45, do: func(img, _ map[string]any) {
		img["Container"] = ""
		img["ContainerConfig"] = containerConfig()
	}},
	{below: 44, path: "Config.Healthcheck", drop: []string{"StartInterval"}},
	{below: 44, add: map[string]any{"Created": "0001-01-01T00:00:00Z"}, do: func(img, _ map[string]any) {
		img["VirtualSize"] = img["Size"]
	}},
}

func imageList(c *call) error {
	filters, err := c.filters()
	if err != nil {
		return err
	}
	if name := c.arg("filter"); name != "" && c.version <= 40 {
		filters["reference"] = map[string]bool{name: true}
	}
	l, err := c.s.engine.ImageList(c.ctx, engine.ImageListOptions{
		All:        c.flag("all"),
		SharedSize: c.version >= 42 && c.flag("shared-size"),
		Manifests:  c.version >= 47 && c.flag("manifests"),
		Filters:    filters,
	})
	if err != nil {
		return err
	}
	return c.shaped(list(l), imageListChanges)
}

func imageInspect(c *call) error {
	opts := engine.ImageInspectOptions{Manifests: c.version >= 48 && c.flag("manifests")}
	if c.version >= 49 {
		var err error
		if opts.Platform, err = c.platform("platform"); err != nil {
			return err
		}
		if opts.Platform != nil && opts.Manifests {
			return invalidf("conflicting options: manifests and platform options cannot both be set")
		}
	}
	v, err := c.s.engine.ImageInspect(c.ctx, c.name, opts)
	if err != nil {
		return err
	}
	return c.shaped(v, imageChanges)
}

func imageHistory(c *call) error {
	if c.version < 48 {
		delete(c.query, "platform")
	}
	platform, err := c.platform("platform")
	if err != nil {
		return err
	}
	l, err := c.s.engine.ImageHistory(c.ctx, c.name, platform)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, list(l))
}

func imageTag(c *call) error {
	target := c.arg("repo")
	if tag := c.arg("tag"); tag != "" {
		target += ":" + tag
	}
	if err := c.s.engine.ImageTag(c.ctx, c.name, target); err != nil {
		return err
	}
	return c.empty(http.StatusCreated)
}

func imageRemove(c *call) error {
	opts := engine.ImageRemoveOptions{Force: c.flag("force"), NoPrune: c.flag("noprune")}
	if c.version >= 50 {
		var err error
		if opts.Platforms, err = c.platforms("platforms"); err != nil {
			return err
		}
	}
	l, err := c.s.engine.ImageRemove(c.ctx, c.name, opts)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, list(l))
}

func imagesPrune(c *call) error {
	filters, err := c.filters()
	if err != nil {
		return err
	}
	v, err := c.s.engine.ImagesPrune(c.ctx, filters)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, v)
}
