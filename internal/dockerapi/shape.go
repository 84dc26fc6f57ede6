package dockerapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// A change says how an answer differed in older versions of the API. Each resource keeps one list of them; the
// source is the API module's docs/CHANGELOG.md and the specification of each version beside it.
type change struct {
	below version        // for requests of versions before this one
	path  string         // where: names joined by dots, "*" for every element of a list or map; "" is the top
	drop  []string       // fields that these versions did not have
	add   map[string]any // fields that these versions had: put there unless one of that name is there
	do    func(obj, top map[string]any)
}

// shape returns v as a client of version ver expects it. With nothing to change that is v itself, so the current
// version pays nothing; otherwise v goes through its JSON form.
func shape(v any, ver version, changes []change) (any, error) {
	needed := false
	for i := range changes {
		needed = needed || ver < changes[i].below
	}
	if !needed {
		return v, nil
	}
	b, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encoding %T: %w", v, err)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber() // sizes and times are beyond what a float64 holds
	var tree any
	if err := dec.Decode(&tree); err != nil {
		return nil, fmt.Errorf("decoding %T: %w", v, err)
	}
	roots := []any{tree}
	if list, ok := tree.([]any); ok {
		roots = list
	}
	for i := range changes {
		if ver < changes[i].below {
			for _, root := range roots {
				if top, ok := root.(map[string]any); ok {
					changes[i].apply(root, changes[i].path, top)
				}
			}
		}
	}
	return tree, nil
}

// apply walks down to path and changes each object it ends at. A list at the top is not part of the path: changes
// are about its elements.
func (ch *change) apply(node any, path string, top map[string]any) {
	if path == "" {
		if obj, ok := node.(map[string]any); ok {
			ch.change(obj, top)
		}
		return
	}
	name, rest, _ := strings.Cut(path, ".")
	switch n := node.(type) {
	case map[string]any:
		if name != "*" {
			ch.apply(n[name], rest, top)
			return
		}
		for _, v := range n {
			ch.apply(v, rest, top)
		}
	case []any:
		if name == "*" {
			for _, v := range n {
				ch.apply(v, rest, top)
			}
		}
	}
}

func (ch *change) change(obj, top map[string]any) {
	for _, name := range ch.drop {
		delete(obj, name)
	}
	for name, v := range ch.add {
		if _, there := obj[name]; !there {
			obj[name] = v
		}
	}
	if ch.do != nil {
		ch.do(obj, top)
	}
}
