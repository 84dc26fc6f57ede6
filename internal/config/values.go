package config

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"
)

// value is the place an option's value goes to, from a flag (pflag's Set) or from the file.
type value interface {
	pflag.Value
	setJSON(raw json.RawMessage) error
}

type stringValue string

func (v *stringValue) Set(s string) error              { *v = stringValue(s); return nil }
func (v *stringValue) String() string                  { return string(*v) }
func (v *stringValue) Type() string                    { return "string" }
func (v *stringValue) setJSON(r json.RawMessage) error { return json.Unmarshal(r, (*string)(v)) }

type boolValue bool

func (v *boolValue) Set(s string) error {
	b, err := strconv.ParseBool(s)
	*v = boolValue(b)
	return err
}
func (v *boolValue) String() string                  { return strconv.FormatBool(bool(*v)) }
func (v *boolValue) Type() string                    { return "bool" }
func (v *boolValue) IsBoolFlag() bool                { return true }
func (v *boolValue) setJSON(r json.RawMessage) error { return json.Unmarshal(r, (*bool)(v)) }

type intValue int

func (v *intValue) Set(s string) error {
	n, err := strconv.Atoi(s)
	*v = intValue(n)
	return err
}
func (v *intValue) String() string {
	if *v == 0 {
		return "" // unset, so that the help shows no default
	}
	return strconv.Itoa(int(*v))
}
func (v *intValue) Type() string                    { return "int" }
func (v *intValue) setJSON(r json.RawMessage) error { return json.Unmarshal(r, (*int)(v)) }

// listValue is a flag that may be given several times, and a list in the file.
type listValue []string

func (v *listValue) Set(s string) error              { *v = append(*v, s); return nil }
func (v *listValue) String() string                  { return brackets(*v) }
func (v *listValue) Type() string                    { return "list" }
func (v *listValue) setJSON(r json.RawMessage) error { return json.Unmarshal(r, (*[]string)(v)) }

func brackets(l []string) string {
	if len(l) == 0 {
		return ""
	}
	return "[" + strings.Join(l, " ") + "]"
}

type mapValue struct{ m *map[string]string }

func (v *mapValue) Set(s string) error {
	k, val, ok := strings.Cut(s, "=")
	if !ok || k == "" {
		return fmt.Errorf("%q is not of the form name=value", s)
	}
	if *v.m == nil {
		*v.m = map[string]string{}
	}
	(*v.m)[k] = val
	return nil
}
func (v *mapValue) String() string {
	if v.m == nil || len(*v.m) == 0 {
		return ""
	}
	return fmt.Sprint(*v.m)
}
func (v *mapValue) Type() string                    { return "map" }
func (v *mapValue) setJSON(r json.RawMessage) error { return json.Unmarshal(r, v.m) }

// sizeValue is a number of bytes, with a unit as "64M" or plain.
type sizeValue int64

func (v *sizeValue) Set(s string) error {
	n, err := units.RAMInBytes(s)
	*v = sizeValue(n)
	return err
}
func (v *sizeValue) String() string {
	if *v == 0 {
		return ""
	}
	return units.BytesSize(float64(*v))
}
func (v *sizeValue) Type() string { return "bytes" }
func (v *sizeValue) setJSON(r json.RawMessage) error {
	var s string
	if json.Unmarshal(r, &s) == nil {
		return v.Set(s)
	}
	return json.Unmarshal(r, (*int64)(v))
}

type ulimitValue struct{ m *map[string]*units.Ulimit }

func (v *ulimitValue) Set(s string) error {
	u, err := units.ParseUlimit(s)
	if err != nil {
		return err
	}
	if *v.m == nil {
		*v.m = map[string]*units.Ulimit{}
	}
	(*v.m)[u.Name] = u
	return nil
}
func (v *ulimitValue) String() string {
	if v.m == nil || len(*v.m) == 0 {
		return ""
	}
	var l []string
	for _, u := range *v.m {
		l = append(l, u.String())
	}
	slices.Sort(l)
	return brackets(l)
}
func (v *ulimitValue) Type() string { return "ulimit" }

// setJSON reads {"nofile": {"Name": "nofile", "Hard": 64000, "Soft": 64000}}.
func (v *ulimitValue) setJSON(r json.RawMessage) error {
	if err := json.Unmarshal(r, v.m); err != nil {
		return err
	}
	for name, u := range *v.m {
		switch {
		case u == nil:
			return fmt.Errorf("ulimit %s is null", name)
		case u.Name == "":
			u.Name = name
		case u.Name != name:
			return fmt.Errorf("ulimit %s has the name %s", name, u.Name)
		}
		if _, err := u.GetRlimit(); err != nil {
			return err
		}
	}
	return nil
}

type poolValue struct{ l *[]AddressPool }

func (v *poolValue) Set(s string) error {
	var p AddressPool
	for _, field := range strings.Split(s, ",") {
		k, val, _ := strings.Cut(field, "=")
		switch strings.TrimSpace(k) {
		case "base":
			p.Base = strings.TrimSpace(val)
		case "size":
			n, err := strconv.Atoi(strings.TrimSpace(val))
			if err != nil {
				return fmt.Errorf("invalid size value %q: must be an integer", val)
			}
			p.Size = n
		default:
			return fmt.Errorf("unexpected key '%s' in '%s'", k, field)
		}
	}
	*v.l = append(*v.l, p)
	return nil
}
func (v *poolValue) String() string {
	if v.l == nil || len(*v.l) == 0 {
		return ""
	}
	return fmt.Sprint(*v.l)
}
func (v *poolValue) Type() string                    { return "pool" }
func (v *poolValue) setJSON(r json.RawMessage) error { return json.Unmarshal(r, v.l) }

// fixedValue holds what was given for an option that kiri does not have.
type fixedValue struct {
	harmless []string
	bad      []string
}

func (v *fixedValue) Set(s string) error {
	if !slices.Contains(v.harmless, s) {
		v.bad = append(v.bad, s)
	}
	return nil
}
func (v *fixedValue) String() string { return "" }
func (v *fixedValue) Type() string   { return "" }

// setJSON takes the values apart: each element of a list and each member of an object counts on its own; empty ones
// ask for nothing.
func (v *fixedValue) setJSON(r json.RawMessage) error {
	var any any
	if err := json.Unmarshal(r, &any); err != nil {
		return err
	}
	return v.take("", any)
}

func (v *fixedValue) take(name string, x any) error {
	switch x := x.(type) {
	case nil:
	case []any:
		for _, e := range x {
			if err := v.take(name, e); err != nil {
				return err
			}
		}
	case map[string]any:
		for k, e := range x {
			if err := v.take(k, e); err != nil {
				return err
			}
		}
	default:
		s := fmt.Sprint(x)
		switch {
		case s == "":
			return nil
		case name != "" && s == "false": // a feature that is off
			return nil
		case name != "":
			s = name + "=" + s
		}
		return v.Set(s)
	}
	return nil
}
