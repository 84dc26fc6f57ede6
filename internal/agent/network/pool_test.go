//go:build linux

package network

import (
	"net/netip"
	"strings"
	"testing"

	"runkiri.com/kiri/internal/wire"
)

func testPool(t *testing.T, subnet string) *pool {
	t.Helper()
	p, err := parseSubnet(subnet)
	if err != nil {
		t.Fatal(err)
	}
	return newPool(p, p.Addr())
}

func take(t *testing.T, p *pool) string {
	t.Helper()
	a, _, err := p.take("", "")
	if err != nil {
		t.Fatal(err)
	}
	return a.String()
}

func TestPoolTurns(t *testing.T) {
	p := testPool(t, "10.0.0.0/29") // .1 is the gateway, .2 to .6 are for containers
	for _, want := range []string{"10.0.0.2", "10.0.0.3", "10.0.0.4"} {
		if got := take(t, p); got != want {
			t.Fatalf("got %s, want %s", got, want)
		}
	}
	p.release("10.0.0.3")
	for _, want := range []string{"10.0.0.5", "10.0.0.6", "10.0.0.3"} { // what was freed comes last
		if got := take(t, p); got != want {
			t.Fatalf("got %s, want %s", got, want)
		}
	}
	_, _, err := p.take("", "")
	if err == nil || wire.ClassOf(err) != wire.Internal || !strings.HasPrefix(err.Error(), "no available IPv4 addresses on this network's address pools") {
		t.Errorf("full pool: %v", err)
	}
	p.release("10.0.0.6")
	p.release("not an address")
	if got := take(t, p); got != "10.0.0.6" {
		t.Errorf("got %s, want the only free one", got)
	}
}

func TestPoolAsked(t *testing.T) {
	p := testPool(t, "10.0.0.0/24")
	a, mac, err := p.take("10.0.0.77", "02:00:00:00:00:aa")
	if err != nil || a.String() != "10.0.0.77" || mac.String() != "02:00:00:00:00:aa" {
		t.Fatalf("%s, %s, %v", a, mac, err)
	}
	for _, c := range []struct {
		address, mac string
		class        wire.Class
		text         string
	}{
		{"10.0.0.77", "", wire.Conflict, "Address already in use"},
		{"10.0.0.1", "", wire.Conflict, "Address already in use"},
		{"10.0.0.0", "", wire.Conflict, "Address already in use"},
		{"10.0.0.255", "", wire.Conflict, "Address already in use"},
		{"10.0.1.1", "", wire.Invalid, "no configured subnet or ip-range contain the IP address 10.0.1.1"},
		{"10.0.0", "", wire.Invalid, "invalid IPv4 address: 10.0.0"},
		{"fe80::1", "", wire.Invalid, "invalid IPv4 address: fe80::1"},
		{"", "02:00:00:00:00:AA", wire.Conflict, "MAC address 02:00:00:00:00:aa is already in use"},
		{"", "nope", wire.Invalid, "invalid MAC address: nope"},
		{"", "01:00:5e:00:00:01", wire.Invalid, "invalid MAC address: 01:00:5e:00:00:01 is not the address of one interface"},
		{"", "00:00:00:00:00:00", wire.Invalid, "invalid MAC address: 00:00:00:00:00:00 is not the address of one interface"},
		{"", "02:00:00:00:00:00:00:01", wire.Invalid, "invalid MAC address: 02:00:00:00:00:00:00:01"},
	} {
		_, _, err := p.take(c.address, c.mac)
		if err == nil || wire.ClassOf(err) != c.class || err.Error() != c.text {
			t.Errorf("take(%q, %q): %v (class %d), want %q (class %d)", c.address, c.mac, err, wire.ClassOf(err), c.text, c.class)
		}
	}
	if len(p.used) != 1 {
		t.Errorf("refused requests left %v", p.used)
	}
}

func TestPoolAdopt(t *testing.T) {
	p := testPool(t, "10.0.0.0/24")
	for _, a := range []string{"10.0.0.9", "10.0.0.4"} {
		if err := p.adopt(a, "02:42:0a:00:00:09"); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.adopt("10.0.0.4", ""); wire.ClassOf(err) != wire.Conflict {
		t.Errorf("adopted twice: %v", err)
	}
	for _, a := range []string{"", "10.0.1.1", "x"} {
		if err := p.adopt(a, ""); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("adopt(%q): %v, want Invalid", a, err)
		}
	}
	if got := take(t, p); got != "10.0.0.10" {
		t.Errorf("got %s, want the one after the last adopted", got)
	}
}

func TestParseSubnet(t *testing.T) {
	for text, want := range map[string]string{
		"10.1.0.0/16": "10.1.0.1/16", "10.1.0.254/24": "10.1.0.254/24", "192.168.5.0/30": "192.168.5.1/30",
	} {
		if p, err := parseSubnet(text); err != nil || p.String() != want {
			t.Errorf("parseSubnet(%s): %v, %v; want %s", text, p, err, want)
		}
	}
	for _, text := range []string{"", "10.0.0.0", "10.0.0.0/31", "10.0.0.0/4", "fd00::/64", "10.0.0.0/33"} {
		if p, err := parseSubnet(text); wire.ClassOf(err) != wire.Invalid {
			t.Errorf("parseSubnet(%q): %v, %v; want Invalid", text, p, err)
		}
	}
}

func TestMACOfAddress(t *testing.T) {
	if got := macOf(netip.MustParseAddr("172.17.0.2")).String(); got != "02:42:ac:11:00:02" {
		t.Errorf("got %s", got)
	}
}
