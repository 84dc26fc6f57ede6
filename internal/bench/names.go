package bench

// The names of the kernel's building blocks, as they are printed.
const (
	PrimExec       = "fork + exec"
	PrimNamespaces = "mnt uts ipc pid namespaces + exec"
	PrimNet        = "+ network namespace"
	PrimCgroup     = "cgroup v2 create + remove"
	PrimOverlay    = "overlay mount + unmount"
	PrimVethCreate = "veth create + attach to bridge"
	PrimVethDelete = "veth delete"
)

// The floors under a container start: one clone3 with its namespaces, overlay, proc, a tmpfs on /dev, pivot_root,
// execve of a static true, and wait.
const (
	FloorNone   = "start floor, network none"
	FloorBridge = "start floor, with a network namespace"
)

// PrimitiveNames and FloorNames give the order in which figures are printed.
var (
	PrimitiveNames = []string{PrimExec, PrimNamespaces, PrimNet, PrimCgroup, PrimOverlay, PrimVethCreate, PrimVethDelete}
	FloorNames     = []string{FloorNone, FloorBridge}
)
