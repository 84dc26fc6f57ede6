package main

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
)

func decodeAuth(t *testing.T, s string) string {
	t.Helper()
	b, err := base64.URLEncoding.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestPs(t *testing.T) {
	f := newFake(t)
	created := time.Now().Add(-3 * time.Hour).Unix()
	const id, id2 = "6de487b0e14dc685ae97e6c465eae60389a411a209fdce08371230a5c1f49d2a", "0f4a0baf9cda7b2d011a6c931ff65b1faad5ee2d927f56475f358b4297b28fe8"
	f.answer("GET /containers/json", 200, fmt.Sprintf(`[
		{"Id":%q,"Names":["/other/alias","/web"],"Image":"nginx","ImageID":"sha256:aa","Command":"nginx -g 'daemon off;' and more","Created":%d,"State":"running","Status":"Up 3 hours",
		 "Labels":{"b":"2","a":"1"},"Ports":[{"IP":"0.0.0.0","PrivatePort":80,"PublicPort":8080,"Type":"tcp"},{"PrivatePort":443,"Type":"tcp"}],
		 "Mounts":[{"Type":"volume","Name":"a-volume-with-a-long-name","Source":"/x"},{"Type":"bind","Source":"/src"}],"NetworkSettings":{"Networks":{"bridge":{}}},"SizeRw":12345678,"SizeRootFs":99000000},
		{"Id":%q,"Names":["/job"],"Image":"sha256:1234567890abcdef","ImageID":"sha256:1234567890abcdef","Command":"true","Created":%d,"State":"exited","Status":"Exited (0) 2 hours ago","Labels":{},"Ports":[],"NetworkSettings":{"Networks":{}}}]`,
		id, created, id2, created))
	want(t, f.run("ps", "-a"), 0, `CONTAINER ID   IMAGE          COMMAND                  CREATED       STATUS                   PORTS                           NAMES
6de487b0e14d   nginx          "nginx -g 'daemon of…"   3 hours ago   Up 3 hours               443/tcp, 0.0.0.0:8080->80/tcp   web
0f4a0baf9cda   1234567890ab   "true"                   3 hours ago   Exited (0) 2 hours ago                                   job
`, "")
	want(t, f.run("ps", "-q"), 0, "6de487b0e14d\n0f4a0baf9cda\n", "")
	want(t, f.run("ps", "-q", "--no-trunc"), 0, id+"\n"+id2+"\n", "")
	want(t, f.run("ps", "--format", `{{.Names}}|{{.Label "a"}}|{{.Labels}}|{{.Mounts}}|{{.LocalVolumes}}|{{.Size}}|{{upper .State}}`), 0,
		"web|1|a=1,b=2|a-volume-with-…,/src|1|12.3MB (virtual 99MB)|RUNNING\njob||||0|0B|EXITED\n", "")
	want(t, f.run("ps", "--format", `table {{.Names}}\t{{.Label "com.example.some-name"}}`), 0, "NAMES     some name\nweb       \njob       \n", "")
	for l := range strings.Lines(f.run("ps", "--format", "json").out) {
		var m map[string]any
		if err := json.Unmarshal([]byte(l), &m); err != nil || len(m) != 15 || m["ID"] == nil {
			t.Errorf("%s: %v", l, err)
		}
	}
	calls := f.called()
	f.run("ps", "-a", "-s", "-n", "3", "--filter", "label=a=b", "--filter", "label=c", "-f", "NAME=x")
	f.run("ps", "-l")
	got := strings.Join(f.called()[len(calls):], "\n")
	if got != "GET /containers/json?all=1&filters=%7B%22label%22%3A%7B%22a%3Db%22%3Atrue%2C%22c%22%3Atrue%7D%2C%22name%22%3A%7B%22x%22%3Atrue%7D%7D&limit=3&size=1\nGET /containers/json?limit=1" {
		t.Error(got)
	}
}

func TestPortsText(t *testing.T) {
	for want, ports := range map[string][]psPort{
		"":                         nil,
		"80/tcp":                   {{"", 80, 0, "tcp"}},
		"80-82/tcp, 53/udp":        {{"", 81, 0, "tcp"}, {"", 80, 0, "tcp"}, {"", 82, 0, "tcp"}, {"", 53, 0, "udp"}},
		"0.0.0.0:8080->80/tcp":     {{"0.0.0.0", 80, 8080, "tcp"}},
		"0.0.0.0:80->80/tcp":       {{"0.0.0.0", 80, 80, "tcp"}},
		"0.0.0.0:80-81->80-81/tcp": {{"0.0.0.0", 80, 80, "tcp"}, {"0.0.0.0", 81, 81, "tcp"}},
	} {
		if got := portsText(ports); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	if got := portsText([]psPort{{"0.0.0.0", 80, 80, "tcp"}, {"::", 80, 80, "tcp"}}); got != "0.0.0.0:80->80/tcp, [::]:80->80/tcp" {
		t.Errorf("%q", got)
	}
}

func TestImages(t *testing.T) {
	f := newFake(t)
	created := time.Now().Add(-48 * time.Hour).Unix()
	const id = "132842916bef2b90b3c71e1f024f8e78b365e534943ee2b66ab22f0e3000ad45"
	f.answer("GET /images/json", 200, fmt.Sprintf(`[
		{"Id":"sha256:%[1]s","RepoTags":["a:1","localhost:5000/b/c:2"],"RepoDigests":["a@sha256:%[1]s"],"Created":%[2]d,"Size":1982000,"SharedSize":-1,"Containers":-1},
		{"Id":"sha256:0%[1]s","RepoTags":[],"RepoDigests":["only@sha256:%[1]s"],"Created":%[2]d,"Size":5,"SharedSize":-1,"Containers":-1},
		{"Id":"sha256:1%[1]s","RepoTags":null,"RepoDigests":null,"Created":%[2]d,"Size":5,"SharedSize":-1,"Containers":-1}]`, id, created))
	out := f.run("images").out
	for _, l := range []string{"REPOSITORY           TAG       IMAGE ID       CREATED      SIZE", "a                    1         132842916bef   2 days ago   1.98MB",
		"localhost:5000/b/c   2         132842916bef   2 days ago   1.98MB", "only                 <none>    0132842916be   2 days ago   5B", "<none>               <none>    1132842916be   2 days ago   5B"} {
		if !strings.Contains(out, l+"\n") {
			t.Errorf("no line %q in\n%s", l, out)
		}
	}
	want(t, f.run("images", "-q"), 0, "132842916bef\n0132842916be\n1132842916be\n", "")
	if out := f.run("images", "--digests").out; !strings.Contains(out, "a                    1         sha256:"+id+"   132842916bef") {
		t.Error(out)
	}
	n := len(f.called())
	f.run("images", "-a", "alpine:3")
	if got := f.called()[n]; got != "GET /images/json?all=1&filters=%7B%22reference%22%3A%7B%22alpine%3A3%22%3Atrue%7D%7D" {
		t.Error(got)
	}
}

func TestInspect(t *testing.T) {
	f := newFake(t)
	f.answer("GET /containers/web/json", 200, `{"Id":"abc","Name":"/web","State":{"Status":"running","ExitCode":0},"Config":{"Cmd":["a","b"]},"NetworkSettings":{"IPAddress":"10.0.0.2"},"Extra":12345678901234567890}`)
	f.answer("GET /images/alpine/json", 200, `{"Id":"sha256:1","RepoTags":["alpine:latest"]}`)
	f.fail("/", 404, "no such thing")
	want(t, f.run("inspect", "web"), 0, `[
    {
        "Id": "abc",
        "Name": "/web",
        "State": {
            "Status": "running",
            "ExitCode": 0
        },
        "Config": {
            "Cmd": [
                "a",
                "b"
            ]
        },
        "NetworkSettings": {
            "IPAddress": "10.0.0.2"
        },
        "Extra": 12345678901234567890
    }
]
`, "")
	// A field of the type, one that only the JSON has, functions, numbers that are compared.
	want(t, f.run("inspect", "-f", `{{.ID}} {{.State.Status}} {{json .Config.Cmd}} {{join .Config.Cmd "+"}} {{if eq .State.ExitCode 0}}ok{{end}}`, "web"), 0, "abc running [\"a\",\"b\"] a+b ok\n", "")
	want(t, f.run("inspect", "-f", `{{.NetworkSettings.IPAddress}} {{.Extra}}`, "web"), 0, "10.0.0.2 12345678901234567890\n", "")
	want(t, f.run("inspect", "-f", `{{.RepoTags}}`, "alpine"), 0, "[alpine:latest]\n", "")
	want(t, f.run("inspect", "-f", `{{.Nope}}`, "web"), 1, "\n", "template parsing error: template: :1:2: executing \"\" at <.Nope>: map has no entry for key \"Nope\"\n")
	want(t, f.run("inspect", "-f", `{{.Nope`, "web"), 64, "", "template parsing error: template: :1: unclosed action\n")
	want(t, f.run("inspect", "nope"), 1, "[]\n", "Error: No such object: nope\n")
	want(t, f.run("container", "inspect", "nope"), 1, "[]\n", "Error response from daemon: no such thing\n")
	want(t, f.run("inspect", "--format", "json", "alpine"), 0, `[{"Id":"sha256:1","RepoTags":["alpine:latest"]}]`+"\n", "")
	want(t, f.run("inspect", "-f", "{{.Id}}", "nope", "alpine"), 1, "sha256:1\n", "Error: No such object: nope\n")
}

func TestLifecycleCommands(t *testing.T) {
	f := newFake(t)
	for _, name := range []string{"a", "b"} {
		for _, action := range []string{"stop", "start", "kill", "restart", "pause", "unpause"} {
			f.answer("POST /containers/"+name+"/"+action, 204, "")
		}
		f.answer("DELETE /containers/"+name, 204, "")
		f.answer("POST /containers/"+name+"/wait", 200, `{"StatusCode":3}`)
	}
	f.fail("/", 404, "No such container: nope")
	const missing = "Error response from daemon: No such container: nope\n"
	want(t, f.run("stop", "a", "nope", "b"), 1, "a\nb\n", missing)
	want(t, f.run("start", "a", "nope"), 1, "a\n", missing+"Error: failed to start containers: nope\n")
	want(t, f.run("rm", "/a", "nope"), 1, "/a\n", missing)
	want(t, f.run("rm", "-f", "a", "nope"), 0, "a\n", missing)
	want(t, f.run("wait", "a", "b"), 0, "3\n3\n", "")
	want(t, f.run("kill", "-s", "HUP", "a"), 0, "a\n", "")
	want(t, f.run("restart", "-t", "5", "--signal", "INT", "a"), 0, "a\n", "")
	want(t, f.run("stop", "--time", "0", "a"), 0, "a\n", "")
	for _, call := range []string{"POST /containers/a/kill?signal=HUP", "POST /containers/a/restart?signal=INT&t=5", "POST /containers/a/stop?t=0", "DELETE /containers/a?force=1"} {
		if !strings.Contains(strings.Join(f.called(), "\n")+"\n", call+"\n") {
			t.Errorf("no %s in %q", call, f.called())
		}
	}
}

func TestLogTime(t *testing.T) {
	now := time.Unix(1000000, 5)
	for in, want := range map[string]string{
		"10s": "999990.000000005", "1h30m": "994600.000000005", "1234567890": "1234567890", "1234567890.123456789": "1234567890.123456789",
		"2013-01-02T13:23:37Z": "1357133017.000000000", "2013-01-02T13:23:37.5+01:00": "1357129417.500000000",
	} {
		if got, err := logTime(in, now); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", in, got, err, want)
		}
	}
	for _, in := range []string{"yesterday", "12x", "1.2.3", "2013-13-01", "-"} {
		if got, err := logTime(in, now); err == nil {
			t.Errorf("%s was read as %s", in, got)
		}
	}
}

func TestProgressOnATerminal(t *testing.T) {
	var out bytes.Buffer
	in := `{"status":"Pulling from library/a","id":"latest"}
{"status":"Downloading","progressDetail":{"current":512,"total":1024},"progress":"[==> ]","id":"l1"}
{"status":"Downloading","progressDetail":{"current":1024,"total":2048},"id":"l2"}
{"status":"Pull complete","id":"l1"}
{"status":"evil \u001b[2J\u0007 text"}
`
	d := &progressDisplay{out: bufio.NewWriter(&out), terminal: true, width: 200, lines: map[string]int{}}
	if err := d.read(strings.NewReader(in)); err != nil {
		t.Fatal(err)
	}
	s := out.String()
	if !strings.Contains(s, "l1: Downloading [=========================>") || !strings.Contains(s, "512B/1.024kB") {
		t.Errorf("no bar in %q", s)
	}
	// Line 0 is latest, 1 is l1, 2 is l2: from below the third, l1 is two up.
	if !strings.Contains(s, "\x1b[2A\x1b[2K\rl1: Pull complete\r\x1b[2B") {
		t.Errorf("l1 is not redrawn in place: %q", s)
	}
	if strings.Contains(s, "\x1b[2J") || strings.Contains(s, "\a") || !strings.Contains(s, "evil [2J text") {
		t.Errorf("control characters of a registry reach the terminal: %q", s)
	}
}

func TestProgressError(t *testing.T) {
	for _, in := range []string{`{"errorDetail":{"message":"no"}}`, `{"error":"no"}`, `{"status":"a"}{"errorDetail":{"code":401,"message":"no"},"error":"no"}`} {
		var out bytes.Buffer
		if err := showProgress(strings.NewReader(in), &out); err == nil || err.Error() != "no" {
			t.Errorf("%s: %v", in, err)
		}
	}
	if err := showProgress(strings.NewReader(`{"status":"a"`), &bytes.Buffer{}); err == nil {
		t.Error("a cut stream was taken for a whole one")
	}
}
