package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// handOver gives a command line that is not native to the docker CLI, pointed at kiri's socket; refusal is what to say when there is no
// docker CLI. args start with the command; the options in front of it have been read.
func (c *cli) handOver(args []string, refusal error) error {
	docker, err := exec.LookPath("docker")
	if err != nil || isSelf(docker) {
		return noDocker(args, refusal)
	}
	// The daemon is started here if it may be: docker would only say that it does not run. Commands of docker's own client need none.
	if needsDaemon(args[0]) {
		if _, err := c.client(); err != nil {
			return err
		}
	}
	var global []string
	if c.global.configDir != "" {
		global = append(global, "--config", c.global.configDir)
	}
	if c.global.debug {
		global = append(global, "--debug")
	}
	for _, f := range []struct{ name, v string }{{"--tlscacert", c.global.tlsCA}, {"--tlscert", c.global.tlsCert}, {"--tlskey", c.global.tlsKey}} {
		if f.v != "" {
			global = append(global, f.name, f.v)
		}
	}
	if c.global.tlsVerify {
		global = append(global, "--tlsverify")
	} else if c.global.tls {
		global = append(global, "--tls")
	}
	return execDocker(docker, append(global, args...), dockerEnv(os.Environ(), c.Host()))
}

// dockerEnv is the caller's environment with docker's choice of a host replaced by kiri's.
func dockerEnv(env []string, host string) []string {
	out := make([]string, 0, len(env)+1)
	for _, e := range env {
		switch name, _, _ := strings.Cut(e, "="); name {
		case "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH":
		default:
			out = append(out, e)
		}
	}
	return append(out, "DOCKER_HOST="+host)
}

// isSelf keeps a `docker` that is a link to kiri from calling itself for ever.
func isSelf(path string) bool {
	self, err := os.Executable()
	if err != nil {
		return false
	}
	a, err := os.Stat(self)
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}

func needsDaemon(command string) bool {
	switch command {
	case "buildx", "completion", "config", "context", "help", "login", "logout", "plugin", "scout":
		return false
	}
	return true
}

// noDocker refuses by name.
func noDocker(args []string, refusal error) error {
	var s *status
	code := 1
	if errors.As(refusal, &s) {
		code = s.code
	}
	return &status{code, fmt.Sprintf("%s: '%s %s' is not one of kiri's own commands or options, and there is no docker CLI to hand it to: install docker-cli to use it.\n%v",
		prog, prog, strings.Join(firstWords(args), " "), refusal)}
}

func firstWords(args []string) []string {
	n := 1
	if len(args) > 1 && isGroup(args[0]) && !strings.HasPrefix(args[1], "-") {
		n = 2
	}
	return args[:n]
}
