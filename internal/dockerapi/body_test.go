package dockerapi

import (
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestMalformedBodies(t *testing.T) {
	_, client := serveUnix(t, &fakeEngine{})
	for _, c := range []struct {
		name, path, kind, body string
		code                   int
		text                   string // part of the message
	}{
		{"no body", "/containers/create", "", "", 400, "invalid JSON: got EOF while reading request body"},
		{"cut", "/containers/create", "application/json", `{"Image":`, 400, "invalid JSON: unexpected EOF"},
		{"not JSON", "/containers/create", "application/json", `hello`, 400, "invalid JSON: invalid character 'h'"},
		{"null", "/containers/create", "application/json", `null`, 400, "config cannot be empty in order to create a container"},
		{"nothing in it", "/containers/create", "application/json", `{}`, 400, "config cannot be empty in order to create a container"},
		{"only a host configuration", "/containers/create", "application/json", `{"HostConfig":{}}`, 400, "config cannot be empty"},
		{"second value", "/containers/create", "application/json", `{"Image":"bb"}{}`, 400, "unexpected content after JSON"},
		{"wrong type", "/containers/create", "application/json", `{"Image":3}`, 400, "invalid JSON: json: cannot unmarshal number into Go struct field"},
		{"list", "/containers/create", "application/json", `[]`, 400, "invalid JSON: json: cannot unmarshal array"},
		{"text", "/containers/create", "text/plain", `{"Image":"bb"}`, 400, "unsupported Content-Type header (text/plain): must be 'application/json'"},
		{"no type", "/containers/create", "", `{"Image":"bb"}`, 400, "malformed Content-Type header ()"},
		{"bad type", "/containers/create", ";;", `{"Image":"bb"}`, 400, "malformed Content-Type header (;;)"},
		{"type with charset", "/containers/create", "application/json; charset=utf-8", `{"Image":"bb"}`, 201, ""},
		{"unknown field", "/containers/create", "application/json", `{"Image":"bb","Nope":[1,2]}`, 201, ""},
		{"lower case", "/containers/create", "application/json", `{"image":"bb"}`, 201, ""},
		{"deep", "/containers/create", "application/json", strings.Repeat(`{"a":`, 20000), 400, "invalid JSON"},
		{"too large", "/containers/create", "application/json", `{"Image":"` + strings.Repeat("x", maxBody) + `"}`, 413, "request body too large"},
		{"exec without command", "/containers/x/exec", "application/json", `{}`, 400, "No exec command specified"},
		{"exec without body", "/containers/x/exec", "", "", 400, "No exec command specified"},
		{"start with a body", "/containers/x/start", "application/json", `{"Binds":["/a:/b"]}`, 400, "starting container with non-empty request body"},
		{"start with an empty object", "/containers/x/start", "application/json", `{}`, 204, ""},
		{"volume without body", "/volumes/create", "", "", 400, "got EOF"},
		{"connect to null", "/networks/x/connect", "application/json", `null`, 200, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			req, _ := http.NewRequest("POST", "http://docker"+c.path, strings.NewReader(c.body))
			if c.kind != "" {
				req.Header.Set("Content-Type", c.kind)
			}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != c.code {
				t.Errorf("%s: %s", resp.Status, b)
			}
			if c.text != "" && !strings.Contains(message(t, string(b)), c.text) {
				t.Errorf("%q, want %q", b, c.text)
			}
		})
	}
}

func TestArguments(t *testing.T) {
	f := &fakeEngine{}
	_, client := serveUnix(t, f)
	for _, c := range []struct {
		method, path string
		code         int
	}{
		{"GET", "/containers/json?limit=x", 400},
		{"GET", "/containers/json?filters=%7B", 400},
		{"GET", "/containers/json?filters=3", 400},
		{"GET", "/containers/json?filters=null", 200},
		{"GET", "/containers/json?a=%zz", 400},
		{"POST", "/containers/x/stop?t=ten", 400},
		{"POST", "/containers/x/resize", 400},
		{"POST", "/containers/x/resize?h=1&w=-1", 400},
		{"POST", "/exec/x/resize?h=1&w=99999999999", 400},
		{"GET", "/containers/x/logs", 400},
		{"GET", "/containers/x/logs?stdout=1&since=yesterday", 400},
		{"GET", "/containers/x/logs?stdout=1&since=1.5&until=10m", 200},
		{"GET", "/containers/x/archive", 400},
		{"POST", "/containers/x/wait?condition=never", 400},
		{"POST", "/v1.29/containers/x/wait?condition=never", 200},
		{"GET", "/events?since=2&until=1", 400},
		{"GET", "/events?since=99999999999999999999", 400},
		{"GET", "/events?since=9223372036854775807&until=9223372036854775807", 400},
		{"GET", "/images/x/json?platform=%7B", 400},
		{"GET", "/images/x/json?platform=%7B%22os%22%3A%22linux%22%7D", 400},
		{"GET", "/v1.48/images/x/json?platform=%7B", 200},
		{"GET", "/system/df?type=nope", 400},
		{"GET", "/v1.41/system/df?type=nope", 200},
		{"POST", "/images/create", 400},
		{"POST", "/images/create?fromSrc=file:///etc/passwd", 400},
		{"GET", "/containers/x/stats?one-shot=1", 400},
		{"POST", "/volumes/prune?filters=" + `{"all":["perhaps"]}`, 400},
	} {
		if resp, body := do(t, client, c.method, c.path, ""); resp.StatusCode != c.code {
			t.Errorf("%s %s: %s %s", c.method, c.path, resp.Status, body)
		}
	}
	for text, want := range map[string]bool{"1": true, "true": true, "yes": true, "x": true, "0": false, "no": false, "False": false, "none": false, "": false, " 0 ": false} {
		c := &call{query: map[string][]string{"k": {text}}}
		if c.flag("k") != want {
			t.Errorf("flag(%q) = %v", text, !want)
		}
	}
	// Filters in both forms.
	for _, text := range []string{`{"label":{"a=b":true,"c":true}}`, `{"label":["a=b","c"]}`} {
		got, err := parseFilters(text)
		if err != nil || len(got) != 1 || !got["label"]["a=b"] || !got["label"]["c"] {
			t.Errorf("%s: %v %v", text, got, err)
		}
	}
}

func TestVersionedArguments(t *testing.T) {
	f := &fakeEngine{}
	_, client := serveUnix(t, f)
	for path, all := range map[string]bool{
		"/v1.41/volumes/prune": true,
		"/v1.42/volumes/prune": false,
		"/v1.57/volumes/prune?filters=" + `{"all":{"true":true}}`:  true,
		"/v1.57/volumes/prune?filters=" + `{"all":{"0":true}}`:     false,
		"/v1.57/volumes/prune?filters=" + `{"label":{"a":true}}`:   false,
		"/v1.41/volumes/prune?filters=" + `{"label":{"a!":true}}`:  true,
		"/v1.42/volumes/prune?filters=" + `{"all":["1"]}`:          true,
		"/v1.42/volumes/prune?filters=" + `{"all":{"false":true}}`: false,
	} {
		if resp, body := do(t, client, "POST", path, ""); resp.StatusCode != 200 || f.pruneAll != all {
			t.Errorf("%s: all=%v %s %s", path, f.pruneAll, resp.Status, body)
		}
		if _, there := f.filters["all"]; there && f.filters["all"] != nil && strings.HasPrefix(path, "/v1.57") {
			t.Errorf("%s: the filter is passed on", path)
		}
	}
	do(t, client, "POST", "/v1.41/containers/x/restart?signal=HUP&t=-1", "")
	if f.signal != "" || f.timeout == nil || *f.timeout != -1 {
		t.Errorf("1.41: signal %q, timeout %v", f.signal, f.timeout)
	}
	do(t, client, "POST", "/v1.42/containers/x/restart?signal=HUP", "")
	if f.signal != "HUP" || f.timeout != nil {
		t.Errorf("1.42: signal %q, timeout %v", f.signal, f.timeout)
	}
	do(t, client, "GET", "/v1.40/images/json?filter=bb", "")
	if !f.filters["reference"]["bb"] {
		t.Errorf("1.40: filters %v", f.filters)
	}
	do(t, client, "GET", "/v1.41/images/json?filter=bb", "")
	if len(f.filters) != 0 {
		t.Errorf("1.41: filters %v", f.filters)
	}
	for path, want := range map[string]string{
		"?fromImage=bb&tag=1":                 "bb:1",
		"?fromImage=bb&tag=sha256:abc":        "bb@sha256:abc",
		"?fromImage=reg:5000/bb&tag=x":        "reg:5000/bb:x",
		"?fromImage=reg:5000/bb":              "reg:5000/bb all",
		"?fromImage=bb:2":                     "bb:2",
		"?fromImage=bb@sha256:1":              "bb@sha256:1",
		"?fromImage=bb":                       "bb all",
		"?fromSrc=-&repo=bb&tag=x":            "bb:x",
		"?fromImage=bb&tag=1&platform=linux/": "bb:1",
	} {
		do(t, client, "POST", "/images/create"+path, "")
		got := f.pulled
		if f.pullOpts.AllTags && strings.Contains(path, "fromImage") {
			got += " all"
		}
		if got != want {
			t.Errorf("%s: pulls %q, want %q", path, got, want)
		}
	}
}

// decode puts a body through a handler without a socket, which is what fuzzing needs.
func decode(t *testing.T, h http.Handler, method, path, body string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(method, "/v1.44/x", strings.NewReader(body))
	req.URL.Path, req.URL.RawQuery, _ = strings.Cut(path, "?")
	req.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w
}

func FuzzCreate(f *testing.F) {
	f.Add(`{"Image":"bb","Cmd":"true","HostConfig":{"Mounts":[{"Type":"bind"}]},"NetworkingConfig":{"EndpointsConfig":{"a":null}}}`, uint16(24))
	f.Add(`{"Image":"bb","MacAddress":"02:42:ac:11:00:02","HostConfig":{"NetworkMode":"x"}}`, uint16(44))
	f.Add(`null`, uint16(40))
	f.Add(`{"Cmd":null,"Healthcheck":{"StartInterval":1}}`, uint16(30))
	s := New(&fakeEngine{}, "1", slog.New(slog.DiscardHandler))
	f.Fuzz(func(t *testing.T, body string, v uint16) {
		v = v%uint16(maxVersion-minVersion+1) + uint16(minVersion)
		w := decode(t, s, "POST", "/v"+version(v).String()+"/containers/create", body)
		if w.Code != 201 && w.Code != 400 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	})
}

func FuzzExec(f *testing.F) {
	f.Add(`{"Cmd":"true","ConsoleSize":[1,2],"Env":null}`)
	f.Add(`{"Cmd":[null]}`)
	s := New(&fakeEngine{}, "1", slog.New(slog.DiscardHandler))
	f.Fuzz(func(t *testing.T, body string) {
		if w := decode(t, s, "POST", "/containers/x/exec", body); w.Code != 201 && w.Code != 400 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		if strings.Contains(body, "etach") { // else it wants the connection, which there is none of
			if w := decode(t, s, "POST", "/exec/x/start", body); w.Code != 200 && w.Code != 400 && w.Code != 500 {
				t.Errorf("%d %s", w.Code, w.Body)
			}
		}
	})
}

func FuzzFilters(f *testing.F) {
	f.Add(`{"label":{"a":true}}`)
	f.Add(`{"label":["a"]}`)
	f.Add(`null`)
	f.Fuzz(func(t *testing.T, text string) {
		got, err := parseFilters(text)
		if (got == nil) == (err == nil) {
			t.Errorf("%v %v", got, err)
		}
	})
}
