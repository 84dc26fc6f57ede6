//go:build linux

package network

import (
	"net/netip"
	"strings"

	"runkiri.com/kiri/internal/wire"
)

// resolv is a resolv.conf taken apart.
type resolv struct {
	servers []string
	search  []string
	options []string
	other   []string // whole lines: sortlist and what is not known
}

// fallbackServers are what a container gets whose host has only name servers that it cannot reach: Docker's choice.
var fallbackServers = []string{"8.8.8.8", "8.8.4.4"}

// resolvFile makes a container's resolv.conf of the host's and of what the container asks for: each of servers, search
// list and options replaces the host's as a whole. In mode host all of the host's servers are good; else those on the
// loopback are not, nor IPv6 ones, as the default bridge has no IPv6. Servers the user names are never left out.
func resolvFile(n *wire.NetConfig) (string, error) {
	text, err := readHost(hostResolv)
	if err != nil {
		return "", err
	}
	r := parseResolv(text)
	if len(r.servers) == 1 && r.servers[0] == "127.0.0.53" && n.Mode != "host" {
		real, err := readHost(stubResolv)
		if err != nil {
			return "", err
		}
		if real != "" {
			r = parseResolv(real)
		}
	}
	if n.Mode == "host" && len(n.DNS)+len(n.DNSSearch)+len(n.DNSOptions) == 0 {
		return text, nil
	}
	if len(n.DNS) > 0 {
		for _, s := range n.DNS {
			if _, err := netip.ParseAddr(s); err != nil {
				return "", wire.Errorf(wire.Invalid, "bad nameserver address %s: %w", s, err)
			}
		}
		r.servers = n.DNS
	} else if n.Mode != "host" {
		r.servers = reachable(r.servers)
		if len(r.servers) == 0 {
			r.servers = fallbackServers
		}
	}
	for _, s := range append(append([]string{}, n.DNSSearch...), n.DNSOptions...) {
		if strings.ContainsAny(s, " \t\r\n") {
			return "", wire.Errorf(wire.Invalid, "bad DNS search domain or option %q", s)
		}
	}
	if len(n.DNSSearch) > 0 {
		r.search = n.DNSSearch
		if len(r.search) == 1 && r.search[0] == "." { // the way to ask for none
			r.search = nil
		}
	}
	if len(n.DNSOptions) > 0 {
		r.options = n.DNSOptions
	}
	return r.String(), nil
}

func reachable(servers []string) []string {
	var out []string
	for _, s := range servers {
		if a, err := netip.ParseAddr(s); err == nil && !a.IsLoopback() && a.Is4() {
			out = append(out, s)
		}
	}
	return out
}

func parseResolv(text string) resolv {
	var r resolv
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		f := strings.Fields(line)
		if len(f) == 0 || f[0][0] == '#' || f[0][0] == ';' {
			continue
		}
		switch f[0] {
		case "nameserver":
			if len(f) > 1 {
				r.servers = append(r.servers, f[1])
			}
		case "domain", "search": // the last of either wins
			r.search = f[1:]
		case "options":
			r.options = append(r.options, f[1:]...)
		default:
			r.other = append(r.other, line)
		}
	}
	return r
}

func (r resolv) String() string {
	var b strings.Builder
	b.WriteString("# Made by kiri when the container started; edits are kept until it starts again.\n")
	for _, s := range r.servers {
		b.WriteString("nameserver " + s + "\n")
	}
	if len(r.search) > 0 {
		b.WriteString("search " + strings.Join(r.search, " ") + "\n")
	}
	if len(r.options) > 0 {
		b.WriteString("options " + strings.Join(r.options, " ") + "\n")
	}
	for _, l := range r.other {
		b.WriteString(l + "\n")
	}
	return b.String()
}
