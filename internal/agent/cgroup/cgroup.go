//go:build linux

// Package cgroup makes, limits, measures and removes the control groups of containers, on hosts where all controllers
// are in the v2 tree and on hybrid ones where they are still in v1 hierarchies beside it.
package cgroup

import (
	"errors"

	"runkiri.com/kiri/internal/wire"
)

var errNotBuilt = errors.New("not built yet")

// Host is what the kernel offers: which hierarchies are mounted where.
type Host struct{}

// Manager makes cgroups below one parent.
type Manager struct{}

// Cgroup is the control group of one container: a v2 directory and, on hybrid hosts, one in each v1 hierarchy used.
type Cgroup struct{}

// Detect finds the mounted hierarchies.
func Detect() (*Host, error) { return nil, errNotBuilt }

// Version is 2 where the v2 tree has the controllers, else 1.
func (h *Host) Version() int { return 2 }

// Features lists, as words, the controllers and files there are: "memory", "swap", "pids", "cpuset", "blkio-weight", ...
func (h *Host) Features() []string { return nil }

// Open makes sure parent ("/kiri-1a2b3c4d") is there in every hierarchy and that the default device rules hold below it.
func (h *Host) Open(parent string) (*Manager, error) { return nil, errNotBuilt }

// New makes an empty cgroup with the default device rules. name must not be in use.
func (m *Manager) New(name string) (*Cgroup, error) { return nil, errNotBuilt }

// NewAt makes the cgroup below another parent (--cgroup-parent), which is made if it is missing and never removed.
func (m *Manager) NewAt(parent, name string) (*Cgroup, error) { return nil, errNotBuilt }

// Load finds a cgroup again, by its name, or by Path (begins with "/") if NewAt made it. Error class NotFound if it is gone.
func (m *Manager) Load(nameOrPath string) (*Cgroup, error) { return nil, errNotBuilt }

// List names the cgroups below the parent, in no order, those too of which a crash left only a part.
func (m *Manager) List() ([]string, error) { return nil, errNotBuilt }

// LeaveThread moves a thread that JoinThread moved back to the v1 cgroups this process was in at Open. tid 0 is the
// calling thread, which is far cheaper than naming one.
func (m *Manager) LeaveThread(tid int) error { return errNotBuilt }

// Close closes the descriptors; it removes nothing.
func (m *Manager) Close() error { return nil }

// Remove deletes the manager's own directories; all cgroups in them must have been removed.
func (m *Manager) Remove() error { return errNotBuilt }

// Name is the name it was made with.
func (c *Cgroup) Name() string { return "" }

// Path is the v2 path below the cgroup root, "/kiri-1a2b3c4d/NAME". It changes in SetDevices.
func (c *Cgroup) Path() string { return "" }

// FD is the v2 directory for CLONE_INTO_CGROUP, owned by c. It changes in SetDevices.
func (c *Cgroup) FD() int { return -1 }

// JoinThread moves one thread into the v1 cgroups, so that the processes it clones are born there; v2 is left to
// CLONE_INTO_CGROUP. tid 0 is the calling thread, which is far cheaper than naming one.
func (c *Cgroup) JoinThread(tid int) error { return errNotBuilt }

// SetDevices replaces the default device rules by these added to them ("c 10:229 rwm"), or by all devices. It must
// be called before Apply and before any process is in the cgroup; a thread that joined before must join again.
func (c *Cgroup) SetDevices(rules []string, privileged bool) error { return errNotBuilt }

// Apply sets the limits that r names and leaves the others. Values that the kernel refuses are errors of class Invalid,
// and then nothing has been changed.
func (c *Cgroup) Apply(r *wire.Resources) error { return errNotBuilt }

// Freeze stops all processes, or lets them go on, and returns when the kernel has done it.
func (c *Cgroup) Freeze(on bool) error { return errNotBuilt }

// Kill sends SIGKILL to all processes, frozen ones too, and does not wait.
func (c *Cgroup) Kill() error { return errNotBuilt }

// Procs lists the processes, those of child cgroups included.
func (c *Cgroup) Procs() ([]int, error) { return nil, errNotBuilt }

// Populated tells whether a process that has not ended is in it or below it.
func (c *Cgroup) Populated() (bool, error) { return false, errNotBuilt }

// OOMKills counts the processes that the kernel has killed here because of the memory limit.
func (c *Cgroup) OOMKills() (uint64, error) { return 0, errNotBuilt }

// Stats fills in all but Interfaces. Times are ns, sizes bytes.
func (c *Cgroup) Stats(s *wire.StatsReply) error { return errNotBuilt }

// Remove deletes the cgroup and those that processes made in it; it waits up to ten seconds for the last process to
// end. c cannot be used afterwards. Quiet if it is gone.
func (c *Cgroup) Remove() error { return errNotBuilt }

// Close closes the descriptors and leaves the cgroup.
func (c *Cgroup) Close() error { return nil }
