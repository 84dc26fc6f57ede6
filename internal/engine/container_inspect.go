package engine

import (
	"context"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/api/types/storage"
)

// storageDriver is what inspect and info call the way roots are made: overlayfs, by the agent.
const storageDriver = "overlayfs"

// ContainerInspect tells everything about one container. What the answer points at is shared and must not be changed.
func (e *Engine) ContainerInspect(ctx context.Context, ref string, size bool) (*container.InspectResponse, error) {
	c, err := e.containers.get(ref)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	rec, status := c.rec, c.status()
	execs := slices.Sorted(maps.Keys(c.execs))
	c.mu.Unlock()
	host := *rec.Host
	host.Ulimits = e.ulimits(&host)
	dir := filepath.Join(e.cfg.ExecRoot, "containers", rec.ID)
	r := &container.InspectResponse{
		ID: rec.ID, Created: rec.Created.Format(time.RFC3339Nano), Path: rec.Path, Args: rec.Args,
		State: apiState(&rec, status), Image: rec.Image, Name: "/" + rec.Name, RestartCount: rec.RestartCount,
		ResolvConfPath: filepath.Join(dir, "resolv.conf"), HostnamePath: filepath.Join(dir, "hostname"), HostsPath: filepath.Join(dir, "hosts"),
		Driver: storageDriver, Platform: rec.Platform.OS, ExecIDs: execs, HostConfig: &host, Config: rec.Config,
		Storage: &storage.Storage{RootFS: &storage.RootFSStorage{Snapshot: &storage.RootFSStorageSnapshot{Name: storageDriver}}},
		Mounts:  apiMounts(&rec), NetworkSettings: networkSettings(&rec),
	}
	if rec.Args == nil {
		r.Args = []string{}
	}
	if rec.Host.LogConfig.Type == "json-file" {
		r.LogPath = filepath.Join(e.cfg.DataRoot, "containers", rec.ID, rec.ID+"-json.log")
	}
	if sec, err := parseSecurity(rec.Host.SecurityOpt); err == nil {
		r.AppArmorProfile = sec.apparmor
	}
	if size {
		rw := e.sizeRw(ctx, &rec)
		root := rw + e.imageSize(&rec)
		r.SizeRw, r.SizeRootFs = &rw, &root
	}
	return r, nil
}

func apiState(rec *containerRecord, status container.ContainerState) *container.State {
	s := &rec.State
	return &container.State{
		Status: status, Running: s.Running, Paused: s.Paused, Restarting: s.Restarting, OOMKilled: s.OOMKilled, Dead: rec.Dead,
		Pid: s.Pid, ExitCode: s.ExitCode, Error: s.Error, StartedAt: s.StartedAt.Format(time.RFC3339Nano),
		FinishedAt: s.FinishedAt.Format(time.RFC3339Nano), Health: s.Health,
	}
}

// apiMounts lists the mounts as Docker does: tmpfs given by --tmpfs is not among them.
func apiMounts(rec *containerRecord) []container.MountPoint {
	l := make([]container.MountPoint, len(rec.Mounts))
	for i := range rec.Mounts {
		l[i] = rec.Mounts[i].api()
	}
	return l
}

func networkSettings(rec *containerRecord) *container.NetworkSettings {
	n := &container.NetworkSettings{SandboxID: rec.State.SandboxID, Ports: portMap(rec), Networks: rec.Networks}
	if rec.State.SandboxID != "" && rec.State.Pid != 0 {
		n.SandboxKey = "/proc/" + strconv.Itoa(rec.State.Pid) + "/ns/net" // it is never a file
	}
	return n
}

// portMap lists exposed ports, with what each is published as while the container runs.
func portMap(rec *containerRecord) network.PortMap {
	m := network.PortMap{}
	if !rec.State.Running || rec.State.Restarting || rec.State.EndpointID == "" {
		return m
	}
	if _, name := networkOf(rec); name != network.NetworkBridge {
		return m
	}
	for p := range rec.Config.ExposedPorts {
		m[p] = nil
	}
	for _, p := range rec.State.Endpoint.Ports {
		port, ok := network.PortFrom(uint16(p.ContainerPort), network.IPProtocol(p.Proto))
		if !ok {
			continue
		}
		hosts := []string{p.HostIP}
		if p.HostIP == "" {
			hosts = []string{"0.0.0.0"}
		}
		for _, h := range hosts {
			addr, _ := netip.ParseAddr(h)
			m[port] = append(m[port], network.PortBinding{HostIP: addr, HostPort: strconv.Itoa(p.HostPort)})
		}
	}
	return m
}

// imageSize is the size of the container's image in bytes, as far as it is still known.
func (e *Engine) imageSize(rec *containerRecord) int64 {
	info, err := e.images.inspect(rec.Image, ImageInspectOptions{})
	if err != nil {
		return 0
	}
	return info.Size
}
