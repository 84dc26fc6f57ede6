package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"strconv"
	"time"

	"runkiri.com/kiri/internal/config"
)

// listen opens every host of the configuration.
func (d *daemon) listen() error {
	var passed []*os.File // by a service manager; read once, as several hosts may name them
	defer func() {
		for _, f := range passed {
			f.Close() // listeners have descriptors of their own
		}
	}()
	for _, s := range d.cfg.Hosts {
		h, err := config.ParseHost(s)
		if err != nil {
			return err
		}
		var ls []net.Listener
		switch h.Proto {
		case "unix":
			ls, err = d.listenUnix(h.Addr)
		case "tcp":
			ls, err = d.listenTCP(h.Addr)
		case "fd":
			if passed == nil {
				passed, err = passedFiles()
			}
			if err == nil {
				ls, err = d.listenPassed(passed, h.Addr)
			}
		}
		if err != nil {
			return fmt.Errorf("listening on %s: %w", h, err)
		}
		d.listeners = append(d.listeners, ls...)
	}
	return nil
}

// listenUnix makes a socket for its owner and group only. The socket of a daemon that has died is replaced, that of
// one that answers is not.
func (d *daemon) listenUnix(path string) ([]net.Listener, error) {
	if st, err := os.Lstat(path); err == nil {
		if st.Mode()&fs.ModeSocket == 0 {
			return nil, errors.New("there is a file of that name that is no socket")
		}
		conn, err := net.DialTimeout("unix", path, time.Second)
		if err == nil {
			conn.Close()
			return nil, errors.New("another daemon answers there")
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("removing what an earlier daemon left: %w", err)
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	// With the usual umask nobody but the owner can connect yet: that takes permission to write.
	if err := d.giveSocket(path); err != nil {
		l.Close()
		return nil, err
	}
	return []net.Listener{l}, nil
}

func (d *daemon) giveSocket(path string) error {
	if d.cfg.Group != "" {
		gid, err := lookupGroup(d.cfg.Group)
		var unknown user.UnknownGroupError
		switch {
		case errors.As(err, &unknown) && d.cfg.System:
			d.log.Warn("no such group; the socket stays with root's", "group", d.cfg.Group, "socket", path)
		case err != nil:
			return fmt.Errorf("finding group %s: %w", d.cfg.Group, err)
		default:
			if err := os.Chown(path, -1, gid); err != nil {
				return fmt.Errorf("giving the socket to group %s: %w", d.cfg.Group, err)
			}
		}
	}
	if err := os.Chmod(path, 0o660); err != nil {
		return fmt.Errorf("opening the socket to its group: %w", err)
	}
	return nil
}

func lookupGroup(name string) (int, error) {
	if gid, err := strconv.Atoi(name); err == nil {
		return gid, nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(g.Gid)
}

func (d *daemon) listenTCP(addr string) ([]net.Listener, error) {
	c, err := d.tlsConfig()
	if err != nil {
		return nil, err
	}
	l, err := tls.Listen("tcp", addr, c)
	if err != nil {
		return nil, err
	}
	return []net.Listener{l}, nil
}

// tlsConfig lets in only clients that show a certificate of the given authority.
func (d *daemon) tlsConfig() (*tls.Config, error) {
	ca, err := os.ReadFile(d.cfg.TLSCACert)
	if err != nil {
		return nil, fmt.Errorf("reading the CA certificate: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("reading the CA certificate %s: no certificate in PEM form", d.cfg.TLSCACert)
	}
	pair, err := tls.LoadX509KeyPair(d.cfg.TLSCert, d.cfg.TLSKey)
	if err != nil {
		return nil, fmt.Errorf("reading the certificate and its key: %w", err)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{pair},
		ClientAuth:   tls.RequireAndVerifyClientCert,
		ClientCAs:    pool,
	}, nil
}

// firstPassed is the number of the first descriptor that a service manager passes: sd_listen_fds(3).
const firstPassed = 3

// listenPassed takes the sockets that a service manager opened: all of them, or the one of that number.
func (d *daemon) listenPassed(files []*os.File, which string) ([]net.Listener, error) {
	var ls []net.Listener
	for i, f := range files {
		fd := firstPassed + i
		if which != "" && which != strconv.Itoa(fd) {
			continue
		}
		l, err := net.FileListener(f)
		if err != nil {
			return nil, fmt.Errorf("descriptor %d: %w", fd, err)
		}
		if _, unix := l.(*net.UnixListener); !unix {
			c, err := d.tlsConfig()
			if err != nil {
				l.Close()
				return nil, fmt.Errorf("descriptor %d is not a unix socket and needs --tlsverify with its certificates: %w", fd, err)
			}
			l = tls.NewListener(l, c)
		}
		ls = append(ls, l)
	}
	if len(ls) == 0 {
		return nil, errors.New("the service manager passed no such socket")
	}
	return ls, nil
}
