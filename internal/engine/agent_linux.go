package engine

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
)

// hostAgent is the agent of this host: a process of its own that outlives the daemon.
type hostAgent struct{ cfg *Config }

func newAgentHost(cfg *Config) agentHost { return &hostAgent{cfg: cfg} }

func (h *hostAgent) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", agentSocket(h.cfg.ExecRoot))
}

const agentLogMax = 4 << 20 // bytes, beyond which the log begins anew at a start

// start runs kiri-init in a session of its own, so that what ends the daemon (a signal to its group, its terminal)
// does not end the agent. Its output goes to a file: a pipe would break with the daemon.
func (h *hostAgent) start() (<-chan struct{}, error) {
	path := filepath.Join(h.cfg.ExecRoot, "agent.log")
	flags := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if st, err := os.Stat(path); err == nil && st.Size() > agentLogMax {
		flags |= os.O_TRUNC
	}
	log, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening the agent's log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(h.cfg.InitPath, h.arguments()...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	gone := make(chan struct{})
	go func() {
		cmd.Wait() // the code says nothing that its log does not
		close(gone)
	}()
	return gone, nil
}

func (h *hostAgent) arguments() []string {
	args := []string{"agent", "--data-root", h.cfg.DataRoot, "--exec-root", h.cfg.ExecRoot}
	if h.cfg.Bridge != "" {
		// A second engine of a host has a bridge of its own, and so a table of its own.
		args = append(args, "--bridge", h.cfg.Bridge, "--nft-table", "kiri-"+h.cfg.Bridge)
	}
	if h.cfg.BIP != "" {
		args = append(args, "--subnet", h.cfg.BIP)
	}
	if h.cfg.MTU != 0 {
		args = append(args, "--mtu", strconv.Itoa(h.cfg.MTU))
	}
	return args
}
