//go:build linux

package network

import (
	"os"
	"path/filepath"
	"testing"

	"runkiri.com/kiri/internal/wire"
)

// pretend gives the host other files for one test.
func pretend(t *testing.T, resolv, stub, hosts string, ipv6 bool) {
	t.Helper()
	dir := t.TempDir()
	for _, f := range []struct {
		at   *string
		name string
		text string
	}{{&hostResolv, "resolv", resolv}, {&stubResolv, "stub", stub}, {&hostHosts, "hosts", hosts}} {
		old, path := *f.at, filepath.Join(dir, f.name)
		if f.text != "" {
			if err := os.WriteFile(path, []byte(f.text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		*f.at = path
		t.Cleanup(func() { *f.at = old })
	}
	old := hostInetIPs
	hostInetIPs = filepath.Join(dir, "none")
	if ipv6 {
		hostInetIPs = dir
	}
	t.Cleanup(func() { hostInetIPs = old })
}

const (
	v4Names = "127.0.0.1\tlocalhost\n"
	v6Names = "::1\tlocalhost ip6-localhost ip6-loopback\nfe00::\tip6-localnet\nff00::\tip6-mcastprefix\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n"
)

func TestHostsFile(t *testing.T) {
	pretend(t, "", "", "127.0.0.1 localhost\n10.1.1.1 nas", true)
	ep := wire.Endpoint{Address: "172.17.0.5", Gateway: "172.17.0.1"}
	for _, c := range []struct {
		what string
		run  wire.Run
		ep   wire.Endpoint
		want string
	}{
		{"bridge", wire.Run{Hostname: "web", Net: wire.NetConfig{Mode: "bridge"}}, ep, v4Names + v6Names + "172.17.0.5\tweb\n"},
		{"domain", wire.Run{Hostname: "web", Domainname: "corp.test", Net: wire.NetConfig{Mode: "bridge"}}, ep, v4Names + v6Names + "172.17.0.5\tweb.corp.test web\n"},
		{"domain in the host name", wire.Run{Hostname: "web.corp.test", Net: wire.NetConfig{Mode: "bridge"}}, ep, v4Names + v6Names + "172.17.0.5\tweb.corp.test web\n"},
		{"extra", wire.Run{Hostname: "web", Net: wire.NetConfig{Mode: "bridge", ExtraHosts: []string{"db:10.0.0.9", "host.docker.internal:host-gateway", "six=[fd00::1]", "seven:fd00::7"}}}, ep,
			v4Names + v6Names + "10.0.0.9\tdb\n172.17.0.1\thost.docker.internal\nfd00::1\tsix\nfd00::7\tseven\n172.17.0.5\tweb\n"},
		{"none", wire.Run{Hostname: "web", Net: wire.NetConfig{Mode: "none"}}, wire.Endpoint{}, v4Names + v6Names},
		{"host", wire.Run{Hostname: "web", Net: wire.NetConfig{Mode: "host", ExtraHosts: []string{"gw:host-gateway"}}}, wire.Endpoint{Gateway: "172.17.0.1"},
			"127.0.0.1 localhost\n10.1.1.1 nas\n172.17.0.1\tgw\n"},
	} {
		if got, err := hostsFile(&c.run, c.ep); err != nil || got != c.want {
			t.Errorf("%s: %v\n%s\nwant\n%s", c.what, err, got, c.want)
		}
	}
	for _, bad := range []string{"", ":1.2.3.4", "x", "x:", "x:nope", "x:1.2.3.4\n6.6.6.6 bank", "x y:1.2.3.4"} {
		if _, err := hostsFile(&wire.Run{Net: wire.NetConfig{ExtraHosts: []string{bad}}}, ep); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("extra host %q: %v, want Invalid", bad, err)
		}
	}
	if _, err := hostsFile(&wire.Run{Net: wire.NetConfig{ExtraHosts: []string{"h:host-gateway"}}}, wire.Endpoint{}); wire.ClassOf(err) != wire.Invalid {
		t.Errorf("host-gateway without a gateway: %v, want Invalid", err)
	}
	pretend(t, "", "", "", false)
	if got, err := hostsFile(&wire.Run{}, wire.Endpoint{}); err != nil || got != v4Names {
		t.Errorf("without IPv6: %q, %v", got, err)
	}
}

const head = "# Made by kiri when the container started; edits are kept until it starts again.\n"

func TestResolvFile(t *testing.T) {
	const host = "# from DHCP\ndomain old.test\nnameserver 10.0.0.53\nnameserver ::1\nnameserver 127.0.0.1\nnameserver fd00::53\nsearch corp.test lab.test\noptions ndots:2\noptions rotate\nsortlist 10.0.0.0\n"
	for _, c := range []struct {
		what, host, stub string
		net              wire.NetConfig
		want             string
	}{
		{"filtered", host, "", wire.NetConfig{Mode: "bridge"}, head + "nameserver 10.0.0.53\nsearch corp.test lab.test\noptions ndots:2 rotate\nsortlist 10.0.0.0\n"},
		{"none", host, "", wire.NetConfig{Mode: "none"}, head + "nameserver 10.0.0.53\nsearch corp.test lab.test\noptions ndots:2 rotate\nsortlist 10.0.0.0\n"},
		{"host's own", host, "", wire.NetConfig{Mode: "host"}, host},
		{"host with a search list", "nameserver 127.0.0.53\n", "nameserver 9.9.9.9\n", wire.NetConfig{Mode: "host", DNSSearch: []string{"x.test"}}, head + "nameserver 127.0.0.53\nsearch x.test\n"},
		{"only the loopback", "nameserver 127.0.0.1\n", "", wire.NetConfig{Mode: "bridge"}, head + "nameserver 8.8.8.8\nnameserver 8.8.4.4\n"},
		{"no file", "", "", wire.NetConfig{Mode: "bridge"}, head + "nameserver 8.8.8.8\nnameserver 8.8.4.4\n"},
		{"systemd's stub", "nameserver 127.0.0.53\noptions edns0\n", "nameserver 10.7.7.7\nsearch real.test\n", wire.NetConfig{Mode: "bridge"}, head + "nameserver 10.7.7.7\nsearch real.test\n"},
		{"asked for", host, "", wire.NetConfig{Mode: "bridge", DNS: []string{"127.0.0.1", "fd00::9"}, DNSSearch: []string{"a.test", "b.test"}, DNSOptions: []string{"ndots:0"}},
			head + "nameserver 127.0.0.1\nnameserver fd00::9\nsearch a.test b.test\noptions ndots:0\nsortlist 10.0.0.0\n"},
		{"no search", host, "", wire.NetConfig{Mode: "bridge", DNSSearch: []string{"."}}, head + "nameserver 10.0.0.53\noptions ndots:2 rotate\nsortlist 10.0.0.0\n"},
	} {
		pretend(t, c.host, c.stub, "", true)
		if got, err := resolvFile(&c.net); err != nil || got != c.want {
			t.Errorf("%s: %v\n%s\nwant\n%s", c.what, err, got, c.want)
		}
	}
	for _, bad := range []wire.NetConfig{
		{DNS: []string{"nope"}}, {DNS: []string{"1.1.1.1\nsearch evil.test"}}, {DNSSearch: []string{"a\nnameserver 6.6.6.6"}}, {DNSOptions: []string{"a b"}},
	} {
		if got, err := resolvFile(&bad); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("%+v: %q, %v; want Invalid", bad, got, err)
		}
	}
}

func TestWriteFiles(t *testing.T) {
	pretend(t, "nameserver 10.0.0.53\n", "", "", false)
	dir := t.TempDir()
	r := &wire.Run{ID: "x", Hostname: "web", Net: wire.NetConfig{Mode: "bridge"}}
	if err := WriteFiles(dir, r, wire.Endpoint{Address: "172.17.0.2", Gateway: "172.17.0.1"}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"hostname": "web\n", "hosts": v4Names + "172.17.0.2\tweb\n", "resolv.conf": head + "nameserver 10.0.0.53\n",
	} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, want)
		}
	}
	r.Net.Mode = "container"
	empty := t.TempDir()
	if err := WriteFiles(empty, r, wire.Endpoint{}); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(empty); len(left) != 0 {
		t.Errorf("mode container wrote %v", left)
	}
}

func FuzzResolv(f *testing.F) {
	f.Add("nameserver 1.1.1.1\nsearch a b\noptions x\n")
	f.Add("nameserver\nsearch\n;x\n#y\n\x00")
	f.Fuzz(func(t *testing.T, text string) {
		once := parseResolv(text).String()
		if twice := parseResolv(once).String(); twice != once {
			t.Errorf("%q becomes %q, then %q", text, once, twice)
		}
	})
}
