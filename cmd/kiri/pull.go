package main

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/spf13/pflag"
	"runkiri.com/kiri/internal/reference"
)

func cmdPull() *command {
	return &command{
		name: "pull", long: []string{"image pull"}, use: "[OPTIONS] NAME[:TAG|@DIGEST]", short: "Download an image from a registry",
		example: "  kiri pull alpine\n  kiri pull --platform linux/arm64 debian:12\n  kiri pull localhost:5000/app:1.2", min: 1, max: 1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			all := f.BoolP("all-tags", "a", false, "Download all tagged images in the repository")
			f.Bool("disable-content-trust", true, "Skip image verification")
			f.Lookup("disable-content-trust").Hidden = true
			platform := f.String("platform", "", "Set platform if server is multi-platform capable")
			quiet := f.BoolP("quiet", "q", false, "Suppress verbose output")
			return func(args []string) error {
				ref, err := reference.ParseNormalizedNamed(args[0])
				if err != nil {
					return err
				}
				name := args[0]
				tagged := taggedName(name)
				switch {
				case *all && tagged == name:
					return errors.New("tag can't be used with --all-tags/-a")
				case *all:
					// every tag is a name without one
				case tagged != name:
					if !*quiet {
						fmt.Fprintln(c.out, "Using default tag: latest")
					}
					name, ref = tagged, reference.TagNameOnly(ref)
				}
				if _, err := c.client(); err != nil {
					return err
				}
				out := c.out
				if *quiet {
					out = io.Discard
				}
				if err := c.pullImage(name, *platform, out); err != nil {
					return err
				}
				fmt.Fprintln(c.out, ref.String())
				return nil
			}
		},
	}
}

// pullImage pulls and shows the progress on out.
func (c *cli) pullImage(image, platform string, out io.Writer) error {
	repo, tag := splitName(image)
	q := url.Values{"fromImage": {repo}}
	if tag != "" {
		q.Set("tag", tag)
	}
	if platform != "" {
		q.Set("platform", strings.ToLower(platform))
	}
	r := &request{method: "POST", path: "/images/create", query: q}
	auth, err := c.registryAuth(image)
	if err != nil {
		return err
	}
	if auth != "" {
		r.header = append(r.header, [2]string{"X-Registry-Auth", auth})
	}
	res, err := c.c.do(r)
	if err != nil {
		return err
	}
	defer res.Close()
	return showProgress(res, out)
}

// splitName cuts the tag or digest off. A colon before the last slash belongs to a port.
func splitName(image string) (repo, tag string) {
	if name, digest, ok := strings.Cut(image, "@"); ok {
		return name, digest
	}
	if i := strings.LastIndexByte(image, ':'); i > strings.LastIndexByte(image, '/') {
		return image[:i], image[i+1:]
	}
	return image, ""
}
