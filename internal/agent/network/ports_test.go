//go:build linux

package network

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// publish publishes ports of s and gives s's endpoint what came of it, as the agent does.
func publish(t testing.TB, n *Network, s *Sandbox, ports ...wire.Port) []wire.Port {
	t.Helper()
	got, err := n.Publish(s, ports)
	if err != nil {
		t.Fatal(err)
	}
	s.Endpoint.Ports = append(s.Endpoint.Ports, got...)
	return got
}

func TestPublishedPort(t *testing.T) {
	// Where br_netfilter is loaded NAT also happens to bridged packets, and a packet back to its own port needs another
	// way than where it is not.
	const bridged = "net/bridge/bridge-nf-call-iptables"
	for _, on := range []string{"0", "1"} {
		t.Run("bridged NAT "+on, func(t *testing.T) {
			asHost(t)
			if err := sysctl(bridged, on); err != nil {
				if on == "1" {
					t.Skip("br_netfilter is not loaded, so no packet takes this way here")
				}
				if !errors.Is(err, os.ErrNotExist) {
					t.Fatal(err)
				}
			}
			testPublishedPort(t)
		})
	}
}

func testPublishedPort(t *testing.T) {
	world := outside(t)
	n := open(t, Config{})
	a, b := sandbox(t, n, "bridge", wire.NetConfig{}), sandbox(t, n, "bridge", wire.NetConfig{})
	serve(t, a.NS, ":80")
	got := publish(t, n, a,
		wire.Port{Proto: "tcp", ContainerPort: 80, HostPort: 8080},
		wire.Port{Proto: "tcp", ContainerPort: 80, HostIP: "127.0.0.1", HostPort: 8081},
		wire.Port{Proto: "tcp", ContainerPort: 80, HostIP: "198.51.100.1", HostPort: 8082},
		wire.Port{Proto: "tcp", ContainerPort: 80})
	if got[0].HostIP != "0.0.0.0" || got[0].HostPort != 8080 || got[3].HostPort == 0 {
		t.Errorf("published %+v", got)
	}
	any := fmt.Sprint(got[3].HostPort)
	self := host(t)
	for _, c := range []struct {
		what string
		ns   *os.File
		to   string
		want string // the client as the container sees it; "" if it must not get there
	}{
		{"from outside", world, "198.51.100.1:8080", "198.51.100.2"},
		{"from outside, port chosen", world, "198.51.100.1:" + any, "198.51.100.2"},
		{"from outside, one address", world, "198.51.100.1:8082", "198.51.100.2"},
		{"from outside, the loopback's", world, "198.51.100.1:8081", ""},
		{"from outside, not published", world, "198.51.100.1:80", ""},
		{"from the host by loopback", self, "127.0.0.1:8080", "172.17.0.1"},
		{"from the host by loopback alone", self, "127.0.0.1:8081", "172.17.0.1"},
		{"from the host by its address", self, "198.51.100.1:8080", "172.17.0.1"},
		{"from the host by the gateway", self, "172.17.0.1:8080", "172.17.0.1"},
		{"from the host, the other address", self, "127.0.0.1:8082", ""},
		{"from another container", b.NS, "198.51.100.1:8080", "172.17.0.1"},
		{"from another container by the gateway", b.NS, "172.17.0.1:8080", "172.17.0.1"},
		{"from itself", a.NS, "172.17.0.1:8080", "172.17.0.1"},
		{"to the same port of someone else", b.NS, "198.51.100.2:8080", ""},
	} {
		limit := 10 * time.Second
		if c.want == "" {
			limit = time.Second
		}
		if who, err := ask(c.ns, c.to, limit); who != c.want || (err == nil) != (c.want != "") {
			// The host's own address as source is as good as the bridge's.
			if !(c.ns == self && who == "198.51.100.1") {
				t.Errorf("%s: server saw %q, %v; want %q", c.what, who, err, c.want)
			}
		}
	}
	if err := n.Release(a.Endpoint); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"198.51.100.1:8080", "198.51.100.1:8082"} {
		if who, err := ask(world, to, time.Second); err == nil {
			t.Errorf("%s still leads to a container that saw %q", to, who)
		}
	}
	l, err := net.Listen("tcp4", ":8080")
	if err != nil {
		t.Errorf("the port is not free again: %v", err)
	} else {
		l.Close()
	}
	if left := elements(t, n); len(left) != 0 {
		t.Errorf("left in the map: %v", left)
	}
}

func elements(t testing.TB, n *Network) map[portKey]portValue {
	t.Helper()
	m, err := n.readPorts(true)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// The kernel's loopback switch must not let containers at what listens on the host's loopback alone.
func TestLoopbackIsGuarded(t *testing.T) {
	asHost(t)
	n := open(t, Config{})
	a := sandbox(t, n, "bridge", wire.NetConfig{})
	publish(t, n, a, wire.Port{Proto: "tcp", ContainerPort: 80, HostPort: 8080})
	secret := serve(t, host(t), "127.0.0.1:9999")
	self := host(t)
	if _, err := ask(self, "127.0.0.1:9999", 10*time.Second); err != nil {
		t.Fatal(err)
	}
	// A container with NET_ADMIN sends packets for 127.0.0.1 out by eth0.
	within(t, a.NS, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(lo, netlink.FAMILY_V4)
		for _, addr := range addrs {
			err = errors.Join(err, netlink.AddrDel(lo, &addr))
		}
		eth, lerr := netlink.LinkByName("eth0")
		_, net127, _ := net.ParseCIDR("127.0.0.0/8")
		return errors.Join(err, lerr, sysctl("net/ipv4/conf/eth0/route_localnet", "1"),
			netlink.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Dst: net127, Gw: net.ParseIP("172.17.0.1"), Flags: int(netlink.FLAG_ONLINK)}))
	})
	if who, err := ask(a.NS, secret.Addr().String(), time.Second); err == nil {
		t.Errorf("a container reached the host's loopback as %q", who)
	}
}

func TestPortTaken(t *testing.T) {
	asHost(t)
	n := open(t, Config{})
	a, b := sandbox(t, n, "bridge", wire.NetConfig{}), sandbox(t, n, "bridge", wire.NetConfig{})
	l, err := net.Listen("tcp4", "127.0.0.1:7000")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	u, err := net.ListenPacket("udp4", ":7001")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	publish(t, n, a, wire.Port{Proto: "tcp", ContainerPort: 80, HostPort: 8080})
	before := elements(t, n)
	for _, c := range []struct {
		port  wire.Port
		class wire.Class
		text  string
	}{
		{wire.Port{Proto: "tcp", ContainerPort: 1, HostPort: 7000}, wire.Internal, "failed to bind host port 0.0.0.0:7000/tcp: address already in use"},
		{wire.Port{Proto: "udp", ContainerPort: 1, HostPort: 7001}, wire.Internal, "failed to bind host port 0.0.0.0:7001/udp: address already in use"},
		{wire.Port{Proto: "tcp", ContainerPort: 1, HostPort: 8080}, wire.Internal, "Bind for 0.0.0.0:8080 failed: port is already allocated"},
		{wire.Port{Proto: "tcp", ContainerPort: 1, HostPort: 9000, HostIP: "9.9.9.9"}, wire.Internal, "failed to bind host port 9.9.9.9:9000/tcp: cannot assign requested address"},
		{wire.Port{Proto: "icmp", ContainerPort: 1}, wire.Invalid, "invalid proto: icmp"},
		{wire.Port{Proto: "tcp"}, wire.Invalid, "invalid port: 0:0"},
		{wire.Port{Proto: "tcp", ContainerPort: 1, HostPort: 65536}, wire.Invalid, "invalid port: 65536:1"},
		{wire.Port{Proto: "tcp", ContainerPort: 1, HostIP: "x"}, wire.Invalid, "invalid IP address: x"},
		{wire.Port{Proto: "tcp", ContainerPort: 1, HostIP: "::1"}, wire.Unsupported, "publishing on the IPv6 address ::1: not built yet"},
	} {
		// A good one before it must not stay either.
		_, err := n.Publish(b, []wire.Port{{Proto: "tcp", ContainerPort: 80, HostPort: 8090}, c.port})
		if err == nil || wire.ClassOf(err) != c.class || err.Error() != c.text {
			t.Errorf("%+v: %v (class %d), want %q (class %d)", c.port, err, wire.ClassOf(err), c.text, c.class)
		}
	}
	if _, err := n.Publish(b, []wire.Port{{Proto: "tcp", ContainerPort: 1, HostPort: 8091}, {Proto: "tcp", ContainerPort: 2, HostPort: 8091}}); err == nil {
		t.Error("one port was published twice")
	}
	if got := elements(t, n); len(got) != len(before) {
		t.Errorf("refused ports left %v", got)
	}
	for _, free := range []string{":8090", ":8091"} {
		if l, err := net.Listen("tcp4", free); err != nil {
			t.Errorf("refused ports left a socket: %v", err)
		} else {
			l.Close()
		}
	}
	// What is published is taken for everyone else, but only in its own protocol.
	if l, err := net.Listen("tcp4", "127.0.0.1:8080"); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("listening on a published port: %v", err)
		if err == nil {
			l.Close()
		}
	}
	publish(t, n, b, wire.Port{Proto: "udp", ContainerPort: 80, HostPort: 8080})
}

func TestUDPFlowsAreForgotten(t *testing.T) {
	asHost(t)
	world := outside(t)
	n := open(t, Config{})
	echo := func(s *Sandbox, name string) {
		var c net.PacketConn
		within(t, s.NS, func() (err error) { c, err = net.ListenPacket("udp4", ":53"); return err })
		t.Cleanup(func() { c.Close() })
		go func() {
			buf := make([]byte, 64)
			for {
				_, from, err := c.ReadFrom(buf)
				if err != nil {
					return
				}
				c.WriteTo([]byte(name), from)
			}
		}()
	}
	port := wire.Port{Proto: "udp", ContainerPort: 53, HostPort: 5353}
	a := sandbox(t, n, "bridge", wire.NetConfig{})
	echo(a, "first")
	publish(t, n, a, port)
	// One client with one port goes on across a change of containers.
	var client net.Conn
	within(t, world, func() (err error) { client, err = net.Dial("udp4", "198.51.100.1:5353"); return err })
	defer client.Close()
	say := func() string {
		buf := make([]byte, 64)
		client.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := client.Write([]byte("x")); err != nil {
			return err.Error()
		}
		n, err := client.Read(buf)
		if err != nil {
			return err.Error()
		}
		return string(buf[:n])
	}
	if got := say(); got != "first" {
		t.Fatalf("answer %q, want first", got)
	}
	if err := n.Release(a.Endpoint); err != nil {
		t.Fatal(err)
	}
	b := sandbox(t, n, "bridge", wire.NetConfig{})
	echo(b, "second")
	publish(t, n, b, port)
	if got := say(); got != "second" {
		t.Errorf("answer %q, want second", got)
	}
}

func TestPortsOverACrash(t *testing.T) {
	asHost(t)
	world := outside(t)
	n := open(t, Config{})
	a := sandbox(t, n, "bridge", wire.NetConfig{})
	gone := sandbox(t, n, "bridge", wire.NetConfig{})
	serve(t, a.NS, ":80")
	publish(t, n, a, wire.Port{Proto: "tcp", ContainerPort: 80, HostPort: 8080})
	publish(t, n, gone, wire.Port{Proto: "tcp", ContainerPort: 80, HostPort: 8081})
	n.Close() // the agent dies: its sockets go, the table stays
	if who, err := ask(world, "198.51.100.1:8080", 10*time.Second); err != nil {
		t.Errorf("without an agent: %q, %v", who, err)
	}
	again := open(t, Config{})
	if who, err := ask(world, "198.51.100.1:8080", 10*time.Second); err != nil {
		t.Errorf("before the adoption: %q, %v", who, err)
	}
	// The address of the container that ended meanwhile goes to another: its port must not lead there.
	other, err := again.New("bridge", wire.NetConfig{Address: gone.Endpoint.Address, MAC: "02:00:00:00:00:01"})
	if err != nil {
		t.Fatal(err)
	}
	defer other.NS.Close()
	if m := elements(t, again); len(m) != 1 {
		t.Errorf("map %v, want the first port alone", m)
	}
	if err := again.Adopt(a.Endpoint); err != nil {
		t.Fatal(err)
	}
	if err := again.Adopted(); err != nil {
		t.Fatal(err)
	}
	if who, err := ask(world, "198.51.100.1:8080", 10*time.Second); err != nil {
		t.Errorf("after the adoption: %q, %v", who, err)
	}
	if _, err := net.Listen("tcp4", ":8080"); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("listening on an adopted port: %v", err)
	}
	if err := again.Release(a.Endpoint); err != nil {
		t.Fatal(err)
	}
	again.Close()

	// Nothing is adopted: what is left is taken back.
	third := open(t, Config{})
	s := sandbox(t, third, "bridge", wire.NetConfig{})
	publish(t, third, s, wire.Port{Proto: "tcp", ContainerPort: 80, HostPort: 8080})
	third.Close()
	last := open(t, Config{})
	if err := last.Adopted(); err != nil {
		t.Fatal(err)
	}
	if m := elements(t, last); len(m) != 0 {
		t.Errorf("map %v, want nothing", m)
	}
}

// A table with other rules, as an older kiri's, is replaced with its ports in it.
func TestPortsOverAnUpgrade(t *testing.T) {
	asHost(t)
	world := outside(t)
	n := open(t, Config{})
	a := sandbox(t, n, "bridge", wire.NetConfig{})
	serve(t, a.NS, ":80")
	publish(t, n, a, wire.Port{Proto: "tcp", ContainerPort: 80, HostPort: 8080})
	want := ruleset(t)
	chains, err := n.nft.ListChains()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range chains {
		if c.Name == "forward" {
			n.nft.FlushChain(c)
		}
	}
	if err := n.nft.Flush(); err != nil {
		t.Fatal(err)
	}
	again := open(t, Config{})
	if got := ruleset(t); got != want {
		t.Errorf("rules\n%s\nwant\n%s", got, want)
	}
	if who, err := ask(world, "198.51.100.1:8080", 10*time.Second); err != nil {
		t.Errorf("after the upgrade: %q, %v", who, err)
	}
	_ = again
}

func TestThousandsOfPorts(t *testing.T) {
	asHost(t)
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	count := int(min(5000, lim.Cur-200)) // a socket each
	if count < 2*elementsPerMessage {
		need(t, fmt.Sprintf("only %d descriptors", lim.Cur))
	}
	n := open(t, Config{})
	s := sandbox(t, n, "bridge", wire.NetConfig{})
	var ports []wire.Port
	for p := 20000; p < 20000+count; p++ {
		ports = append(ports, wire.Port{Proto: "udp", ContainerPort: p, HostPort: p})
	}
	begin := time.Now()
	s.Endpoint.Ports = publish(t, n, s, ports...)
	published := time.Since(begin)
	if m := elements(t, n); len(m) != len(ports) {
		t.Errorf("%d elements, want %d", len(m), len(ports))
	}
	begin = time.Now()
	if err := n.Release(s.Endpoint); err != nil {
		t.Fatal(err)
	}
	t.Logf("publishing took %v, taking back %v", published, time.Since(begin))
	if m := elements(t, n); len(m) != 0 {
		t.Errorf("%d elements left", len(m))
	}
}

func TestRouteLocalOnlyWhenNeeded(t *testing.T) {
	asHost(t)
	n := open(t, Config{})
	s := sandbox(t, n, "bridge", wire.NetConfig{})
	get := func() string {
		b, err := os.ReadFile("/proc/sys/net/ipv4/conf/kiri0/route_localnet")
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	if got := get(); got != "0" {
		t.Errorf("route_localnet is %s before a port is published", got)
	}
	if got, err := n.Publish(s, nil); err != nil || len(got) != 0 || get() != "0" {
		t.Errorf("publishing nothing: %v, %v, route_localnet %s", got, err, get())
	}
	publish(t, n, s, wire.Port{Proto: "tcp", ContainerPort: 1})
	if got := get(); got != "1" {
		t.Errorf("route_localnet is %s after", got)
	}
}
