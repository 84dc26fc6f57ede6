package engine

import (
	"testing"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
)

func TestSysctlsOfTheHost(t *testing.T) {
	for _, c := range []struct {
		key  string
		host container.HostConfig
		want string // "" allowed
	}{
		{"net.core.somaxconn", container.HostConfig{NetworkMode: "bridge"}, ""},
		{"net/ipv4/conf/eth0.1/forwarding", container.HostConfig{}, ""},
		{"net.core.somaxconn", container.HostConfig{NetworkMode: "container:other"}, ""},
		{"net.core.somaxconn", container.HostConfig{NetworkMode: "host"}, `sysctl "net.core.somaxconn" not allowed in host network namespace`},
		{"net/core/somaxconn", container.HostConfig{NetworkMode: "host"}, `sysctl "net/core/somaxconn" not allowed in host network namespace`},
		{"kernel.shmmax", container.HostConfig{IpcMode: "private"}, ""},
		{"kernel/shmmax", container.HostConfig{}, ""},
		{"fs.mqueue.msg_max", container.HostConfig{}, ""},
		{"fs.mqueue.msg_max", container.HostConfig{IpcMode: "host"}, `sysctl "fs.mqueue.msg_max" is not allowed in the hosts ipc namespace`},
		{"kernel.msgmax", container.HostConfig{IpcMode: "host"}, `sysctl "kernel.msgmax" is not allowed in the hosts ipc namespace`},
		{"kernel.domainname", container.HostConfig{}, ""},
		{"kernel.domainname", container.HostConfig{UTSMode: "host"}, `sysctl "kernel.domainname" is not allowed in the hosts uts namespace`},
		{"kernel.hostname", container.HostConfig{}, `sysctl "kernel.hostname" is not allowed as it conflicts with the host name`},
		{"kernel.core_pattern", container.HostConfig{}, `sysctl "kernel.core_pattern" is not in a separate kernel namespace`},
		{"kernel.core_pattern", container.HostConfig{Privileged: true}, `sysctl "kernel.core_pattern" is not in a separate kernel namespace`},
		{"vm.overcommit_memory", container.HostConfig{}, `sysctl "vm.overcommit_memory" is not in a separate kernel namespace`},
		{"netx", container.HostConfig{}, `sysctl "netx" is not in a separate kernel namespace`},
		{"", container.HostConfig{}, `sysctl "" is not in a separate kernel namespace`},
	} {
		c.host.Sysctls = map[string]string{c.key: "1"}
		err := validateNamespaces(&container.Config{}, &c.host)
		got := ""
		if err != nil {
			got = err.Error()
			if !cerrdefs.IsInvalidArgument(err) {
				t.Errorf("%q: %v is no bad request", c.key, err)
			}
		}
		if got != c.want {
			t.Errorf("%q with %+v\ngave %q\nwant %q", c.key, c.host.NetworkMode, got, c.want)
		}
	}
}
