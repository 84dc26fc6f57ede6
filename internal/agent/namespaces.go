//go:build linux

package agent

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/agent/cgroup"
	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/wire"
)

// sharePID changes the spec for a container without a PID namespace of its own. Its process is made by the template,
// which has joined nothing: what the cell's thread has of its own is joined by descriptor.
func (a *Agent) sharePID(c *container, cell *cell, mounts *mounter, spec *launch.Spec) (err error) {
	spec.Cloneflags &^= unix.CLONE_NEWPID
	if c.run.PID == "host" {
		spec.ProcMount, err = launch.ProcMount(0)
	} else {
		var other *container
		if other, err = a.findRunning(c.run.PID); err != nil {
			return wire.Errorf(wire.Conflict, "cannot join PID namespace of a non running container: %s", c.run.PID)
		}
		spec.Into, spec.IntoFlags = other.main.pidfd, unix.CLONE_NEWPID
		spec.ProcMount, err = launch.ProcMount(other.main.pid)
	}
	if err != nil {
		return err
	}
	mounts.keep(spec.ProcMount)
	for name, own := range map[string]bool{"net": cell.kind.net != "host", "ipc": cell.kind.ipc != "host"} {
		if !own {
			continue
		}
		f, err := os.Open("/proc/self/task/" + strconv.Itoa(cell.thread.TID()) + "/ns/" + name)
		if err != nil {
			return fmt.Errorf("opening the %s namespace of a cell: %w", name, err)
		}
		spec.Join = append(spec.Join, mounts.keep(f))
	}
	procs, err := cell.cgroup.OpenV1("cgroup.procs")
	if err != nil {
		return err
	}
	for _, p := range procs {
		spec.CgroupProcs = append(spec.CgroupProcs, mounts.keep(p.File))
	}
	if spec.OOMScoreAdj == nil {
		spec.OOMScoreAdj = new(int)
	}
	return nil
}

func (a *Agent) startPlan(cell *cell, plan *launch.Plan) (launch.Proc, error) {
	if plan.NeedsTemplate() {
		return a.template.Start(plan)
	}
	return cell.thread.Start(plan)
}

// rootDir is the root of a running container, for looking things up in it. The caller closes it.
func (c *container) rootDir() (*os.File, error) {
	if c.root != nil {
		return dupFile(fdOf(c.root), "root")
	}
	// After adoption: as its main process sees it.
	fd, err := unix.Open("/proc/"+strconv.Itoa(c.main.pid)+"/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil || c.phase.Load() != phaseRunning {
		if err == nil {
			unix.Close(fd)
		}
		return nil, wire.Errorf(wire.Conflict, "container %s is not running", short(c.id))
	}
	return os.NewFile(uintptr(fd), "root"), nil
}

const devptsMagic = 0x1cd1

// devpts opens the container's devpts. The path is the container's to change, so what is there is checked.
func (c *container) devpts() (*os.File, error) {
	if c.pts != nil {
		return dupFile(fdOf(c.pts), "devpts")
	}
	root, err := c.rootDir()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	fd, err := unix.Openat2(fdOf(root), "dev/pts", &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return nil, fmt.Errorf("opening /dev/pts of container %s: %w", short(c.id), err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(fd, &fs); err != nil || fs.Type != devptsMagic {
		unix.Close(fd)
		return nil, wire.Errorf(wire.Conflict, "/dev/pts of container %s is no devpts", short(c.id))
	}
	return os.NewFile(uintptr(fd), "devpts"), nil
}

// cgroupKey is what the next agent gives Load.
func cgroupKey(m *wire.Run, c *cgroup.Cgroup) string {
	if m.CgroupParent != "" {
		return c.Path()
	}
	return c.Name()
}

// descriptors are what RunReply carries.
func (c *container) descriptors() ([]*os.File, error) {
	pidfd, err := dupFile(fdOf(c.main.pidfd), "pidfd")
	if err != nil {
		return nil, err
	}
	files, err := c.main.forDaemon()
	if err != nil {
		pidfd.Close()
		return nil, err
	}
	return append([]*os.File{pidfd}, files...), nil
}

// warner makes the function that a container's streams complain through.
func (a *Agent) warner(id string) func(error) {
	return func(err error) { a.logf("container %s: %v", short(id), err) }
}
