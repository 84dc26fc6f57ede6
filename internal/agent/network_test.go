//go:build linux

package agent

import (
	"strings"

	"runkiri.com/kiri/internal/agent/cgroup"
	"runkiri.com/kiri/internal/agent/network"
)

// removeNetwork takes away what outlives the agent by design: the bridge, the table, the parent cgroups.
func removeNetwork(r *rig) {
	cfg, err := parseFlags(append([]string{"--data-root", "/x", "--exec-root", "/x", "--bridge", r.bridge,
		"--nft-table", strings.ReplaceAll(r.bridge, "-", "_")}, r.args...), r.log)
	if err != nil {
		r.t.Error(err)
		return
	}
	n, err := network.Open(cfg.Network)
	if err == nil {
		err = n.Remove()
	}
	if err != nil {
		r.t.Error(err)
	}
	h, err := cgroup.Detect()
	if err != nil {
		r.t.Error(err)
		return
	}
	m, err := h.Open(cgroupParent(r.execRoot()))
	if err == nil {
		err = m.Remove()
	}
	if err != nil {
		r.t.Error(err)
	}
}
