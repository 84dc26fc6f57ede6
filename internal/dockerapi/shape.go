package dockerapi

import (
	"bytes"
	"encoding/json"
	"strings"
)

// A change says how an answer differed in older versions of the API. Each resource keeps one list of them; the
// source is the API module's docs/CHANGELOG.md and the specification of each version beside it.
type change struct {
	below version        // for requests of versions before this one
	path  string         // where: names joined by dots, "*" for every element of a list or map; "" is the top
	drop  []string       // fields that these versions did not have
	add   map[string]any // fields that these versions had: put there unless one of that name is there
	// do makes any other change of obj. Values in it may not be taken apart yet: member does that.
	do func(obj, top map[string]any)
}

// shape returns v as a client of version ver expects it. With nothing to change that is v itself, so the current
// version pays nothing; otherwise v goes through its JSON form, taken apart only as far as the changes reach.
func shape(v any, ver version, changes []change) (any, error) {
	needed := false
	for i := range changes {
		needed = needed || ver < changes[i].below
	}
	if !needed {
		return v, nil
	}
	var buf bytes.Buffer
	if err := encode(&buf, v); err != nil {
		return nil, err
	}
	tree := open(json.RawMessage(buf.Bytes()))
	roots := []any{tree}
	if list, ok := tree.([]any); ok {
		roots = list
		for i := range roots {
			roots[i] = open(roots[i])
		}
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

// open takes one level of JSON apart: an object becomes a map[string]any, a list a []any, a string a string, and what
// is in them stays json.RawMessage until it is opened in turn. Most of an answer never is, and no number loses digits.
func open(v any) any {
	raw, ok := v.(json.RawMessage)
	if !ok || len(raw) == 0 {
		return v
	}
	switch raw[0] {
	case '{':
		var members map[string]json.RawMessage
		if json.Unmarshal(raw, &members) != nil {
			return v
		}
		obj := make(map[string]any, len(members)+8)
		for name, m := range members {
			obj[name] = m
		}
		return obj
	case '[':
		var elements []json.RawMessage
		if json.Unmarshal(raw, &elements) != nil {
			return v
		}
		list := make([]any, len(elements))
		for i, e := range elements {
			list[i] = e
		}
		return list
	case '"':
		var s string
		if json.Unmarshal(raw, &s) != nil {
			return v
		}
		return s
	case 'n':
		return nil
	}
	return v
}

// member opens a member of an object in place and returns it; nil if there is none or it is null.
func member(obj map[string]any, name string) any {
	v, there := obj[name]
	if !there {
		return nil
	}
	v = open(v)
	obj[name] = v
	return v
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
			if ch.reaches(n[name]) {
				ch.apply(member(n, name), rest, top)
			}
			return
		}
		for k := range n {
			if ch.reaches(n[k]) {
				ch.apply(member(n, k), rest, top)
			}
		}
	case []any:
		if name == "*" {
			for i := range n {
				if ch.reaches(n[i]) {
					n[i] = open(n[i])
					ch.apply(n[i], rest, top)
				}
			}
		}
	}
}

// reaches tells whether the change may find something to do in v. Fields that only newer versions have are seldom
// set, and then taking v apart to look for them would be most of the work.
func (ch *change) reaches(v any) bool {
	raw, ok := v.(json.RawMessage)
	if !ok || ch.add != nil || ch.do != nil {
		return true
	}
	for _, name := range ch.drop {
		if bytes.Contains(raw, []byte(name)) {
			return true
		}
	}
	return false
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
