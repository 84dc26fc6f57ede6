//go:build linux

package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// Each of these tests is the host of a network namespace of its own, so that they can use any name and see everything
// that is left behind. They need root.

// need skips the test for want of something, or fails it where all must be there.
func need(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("KIRI_MUST") == "1" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// asHost puts the test's thread in a fresh namespace with lo up. The thread is not given back: it ends with the test.
func asHost(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		need(t, "not root: network namespaces cannot be made")
	}
	runtime.LockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		t.Fatal(err)
	}
	// A new namespace copies this from the first one, where a kiri may be running.
	if err := sysctl("net/ipv4/ip_forward", "0"); err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, cfg Config) *Network {
	t.Helper()
	n, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { n.Close() })
	return n
}

func sandbox(t testing.TB, n *Network, kind string, want wire.NetConfig) *Sandbox {
	t.Helper()
	s, err := n.New(kind, want)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.NS.Close() })
	return s
}

// within runs f on a thread in the namespace ns, which ends after it.
func within(t testing.TB, ns *os.File, f func() error) {
	t.Helper()
	if err := <-withinLater(ns, f); err != nil {
		t.Fatal(err)
	}
}

func withinLater(ns *os.File, f func() error) <-chan error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return done
}

func linkNames(t testing.TB) []string {
	t.Helper()
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, l := range links {
		names = append(names, l.Attrs().Name)
	}
	return names
}

// awaitLinkGone returns when the kernel has deleted a link of the calling thread's namespace, told by its own notices.
func awaitLinkGone(t testing.TB, name string) {
	t.Helper()
	updates, stop := make(chan netlink.LinkUpdate, 64), make(chan struct{})
	defer close(stop)
	if err := netlink.LinkSubscribe(updates, stop); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(linkNames(t), name) {
		return
	}
	limit := time.After(20 * time.Second)
	for {
		select {
		case u := <-updates:
			if u.Header.Type == unix.RTM_DELLINK && u.Attrs().Name == name {
				return
			}
		case <-limit:
			t.Fatalf("link %s is still there: %q", name, linkNames(t))
		}
	}
}

// outside makes a namespace that is the rest of the world, 198.51.100.2 behind the host's link up0, without any route
// back to containers.
func outside(t testing.TB) *os.File {
	t.Helper()
	home, err := os.Open(ownNS)
	if err != nil {
		t.Fatal(err)
	}
	defer home.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	ns, err := os.Open(ownNS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "up0"
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "world", PeerNamespace: netlink.NsFd(int(ns.Fd()))}
	if err := netlink.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	up := func(name, cidr string) error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(cidr)
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(l, a), netlink.LinkSetUp(l))
	}
	if err := up("up0", "198.51.100.1/24"); err != nil {
		t.Fatal(err)
	}
	within(t, ns, func() error { return up("world", "198.51.100.2/24") })
	return ns
}

// serve answers each connection to address in ns with the address it comes from.
func serve(t testing.TB, ns *os.File, address string) net.Listener {
	t.Helper()
	var l net.Listener
	within(t, ns, func() (err error) {
		l, err = net.Listen("tcp4", address)
		return err
	})
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprint(c, c.RemoteAddr().(*net.TCPAddr).IP)
			c.Close()
		}
	}()
	return l
}

// ask connects to address from ns and returns what the server says.
func ask(ns *os.File, address string, limit time.Duration) (string, error) {
	var text []byte
	err := <-withinLater(ns, func() error {
		c, err := net.DialTimeout("tcp4", address, limit)
		if err != nil {
			return err
		}
		defer c.Close()
		text, err = io.ReadAll(c)
		return err
	})
	return string(text), err
}

func host(t testing.TB) *os.File {
	t.Helper()
	ns, err := os.Open(ownNS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

func TestBridgeTraffic(t *testing.T) {
	asHost(t)
	world := outside(t)
	n := open(t, Config{})
	a, b := sandbox(t, n, "bridge", wire.NetConfig{}), sandbox(t, n, "bridge", wire.NetConfig{})
	if a.Endpoint.Address != "172.17.0.2" || b.Endpoint.Address != "172.17.0.3" || a.Endpoint.Gateway != "172.17.0.1" || a.Endpoint.PrefixLen != 16 {
		t.Errorf("endpoints %+v and %+v", a.Endpoint, b.Endpoint)
	}
	serve(t, world, "198.51.100.2:80")
	serve(t, b.NS, ":81")
	self := host(t)
	serve(t, self, ":82")
	for _, c := range []struct {
		what, from string
		ns         *os.File
		to, want   string
	}{
		{"out by NAT", "a", a.NS, "198.51.100.2:80", "198.51.100.1"},
		{"to another container", "a", a.NS, b.Endpoint.Address + ":81", a.Endpoint.Address},
		{"to the host", "a", a.NS, "172.17.0.1:82", a.Endpoint.Address},
		{"from the host", "host", self, b.Endpoint.Address + ":81", "172.17.0.1"},
		{"to itself on lo", "b", b.NS, "127.0.0.1:81", "127.0.0.1"},
	} {
		if got, err := ask(c.ns, c.to, 10*time.Second); err != nil || got != c.want {
			t.Errorf("%s: server saw %q, %v; want %q", c.what, got, err, c.want)
		}
	}
}

func TestContainersAreNotReachedFromOutside(t *testing.T) {
	asHost(t)
	world := outside(t)
	n := open(t, Config{})
	a := sandbox(t, n, "bridge", wire.NetConfig{})
	serve(t, a.NS, ":81")
	// Someone on the host's network who knows the subnet sends its packets to the host.
	within(t, world, func() error {
		_, dst, _ := net.ParseCIDR("172.17.0.0/16")
		return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP("198.51.100.1")})
	})
	if got, err := ask(world, a.Endpoint.Address+":81", time.Second); err == nil {
		t.Errorf("reached from outside: %q", got)
	}
}

// The host forwards for containers only: two other networks are as far apart as before.
func TestForwardingIsNotOpened(t *testing.T) {
	for _, before := range []bool{false, true} {
		t.Run(fmt.Sprint("forwarding=", before), func(t *testing.T) {
			asHost(t)
			world := outside(t)
			// A second network of the host, with a route to the first over the host.
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "lan0"
			lan := emptyNS(t)
			veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(lan.Fd()))}
			if err := netlink.LinkAdd(veth); err != nil {
				t.Fatal(err)
			}
			l, _ := netlink.LinkByName("lan0")
			addr, _ := netlink.ParseAddr("203.0.113.1/24")
			if err := errors.Join(netlink.AddrAdd(l, addr), netlink.LinkSetUp(l)); err != nil {
				t.Fatal(err)
			}
			within(t, lan, func() error {
				l, err := netlink.LinkByName("eth0")
				addr, _ := netlink.ParseAddr("203.0.113.2/24")
				return errors.Join(err, netlink.AddrAdd(l, addr), netlink.LinkSetUp(l), netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("203.0.113.1")}))
			})
			within(t, world, func() error { return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("198.51.100.1")}) })
			serve(t, world, ":80")
			if before {
				if err := sysctl("net/ipv4/ip_forward", "1"); err != nil {
					t.Fatal(err)
				}
			}
			n := open(t, Config{})
			again := open(t, Config{}) // a restarted agent finds forwarding on and must not forget who turned it on
			for _, n := range []*Network{n, again} {
				_ = n
				limit := time.Second // of waiting for what must not come
				if before {
					limit = 10 * time.Second
				}
				_, err := ask(lan, "198.51.100.2:80", limit)
				if reached := err == nil; reached != before {
					t.Errorf("the other network is reached: %v, want %v (%v)", reached, before, err)
				}
			}
			if err := again.Remove(); err != nil {
				t.Fatal(err)
			}
			if on, err := n.forwarding(); err != nil || on != before {
				t.Errorf("forwarding after Remove: %v, %v; want %v", on, err, before)
			}
		})
	}
}

// emptyNS is a namespace with nothing set up.
func emptyNS(t testing.TB) *os.File {
	t.Helper()
	done := make(chan *os.File, 1)
	go func() {
		runtime.LockOSThread()
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- nil
			return
		}
		f, _ := os.Open(ownNS)
		done <- f
	}()
	f := <-done
	if f == nil {
		t.Fatal("no network namespace could be made")
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestNone(t *testing.T) {
	asHost(t)
	n := open(t, Config{})
	s := sandbox(t, n, "none", wire.NetConfig{})
	if s.Endpoint.Address != "" || s.Endpoint.Interface != "" {
		t.Errorf("endpoint %+v, want none", s.Endpoint)
	}
	serve(t, s.NS, "127.0.0.1:80")
	if got, err := ask(s.NS, "127.0.0.1:80", 10*time.Second); err != nil || got != "127.0.0.1" {
		t.Errorf("lo: %q, %v", got, err)
	}
	within(t, s.NS, func() error {
		if names := linkNames(t); !slices.Equal(names, []string{"lo"}) {
			t.Errorf("links %q, want lo alone", names)
		}
		routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
		for _, r := range routes {
			if !r.Dst.IP.IsLoopback() {
				t.Errorf("route %v", r)
			}
		}
		return err
	})
	if _, err := ask(s.NS, "172.17.0.1:82", time.Second); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("to the bridge: %v, want %v", err, unix.ENETUNREACH)
	}
}

func TestInsideOfBridgeSandbox(t *testing.T) {
	asHost(t)
	n := open(t, Config{MTU: 1380})
	s := sandbox(t, n, "bridge", wire.NetConfig{})
	var dev string
	within(t, s.NS, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if a := l.Attrs(); a.MTU != 1380 || a.HardwareAddr.String() != s.Endpoint.MAC || a.OperState != netlink.OperUp {
			t.Errorf("eth0: mtu %d, mac %s, %s; want 1380, %s, up", a.MTU, a.HardwareAddr, a.OperState, s.Endpoint.MAC)
		}
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil || len(addrs) != 1 || addrs[0].IPNet.String() != s.Endpoint.Address+"/16" || addrs[0].Broadcast.String() != "172.17.255.255" {
			t.Errorf("addresses of eth0: %v, %v", addrs, err)
		}
		lo, err := netlink.AddrList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: 1}}, netlink.FAMILY_V6)
		if _, serr := os.Stat(hostInetIPs); serr == nil && (err != nil || len(lo) != 1) {
			t.Errorf("IPv6 addresses of lo: %v, %v; want ::1", lo, err)
		}
		// Links the container makes itself are the kernel's usual ones.
		if b, err := os.ReadFile("/proc/sys/net/ipv6/conf/default/disable_ipv6"); err == nil && strings.TrimSpace(string(b)) != "0" {
			t.Errorf("disable_ipv6 of later links: %s", b)
		}
		text, err := os.ReadFile("/proc/thread-self/net/dev")
		dev = string(text)
		return err
	})
	if !strings.Contains(dev, "eth0:") {
		t.Errorf("counters: %s", dev)
	}
	host, err := netlink.LinkByName(s.Endpoint.Interface)
	if err != nil {
		t.Fatal(err)
	}
	if host.Attrs().MasterIndex != n.index || host.Attrs().MTU != 1380 || len(host.Attrs().Name) > 15 {
		t.Errorf("host's end: %+v", host.Attrs())
	}
	// A process in it has the counters.
	cmd := processIn(t, s.NS)
	stats, err := InterfaceStats(cmd.Process.Pid)
	if err != nil || len(stats) != 1 || stats[0].Name != "eth0" {
		t.Errorf("InterfaceStats: %+v, %v", stats, err)
	}
}

// processIn starts a process that lives in ns until it is killed.
func processIn(t testing.TB, ns *os.File) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sleep", "1000")
	within(t, ns, cmd.Start)
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	return cmd
}

func TestEndOfNamespaceTakesVeth(t *testing.T) {
	asHost(t)
	n := open(t, Config{})
	s := sandbox(t, n, "bridge", wire.NetConfig{})
	cmd := processIn(t, s.NS)
	s.NS.Close() // now the process alone holds it
	if !slices.Contains(linkNames(t), s.Endpoint.Interface) {
		t.Fatalf("no %s among %q", s.Endpoint.Interface, linkNames(t))
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	awaitLinkGone(t, s.Endpoint.Interface)
	n.Release(s.Endpoint)
}

func TestOpenTwiceIsQuiet(t *testing.T) {
	asHost(t)
	foreign := foreignTable(t)
	before := ruleset(t)
	n := open(t, Config{})
	a := sandbox(t, n, "bridge", wire.NetConfig{})
	once := ruleset(t)
	if once == before {
		t.Fatal("the table was not made")
	}
	// The agent dies and comes back: nothing may change, on the wire either.
	addresses, stop := make(chan netlink.AddrUpdate, 64), make(chan struct{})
	defer close(stop)
	if err := netlink.AddrSubscribe(addresses, stop); err != nil {
		t.Fatal(err)
	}
	bridge := func() string {
		l, err := netlink.LinkByName("kiri0")
		if err != nil {
			t.Fatal(err)
		}
		a := l.Attrs()
		return fmt.Sprint(a.Index, a.MTU, a.HardwareAddr, a.Flags&net.FlagUp)
	}
	link := bridge()
	generation := nftGeneration(t)
	again := open(t, Config{})
	if got := ruleset(t); got != once {
		t.Errorf("the second Open changed the rules:\n%s\nto\n%s", once, got)
	}
	if got := nftGeneration(t); got != generation {
		t.Errorf("the second Open wrote to nf_tables: generation %d, was %d", got, generation)
	}
	select {
	case u := <-addresses:
		t.Errorf("the second Open changed address %s", u.LinkAddress.String())
	default:
	}
	if got := bridge(); got != link {
		t.Errorf("the second Open changed the bridge from %s to %s", link, got)
	}
	if again.Bridge() != n.Bridge() {
		t.Errorf("bridge %+v, was %+v", again.Bridge(), n.Bridge())
	}
	if err := again.Adopt(a.Endpoint); err != nil {
		t.Fatal(err)
	}
	if err := again.Adopt(a.Endpoint); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("adopted twice: %v", err)
	}
	b := sandbox(t, again, "bridge", wire.NetConfig{})
	if b.Endpoint.Address == a.Endpoint.Address {
		t.Errorf("address %s given twice", b.Endpoint.Address)
	}
	// Someone deletes a rule: the next Open puts it back.
	chains, err := n.nft.ListChainsOfTableFamily(nftables.TableFamilyIPv4)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range chains {
		if c.Table.Name == "kiri" && c.Name == "forward" {
			n.nft.FlushChain(c)
		}
	}
	if err := n.nft.Flush(); err != nil {
		t.Fatal(err)
	}
	if ruleset(t) == once {
		t.Fatal("flushing the chain did nothing")
	}
	open(t, Config{})
	if got := ruleset(t); got != once {
		t.Errorf("Open did not mend the rules:\n%s\nwant\n%s", got, once)
	}
	if got := foreignText(t, foreign); !strings.Contains(once, got) {
		t.Errorf("the foreign table changed to\n%s", got)
	}
	a.NS.Close()
	b.NS.Close()
	if err := again.Remove(); err != nil {
		t.Fatal(err)
	}
	if got := ruleset(t); got != before {
		t.Errorf("Remove left\n%s\nwant\n%s", got, before)
	}
	awaitLinkGone(t, a.Endpoint.Interface)
	awaitLinkGone(t, b.Endpoint.Interface)
	if got := linkNames(t); !slices.Equal(got, []string{"lo"}) {
		t.Errorf("Remove left links %q", got)
	}
}

// foreignTable is what someone else has in nf_tables.
func foreignTable(t testing.TB) *nftables.Table {
	t.Helper()
	c := &nftables.Conn{}
	table := c.AddTable(&nftables.Table{Name: "neighbour", Family: nftables.TableFamilyIPv4})
	chain := c.AddChain(&nftables.Chain{Name: "input", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter})
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: rule(in("nope0"), &expr.Counter{}, &expr.Verdict{Kind: expr.VerdictDrop})})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	return table
}

// ruleset is all of nf_tables as text. Handles are left out: a table made anew has new ones.
func ruleset(t testing.TB) string {
	t.Helper()
	c := &nftables.Conn{}
	tables, err := c.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, table := range tables {
		b.WriteString(foreignText(t, table))
	}
	return b.String()
}

func foreignText(t testing.TB, table *nftables.Table) string {
	t.Helper()
	c := &nftables.Conn{}
	chains, err := c.ListChains()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "table %d %s\n", table.Family, table.Name)
	for _, ch := range chains {
		if ch.Table.Name != table.Name || ch.Table.Family != table.Family {
			continue
		}
		fmt.Fprintf(&b, "  chain %s %s", ch.Name, ch.Type)
		if ch.Hooknum != nil {
			fmt.Fprintf(&b, " hook %d priority %d", *ch.Hooknum, *ch.Priority)
		}
		if ch.Policy != nil {
			fmt.Fprintf(&b, " policy %d", *ch.Policy)
		}
		b.WriteByte('\n')
		rules, err := c.GetRules(table, ch)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rules {
			fmt.Fprintf(&b, "    %q", r.UserData)
			for _, e := range r.Exprs {
				fmt.Fprintf(&b, " %T%+v", e, e)
			}
			b.WriteByte('\n')
		}
	}
	return b.String()
}

// nftGeneration counts the transactions of this namespace: NFTA_GEN_ID of the answer to NFT_MSG_GETGEN.
func nftGeneration(t testing.TB) uint32 {
	t.Helper()
	c, err := mdl.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	msgs, err := c.Execute(mdl.Message{
		Header: mdl.Header{Type: unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_GETGEN, Flags: mdl.Request},
		Data:   make([]byte, 4),
	})
	if err != nil || len(msgs) != 1 {
		t.Fatalf("asking for the generation: %v, %v", msgs, err)
	}
	attrs, err := mdl.NewAttributeDecoder(msgs[0].Data[4:])
	if err != nil {
		t.Fatal(err)
	}
	attrs.ByteOrder = binary.BigEndian
	for attrs.Next() {
		if attrs.Type() == unix.NFTA_GEN_ID {
			return attrs.Uint32()
		}
	}
	t.Fatal("no generation in the answer")
	return 0
}

func TestSubnetAvoidsTheHosts(t *testing.T) {
	asHost(t)
	pretend(t, "nameserver 172.19.0.53\n", "", "", true)
	// A bridge without ports stands for the host's interfaces; not every kernel has dummy links.
	link := func(name, cidr string) *netlink.Bridge {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		d := &netlink.Bridge{LinkAttrs: attrs}
		if err := errors.Join(netlink.LinkAdd(d), netlink.LinkSetUp(d)); err != nil {
			t.Fatal(err)
		}
		if cidr != "" {
			a, err := netlink.ParseAddr(cidr)
			if err == nil {
				err = netlink.AddrAdd(d, a)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		return d
	}
	link("lan0", "172.17.200.1/24") // an address in the first
	vpn := link("vpn0", "10.99.0.1/24")
	_, part, _ := net.ParseCIDR("172.18.4.0/22") // a route, in a table of its own, to a part of the second
	_, half, _ := net.ParseCIDR("128.0.0.0/1")   // and one for half of everything
	for _, r := range []*netlink.Route{{LinkIndex: vpn.Index, Dst: part, Table: 51820}, {LinkIndex: vpn.Index, Dst: half}} {
		if err := netlink.RouteAdd(r); err != nil {
			t.Fatal(err)
		}
	}
	n := open(t, Config{}) // a name server in the third
	if b := n.Bridge(); b.Subnet != "172.20.0.0/16" || b.Gateway != "172.20.0.1" || b.Name != "kiri0" {
		t.Errorf("bridge %+v, want 172.20.0.0/16", b)
	}
	// What was chosen once stays, also when another would be free now.
	if err := netlink.LinkDel(vpn); err != nil {
		t.Fatal(err)
	}
	if b := open(t, Config{}).Bridge(); b.Subnet != "172.20.0.0/16" {
		t.Errorf("the second Open chose %s", b.Subnet)
	}
	// A subnet asked for replaces it.
	if b := open(t, Config{Subnet: "10.50.0.9/24", MTU: 1300}).Bridge(); b.Subnet != "10.50.0.0/24" || b.Gateway != "10.50.0.9" || b.MTU != 1300 {
		t.Errorf("bridge %+v, want what was asked for", b)
	}
	l, err := netlink.LinkByName("kiri0")
	if err != nil {
		t.Fatal(err)
	}
	if addrs, err := netlink.AddrList(l, netlink.FAMILY_V4); err != nil || len(addrs) != 1 || l.Attrs().MTU != 1300 {
		t.Errorf("addresses %v, %v, mtu %d", addrs, err, l.Attrs().MTU)
	}
}

func TestUplinkMTU(t *testing.T) {
	asHost(t)
	outside(t)
	l, err := netlink.LinkByName("up0")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(netlink.LinkSetMTU(l, 1400), netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("198.51.100.2")})); err != nil {
		t.Fatal(err)
	}
	if b := open(t, Config{}).Bridge(); b.MTU != 1400 {
		t.Errorf("mtu %d, want the uplink's 1400", b.MTU)
	}
}

func TestBridgeNameOfAnotherLink(t *testing.T) {
	asHost(t)
	if _, err := Open(Config{Bridge: "lo"}); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("Open on lo: %v, want Conflict", err)
	}
	if got := ruleset(t); got != "" {
		t.Errorf("left behind:\n%s", got)
	}
}

func TestFailedNewLeavesNothing(t *testing.T) {
	asHost(t)
	n := open(t, Config{Subnet: "10.9.0.0/29"})
	links := linkNames(t)
	for _, want := range []wire.NetConfig{{Address: "10.9.0.1"}, {Address: "x"}, {MAC: "x"}} {
		if s, err := n.New("bridge", want); err == nil {
			t.Errorf("New(%+v): %+v", want, s.Endpoint)
		}
	}
	if _, err := n.New("host", wire.NetConfig{}); wire.ClassOf(err) != wire.Unsupported {
		t.Errorf("New(host): %v, want Unsupported", err)
	}
	// The bridge is taken away under us: the pair cannot be made, and its address must come back.
	l, err := netlink.LinkByName("kiri0")
	if err == nil {
		err = netlink.LinkDel(l)
	}
	if err != nil {
		t.Fatal(err)
	}
	for range 10 { // more often than there are addresses
		if _, err := n.New("bridge", wire.NetConfig{}); err == nil || strings.Contains(err.Error(), "no available") {
			t.Fatalf("New without a bridge: %v", err)
		}
	}
	links = slices.DeleteFunc(links, func(s string) bool { return s == "kiri0" })
	if got := linkNames(t); !slices.Equal(got, links) {
		t.Errorf("links %q, want %q", got, links)
	}
}

func TestAskedAddressAndMAC(t *testing.T) {
	asHost(t)
	n := open(t, Config{})
	s := sandbox(t, n, "bridge", wire.NetConfig{Address: "172.17.9.9", MAC: "02:00:00:00:00:99"})
	if s.Endpoint.Address != "172.17.9.9" || s.Endpoint.MAC != "02:00:00:00:00:99" {
		t.Errorf("endpoint %+v", s.Endpoint)
	}
	serve(t, s.NS, ":80")
	if got, err := ask(host(t), "172.17.9.9:80", 10*time.Second); err != nil || got != "172.17.0.1" {
		t.Errorf("server saw %q, %v", got, err)
	}
}

func TestManyAtOnce(t *testing.T) {
	asHost(t)
	n := open(t, Config{})
	const count = 40
	type result struct {
		s   *Sandbox
		err error
	}
	results := make(chan result, count)
	for range count {
		go func() {
			s, err := n.New("bridge", wire.NetConfig{})
			results <- result{s, err}
		}()
	}
	seen := map[string]bool{}
	var names []string
	for range count {
		r := <-results
		if r.err != nil {
			t.Error(r.err)
			continue
		}
		e := r.s.Endpoint
		if seen[e.Address] || seen[e.MAC] || seen[e.Interface] {
			t.Errorf("given twice: %+v", e)
		}
		seen[e.Address], seen[e.MAC], seen[e.Interface] = true, true, true
		names = append(names, e.Interface)
		r.s.NS.Close()
		n.Release(e)
	}
	for _, name := range names {
		awaitLinkGone(t, name)
	}
}

// Two engines on one host: the one that turned forwarding on must not drop the other's, and when it goes the host must not
// become a router.
func TestTwoEngines(t *testing.T) {
	asHost(t)
	world := outside(t)
	first := open(t, Config{})
	second := open(t, Config{Bridge: "other0", Table: "other"})
	if first.Bridge().Subnet == second.Bridge().Subnet {
		t.Fatalf("both have %s", first.Bridge().Subnet)
	}
	if len(second.Warnings()) != 0 {
		t.Errorf("warned of each other: %q", second.Warnings())
	}
	a, b := sandbox(t, first, "bridge", wire.NetConfig{}), sandbox(t, second, "bridge", wire.NetConfig{})
	serve(t, world, "198.51.100.2:80")
	// A socket keeps its namespace alive, so these are closed before the namespaces are.
	la, lb := serve(t, a.NS, ":81"), serve(t, b.NS, ":81")
	for _, s := range []*Sandbox{a, b} {
		if who, err := ask(s.NS, "198.51.100.2:80", 10*time.Second); err != nil || who != "198.51.100.1" {
			t.Errorf("%s goes out as %q, %v", s.Endpoint.Address, who, err)
		}
	}
	if who, err := ask(a.NS, b.Endpoint.Address+":81", time.Second); err == nil {
		t.Errorf("one engine's container reached the other's as %q", who)
	}
	la.Close()
	a.NS.Close()
	awaitLinkGone(t, a.Endpoint.Interface)
	if err := first.Remove(); err != nil {
		t.Fatal(err)
	}
	if who, err := ask(b.NS, "198.51.100.2:80", 10*time.Second); err != nil {
		t.Errorf("the other engine's container is cut off: %q, %v", who, err)
	}
	if text := ruleset(t); !strings.Contains(text, "chain forward filter hook 2 priority 0 policy 0") {
		t.Errorf("nobody drops what is not kiri's:\n%s", text)
	}
	// The other finds its table as it should be.
	generation := nftGeneration(t)
	again := open(t, Config{Bridge: "other0", Table: "other"})
	if got := nftGeneration(t); got != generation {
		t.Error("the table was written anew")
	}
	lb.Close()
	b.NS.Close()
	awaitLinkGone(t, b.Endpoint.Interface)
	if err := again.Remove(); err != nil {
		t.Fatal(err)
	}
	if on, err := again.forwarding(); err != nil || on {
		t.Errorf("forwarding after both are gone: %v, %v", on, err)
	}
}

func TestWarnsOfForeignDrop(t *testing.T) {
	asHost(t)
	c := &nftables.Conn{}
	drop := nftables.ChainPolicyDrop
	table := c.AddTable(&nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4})
	c.AddChain(&nftables.Chain{Name: "FORWARD", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	before := foreignText(t, table)
	n := open(t, Config{})
	if w := n.Warnings(); len(w) != 1 || !strings.Contains(w[0], "chain FORWARD of nf_tables table filter") {
		t.Errorf("warnings %q", w)
	}
	if got := foreignText(t, table); got != before {
		t.Errorf("the foreign table became\n%s", got)
	}
}
