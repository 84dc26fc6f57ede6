package engine

import (
	"slices"
	"strings"

	"github.com/moby/moby/api/types/container"
)

// ipcSysctls are the kernel parameters of an IPC namespace, ipc_namespaces(7), beside those below fs.mqueue.
var ipcSysctls = []string{
	"kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem",
	"kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced",
}

// validateSysctls refuses kernel parameters that are not the container's own: the host's would be set. The rules and the
// words are runc's, which Docker leaves it to.
func validateSysctls(h *container.HostConfig) error {
	for key := range h.Sysctls {
		name := key
		// As sysctl(8) has it, the separator is what comes first.
		if i := strings.IndexAny(name, "./"); i >= 0 && name[i] == '/' {
			name = strings.NewReplacer("/", ".", ".", "/").Replace(name)
		}
		switch {
		case strings.HasPrefix(name, "net."):
			if h.NetworkMode.IsHost() {
				return invalid("sysctl %q not allowed in host network namespace", key)
			}
		case slices.Contains(ipcSysctls, name), strings.HasPrefix(name, "fs.mqueue."):
			if h.IpcMode.IsHost() {
				return invalid("sysctl %q is not allowed in the hosts ipc namespace", key)
			}
		case name == "kernel.domainname":
			if h.UTSMode.IsHost() {
				return invalid("sysctl %q is not allowed in the hosts uts namespace", key)
			}
		case name == "kernel.hostname":
			return invalid("sysctl %q is not allowed as it conflicts with the host name", key)
		default:
			return invalid("sysctl %q is not in a separate kernel namespace", key)
		}
	}
	return nil
}
