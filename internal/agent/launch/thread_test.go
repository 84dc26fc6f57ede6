//go:build linux && (amd64 || arm64)

package launch

import (
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNamespacesAreNew(t *testing.T) {
	s := container(t, "report")
	s.Domainname = "example.org"
	r := see(t, nil, s)
	for _, n := range []string{"mnt", "pid", "net", "ipc", "uts", "cgroup"} {
		if r.Namespaces[n] == "" || r.Namespaces[n] == ns(t, n) {
			t.Errorf("%s namespace: %q, the host's is %q", n, r.Namespaces[n], ns(t, n))
		}
	}
	if r.Namespaces["user"] != ns(t, "user") {
		t.Errorf("user namespace: %q", r.Namespaces["user"])
	}
	if r.PID != 1 || r.PPID != 0 || r.SID != 1 || r.PGID != 1 {
		t.Errorf("pid %d, parent %d, session %d, group %d: want 1, 0, 1, 1", r.PID, r.PPID, r.SID, r.PGID)
	}
	if r.Hostname != "box" || r.Domainname != "example.org" {
		t.Errorf("names %q, %q", r.Hostname, r.Domainname)
	}
	if r.Cwd != "/" || r.Umask != 0o022 {
		t.Errorf("cwd %q, umask %#o", r.Cwd, r.Umask)
	}
	if !slices.Equal(r.Env, s.Env) || !slices.Equal(r.Args, s.Args) {
		t.Errorf("env %q, args %q", r.Env, r.Args)
	}
	// overlay, dev, sys, proc, 5 read-only, masks: nothing of the host.
	for _, m := range r.Mounts {
		f := strings.Fields(m)
		if f[4] != "/" && !strings.HasPrefix(f[4], "/proc") && !strings.HasPrefix(f[4], "/sys") && f[4] != "/dev" {
			t.Errorf("mount %s", m)
		}
		if strings.Contains(m, "shared:") || strings.Contains(m, "master:") {
			t.Errorf("mount propagates: %s", m)
		}
	}
}

func TestDescriptorsOfTheHostAreClosed(t *testing.T) {
	r := see(t, nil, container(t, "report"))
	for fd, to := range r.FDs {
		// What the probe itself has open: the directory it reads, and its runtime's poller.
		if fd > 2 && to != "/proc/1/fd" && !strings.HasPrefix(to, "anon_inode:[event") {
			t.Errorf("descriptor %d: %s", fd, to)
		}
	}
}

func TestSignalsAreReset(t *testing.T) {
	r := see(t, nil, container(t, "report"))
	// The probe is a Go program: it catches signals. Nothing may be blocked or ignored.
	for _, k := range []string{"SigBlk", "SigIgn", "SigPnd", "ShdPnd"} {
		if r.Status[k] != "0000000000000000" {
			t.Errorf("%s: %s", k, r.Status[k])
		}
	}
}

func TestRights(t *testing.T) {
	const zero = "0000000000000000"
	hex := func(set uint64) string { return strings.ToLower(pad16(set)) }
	t.Run("root", func(t *testing.T) {
		r := see(t, nil, container(t, "report"))
		for k, want := range map[string]string{"CapInh": zero, "CapPrm": hex(DefaultCaps()), "CapEff": hex(DefaultCaps()),
			"CapBnd": hex(DefaultCaps()), "CapAmb": zero, "NoNewPrivs": "0", "Seccomp": "0", "Uid": "0 0 0 0", "Groups": ""} {
			if r.Status[k] != want {
				t.Errorf("%s: %q, want %q", k, r.Status[k], want)
			}
		}
	})
	t.Run("user", func(t *testing.T) {
		s := container(t, "report")
		s.UID, s.GID, s.Groups = 1000, 1001, []uint32{7, 1002}
		s.Caps = CapsFor(DefaultCaps(), s.UID)
		r := see(t, nil, s)
		for k, want := range map[string]string{"CapInh": zero, "CapPrm": zero, "CapEff": zero, "CapBnd": hex(DefaultCaps()),
			"CapAmb": zero, "Uid": "1000 1000 1000 1000", "Gid": "1001 1001 1001 1001", "Groups": "7 1002"} {
			if r.Status[k] != want {
				t.Errorf("%s: %q, want %q", k, r.Status[k], want)
			}
		}
	})
	t.Run("ambient", func(t *testing.T) {
		s := container(t, "report")
		s.UID, s.GID = 1000, 1000
		s.Caps = Caps{Bounding: DefaultCaps(), Ambient: 1 << unix.CAP_NET_BIND_SERVICE}
		s.Seccomp, _ = SeccompFilter("", DefaultCaps())
		r := see(t, nil, s)
		want := hex(1 << unix.CAP_NET_BIND_SERVICE)
		for _, k := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
			if r.Status[k] != want {
				t.Errorf("%s: %q, want %q", k, r.Status[k], want)
			}
		}
	})
	t.Run("filter", func(t *testing.T) {
		for _, nnp := range []bool{false, true} {
			for _, uid := range []uint32{0, 1000} {
				s := container(t, "report")
				s.NoNewPrivs = nnp
				s.UID = uid
				s.Caps = CapsFor(DefaultCaps(), uid)
				f, err := SeccompFilter("", DefaultCaps())
				must(t, err)
				s.Seccomp = f
				r := see(t, nil, s)
				if r.Status["Seccomp"] != "2" || r.Status["Seccomp_filters"] != "1" {
					t.Errorf("no_new_privs %v, user %d: seccomp %s, filters %s", nnp, uid, r.Status["Seccomp"], r.Status["Seccomp_filters"])
				}
				want := map[uint32]string{0: hex(DefaultCaps()), 1000: zero}[uid]
				if r.Status["CapEff"] != want || r.Status["CapPrm"] != want || r.Status["CapBnd"] != hex(DefaultCaps()) {
					t.Errorf("no_new_privs %v, user %d: caps %s", nnp, uid, r.Status["CapEff"])
				}
				if got := r.Status["NoNewPrivs"] == "1"; got != nnp {
					t.Errorf("no_new_privs: %v, want %v", got, nnp)
				}
			}
		}
	})
	t.Run("everything", func(t *testing.T) {
		s := container(t, "report")
		s.Caps = CapsFor(^uint64(0), 0)
		if r := see(t, nil, s); r.Status["CapEff"] != hex(AllCaps()) || r.Status["CapBnd"] != hex(AllCaps()) {
			t.Errorf("effective %s, want %s", r.Status["CapEff"], hex(AllCaps()))
		}
	})
}

func pad16(v uint64) string {
	const digits = "0123456789abcdef"
	b := make([]byte, 16)
	for i := range b {
		b[15-i] = digits[v>>(4*i)&15]
	}
	return string(b)
}
