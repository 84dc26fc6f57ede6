package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
)

// systemSocket is where the system service listens.
const systemSocket = "/run/kiri/docker.sock"

// homeSocket is where a daemon that a user started by hand listens, next to its data in ~/.kiri.
func homeSocket() string {
	home, err := os.UserHomeDir()
	if err != nil {
		home = "/root" // a service without HOME
	}
	return filepath.Join(home, ".kiri", "run", "docker.sock")
}

// socketHost gives the host that is used when nobody names one: the user's own daemon if its socket is there, else the system service if
// its socket is there, else the user's own.
func socketHost() string {
	home := homeSocket()
	if _, err := os.Lstat(home); err != nil {
		if _, err := os.Lstat(systemSocket); err == nil {
			return "unix://" + systemSocket
		}
	}
	return "unix://" + home
}

// Host gives the address that the command talks to: --host, KIRI_HOST, or kiri's own socket. DOCKER_HOST and docker contexts name where
// the docker CLI goes and are not looked at.
func (c *cli) Host() string {
	if c.global.host != "" {
		return c.global.host
	}
	return socketHost()
}

// client gives the connection to the daemon, which is started when it is kiri's own, not running, and may be started.
func (c *cli) client() (*client, error) {
	if c.c != nil {
		return c.c, nil
	}
	cl, err := c.newClient(c.Host())
	if err != nil {
		return nil, err
	}
	// The first dial is kept for the first request.
	cc, err := cl.dial()
	var refused *connectError
	if errors.As(err, &refused) && c.global.host == "" {
		cl, cc, err = c.startDaemon(cl, err)
	}
	if err != nil {
		return nil, err
	}
	cl.idle = append(cl.idle, cc)
	c.c = cl
	return cl, nil
}

// newClient reads a host as docker writes them: unix:///path or tcp://host:port.
func (c *cli) newClient(host string) (*client, error) {
	scheme, addr, ok := strings.Cut(host, "://")
	if !ok {
		if !filepath.IsAbs(host) {
			return nil, fmt.Errorf("unable to parse docker host `%s`", host)
		}
		scheme, addr = "unix", host
	}
	cl := &client{host: scheme + "://" + addr, network: scheme, addr: addr, name: "docker", prefix: "/v" + apiVersion}
	if v := os.Getenv("DOCKER_API_VERSION"); v != "" {
		cl.prefix = "/v" + strings.TrimPrefix(v, "v")
	}
	switch scheme {
	case "unix":
	case "tcp", "http", "https":
		u, err := url.Parse(host)
		if err != nil || u.Host == "" {
			return nil, fmt.Errorf("unable to parse docker host `%s`", host)
		}
		cl.network, cl.name, cl.addr = "tcp", u.Host, u.Host
		secure := c.global.tls || c.global.tlsVerify || scheme == "https"
		if u.Port() == "" {
			cl.addr += map[bool]string{true: ":2376", false: ":2375"}[secure]
		}
		if secure {
			if cl.tls, err = c.tlsConfig(u.Hostname()); err != nil {
				return nil, err
			}
		}
	default:
		return nil, fmt.Errorf("%s: cannot talk to %s: unix:// and tcp:// are what this command speaks; for %s use docker --host %s", prog, host, scheme, host)
	}
	cfg, err := c.dockerConfig()
	if err != nil {
		return nil, err
	}
	cl.headers = cfg.HTTPHeaders
	return cl, nil
}

// tlsConfig reads the three files of mutual TLS, by default from docker's config directory.
func (c *cli) tlsConfig(server string) (*tls.Config, error) {
	dir := c.configDir()
	or := func(v, name string) string {
		if v != "" {
			return v
		}
		return filepath.Join(dir, name)
	}
	cfg := &tls.Config{ServerName: server, MinVersion: tls.VersionTLS12, InsecureSkipVerify: !c.global.tlsVerify}
	if c.global.tlsVerify || c.global.tlsCA != "" {
		pem, err := os.ReadFile(or(c.global.tlsCA, "ca.pem"))
		if err != nil {
			return nil, fmt.Errorf("reading the CA of the daemon: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("reading the CA of the daemon: no certificate in %s", or(c.global.tlsCA, "ca.pem"))
		}
	}
	cert, err := tls.LoadX509KeyPair(or(c.global.tlsCert, "cert.pem"), or(c.global.tlsKey, "key.pem"))
	if err != nil {
		return nil, fmt.Errorf("reading the client's certificate: %w", err)
	}
	cfg.Certificates = []tls.Certificate{cert}
	return cfg, nil
}
