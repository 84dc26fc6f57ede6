//go:build linux

package network

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// The table.
//
//	table ip kiri {
//	  map ports { type inet_proto . ipv4_addr . inet_service : ipv4_addr . inet_service; }
//	  chain guard { type filter hook prerouting priority raw; policy accept;
//	    iifname "kiri0" ip daddr 127.0.0.0/8 drop               # see ports.go
//	    iifname "kiri0" ip saddr 127.0.0.0/8 drop
//	  }
//	  chain prerouting { type nat hook prerouting priority dstnat; policy accept;
//	    fib daddr type local dnat to meta l4proto . ip daddr . th dport map @ports
//	    fib daddr type local dnat to meta l4proto . 0.0.0.0 . th dport map @ports
//	  }
//	  chain output { type nat hook output priority dstnat; policy accept; the same two rules }
//	  chain postrouting { type nat hook postrouting priority srcnat; policy accept;
//	    ip saddr SUBNET oifname != "kiri0" masquerade
//	    oifname "kiri0" ip saddr 127.0.0.0/8 masquerade         # the host to a published port by its loopback
//	    oifname "kiri0" ip saddr SUBNET ct status dnat masquerade # a container to one: the answer must come back here
//	  }
//	  chain forward { type filter hook forward priority filter; policy accept|drop;
//	    iifname "kiri0" accept                                  # containers to each other and out
//	    oifname "kiri0" ct state established,related accept     # answers
//	    oifname "kiri0" ct status dnat accept                   # published ports
//	    oifname "kiri0" drop                                    # all else from outside
//	    iifgroup 0x6b697269 accept; oifgroup 0x6b697269 accept  # bridges of other kiri engines, whose tables judge them
//	  }
//	}
//
// Forwarding. Containers need the host to forward, and the kernel's switch for that is one for all interfaces: turning
// it on makes a router of a host that was none. So whoever turns it on must see to it that nothing but its own is
// forwarded. Docker sets the policy of iptables' FORWARD chain to drop when it finds forwarding off, and so does kiri
// with its own chain: policy drop if kiri turned forwarding on, accept if it was on before, when what passes between
// other interfaces is the administrator's choice. The policy is also the memory of it: a restarted agent finds
// forwarding on and keeps the policy it finds. An administrator who wants a router turns ip_forward on before kiri
// starts, as with Docker. Several engines on one host know each other's bridges by their link group, and one that is
// removed hands the dropping on. An accept in one table does not overrule a drop in another: where another table drops what is
// forwarded (Docker's own FORWARD policy), kiri cannot and does not change that, it says so in Warnings.

// ruleSpec is a rule as it should be. Its comment, with a hash of the expressions, is how it is known again.
type ruleSpec struct {
	comment string
	exprs   []expr.Any
}

type chainSpec struct {
	chain nftables.Chain
	rules []ruleSpec
}

func (n *Network) table() *nftables.Table {
	return &nftables.Table{Name: n.cfg.Table, Family: nftables.TableFamilyIPv4}
}

// chains is the content of the table as it should be; drop is the policy for what is not kiri's.
func (n *Network) chains(drop bool) []chainSpec {
	bridge := n.cfg.Bridge
	accept, dropped := &expr.Verdict{Kind: expr.VerdictAccept}, &expr.Verdict{Kind: expr.VerdictDrop}
	policy := nftables.ChainPolicyAccept
	forward := []ruleSpec{
		{"containers to each other and out", rule(in(bridge), accept)},
		{"answers to containers", rule(out(bridge), state(expr.CtKeySTATE, expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept)},
		{"published ports", rule(out(bridge), state(expr.CtKeySTATUS, ctStatusDNAT), accept)},
		{"nothing else reaches containers from outside", rule(out(bridge), dropped)},
		{"from bridges of other kiri engines", rule(group(expr.MetaKeyIIFGROUP), accept)},
		otherEngines,
	}
	if drop {
		policy = nftables.ChainPolicyDrop
	}
	all := nftables.ChainPolicyAccept
	dnat := []ruleSpec{
		{"ports published on this address", n.dnat(payload(16, 9))},
		{"ports published on all addresses", n.dnat(&expr.Immediate{Register: 9, Data: make([]byte, 4)})},
	}
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	return []chainSpec{
		{
			nftables.Chain{Name: "guard", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw, Policy: &all},
			[]ruleSpec{
				{"the host's loopback is its own", rule(in(bridge), destination(loopback), dropped)},
				{"nobody else has a loopback address", rule(in(bridge), source(loopback), dropped)},
			},
		},
		{
			nftables.Chain{Name: "prerouting", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest, Policy: &all},
			dnat,
		},
		{
			nftables.Chain{Name: "output", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityNATDest, Policy: &all},
			dnat,
		},
		{
			nftables.Chain{Name: "postrouting", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource, Policy: &all},
			[]ruleSpec{
				{"containers go out with the host's address", rule(source(n.pool.subnet), notOut(bridge), &expr.Masq{})},
				{"the host to a published port by its loopback", rule(out(bridge), source(loopback), &expr.Masq{})},
				{"a container to a published port", rule(out(bridge), source(n.pool.subnet), state(expr.CtKeySTATUS, ctStatusDNAT), &expr.Masq{})},
			},
		},
		{
			nftables.Chain{Name: "forward", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &policy},
			forward,
		},
	}
}

// otherEngines ends the forward chain of every kiri's table, by which they know each other's.
var otherEngines = ruleSpec{"to bridges of other kiri engines", rule(group(expr.MetaKeyOIFGROUP), &expr.Verdict{Kind: expr.VerdictAccept})}

// linkGroup is the group of all bridges of kiri engines: "kiri" in hexadecimal.
const linkGroup = 0x6b697269

// group compares the group of a link.
func group(key expr.MetaKey) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(linkGroup)}}
}

// setUpTable makes the table as it should be, in one transaction, or leaves it alone if it is. turningOn says that
// forwarding is off.
func (n *Network) setUpTable(turningOn bool) error {
	there, policy, err := n.readTable()
	if err != nil {
		return err
	}
	drop := turningOn || there != nil && policy == nftables.ChainPolicyDrop
	want := n.chains(drop)
	published, err := n.readPorts(there != nil)
	if err != nil {
		return err
	}
	n.ports.stale = published
	if there != nil && slices.Equal(there, flat(want)) {
		return nil
	}
	t := n.nft.AddTable(n.table())
	if there != nil {
		n.nft.DelTable(t) // with all that is in it; unseen from outside until the new one is there
		t = n.nft.AddTable(n.table())
	}
	var elements []nftables.SetElement
	for k, v := range published {
		elements = append(elements, nftables.SetElement{Key: k[:], Val: v[:]})
	}
	ports := n.portMap()
	if err := n.nft.AddSet(ports, nil); err != nil {
		return fmt.Errorf("writing map %s: %w", ports.Name, err)
	}
	for some := range slices.Chunk(elements, elementsPerMessage) {
		if err := n.nft.SetAddElements(ports, some); err != nil {
			return fmt.Errorf("writing map %s: %w", ports.Name, err)
		}
	}
	for _, c := range want {
		c.chain.Table = t
		chain := n.nft.AddChain(&c.chain)
		for _, r := range c.rules {
			n.nft.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: r.exprs, UserData: userdata.AppendString(nil, userdata.TypeComment, r.text())})
		}
	}
	if err := n.nft.Flush(); err != nil {
		return fmt.Errorf("writing table ip %s: %w", n.cfg.Table, err)
	}
	return nil
}

// text is the comment as it is stored.
func (r ruleSpec) text() string {
	h := fnv.New32a()
	for _, e := range r.exprs {
		fmt.Fprintf(h, "%T%+v", e, e)
	}
	return fmt.Sprintf("%s [%08x]", r.comment, h.Sum32())
}

// flat is what is compared: the map, then the chains in order, each followed by its rules.
func flat(chains []chainSpec) []string {
	out := []string{portMapName}
	for _, c := range chains {
		out = append(out, fmt.Sprintf("%s %d", c.chain.Name, *c.chain.Policy))
		for _, r := range c.rules {
			out = append(out, r.text())
		}
	}
	return out
}

// readTable returns what flat would be of the kernel's table, nil if there is none, and the policy of forward.
func (n *Network) readTable() ([]string, nftables.ChainPolicy, error) {
	policy := nftables.ChainPolicyAccept
	tables, err := n.nft.ListTablesOfFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return nil, policy, fmt.Errorf("listing tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == n.cfg.Table }) {
		return nil, policy, nil
	}
	chains, err := n.nft.ListChainsOfTableFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return nil, policy, fmt.Errorf("listing chains: %w", err)
	}
	sets, err := n.nft.GetSets(n.table())
	if err != nil {
		return nil, policy, fmt.Errorf("listing maps: %w", err)
	}
	out := []string{}
	for _, s := range sets {
		out = append(out, s.Name)
	}
	for _, c := range chains {
		if c.Table.Name != n.cfg.Table {
			continue
		}
		p := nftables.ChainPolicyAccept
		if c.Policy != nil {
			p = *c.Policy
		}
		if c.Name == "forward" {
			policy = p
		}
		out = append(out, fmt.Sprintf("%s %d", c.Name, p))
		rules, err := n.nft.GetRules(c.Table, c)
		if err != nil {
			return nil, policy, fmt.Errorf("listing rules of chain %s: %w", c.Name, err)
		}
		for _, r := range rules {
			text, _ := userdata.GetString(r.UserData, userdata.TypeComment)
			out = append(out, text)
		}
	}
	return out, policy, nil
}

const portMapName = "ports"

// portMap is the map of published ports.
func (n *Network) portMap() *nftables.Set {
	return &nftables.Set{
		Table: n.table(), Name: portMapName, IsMap: true, Concatenation: true, KeyByteOrder: binaryutil.BigEndian,
		KeyType:  nftables.MustConcatSetType(nftables.TypeInetProto, nftables.TypeIPAddr, nftables.TypeInetService),
		DataType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService),
	}
}

// readPorts returns what an earlier agent has published.
func (n *Network) readPorts(there bool) (map[portKey]portValue, error) {
	out := map[portKey]portValue{}
	if !there {
		return out, nil
	}
	sets, err := n.nft.GetSets(n.table())
	if err != nil {
		return nil, fmt.Errorf("listing maps: %w", err)
	}
	if !slices.ContainsFunc(sets, func(s *nftables.Set) bool { return s.Name == portMapName }) {
		return out, nil
	}
	elements, err := n.nft.GetSetElements(n.portMap())
	if err != nil {
		return nil, fmt.Errorf("listing published ports: %w", err)
	}
	for _, e := range elements {
		if len(e.Key) == len(portKey{}) && len(e.Val) == len(portValue{}) {
			out[portKey(e.Key)] = portValue(e.Val)
		}
	}
	return out, nil
}

// dnat looks a local destination up in the map, with the address that host puts in register 9. Registers 8 to 10 hold the
// key, 12 and 13 the value: the 32-bit names of the second and the third of the four 128-bit ones.
func (n *Network) dnat(host expr.Any) []expr.Any {
	return rule(
		&expr.Fib{Register: 1, ResultADDRTYPE: true, FlagDADDR: true},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.NativeEndian.PutUint32(unix.RTN_LOCAL)},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 8},
		host,
		&expr.Payload{DestRegister: 10, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: 8, DestRegister: 12, IsDestRegSet: true, SetName: portMapName},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 12, RegProtoMin: 13, Specified: true},
	)
}

// payload loads an address of the IP header.
func payload(offset, register uint32) expr.Any {
	return &expr.Payload{DestRegister: register, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}
}

// removeTable deletes the table. If its policy says that kiri turned forwarding on, forwarding is turned off again; nobody
// else can need it, as the policy dropped what they forwarded, but other engines of kiri: then one of them gets the policy.
func (n *Network) removeTable() error {
	there, policy, err := n.readTable()
	if err != nil || there == nil {
		return err
	}
	if policy == nftables.ChainPolicyDrop {
		other, err := n.otherEngine()
		if err != nil {
			return err
		}
		if other == nil {
			if err := sysctl("net/ipv4/ip_forward", "0"); err != nil {
				return err
			}
		} else {
			other.Policy = &policy
			n.nft.AddChain(other)
		}
	}
	n.nft.DelTable(n.table())
	if err := n.nft.Flush(); err != nil {
		return fmt.Errorf("deleting table ip %s: %w", n.cfg.Table, err)
	}
	return nil
}

// otherEngine finds the forward chain of another kiri's table, nil if there is none.
func (n *Network) otherEngine() (*nftables.Chain, error) {
	chains, err := n.nft.ListChainsOfTableFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return nil, fmt.Errorf("listing chains: %w", err)
	}
	for _, c := range chains {
		if c.Table.Name == n.cfg.Table || c.Name != "forward" {
			continue
		}
		if yes, err := n.isEngine(c); err != nil || yes {
			return c, err
		}
	}
	return nil, nil
}

// isEngine tells whether a chain is the forward chain of a kiri's table.
func (n *Network) isEngine(c *nftables.Chain) (bool, error) {
	rules, err := n.nft.GetRules(c.Table, c)
	if err != nil {
		return false, fmt.Errorf("listing rules of table %s: %w", c.Table.Name, err)
	}
	if len(rules) == 0 {
		return false, nil
	}
	text, _ := userdata.GetString(rules[len(rules)-1].UserData, userdata.TypeComment)
	return text == otherEngines.text(), nil
}

// lookForDrops warns of other tables whose policy drops what is forwarded.
func (n *Network) lookForDrops() error {
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyINet} {
		chains, err := n.nft.ListChainsOfTableFamily(family)
		if err != nil {
			return fmt.Errorf("listing chains: %w", err)
		}
		for _, c := range chains {
			if c.Hooknum == nil || *c.Hooknum != *nftables.ChainHookForward || c.Policy == nil || *c.Policy != nftables.ChainPolicyDrop {
				continue
			}
			engine, err := n.isEngine(c)
			if err != nil {
				return err
			}
			if !engine {
				n.warn = append(n.warn, fmt.Sprintf("WARNING: chain %s of nf_tables table %s drops what is forwarded; containers on %s reach other hosts only if it accepts them",
					c.Name, c.Table.Name, n.cfg.Bridge))
			}
		}
	}
	return nil
}

// ctStatusDNAT is IPS_DST_NAT (linux/netfilter/nf_conntrack_common.h): the connection's destination was rewritten.
const ctStatusDNAT = 1 << 5

// rule joins the parts of a rule: single expressions and lists.
func rule(parts ...any) []expr.Any {
	var out []expr.Any
	for _, p := range parts {
		switch p := p.(type) {
		case []expr.Any:
			out = append(out, p...)
		case expr.Any:
			out = append(out, p)
		}
	}
	return out
}

func in(name string) []expr.Any     { return ifname(expr.MetaKeyIIFNAME, expr.CmpOpEq, name) }
func out(name string) []expr.Any    { return ifname(expr.MetaKeyOIFNAME, expr.CmpOpEq, name) }
func notOut(name string) []expr.Any { return ifname(expr.MetaKeyOIFNAME, expr.CmpOpNeq, name) }

// ifname compares an interface's name.
func ifname(key expr.MetaKey, op expr.CmpOp, name string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: data}}
}

// state tests bits of a connection.
func state(key expr.CtKey, bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: key, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

// source compares the source address with a subnet, destination the other.
func source(p netip.Prefix) []expr.Any      { return address(12, p) }
func destination(p netip.Prefix) []expr.Any { return address(16, p) }

func address(offset uint32, p netip.Prefix) []expr.Any {
	mask := ^uint32(0) << (32 - p.Bits())
	return []expr.Any{
		payload(offset, 1),
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.BigEndian.PutUint32(mask), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Masked().Addr().AsSlice()},
	}
}
