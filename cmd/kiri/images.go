package main

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"
)

func cmdImages() *command {
	return &command{
		name: "images", long: []string{"image ls", "image list"}, use: "[OPTIONS] [REPOSITORY[:TAG]]", short: "List images",
		example: "  kiri images\n  kiri images --filter dangling=true -q", max: 1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			o := &imagesFlags{filters: filters{}}
			f.BoolVarP(&o.all, "all", "a", false, "Show all images (default hides intermediate images)")
			f.BoolVar(&o.digests, "digests", false, "Show digests")
			f.VarP(filterValue{o.filters}, "filter", "f", "Filter output based on conditions provided")
			f.StringVar(&o.format, "format", "", formatHelp)
			f.BoolVar(&o.noTrunc, "no-trunc", false, "Don't truncate output")
			f.BoolVarP(&o.quiet, "quiet", "q", false, "Only show image IDs")
			return func(args []string) error {
				if len(args) > 0 {
					o.filters["reference"] = append(o.filters["reference"], args[0])
				}
				return c.images(o)
			}
		},
	}
}

type imagesFlags struct {
	all, digests, noTrunc, quiet bool
	format                       string
	filters                      filters
}

type imageItem struct {
	ID          string `json:"Id"`
	RepoTags    []string
	RepoDigests []string
	Created     int64
	Size        int64
	SharedSize  int64
	Containers  int64
}

func (c *cli) images(o *imagesFlags) error {
	cl, err := c.client()
	if err != nil {
		return err
	}
	format := o.format
	if format == "" && c.config.ImagesFormat != "" && !o.quiet {
		format = c.config.ImagesFormat
	}
	q := url.Values{}
	if o.all {
		q.Set("all", "1")
	}
	if len(o.filters) > 0 {
		q.Set("filters", o.filters.query())
	}
	var items []*imageItem
	if err := cl.call("GET", "/images/json", q, nil, &items); err != nil {
		return err
	}
	if format == "" || format == "table" {
		switch {
		case o.quiet:
			format = "{{.ID}}"
		case o.digests:
			format = "table {{.Repository}}\t{{.Tag}}\t{{.Digest}}\t{{.ID}}\t{{.CreatedSince}}\t{{.Size}}"
		default:
			format = "table {{.Repository}}\t{{.Tag}}\t{{.ID}}\t{{.CreatedSince}}\t{{.Size}}"
		}
	}
	digests := o.digests || strings.Contains(format, ".Digest")
	var rows []*imageRow
	for _, it := range items {
		rows = append(rows, imageRows(it, o.noTrunc, o.quiet, digests)...)
	}
	return printRows(c, format, imageFields(), rows, func(r *imageRow) any { return r })
}

// imageRows gives a line a tag, one a digest where digests are shown, and one <none> for an image with no name.
func imageRows(it *imageItem, whole, once, digests bool) []*imageRow {
	now := time.Now()
	row := func(repo, tag, digest string) *imageRow { return &imageRow{it, repo, tag, digest, whole, now} }
	const none = "<none>"
	byRepo := map[string]string{}
	for _, d := range it.RepoDigests {
		repo, digest, _ := strings.Cut(d, "@")
		if repo != none && byRepo[repo] == "" {
			byRepo[repo] = digest
		}
	}
	var rows []*imageRow
	used := map[string]bool{}
	for _, name := range it.RepoTags {
		repo, tag := splitName(name)
		if repo == none {
			continue
		}
		digest := none
		if d := byRepo[repo]; d != "" && digests {
			digest = d
		}
		used[repo] = true
		rows = append(rows, row(repo, tag, digest))
	}
	for _, d := range it.RepoDigests {
		if repo, digest, _ := strings.Cut(d, "@"); repo != none && !used[repo] {
			used[repo] = true
			if digests || len(it.RepoTags) == 0 {
				rows = append(rows, row(repo, none, digest))
			}
		}
	}
	if len(rows) == 0 {
		rows = append(rows, row(none, none, none))
	}
	if once {
		rows = rows[:1]
	}
	return rows
}

type imageRow struct {
	it                *imageItem
	repo, tag, digest string
	whole             bool
	now               time.Time
}

func (r *imageRow) ID() string {
	if r.whole {
		return r.it.ID
	}
	return shortID(r.it.ID)
}
func (r *imageRow) Repository() string   { return r.repo }
func (r *imageRow) Tag() string          { return r.tag }
func (r *imageRow) Digest() string       { return r.digest }
func (r *imageRow) CreatedSince() string { return ago(r.now, r.it.Created) }
func (r *imageRow) CreatedAt() string    { return time.Unix(r.it.Created, 0).String() }
func (r *imageRow) Size() string         { return units.HumanSizeWithPrecision(float64(r.it.Size), 3) }
func (r *imageRow) VirtualSize() string  { return units.HumanSize(float64(r.it.Size)) }
func (r *imageRow) Containers() string {
	if r.it.Containers < 0 {
		return "N/A"
	}
	return fmt.Sprint(r.it.Containers)
}
func (r *imageRow) SharedSize() string {
	if r.it.SharedSize < 0 {
		return "N/A"
	}
	return units.HumanSize(float64(r.it.SharedSize))
}
func (r *imageRow) UniqueSize() string {
	if r.it.SharedSize < 0 || r.it.Size < 0 {
		return "N/A"
	}
	return units.HumanSize(float64(r.it.Size - r.it.SharedSize))
}

// MarshalJSON makes {{json .}} the same as --format json.
func (r *imageRow) MarshalJSON() ([]byte, error) { return rowJSON(imageFields(), r) }

func imageFields() []field[imageRow] {
	return []field[imageRow]{
		{"Containers", "CONTAINERS", func(r *imageRow) any { return r.Containers() }},
		{"CreatedAt", "CREATED AT", func(r *imageRow) any { return r.CreatedAt() }},
		{"CreatedSince", "CREATED", func(r *imageRow) any { return r.CreatedSince() }},
		{"Digest", "DIGEST", func(r *imageRow) any { return r.Digest() }},
		{"ID", "IMAGE ID", func(r *imageRow) any { return r.ID() }},
		{"Repository", "REPOSITORY", func(r *imageRow) any { return r.Repository() }},
		{"SharedSize", "SHARED SIZE", func(r *imageRow) any { return r.SharedSize() }},
		{"Size", "SIZE", func(r *imageRow) any { return r.Size() }},
		{"Tag", "TAG", func(r *imageRow) any { return r.Tag() }},
		{"UniqueSize", "UNIQUE SIZE", func(r *imageRow) any { return r.UniqueSize() }},
		{"VirtualSize", "SIZE", func(r *imageRow) any { return r.VirtualSize() }},
	}
}

func cmdRmi() *command {
	return &command{
		name: "rmi", long: []string{"image rm", "image remove"}, use: "[OPTIONS] IMAGE [IMAGE...]", short: "Remove one or more images",
		example: "  kiri rmi alpine:latest", min: 1, max: -1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			force := f.BoolP("force", "f", false, "Force removal of the image")
			noPrune := f.Bool("no-prune", false, "Do not delete untagged parents")
			return func(args []string) error {
				cl, err := c.client()
				if err != nil {
					return err
				}
				q := url.Values{}
				if *force {
					q.Set("force", "1")
				}
				if *noPrune {
					q.Set("noprune", "1")
				}
				var errs []error
				fatal := false
				for _, name := range args {
					var deleted []struct{ Deleted, Untagged string }
					if err := cl.call("DELETE", idPath("/images/", name, ""), q, nil, &deleted); err != nil {
						fatal = fatal || !isStatus(err, 404)
						errs = append(errs, err)
						continue
					}
					for _, d := range deleted {
						if d.Deleted != "" {
							fmt.Fprintln(c.out, "Deleted:", d.Deleted)
						} else {
							fmt.Fprintln(c.out, "Untagged:", d.Untagged)
						}
					}
				}
				if err := errors.Join(errs...); err != nil {
					if *force && !fatal {
						return &status{0, err.Error()}
					}
					return err
				}
				return nil
			}
		},
	}
}

func cmdTag() *command {
	return &command{
		name: "tag", long: []string{"image tag"}, use: "SOURCE_IMAGE[:TAG] TARGET_IMAGE[:TAG]", short: "Create a tag TARGET_IMAGE that refers to SOURCE_IMAGE",
		example: "  kiri tag alpine localhost:5000/alpine:3", min: 2, max: 2,
		run: func(c *cli, _ *pflag.FlagSet) func([]string) error {
			return func(args []string) error {
				cl, err := c.client()
				if err != nil {
					return err
				}
				repo, tag := splitName(args[1])
				q := url.Values{"repo": {repo}}
				if tag != "" {
					q.Set("tag", tag)
				}
				return cl.call("POST", idPath("/images/", args[0], "/tag"), q, nil, nil)
			}
		},
	}
}

func cmdImport() *command {
	return &command{
		name: "import", long: []string{"image import"}, use: "[OPTIONS] file|URL|- [REPOSITORY[:TAG]]", short: "Import the contents from a tarball to create a filesystem image",
		example: "  tar -C rootfs -c . | kiri import - base:1", min: 1, max: 2,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			var changes []string
			f.VarP(list(&changes, nil), "change", "c", "Apply Dockerfile instruction to the created image")
			message := f.StringP("message", "m", "", "Set commit message for imported image")
			platform := f.String("platform", "", "Set platform if server is multi-platform capable")
			return func(args []string) error {
				cl, err := c.client()
				if err != nil {
					return err
				}
				q := url.Values{"fromSrc": {args[0]}}
				r := &request{method: "POST", path: "/images/create", query: q}
				if len(args) > 1 {
					// The name goes into "repo" and the tag into "tag", as docker sends them.
					repo, tag := splitName(args[1])
					q.Set("repo", repo)
					if tag != "" {
						q.Set("tag", tag)
					}
				}
				if *message != "" {
					q.Set("message", *message)
				}
				if *platform != "" {
					q.Set("platform", strings.ToLower(*platform))
				}
				q["changes"] = changes
				switch {
				case args[0] == "-":
					r.stream = c.in
				case strings.HasPrefix(args[0], "http://"), strings.HasPrefix(args[0], "https://"):
				default:
					file, err := os.Open(args[0])
					if err != nil {
						return err
					}
					defer file.Close()
					q.Set("fromSrc", "-")
					r.stream = io.Reader(file)
				}
				res, err := cl.do(r)
				if err != nil {
					return err
				}
				defer res.Close()
				return showProgress(res, c.out)
			}
		},
	}
}
