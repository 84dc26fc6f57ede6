//go:build linux && (amd64 || arm64)

// Package launch turns a description of a process into running one: Spec -> Compile -> Plan -> Start.
//
// A Plan is a flat table of system calls. The child is made by one clone3 and walks the table in assembly: it touches
// no stack, runs no Go and never returns. There are two ways to make it:
//
//   - Thread.Start, for a process in a PID namespace of its own. The child shares the agent's memory until execve
//     (CLONE_VM|CLONE_VFORK), which is what makes it cheap, and nobody hostile can see it, as its PID namespace is new.
//   - Template.Start, for a process in a PID namespace that has inhabitants (exec, --pid=container:, --pid=host). The
//     child is a copy of a process of a few pages that holds no secrets, and has the rights of the container, no more,
//     before anyone in there can see it.
//
// Everything that can be prepared before the clone is prepared by the caller in ordinary Go, as descriptors: mounts are
// detached (fsmount, open_tree), targets are O_PATH descriptors resolved inside the root.
//
// It needs Linux 5.12 (mount_setattr). Where a later kernel has something better it is noted in place.
package launch
