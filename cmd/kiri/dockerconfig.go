package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// dockerConfig is what kiri reads of the docker CLI's config.json, so that `docker login` and a user's formats hold for kiri too.
type dockerConfig struct {
	HTTPHeaders    map[string]string `json:"HttpHeaders"`
	PsFormat       string            `json:"psFormat"`
	ImagesFormat   string            `json:"imagesFormat"`
	DetachKeys     string            `json:"detachKeys"`
	CredsStore     string            `json:"credsStore"`
	CredHelpers    map[string]string `json:"credHelpers"`
	CurrentContext string            `json:"currentContext"`
	Auths          map[string]struct {
		Auth          string `json:"auth"`
		Username      string `json:"username"`
		Password      string `json:"password"`
		IdentityToken string `json:"identitytoken"`
		RegistryToken string `json:"registrytoken"`
	} `json:"auths"`
	Proxies map[string]struct {
		HTTPProxy  string `json:"httpProxy"`
		HTTPSProxy string `json:"httpsProxy"`
		NoProxy    string `json:"noProxy"`
		FTPProxy   string `json:"ftpProxy"`
		AllProxy   string `json:"allProxy"`
	} `json:"proxies"`
}

func (c *cli) configDir() string {
	if c.global.configDir != "" {
		return c.global.configDir
	}
	if d := os.Getenv("DOCKER_CONFIG"); d != "" {
		return d
	}
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root"
	}
	return filepath.Join(home, ".docker")
}

// dockerConfig reads config.json once. That there is none is the common case.
func (c *cli) dockerConfig() (*dockerConfig, error) {
	if c.config != nil {
		return c.config, nil
	}
	path := filepath.Join(c.configDir(), "config.json")
	cfg := &dockerConfig{}
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		fmt.Fprintf(c.err, "WARNING: Error loading config file: %v\n", err)
	case len(bytes.TrimSpace(b)) > 0:
		if err := json.Unmarshal(b, cfg); err != nil {
			fmt.Fprintf(c.err, "WARNING: Error parsing config file (%s): %v\n", path, err)
		}
	}
	for k, v := range cfg.HTTPHeaders {
		if strings.ContainsAny(k+v, "\r\n") || strings.Contains(k, ":") {
			return nil, fmt.Errorf("%s: HttpHeaders holds a header that cannot be sent: %q", path, k)
		}
	}
	c.config = cfg
	return cfg, nil
}

// proxyEnv gives the variables that "proxies" of config.json sets in containers, in upper and lower case, for the host or by default.
func (cfg *dockerConfig) proxyEnv(host string) map[string]string {
	p, ok := cfg.Proxies[host]
	if !ok {
		p, ok = cfg.Proxies["default"]
	}
	if !ok {
		return nil
	}
	env := map[string]string{}
	for name, v := range map[string]string{"HTTP_PROXY": p.HTTPProxy, "HTTPS_PROXY": p.HTTPSProxy, "NO_PROXY": p.NoProxy, "FTP_PROXY": p.FTPProxy, "ALL_PROXY": p.AllProxy} {
		if v != "" {
			env[name], env[strings.ToLower(name)] = v, v
		}
	}
	return env
}

// dockerHub is the key under which `docker login` keeps the credentials of Docker Hub.
const dockerHub = "https://index.docker.io/v1/"

// registryKey gives the key of an image's registry in config.json: the first part of the name if it looks like a host.
func registryKey(image string) string {
	first, _, ok := strings.Cut(image, "/")
	if !ok || !strings.ContainsAny(first, ".:") && first != "localhost" && strings.ToLower(first) == first {
		return dockerHub
	}
	if first == "docker.io" || first == "index.docker.io" {
		return dockerHub
	}
	return first
}

// registryAuth gives the value of X-Registry-Auth for an image: base64url JSON of what `docker login` stored, empty when it stored nothing.
func (c *cli) registryAuth(image string) (string, error) {
	cfg, err := c.dockerConfig()
	if err != nil {
		return "", err
	}
	key := registryKey(image)
	auth := map[string]string{"serveraddress": key}
	helper := cfg.CredHelpers[key]
	if helper == "" {
		helper = cfg.CredsStore
	}
	found := false
	if helper != "" {
		user, secret, err := credentialHelper(helper, key)
		if err != nil {
			return "", err
		}
		switch {
		case user == "<token>":
			auth["identitytoken"], found = secret, true
		case user != "":
			auth["username"], auth["password"], found = user, secret, true
		}
	}
	if a, ok := cfg.Auths[key]; ok && !found {
		if a.Auth != "" {
			b, err := base64.StdEncoding.DecodeString(a.Auth)
			user, pass, ok := strings.Cut(string(b), ":")
			if err != nil || !ok {
				return "", fmt.Errorf("reading credentials of %s in %s: not base64 of name:password", key, filepath.Join(c.configDir(), "config.json"))
			}
			a.Username, a.Password = user, strings.TrimRight(pass, "\x00")
		}
		for k, v := range map[string]string{"username": a.Username, "password": a.Password, "identitytoken": a.IdentityToken, "registrytoken": a.RegistryToken} {
			if v != "" {
				auth[k], found = v, true
			}
		}
	}
	if !found {
		return "", nil
	}
	b, err := json.Marshal(auth)
	return base64.URLEncoding.EncodeToString(b), err
}

// credentialHelper asks docker-credential-NAME. A helper that knows nothing of the registry is no error.
func credentialHelper(name, server string) (user, secret string, err error) {
	if strings.ContainsAny(name, "/\\") {
		return "", "", fmt.Errorf("credential helper %q is not a name", name)
	}
	cmd := exec.Command("docker-credential-"+name, "get")
	cmd.Stdin = strings.NewReader(server)
	out, err := cmd.Output()
	if err != nil {
		if strings.Contains(string(out), "credentials not found") {
			return "", "", nil
		}
		return "", "", fmt.Errorf("asking docker-credential-%s for %s: %w: %s", name, server, err, bytes.TrimSpace(out))
	}
	var a struct{ Username, Secret string }
	if err := json.Unmarshal(out, &a); err != nil {
		return "", "", fmt.Errorf("reading the answer of docker-credential-%s: %w", name, err)
	}
	return a.Username, a.Secret, nil
}
