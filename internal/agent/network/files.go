//go:build linux

package network

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"runkiri.com/kiri/internal/wire"
)

// Where the host keeps what containers start from; tests point elsewhere.
var (
	hostResolv  = "/etc/resolv.conf"
	stubResolv  = "/run/systemd/resolve/resolv.conf" // the real servers where hostResolv names systemd's stub alone
	hostHosts   = "/etc/hosts"
	hostInetIPs = "/proc/net/if_inet6" // missing where the kernel has no IPv6
)

// maxHostFile caps what is read of the host's files; resolvers read far less.
const maxHostFile = 1 << 20

// WriteFiles writes hosts, hostname and resolv.conf for r to dir, as Docker does. ep.Gateway is what host-gateway
// stands for, also where the container has no address. Nothing is written for mode container: those files are the
// other container's.
func WriteFiles(dir string, r *wire.Run, ep wire.Endpoint) error {
	if r.Net.Mode == "container" {
		return nil
	}
	texts, err := FileTexts(r, ep)
	if err != nil {
		return err
	}
	for i, text := range texts {
		if err := os.WriteFile(filepath.Join(dir, FileNames[i]), []byte(text), 0o644); err != nil {
			return fmt.Errorf("writing %s of container %s: %w", FileNames[i], r.ID, err)
		}
	}
	return nil
}

// FileNames are the files in /etc that the engine writes for a container.
var FileNames = [3]string{"hosts", "hostname", "resolv.conf"}

// FileTexts are what WriteFiles writes, in the order of FileNames, for who keeps the files elsewhere.
func FileTexts(r *wire.Run, ep wire.Endpoint) (texts [3]string, err error) {
	if texts[0], err = hostsFile(r, ep); err != nil {
		return texts, err
	}
	texts[1] = r.Hostname + "\n"
	texts[2], err = resolvFile(&r.Net)
	return texts, err
}

// hostsFile begins with the host's in mode host, else with the names every host has. Then come the extra hosts, then
// the container's own names.
func hostsFile(r *wire.Run, ep wire.Endpoint) (string, error) {
	var b strings.Builder
	line := func(address, names string) { fmt.Fprintf(&b, "%s\t%s\n", address, names) }
	if r.Net.Mode == "host" {
		text, err := readHost(hostHosts)
		if err != nil {
			return "", err
		}
		b.WriteString(text)
		if text != "" && !strings.HasSuffix(text, "\n") {
			b.WriteByte('\n')
		}
	} else {
		line("127.0.0.1", "localhost")
		if _, err := os.Stat(hostInetIPs); err == nil {
			line("::1", "localhost ip6-localhost ip6-loopback")
			line("fe00::", "ip6-localnet")
			line("ff00::", "ip6-mcastprefix")
			line("ff02::1", "ip6-allnodes")
			line("ff02::2", "ip6-allrouters")
		}
	}
	for _, h := range r.Net.ExtraHosts {
		name, address, err := extraHost(h, ep.Gateway)
		if err != nil {
			return "", err
		}
		line(address, name)
	}
	if ep.Address != "" && r.Hostname != "" {
		// A host name may have its domain in it already; the bare name is found either way, as with Docker.
		names := r.Hostname
		if r.Domainname != "" {
			names += "." + r.Domainname
		}
		if bare, _, ok := strings.Cut(names, "."); ok {
			names += " " + bare
		}
		line(ep.Address, names)
	}
	return b.String(), nil
}

// extraHost splits "name:address" or "name=address"; an IPv6 address may stand in brackets. What would make a line of
// its own is refused.
func extraHost(text, gateway string) (name, address string, err error) {
	i := strings.IndexAny(text, ":=")
	if i <= 0 || strings.ContainsAny(text, " \t\r\n#") {
		return "", "", wire.Errorf(wire.Invalid, "bad format for add-host: %q", text)
	}
	name, address = text[:i], text[i+1:]
	if address == "host-gateway" {
		if gateway == "" {
			return "", "", wire.Errorf(wire.Invalid, "unable to derive the IP value for host-gateway")
		}
		return name, gateway, nil
	}
	if s, ok := strings.CutPrefix(address, "["); ok {
		address = strings.TrimSuffix(s, "]")
	}
	if _, err := netip.ParseAddr(address); err != nil {
		return "", "", wire.Errorf(wire.Invalid, "invalid IP address in add-host: %q", address)
	}
	return name, address, nil
}

// readHost reads a file of the host's; one that is not there is empty.
func readHost(path string) (string, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("reading the host's files: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxHostFile))
	if err != nil {
		return "", fmt.Errorf("reading the host's files: %w", err)
	}
	return string(b), nil
}
