//go:build linux

package network

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/userdata"
	"golang.org/x/sys/unix"
)

// The table.
//
//	table ip kiri {
//	  chain postrouting { type nat hook postrouting priority srcnat; policy accept;
//	    ip saddr SUBNET oifname != "kiri0" masquerade
//	  }
//	  chain forward { type filter hook forward priority filter; policy accept|drop;
//	    iifname "kiri0" accept                                  # containers to each other and out
//	    oifname "kiri0" ct state established,related accept     # answers
//	    oifname "kiri0" ct status dnat accept                   # published ports
//	    oifname "kiri0" drop                                    # all else from outside
//	    iifname "kiri*" accept; oifname "kiri*" accept          # policy drop only: bridges of other kiri engines
//	  }
//	}
//
// Forwarding. Containers need the host to forward, and the kernel's switch for that is one for all interfaces: turning
// it on makes a router of a host that was none. So whoever turns it on must see to it that nothing but its own is
// forwarded. Docker sets the policy of iptables' FORWARD chain to drop when it finds forwarding off, and so does kiri
// with its own chain: policy drop if kiri turned forwarding on, accept if it was on before, when what passes between
// other interfaces is the administrator's choice. The policy is also the memory of it: a restarted agent finds
// forwarding on and keeps the policy it finds. An administrator who wants a router turns ip_forward on before kiri
// starts, as with Docker. An accept in one table does not overrule a drop in another: where another table drops what is
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
	}
	if drop {
		policy = nftables.ChainPolicyDrop
		forward = append(forward,
			ruleSpec{"from bridges of other kiri engines", rule(in(defaultPrefix+"*"), accept)},
			ruleSpec{"to bridges of other kiri engines", rule(out(defaultPrefix+"*"), accept)})
	}
	all := nftables.ChainPolicyAccept
	return []chainSpec{
		{
			nftables.Chain{Name: "postrouting", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityNATSource, Policy: &all},
			[]ruleSpec{{"containers go out with the host's address", rule(source(n.pool.subnet), notOut(bridge), &expr.Masq{})}},
		},
		{
			nftables.Chain{Name: "forward", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &policy},
			forward,
		},
	}
}

const defaultPrefix = "kiri"

// setUpTable makes the table as it should be, in one transaction, or leaves it alone if it is. turningOn says that
// forwarding is off.
func (n *Network) setUpTable(turningOn bool) error {
	there, policy, err := n.readTable()
	if err != nil {
		return err
	}
	drop := turningOn || there != nil && policy == nftables.ChainPolicyDrop
	want := n.chains(drop)
	if there != nil && slices.Equal(there, flat(want)) {
		return nil
	}
	t := n.nft.AddTable(n.table())
	if there != nil {
		n.nft.DelTable(t) // with all that is in it; unseen from outside until the new one is there
		t = n.nft.AddTable(n.table())
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

// flat is what is compared: the chains in order, each followed by its rules.
func flat(chains []chainSpec) []string {
	var out []string
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
	out := []string{}
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

// removeTable also turns forwarding off if the policy says that kiri turned it on, unless another engine of kiri needs it.
// Nobody else can: the policy dropped what they forwarded.
func (n *Network) removeTable() error {
	there, policy, err := n.readTable()
	if err != nil || there == nil {
		return err
	}
	tables, err := n.nft.ListTablesOfFamily(nftables.TableFamilyIPv4)
	if err != nil {
		return fmt.Errorf("listing tables: %w", err)
	}
	alone := !slices.ContainsFunc(tables, func(t *nftables.Table) bool {
		return t.Name != n.cfg.Table && strings.HasPrefix(t.Name, defaultPrefix)
	})
	if policy == nftables.ChainPolicyDrop && alone {
		if err := sysctl("net/ipv4/ip_forward", "0"); err != nil {
			return err
		}
	}
	n.nft.DelTable(n.table())
	if err := n.nft.Flush(); err != nil {
		return fmt.Errorf("deleting table ip %s: %w", n.cfg.Table, err)
	}
	return nil
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
			if !strings.HasPrefix(c.Table.Name, defaultPrefix) && c.Table.Name != n.cfg.Table {
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

// ifname compares an interface's name, of which only the beginning is compared if it ends in a star.
func ifname(key expr.MetaKey, op expr.CmpOp, name string) []expr.Any {
	data := make([]byte, unix.IFNAMSIZ)
	copy(data, name)
	if p, ok := strings.CutSuffix(name, "*"); ok {
		data = []byte(p)
	}
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

// source compares the source address with a subnet.
func source(p netip.Prefix) []expr.Any {
	mask := ^uint32(0) << (32 - p.Bits())
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.BigEndian.PutUint32(mask), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Masked().Addr().AsSlice()},
	}
}
