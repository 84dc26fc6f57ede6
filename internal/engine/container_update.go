package engine

import (
	"context"

	"github.com/moby/moby/api/types/blkiodev"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/events"

	"runkiri.com/kiri/internal/wire"
)

// ContainerUpdate changes limits and the restart policy; of a running container at once.
func (e *Engine) ContainerUpdate(ctx context.Context, ref string, req *container.UpdateConfig) (container.UpdateResponse, error) {
	none := container.UpdateResponse{Warnings: []string{}}
	if req.RestartPolicy.Name != "" {
		if err := container.ValidateRestartPolicy(req.RestartPolicy); err != nil {
			return none, invalid("%w", err)
		}
	}
	for _, f := range []struct {
		set  bool
		what string
	}{
		{len(req.Devices) > 0, "Devices"}, {len(req.DeviceCgroupRules) > 0, "DeviceCgroupRules"}, {len(req.DeviceRequests) > 0, "DeviceRequests"},
		{len(req.Ulimits) > 0, "Ulimits"}, {req.CgroupParent != "", "CgroupParent"},
	} {
		if f.set {
			return none, NotBuilt("updating " + f.what)
		}
	}
	warnings, err := e.validateResources(&req.Resources, true)
	if warnings == nil {
		warnings = []string{}
	}
	resp := container.UpdateResponse{Warnings: warnings}
	if err != nil {
		return resp, err
	}
	c, err := e.containers.get(ref)
	if err != nil {
		return resp, err
	}
	c.op.Lock()
	defer c.op.Unlock()
	if err := e.update(context.WithoutCancel(ctx), c, req); err != nil {
		return resp, errf(classOf(err), "Cannot update container %s: %w", c.id, err)
	}
	e.containerEvent(c, events.ActionUpdate)
	return resp, nil
}

// update applies the change to the cgroup first: what the kernel refuses is not recorded. op is held.
func (e *Engine) update(ctx context.Context, c *ctr, req *container.UpdateConfig) error {
	c.mu.Lock()
	old, s, gone := c.rec.Host, c.rec.State, c.removing || c.removed || c.rec.Dead
	c.mu.Unlock()
	if gone {
		return conflict(`container is marked for removal and cannot be "update"`)
	}
	if old.AutoRemove && req.RestartPolicy.Name != "" && !req.RestartPolicy.IsNone() {
		return conflict("Restart policy cannot be updated because AutoRemove is enabled for the container")
	}
	host := *old
	if err := mergeResources(&host.Resources, &req.Resources); err != nil {
		return err
	}
	if req.RestartPolicy.Name != "" {
		host.RestartPolicy = req.RestartPolicy
	}
	// The whole merged set, so that limits set before are kept whatever the kernel does with those that are named.
	limits := wireResources(&host.Resources)
	if change := wireResources(&req.Resources); s.Running && !s.Restarting && (!change.IsZero() || req.PidsLimit != nil) {
		f, err := e.agent.call(ctx, &wire.Update{ID: c.id, Resources: limits})
		if err := done(f, err); err != nil {
			return err
		}
	}
	c.mu.Lock()
	c.rec.Host = &host
	c.mu.Unlock()
	return e.save(c)
}

// mergeResources puts the limits that req names over those of r, by Docker's rules.
func mergeResources(r, req *container.Resources) error {
	switch {
	case req.NanoCPUs > 0 && r.CPUPeriod > 0:
		return conflict("Conflicting options: Nano CPUs cannot be updated as CPU Period has already been set")
	case req.NanoCPUs > 0 && r.CPUQuota > 0:
		return conflict("Conflicting options: Nano CPUs cannot be updated as CPU Quota has already been set")
	case req.CPUPeriod > 0 && r.NanoCPUs > 0:
		return conflict("Conflicting options: CPU Period cannot be updated as NanoCPUs has already been set")
	case req.CPUQuota > 0 && r.NanoCPUs > 0:
		return conflict("Conflicting options: CPU Quota cannot be updated as NanoCPUs has already been set")
	}
	if req.Memory != 0 {
		// A limit above the one on memory and swap together needs that one raised too, which is the user's to say.
		if r.MemorySwap > 0 && req.Memory > r.MemorySwap && req.MemorySwap == 0 {
			return conflict("Memory limit should be smaller than already set memoryswap limit, update the memoryswap at the same time")
		}
		r.Memory = req.Memory
	}
	set(&r.MemorySwap, req.MemorySwap)
	set(&r.MemoryReservation, req.MemoryReservation)
	set(&r.CPUShares, req.CPUShares)
	set(&r.NanoCPUs, req.NanoCPUs)
	set(&r.CPUPeriod, req.CPUPeriod)
	set(&r.CPUQuota, req.CPUQuota)
	set(&r.CPURealtimePeriod, req.CPURealtimePeriod)
	set(&r.CPURealtimeRuntime, req.CPURealtimeRuntime)
	set(&r.CpusetCpus, req.CpusetCpus)
	set(&r.CpusetMems, req.CpusetMems)
	set(&r.BlkioWeight, req.BlkioWeight)
	if req.PidsLimit != nil {
		r.PidsLimit = req.PidsLimit
	}
	if req.MemorySwappiness != nil {
		r.MemorySwappiness = req.MemorySwappiness
	}
	if req.OomKillDisable != nil {
		r.OomKillDisable = req.OomKillDisable
	}
	for _, l := range []struct{ to, from *[]*throttle }{
		{&r.BlkioDeviceReadBps, &req.BlkioDeviceReadBps}, {&r.BlkioDeviceWriteBps, &req.BlkioDeviceWriteBps},
		{&r.BlkioDeviceReadIOps, &req.BlkioDeviceReadIOps}, {&r.BlkioDeviceWriteIOps, &req.BlkioDeviceWriteIOps},
	} {
		if *l.from != nil {
			*l.to = *l.from
		}
	}
	if req.BlkioWeightDevice != nil {
		r.BlkioWeightDevice = req.BlkioWeightDevice
	}
	return nil
}

func set[T comparable](to *T, from T) {
	var zero T
	if from != zero {
		*to = from
	}
}

type throttle = blkiodev.ThrottleDevice
