// Package agent is kiri-init: it makes containers and looks after them. It owns everything that must go on when the
// daemon is killed: processes, their terminals and pipes, log files, cgroups, mounts and network namespaces. What a
// container is called, whether it is restarted and who may see it is the daemon's and never known here.
//
// The agent is one process. The daemon speaks to it through package wire on one connection; bytes of containers
// travel on descriptors that come with the requests. It keeps no state in memory that it could not find again: each
// container has a state file in the exec root (state.go), written before its process is made, from which the next
// agent adopts it.
//
// What waits for descriptors waits in one epoll set (loop.go), not in goroutines: a container that is quiet costs
// some descriptors and a few structs.
package agent
