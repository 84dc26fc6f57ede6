package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestMain lets a test run the whole program, exec and all, as a child.
func TestMain(m *testing.M) {
	if os.Getenv("KIRI_TEST_MAIN") != "" {
		os.Unsetenv("KIRI_TEST_MAIN")
		os.Exit(runCLI(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// child runs this program as a process of its own with only the given programs on its PATH.
func child(t *testing.T, path string, env []string, args ...string) result {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(self, args...)
	c.Env = append([]string{"KIRI_TEST_MAIN=1", "PATH=" + path, "HOME=" + t.TempDir()}, env...)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); err != nil && c.ProcessState == nil {
		t.Fatal(err)
	}
	return result{c.ProcessState.ExitCode(), out.String(), errs.String()}
}

// fakeDocker is a docker that says how it was called.
func fakeDocker(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\necho \"host=$DOCKER_HOST context=$DOCKER_CONTEXT tls=$DOCKER_TLS_VERIFY\"\nfor a; do echo \"[$a]\"; done\nexit 9\n"
	if err := os.WriteFile(filepath.Join(dir, "docker"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestHandOver(t *testing.T) {
	f := newFake(t)
	docker := fakeDocker(t)
	env := []string{"KIRI_HOST=unix://" + f.socket, "DOCKER_HOST=tcp://elsewhere", "DOCKER_CONTEXT=other", "DOCKER_TLS_VERIFY=1"}
	head := "host=unix://" + f.socket + " context= tls=\n"
	for _, c := range []struct {
		args []string
		out  string
	}{
		{[]string{"compose", "up", "-d"}, "[compose]\n[up]\n[-d]\n"},
		{[]string{"network", "ls"}, "[network]\n[ls]\n"},
		{[]string{"container", "prune"}, "[container]\n[prune]\n"},
		{[]string{"run", "--use-api-socket", "alpine", "--rm"}, "[run]\n[--use-api-socket]\n[alpine]\n[--rm]\n"}, // a flag that is not native
		{[]string{"ps", "-Z"}, "[ps]\n[-Z]\n"},
		{[]string{"--debug", "--config", "/c", "cp", "a:/b", "."}, "[--config]\n[/c]\n[--debug]\n[cp]\n[a:/b]\n[.]\n"},
		{[]string{"help", "build"}, "[build]\n[--help]\n"},
		{[]string{"inspect", "--type", "swarm", "x"}, "[inspect]\n[--type]\n[swarm]\n[x]\n"},
		{[]string{"context", "ls"}, "[context]\n[ls]\n"},
	} {
		want(t, child(t, docker, env, c.args...), 9, head+c.out, "")
	}
}

func TestNoDocker(t *testing.T) {
	f := newFake(t)
	env := []string{"KIRI_HOST=unix://" + f.socket}
	empty := t.TempDir()
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"compose", "up"}, 1, "'kiri compose up'"},
		{[]string{"nonsense"}, 1, "'kiri nonsense'"},
		{[]string{"network", "ls"}, 1, "'kiri network ls'"},
		{[]string{"ps", "--nope"}, 125, "unknown flag: --nope"},
		{[]string{"run", "-Z", "x"}, 125, "unknown shorthand flag: 'Z' in -Z"},
	} {
		got := child(t, empty, env, c.args...)
		if got.code != c.code || got.out != "" || !strings.Contains(got.err, c.says) || !strings.Contains(got.err, "no docker CLI") {
			t.Errorf("%q: %+v", c.args, got)
		}
	}
	// A docker that is a link to kiri must not be handed anything.
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(empty, "docker")); err != nil {
		t.Fatal(err)
	}
	if got := child(t, empty, env, "nonsense"); got.code != 1 || !strings.Contains(got.err, "no docker CLI") {
		t.Errorf("%+v", got)
	}
}

func TestUsage(t *testing.T) {
	f := newFake(t)
	for _, c := range []struct {
		args []string
		code int
		err  string
	}{
		{[]string{"stop"}, 1, "kiri: 'kiri stop' requires at least 1 argument\n\nUsage:  kiri stop [OPTIONS] CONTAINER [CONTAINER...]\n\nSee 'kiri stop --help' for more information\n"},
		{[]string{"rename", "a"}, 1, "kiri: 'kiri rename' requires 2 arguments\n\nUsage:  kiri rename CONTAINER NEW_NAME\n\nRun 'kiri rename --help' for more information\n"},
		{[]string{"ps", "x"}, 1, "kiri: 'kiri ps' accepts no arguments\n\nUsage:  kiri ps [OPTIONS]\n\nRun 'kiri ps --help' for more information\n"},
		{[]string{"run", "-m", "xx", "a"}, 125, "invalid argument \"xx\" for \"-m, --memory\" flag: invalid size: 'xx'\n\nUsage:  kiri run [OPTIONS] IMAGE [COMMAND] [ARG...]\n\nRun 'kiri run --help' for more information\n"},
		{[]string{"run", "-m"}, 125, "flag needs an argument: 'm' in -m\n\nUsage:  kiri run [OPTIONS] IMAGE [COMMAND] [ARG...]\n\nRun 'kiri run --help' for more information\n"},
		{[]string{"run", "-p", "xx", "a"}, 125, "kiri: invalid containerPort: xx\n\nRun 'kiri run --help' for more information\n"},
		{[]string{"run", "-it", "a"}, 1, "the input device is not a TTY\n"},
		{[]string{"--context", "x", "ps"}, 1, "kiri: --context is docker's: kiri always talks to kiri. Use --host to name another socket, or docker --context x\n"},
	} {
		want(t, f.run(c.args...), c.code, "", c.err)
	}
	if calls := f.called(); len(calls) != 0 {
		t.Errorf("a daemon was asked about bad usage: %q", calls)
	}
}

// TestHelp checks that every command explains itself, with an example.
func TestHelp(t *testing.T) {
	f := newFake(t)
	all := f.run("help")
	for _, cmd := range commands() {
		got := f.run(append(strings.Fields(cmd.name), "--help")...)
		if got.code != 0 || !strings.HasPrefix(got.out, cmd.usageLine()) || !strings.Contains(got.out, "\nExamples:\n  kiri ") && !strings.Contains(got.out, "| kiri ") {
			t.Errorf("%s: %+v", cmd.name, got)
		}
		if !strings.Contains(cmd.name, " ") && !strings.Contains(all.out, "\n  "+cmd.name+" ") {
			t.Errorf("kiri help does not name %s", cmd.name)
		}
		for l := range strings.Lines(got.out) {
			if len([]rune(l)) > 121 {
				t.Errorf("%s: line of %d characters: %s", cmd.name, len(l), l)
			}
		}
	}
}

func TestContext(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	t.Setenv("DOCKER_HOST", "")
	config := filepath.Join(dir, "config.json")
	if err := os.WriteFile(config, []byte(`{"auths":{"r":{"auth":"YTpi"}},"currentContext":"other","unknown":[1,2]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	f := newFake(t)
	got := f.run("context")
	if got.code != 0 || got.out != "kiri\n" {
		t.Fatalf("%+v", got)
	}
	files, err := filepath.Glob(filepath.Join(dir, "contexts", "meta", "*", "meta.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%q, %v", files, err)
	}
	b, err := os.ReadFile(files[0])
	if err != nil || !strings.Contains(string(b), `"Host":"unix://`+f.socket+`"`) {
		t.Fatalf("%s, %v", b, err)
	}
	current := func() (v struct {
		CurrentContext string
		Auths          map[string]any
		Unknown        []int
	}) {
		b, err := os.ReadFile(config)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	if c := current(); c.CurrentContext != "other" {
		t.Errorf("kiri context selected %q", c.CurrentContext)
	}
	if got := f.run("context", "use"); got.code != 0 {
		t.Fatalf("%+v", got)
	}
	if c := current(); c.CurrentContext != "kiri" || len(c.Auths) != 1 || len(c.Unknown) != 2 {
		t.Errorf("%+v", c)
	}
	if st, err := os.Stat(config); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "config.json-*")); len(left) != 0 {
		t.Errorf("left behind: %q", left)
	}
	// Docker itself reads it, where there is one.
	if docker, err := exec.LookPath("docker"); err == nil {
		c := exec.Command(docker, "context", "inspect", "kiri", "--format", "{{.Endpoints.docker.Host}}")
		c.Env = []string{"DOCKER_CONFIG=" + dir, "HOME=" + dir}
		if out, err := c.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "unix://"+f.socket {
			t.Errorf("docker context inspect: %s, %v", out, err)
		}
	}
}

func TestRegistryAuth(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("DOCKER_CONFIG", dir)
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{
		"auths": {"localhost:5000": {"auth": "dTpwOnc="}, "https://index.docker.io/v1/": {"identitytoken": "tok"}, "bad": {"auth": "!"}},
		"credHelpers": {"helped.example": "kiritest"}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	helper := "#!/bin/sh\nread s\nif [ \"$s\" = helped.example ]; then echo '{\"Username\":\"h\",\"Secret\":\"s\"}'; else echo credentials not found; exit 1; fi\n"
	if err := os.WriteFile(filepath.Join(dir, "docker-credential-kiritest"), []byte(helper), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for image, has := range map[string]string{
		"localhost:5000/a:b": `"password":"p:w"`, "alpine": `"identitytoken":"tok"`, "docker.io/x/y": `"identitytoken":"tok"`, "x/y": `"identitytoken":"tok"`,
		"helped.example/x": `"username":"h"`, "unknown.example/x": "",
	} {
		c := &cli{err: os.Stderr}
		auth, err := c.registryAuth(image)
		if err != nil {
			t.Fatal(err)
		}
		plain := decodeAuth(t, auth)
		if has == "" && auth != "" || !strings.Contains(plain, has) {
			t.Errorf("%s: %s, want %s", image, plain, has)
		}
	}
	if _, err := (&cli{err: os.Stderr}).registryAuth("bad/x"); err != nil {
		t.Errorf("bad is not a registry's name: %v", err)
	}
}
