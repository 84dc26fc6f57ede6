package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"text/template"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/image"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/api/types/volume"
	"github.com/spf13/pflag"
)

func cmdInspect() *command {
	return &command{
		name: "inspect", use: "[OPTIONS] NAME|ID [NAME|ID...]", short: "Return low-level information on Docker objects",
		example: "  kiri inspect web\n  kiri inspect -f '{{.State.Status}}' web\n  kiri inspect --type image alpine", min: 1, max: -1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			format := f.StringP("format", "f", "", "Format output using a custom template: 'json', or a Go TEMPLATE")
			size := f.BoolP("size", "s", false, "Display total file sizes if the type is container")
			typ := f.String("type", "", "Only inspect objects of the given type")
			return func(args []string) error {
				all := objectKinds(*size)
				kinds := all
				if f.Changed("type") {
					kinds = nil
					for _, k := range all {
						if k.name == *typ {
							kinds = []objectKind{k}
						}
					}
					if kinds == nil {
						// Swarm's kinds are docker's to know.
						return c.handOver(append([]string{"inspect"}, c.argsAfter("inspect")...), fmt.Errorf("%q is not a valid value for --type", *typ))
					}
				}
				return c.inspect(kinds, *format, args)
			}
		},
	}
}

func cmdContainerInspect() *command {
	return &command{
		name: "container inspect", use: "[OPTIONS] CONTAINER [CONTAINER...]", short: "Display detailed information on one or more containers",
		example: "  kiri container inspect web", min: 1, max: -1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			format := f.StringP("format", "f", "", "Format output using a custom template: 'json', or a Go TEMPLATE")
			size := f.BoolP("size", "s", false, "Display total file sizes")
			return func(args []string) error { return c.inspect(objectKinds(*size)[:1], *format, args) }
		},
	}
}

func cmdImageInspect() *command {
	return &command{
		name: "image inspect", use: "[OPTIONS] IMAGE [IMAGE...]", short: "Display detailed information on one or more images",
		example: "  kiri image inspect alpine", min: 1, max: -1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			format := f.StringP("format", "f", "", "Format output using a custom template: 'json', or a Go TEMPLATE")
			return func(args []string) error { return c.inspect(objectKinds(false)[1:2], *format, args) }
		},
	}
}

// An objectKind is a kind of object that inspect looks for, in the order it looks.
type objectKind struct {
	name   string
	path   string
	suffix string
	query  url.Values
	typed  func() any // what a template sees first
}

func objectKinds(size bool) []objectKind {
	var q url.Values
	if size {
		q = url.Values{"size": {"1"}}
	}
	return []objectKind{
		{"container", "/containers/", "/json", q, func() any { return &container.InspectResponse{} }},
		{"image", "/images/", "/json", nil, func() any { return &image.InspectResponse{} }},
		{"network", "/networks/", "", nil, func() any { return &network.Inspect{} }},
		{"volume", "/volumes/", "", nil, func() any { return &volume.Volume{} }},
	}
}

// inspect shows each object as the daemon described it, or through a template. What is found is printed even when something else is not.
func (c *cli) inspect(kinds []objectKind, format string, names []string) error {
	cl, err := c.client()
	if err != nil {
		return err
	}
	var tmpl *template.Template
	if format != "" && format != "json" {
		if tmpl, err = template.New("").Funcs(templateFuncs()).Parse(format); err != nil {
			return &status{64, "template parsing error: " + err.Error()}
		}
	}
	var out bytes.Buffer
	var raws [][]byte
	var errs []error
	for _, name := range names {
		kind, raw, err := find(cl, kinds, name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if tmpl == nil {
			raws = append(raws, raw)
			continue
		}
		if err := executeOn(&out, tmpl, kind, raw); err != nil {
			out.WriteByte('\n')
			errs = append(errs, err)
			break
		}
		out.WriteByte('\n')
	}
	if tmpl == nil {
		joined := append(append([]byte{'['}, bytes.Join(raws, []byte{','})...), ']')
		if format == "json" {
			err = json.Compact(&out, joined)
		} else {
			err = json.Indent(&out, joined, "", "    ")
		}
		if err != nil {
			return fmt.Errorf("reading the answer of the kiri daemon: %w", err)
		}
		out.WriteByte('\n')
	} else if out.Len() == 0 {
		out.WriteByte('\n')
	}
	if _, err := c.out.Write(out.Bytes()); err != nil {
		return err
	}
	return errors.Join(errs...)
}

// find asks for each kind in turn until one knows the name.
func find(cl *client, kinds []objectKind, name string) (objectKind, []byte, error) {
	for _, k := range kinds {
		raw, err := cl.raw("GET", idPath(k.path, name, k.suffix), k.query)
		if err == nil {
			return k, raw, nil
		}
		if len(kinds) == 1 {
			return k, nil, err
		}
		// A kind that this daemon does not have, or a name that cannot be one, is no reason to stop looking.
		if !isStatus(err, 404) && !isStatus(err, 501) && !isStatus(err, 400) {
			return k, nil, err
		}
	}
	return objectKind{}, nil, errors.New("Error: No such object: " + name)
}

// executeOn runs a template on the object's type, and when the template asks for what the type does not have, on the JSON as it came.
func executeOn(out *bytes.Buffer, t *template.Template, kind objectKind, raw []byte) error {
	typed := kind.typed()
	mark := out.Len()
	if err := json.Unmarshal(raw, typed); err == nil && t.Execute(out, typed) == nil {
		return nil
	}
	out.Truncate(mark)
	var v any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber()
	if err := dec.Decode(&v); err != nil {
		return fmt.Errorf("reading the answer of the kiri daemon: %w", err)
	}
	if err := t.Option("missingkey=error").Execute(out, v); err != nil {
		out.Truncate(mark)
		return errors.New("template parsing error: " + err.Error())
	}
	return nil
}

// argsAfter gives the command line behind a word, as it was given.
func (c *cli) argsAfter(word string) []string {
	for i, a := range c.args {
		if a == word {
			return c.args[i+1:]
		}
	}
	return nil
}
