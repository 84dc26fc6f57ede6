package main

import (
	"encoding/json"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
)

type createBody struct {
	container.Config
	HostConfig       container.HostConfig
	NetworkingConfig network.NetworkingConfig
}

// TestCreateBody compares the body of create with what docker CLI 28.2.2 sent for the same arguments. Fields that docker always sends and
// that mean the same as their absence are taken for absent.
func TestCreateBody(t *testing.T) {
	b, err := os.ReadFile("testdata/create.json")
	if err != nil {
		t.Fatal(err)
	}
	cwd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	b = []byte(strings.ReplaceAll(string(b), "$PWD", cwd))
	var cases []struct {
		Args []string
		Path string
		Body json.RawMessage
	}
	if err := json.Unmarshal(b, &cases); err != nil {
		t.Fatal(err)
	}
	t.Setenv("HOME", "/root") // the value that was recorded for -e HOME
	os.Unsetenv("NOSUCHVAR")
	for _, c := range cases {
		t.Run(strings.Join(c.Args, " "), func(t *testing.T) {
			f := newFake(t)
			f.fail("/", 500, "recorded")
			got := f.run(append([]string{"run"}, c.Args...)...)
			if got.code != exitEngine || !strings.Contains(got.err, "recorded") {
				t.Fatalf("code %d, %q", got.code, got.err)
			}
			calls := f.called()
			if len(calls) != 1 || calls[0] != "POST "+c.Path {
				t.Fatalf("calls %q, want POST %s", calls, c.Path)
			}
			ours, theirs := decodeCreate(t, []byte(f.bodyOf("POST /containers/create"))), decodeCreate(t, c.Body)
			ov, tv := reflect.ValueOf(ours).Elem(), reflect.ValueOf(theirs).Elem()
			compare(t, "", ov, tv)
		})
	}
}

func decodeCreate(t *testing.T, b []byte) *createBody {
	t.Helper()
	v := &createBody{}
	if err := json.Unmarshal(b, v); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	h := &v.HostConfig
	if h.MemorySwappiness != nil && *h.MemorySwappiness == -1 {
		h.MemorySwappiness = nil
	}
	if h.OomKillDisable != nil && !*h.OomKillDisable {
		h.OomKillDisable = nil
	}
	if h.PidsLimit != nil && *h.PidsLimit == 0 {
		h.PidsLimit = nil
	}
	eps := v.NetworkingConfig.EndpointsConfig
	maps.DeleteFunc(eps, func(_ string, ep *network.EndpointSettings) bool {
		return ep == nil || reflect.DeepEqual(ep, &network.EndpointSettings{})
	})
	return v
}

func compare(t *testing.T, path string, a, b reflect.Value) {
	t.Helper()
	switch a.Kind() {
	case reflect.Struct:
		if a.Type() == reflect.TypeFor[netip.Addr]() {
			break
		}
		for i := range a.NumField() {
			if a.Type().Field(i).IsExported() {
				compare(t, path+"."+a.Type().Field(i).Name, a.Field(i), b.Field(i))
			}
		}
		return
	case reflect.Slice:
		// For these two an empty list and none are different wishes.
		strict := strings.HasSuffix(path, "MaskedPaths") || strings.HasSuffix(path, "ReadonlyPaths")
		if a.Len() == 0 && b.Len() == 0 && (!strict || a.IsNil() == b.IsNil()) {
			return
		}
		if strings.HasSuffix(path, ".Binds") && a.Len() == b.Len() { // docker's order is that of a map
			x, y := slices.Sorted(slices.Values(a.Interface().([]string))), slices.Sorted(slices.Values(b.Interface().([]string)))
			if reflect.DeepEqual(x, y) {
				return
			}
		}
	case reflect.Map:
		if a.Len() == 0 && b.Len() == 0 {
			return
		}
	}
	if !reflect.DeepEqual(a.Interface(), b.Interface()) {
		x, _ := json.Marshal(a.Interface())
		y, _ := json.Marshal(b.Interface())
		t.Errorf("%s: %s, docker sent %s", path, x, y)
	}
}

// TestEncodeEveryField fills every field of the request and checks that each arrives, so that a field of a newer API is not forgotten.
func TestEncodeEveryField(t *testing.T) {
	in := &createBody{}
	fill(reflect.ValueOf(in).Elem(), 0)
	// Fields that a client does not set.
	in.HostConfig.BlkioDeviceReadBps = in.HostConfig.BlkioDeviceReadBps[:1]
	b, err := encodeCreate(&in.Config, &in.HostConfig, &in.NetworkingConfig)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var got, want any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	if err := json.Unmarshal(whole, &want); err != nil {
		t.Fatal(err)
	}
	for _, diff := range differences("", got, want) {
		t.Error(diff)
	}
}

func differences(path string, got, want any) []string {
	g, gok := got.(map[string]any)
	w, wok := want.(map[string]any)
	if !gok || !wok {
		if !reflect.DeepEqual(got, want) {
			return []string{path + " is not what encoding/json writes"}
		}
		return nil
	}
	var out []string
	for k := range w {
		if _, ok := g[k]; !ok {
			out = append(out, path+"."+k+" is missing")
			continue
		}
		out = append(out, differences(path+"."+k, g[k], w[k])...)
	}
	for k := range g {
		if _, ok := w[k]; !ok {
			out = append(out, path+"."+k+" is unknown to the API")
		}
	}
	return out
}

// fill sets every exported field to something that is not zero.
func fill(v reflect.Value, depth int) {
	switch v.Interface().(type) {
	case netip.Addr:
		v.Set(reflect.ValueOf(netip.MustParseAddr("192.0.2.7")))
		return
	case network.Port:
		v.Set(reflect.ValueOf(network.MustParsePort("80/tcp")))
		return
	}
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		v.SetInt(7)
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		v.SetUint(7)
	case reflect.String:
		v.SetString("a \"quoted\"\nstring")
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), depth)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), depth+1)
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i), depth+1)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, val := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, depth+1)
		fill(val, depth+1)
		v.SetMapIndex(key, val)
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i), depth+1)
			}
		}
	}
}

func FuzzAppendString(f *testing.F) {
	for _, s := range []string{"", "plain", "\"\\/\b\f\n\r\t", "\x00\x1f\x7f", "ü€😀", "\xff\xfe", "a\xc3", "\u2028<&>"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		b := appendString(nil, s)
		var got, wanted string
		if err := json.Unmarshal(b, &got); err != nil {
			t.Fatalf("%q became %q: %v", s, b, err)
		}
		std, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(std, &wanted); err != nil {
			t.Fatal(err)
		}
		if got != wanted || !utf8.Valid(b) {
			t.Fatalf("%q became %q, want %q", s, got, wanted)
		}
	})
}

// TestPathsStayPaths checks that a name cannot leave its place in the path.
func TestPathsStayPaths(t *testing.T) {
	f := newFake(t)
	f.fail("/", 404, "No such container")
	for _, name := range []string{"../images/x", "a?force=1", "a/b", "a b", "a%2f", "a#b", "ä", "\r\nX: y"} {
		f.run("inspect", "--type", "container", name)
	}
	for _, call := range f.called() {
		u, err := url.Parse(strings.TrimPrefix(call, "GET "))
		if err != nil || !strings.HasPrefix(u.Path, "/containers/") || u.RawQuery != "" {
			t.Errorf("asked for %q", call)
		}
	}
}
