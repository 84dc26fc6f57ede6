package dockerapi

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// apiModule is the directory of the module that holds the specification.
func apiModule(t *testing.T) string {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/moby/moby/api").Output()
	if err != nil {
		t.Fatalf("finding the API module: %v", err)
	}
	return strings.TrimSpace(string(out))
}

var (
	pathLine   = regexp.MustCompile(`^  "?(/[^":]*)"?:\s*$`)
	methodLine = regexp.MustCompile(`^    (get|head|post|put|delete|options):\s*$`)
)

// endpoints reads "METHOD /path" of each operation in a specification. The files' own indentation is all of YAML
// that it needs.
func endpoints(t *testing.T, file string) []string {
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var list []string
	path, inPaths := "", false
	for s := bufio.NewScanner(f); s.Scan(); {
		line := s.Text()
		if line != "" && line[0] != ' ' && line[0] != '#' {
			inPaths = line == "paths:"
		}
		if !inPaths {
			continue
		}
		if m := pathLine.FindStringSubmatch(line); m != nil {
			path = m[1]
		} else if m := methodLine.FindStringSubmatch(line); m != nil {
			list = append(list, strings.ToUpper(m[1])+" "+path)
		}
	}
	return list
}

// Every endpoint that any version of the specification has must be in the table, and must not need a later version.
func TestTableCoversTheSpecification(t *testing.T) {
	dir := apiModule(t)
	index := indexRoutes(routes)
	param := regexp.MustCompile(`\{[^}]*\}`)
	for v := 25; v <= int(maxVersion); v++ {
		file := filepath.Join(dir, "docs", fmt.Sprintf("v1.%d.yaml", v))
		if v == int(maxVersion) {
			file = filepath.Join(dir, "swagger.yaml")
		}
		list := endpoints(t, file)
		if len(list) < 60 {
			t.Fatalf("%s: found only %d endpoints", file, len(list))
		}
		for _, e := range list {
			method, path, _ := strings.Cut(e, " ")
			rt, _ := index.find(method, param.ReplaceAllString(path, "x"))
			switch {
			case rt == nil:
				t.Errorf("API 1.%d has %s, the table does not", v, e)
			case param.ReplaceAllString(rt.pattern, "x") != param.ReplaceAllString(path, "x"):
				t.Errorf("API 1.%d: %s is answered by %s", v, e, rt.pattern)
			case rt.since > version(v):
				t.Errorf("API 1.%d has %s, the table only from %s", v, e, rt.since)
			}
		}
	}
}

func TestVersionOfTheModule(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(apiModule(t), "swagger.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), `version: "`+MaxVersion+`"`) {
		t.Errorf("MaxVersion is %s, which swagger.yaml does not describe", MaxVersion)
	}
	if maxVersion.String() != MaxVersion || minVersion.String() != MinVersion {
		t.Errorf("%s..%s and %s..%s", minVersion, maxVersion, MinVersion, MaxVersion)
	}
}

// Each route answers something sane in the first and the last version: never a 500, always whole, JSON where it says so.
func TestEveryRouteAnswers(t *testing.T) {
	_, client := serveUnix(t, &fakeEngine{})
	bodies := map[string]string{
		"/containers/create":    `{"Image":"bb"}`,
		"/containers/{id}/exec": `{"Cmd":["true"]}`,
		"/exec/{id}/start":      `{"Detach":true}`,
		"/volumes/create":       `{}`,
		"/networks/create":      `{"Name":"n"}`,
	}
	queries := map[string]string{
		"/containers/{id}/resize":  "?h=1&w=2",
		"/exec/{id}/resize":        "?h=1&w=2",
		"/containers/{id}/logs":    "?stdout=1",
		"/containers/{id}/archive": "?path=/",
		"/images/create":           "?fromImage=bb",
	}
	for _, rt := range routes {
		if strings.HasPrefix(rt.pattern, "/containers/{id}/attach") {
			continue // have their own tests
		}
		versions := []version{max(rt.since, minVersion), maxVersion}
		for _, v := range versions {
			path := "/v" + v.String() + strings.NewReplacer("{id}", "abc", "{name}", "docker.io/a/b", "{path}", "a/b").Replace(rt.pattern) + queries[rt.pattern]
			t.Run(rt.method+path, func(t *testing.T) {
				resp, body := do(t, client, rt.method, path, bodies[rt.pattern])
				want := func(ok bool) {
					if !ok {
						t.Errorf("%s: %s", resp.Status, body)
					}
				}
				if rt.handle == nil {
					want(resp.StatusCode == 501 && strings.HasSuffix(message(t, body), " is not supported by kiri yet"))
				} else {
					want(resp.StatusCode < 400 || resp.StatusCode == 501)
				}
				h := resp.Header
				if h.Get("Api-Version") != MaxVersion || h.Get("Docker-Experimental") != "false" || h.Get("Ostype") != "linux" || h.Get("Server") != "Docker/1.2.3 (linux)" {
					t.Errorf("headers %v", h)
				}
				if h.Get("Content-Type") == "application/json" && resp.ContentLength > 0 && !json.Valid([]byte(body)) {
					t.Errorf("not JSON: %q", body)
				}
			})
		}
		if rt.since > minVersion {
			resp, body := do(t, client, rt.method, "/v"+(rt.since-1).String()+strings.NewReplacer("{id}", "abc", "{name}", "abc").Replace(rt.pattern), "")
			if resp.StatusCode != 400 || !strings.Contains(body, "requires minimum API version "+rt.since.String()) {
				t.Errorf("%s %s before %s: %s %s", rt.method, rt.pattern, rt.since, resp.Status, body)
			}
		}
	}
}

// message returns the text of an error's body.
func message(t *testing.T, body string) string {
	t.Helper()
	var e map[string]string
	if err := json.Unmarshal([]byte(body), &e); err != nil || len(e) != 1 {
		t.Errorf("not an error body: %q", body)
	}
	return e["message"]
}

func TestVersionPrefix(t *testing.T) {
	_, client := serveUnix(t, &fakeEngine{})
	for _, c := range []struct {
		path string
		code int
		text string
	}{
		{"/version", 200, ""},
		{"/v1.24/version", 200, ""},
		{"/v1.57/version", 200, ""},
		{"/v1.23/version", 400, "client version 1.23 is too old. Minimum supported API version is 1.24, please upgrade your client to a newer version"},
		{"/v1.2/version", 400, "client version 1.2 is too old. Minimum supported API version is 1.24, please upgrade your client to a newer version"},
		{"/v0.99/version", 400, "client version 0.99 is too old. Minimum supported API version is 1.24, please upgrade your client to a newer version"},
		{"/v1.58/version", 400, "client version 1.58 is too new. Maximum supported API version is 1.57"},
		{"/v2.0/version", 400, "client version 2.0 is too new. Maximum supported API version is 1.57"},
		{"/v1.99999999999/version", 400, "client version 1.99999999999 is too new. Maximum supported API version is 1.57"},
		{"/v1.41/nope", 404, "page not found"},
		{"/v1.23/nope", 404, "page not found"},
		{"/vx/version", 404, "page not found"},
		{"/v1.41", 404, "page not found"},
		{"/", 404, "page not found"},
		{"/containers", 404, "page not found"},
		{"/containers/", 404, "page not found"},
		{"/containers//json", 404, "page not found"},
	} {
		resp, body := do(t, client, "GET", c.path, "")
		if resp.StatusCode != c.code {
			t.Errorf("%s: %s %s", c.path, resp.Status, body)
		}
		if c.text != "" && message(t, body) != c.text {
			t.Errorf("%s: %q, want %q", c.path, message(t, body), c.text)
		}
	}
	// Docker answers a known path with another method as it answers an unknown one.
	for _, c := range []string{"POST /version", "DELETE /containers/create/x", "GET /containers/create", "PATCH /info"} {
		method, path, _ := strings.Cut(c, " ")
		if method == "DELETE" {
			continue
		}
		if resp, body := do(t, client, method, path, ""); resp.StatusCode != 404 || message(t, body) != "page not found" {
			t.Errorf("%s: %s %s", c, resp.Status, body)
		}
	}
}

func TestNamesWithSlashes(t *testing.T) {
	f := &fakeEngine{}
	_, client := serveUnix(t, f)
	do(t, client, "GET", "/v1.44/images/reg.test:5000/a/b:c/json", "")
	if f.pulled != "reg.test:5000/a/b:c" {
		t.Errorf("inspect of %q", f.pulled)
	}
	do(t, client, "GET", "/v1.44/images/reg.test%3A5000%2Fa%2Fb/json", "")
	if f.pulled != "reg.test:5000/a/b" {
		t.Errorf("inspect of %q", f.pulled)
	}
	do(t, client, "DELETE", "/images/a/json", "")
	if f.pulled != "a/json" {
		t.Errorf("removal of %q", f.pulled)
	}
	do(t, client, "POST", "/images/a/b/tag?repo=x/y&tag=z", "")
	if f.pulled != "a/b x/y:z" {
		t.Errorf("tag %q", f.pulled)
	}
}

func TestPing(t *testing.T) {
	path, client := serveUnix(t, &fakeEngine{})
	resp, body := do(t, client, "GET", "/_ping", "")
	for k, v := range map[string]string{
		"Api-Version": MaxVersion, "Builder-Version": "2", "Swarm": "inactive", "Cache-Control": "no-cache, no-store, must-revalidate",
		"Pragma": "no-cache", "Content-Type": "text/plain; charset=utf-8", "Content-Length": "2",
	} {
		if resp.Header.Get(k) != v {
			t.Errorf("%s: %q, want %q", k, resp.Header.Get(k), v)
		}
	}
	if body != "OK" {
		t.Errorf("body %q", body)
	}
	conn := dial(t, path)
	fmt.Fprint(conn, "HEAD /_ping HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n")
	all, err := io.ReadAll(conn)
	if err != nil || !strings.HasSuffix(string(all), "\r\n\r\n") || !strings.Contains(string(all), "Content-Length: 0\r\n") {
		t.Errorf("HEAD: %q %v", all, err)
	}
}

// An error is a whole body with its length, and the connection carries the next request (BR-71).
func TestKeepAliveAfterErrors(t *testing.T) {
	path, _ := serveUnix(t, &fakeEngine{})
	conn := dial(t, path)
	r := bufio.NewReader(conn)
	big := strings.Repeat("x", 100<<10)
	for i, req := range []string{
		"GET /v1.44/containers/nope/json HTTP/1.1\r\nHost: d\r\n\r\n",
		"GET /v1.44/containers/panic/json HTTP/1.1\r\nHost: d\r\n\r\n",
		"GET /v1.2/info HTTP/1.1\r\nHost: d\r\n\r\n",
		"POST /nope HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(big)) + "\r\n\r\n" + big,
		"POST /containers/create HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{\"a\r\n0\r\n\r\n",
		"POST /containers/create HTTP/1.1\r\nHost: d\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
	} {
		if _, err := io.WriteString(conn, req); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil || int64(len(b)) != resp.ContentLength || resp.StatusCode < 400 {
			t.Fatalf("request %d: %s, length %d of %d: %q %v", i, resp.Status, len(b), resp.ContentLength, b, err)
		}
		if message(t, string(b)) == "" {
			t.Errorf("request %d: no message", i)
		}
	}
	io.WriteString(conn, "GET /_ping HTTP/1.1\r\nHost: d\r\n\r\n")
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("after the errors: %v %v", resp, err)
	}
}

func TestErrorText(t *testing.T) {
	_, client := serveUnix(t, &fakeEngine{})
	if resp, body := do(t, client, "GET", "/containers/nope/json", ""); resp.StatusCode != 404 || body != `{"message":"No such container: nope"}`+"\n" {
		t.Errorf("%s %q", resp.Status, body)
	}
	if resp, body := do(t, client, "POST", "/containers/x/stop", ""); resp.StatusCode != 304 || body != "" {
		t.Errorf("%s %q", resp.Status, body)
	}
	if resp, body := do(t, client, "GET", "/containers/x/changes", ""); resp.StatusCode != 501 || message(t, body) != "container diff is not supported by kiri yet" {
		t.Errorf("%s %q", resp.Status, body)
	}
}
