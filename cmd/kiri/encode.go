package main

import (
	"encoding/json"
	"strconv"
	"unicode/utf8"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
)

// encodeCreate writes the body of POST /containers/create with only the fields that are set, by hand: encoding/json would spend 0.5 to
// 1 ms of a 3 ms command on learning the types. Fields that are rare and deep go through encoding/json after all. A test fills every field
// and checks that it arrives, so a field that the API gains is not forgotten.
func encodeCreate(cfg *container.Config, host *container.HostConfig, nets *network.NetworkingConfig) ([]byte, error) {
	w := &objectWriter{b: make([]byte, 0, 1024)}
	w.open("")
	w.str("Hostname", cfg.Hostname)
	w.str("Domainname", cfg.Domainname)
	w.str("User", cfg.User)
	w.flag("AttachStdin", cfg.AttachStdin)
	w.flag("AttachStdout", cfg.AttachStdout)
	w.flag("AttachStderr", cfg.AttachStderr)
	w.rare("ExposedPorts", cfg.ExposedPorts, len(cfg.ExposedPorts) > 0)
	w.flag("Tty", cfg.Tty)
	w.flag("OpenStdin", cfg.OpenStdin)
	w.flag("StdinOnce", cfg.StdinOnce)
	w.strs("Env", cfg.Env)
	w.strs("Cmd", cfg.Cmd)
	w.rare("Healthcheck", cfg.Healthcheck, cfg.Healthcheck != nil)
	w.flag("ArgsEscaped", cfg.ArgsEscaped)
	w.str("Image", cfg.Image)
	w.rare("Volumes", cfg.Volumes, len(cfg.Volumes) > 0)
	w.str("WorkingDir", cfg.WorkingDir)
	w.strs("Entrypoint", cfg.Entrypoint)
	w.flag("NetworkDisabled", cfg.NetworkDisabled)
	w.strs("OnBuild", cfg.OnBuild)
	w.strMap("Labels", cfg.Labels)
	w.str("StopSignal", cfg.StopSignal)
	if cfg.StopTimeout != nil {
		w.num("StopTimeout", int64(*cfg.StopTimeout), true)
	}
	w.strs("Shell", cfg.Shell)

	w.open("HostConfig")
	w.strs("Binds", host.Binds)
	w.str("ContainerIDFile", host.ContainerIDFile)
	w.rare("LogConfig", host.LogConfig, host.LogConfig.Type != "" || len(host.LogConfig.Config) > 0)
	w.str("NetworkMode", string(host.NetworkMode))
	w.rare("PortBindings", host.PortBindings, len(host.PortBindings) > 0)
	if host.RestartPolicy.Name != "" || host.RestartPolicy.MaximumRetryCount != 0 {
		w.open("RestartPolicy")
		w.str("Name", string(host.RestartPolicy.Name))
		w.num("MaximumRetryCount", int64(host.RestartPolicy.MaximumRetryCount), false)
		w.close()
	}
	w.flag("AutoRemove", host.AutoRemove)
	w.str("VolumeDriver", host.VolumeDriver)
	w.strs("VolumesFrom", host.VolumesFrom)
	if host.ConsoleSize != [2]uint{} {
		w.key("ConsoleSize")
		w.b = append(w.b, '[')
		w.b = strconv.AppendUint(w.b, uint64(host.ConsoleSize[0]), 10)
		w.b = append(w.b, ',')
		w.b = strconv.AppendUint(w.b, uint64(host.ConsoleSize[1]), 10)
		w.b = append(w.b, ']')
	}
	w.strMap("Annotations", host.Annotations)
	w.strs("CapAdd", host.CapAdd)
	w.strs("CapDrop", host.CapDrop)
	w.str("CgroupnsMode", string(host.CgroupnsMode))
	w.rare("Dns", host.DNS, len(host.DNS) > 0)
	w.strs("DnsOptions", host.DNSOptions)
	w.strs("DnsSearch", host.DNSSearch)
	w.strs("ExtraHosts", host.ExtraHosts)
	w.strs("GroupAdd", host.GroupAdd)
	w.str("IpcMode", string(host.IpcMode))
	w.str("Cgroup", string(host.Cgroup))
	w.strs("Links", host.Links)
	w.num("OomScoreAdj", int64(host.OomScoreAdj), false)
	w.str("PidMode", string(host.PidMode))
	w.flag("Privileged", host.Privileged)
	w.flag("PublishAllPorts", host.PublishAllPorts)
	w.flag("ReadonlyRootfs", host.ReadonlyRootfs)
	w.strs("SecurityOpt", host.SecurityOpt)
	w.strMap("StorageOpt", host.StorageOpt)
	w.strMap("Tmpfs", host.Tmpfs)
	w.str("UTSMode", string(host.UTSMode))
	w.str("UsernsMode", string(host.UsernsMode))
	w.num("ShmSize", host.ShmSize, false)
	w.strMap("Sysctls", host.Sysctls)
	w.str("Runtime", host.Runtime)
	if host.Umask != nil {
		w.num("Umask", int64(*host.Umask), true)
	}
	w.str("Isolation", string(host.Isolation))
	w.resources(&host.Resources)
	w.rare("Mounts", host.Mounts, len(host.Mounts) > 0)
	// An empty list is a wish of its own here: mask nothing.
	w.rare("MaskedPaths", host.MaskedPaths, host.MaskedPaths != nil)
	w.rare("ReadonlyPaths", host.ReadonlyPaths, host.ReadonlyPaths != nil)
	if host.Init != nil {
		w.boolean("Init", *host.Init)
	}
	w.close()
	if nets != nil {
		w.rare("NetworkingConfig", nets, len(nets.EndpointsConfig) > 0)
	}
	w.close()
	return w.b, w.err
}

func (w *objectWriter) resources(r *container.Resources) {
	w.num("CpuShares", r.CPUShares, false)
	w.num("Memory", r.Memory, false)
	w.num("NanoCpus", r.NanoCPUs, false)
	w.str("CgroupParent", r.CgroupParent)
	w.num("BlkioWeight", int64(r.BlkioWeight), false)
	w.rare("BlkioWeightDevice", r.BlkioWeightDevice, len(r.BlkioWeightDevice) > 0)
	w.rare("BlkioDeviceReadBps", r.BlkioDeviceReadBps, len(r.BlkioDeviceReadBps) > 0)
	w.rare("BlkioDeviceWriteBps", r.BlkioDeviceWriteBps, len(r.BlkioDeviceWriteBps) > 0)
	w.rare("BlkioDeviceReadIOps", r.BlkioDeviceReadIOps, len(r.BlkioDeviceReadIOps) > 0)
	w.rare("BlkioDeviceWriteIOps", r.BlkioDeviceWriteIOps, len(r.BlkioDeviceWriteIOps) > 0)
	w.num("CpuPeriod", r.CPUPeriod, false)
	w.num("CpuQuota", r.CPUQuota, false)
	w.num("CpuRealtimePeriod", r.CPURealtimePeriod, false)
	w.num("CpuRealtimeRuntime", r.CPURealtimeRuntime, false)
	w.str("CpusetCpus", r.CpusetCpus)
	w.str("CpusetMems", r.CpusetMems)
	w.rare("Devices", r.Devices, len(r.Devices) > 0)
	w.strs("DeviceCgroupRules", r.DeviceCgroupRules)
	w.rare("DeviceRequests", r.DeviceRequests, len(r.DeviceRequests) > 0)
	w.num("MemoryReservation", r.MemoryReservation, false)
	w.num("MemorySwap", r.MemorySwap, false)
	if r.MemorySwappiness != nil {
		w.num("MemorySwappiness", *r.MemorySwappiness, true)
	}
	if r.OomKillDisable != nil {
		w.boolean("OomKillDisable", *r.OomKillDisable)
	}
	if r.PidsLimit != nil {
		w.num("PidsLimit", *r.PidsLimit, true)
	}
	w.rare("Ulimits", r.Ulimits, len(r.Ulimits) > 0)
	w.num("CpuCount", r.CPUCount, false)
	w.num("CpuPercent", r.CPUPercent, false)
	w.num("IOMaximumIOps", int64(r.IOMaximumIOps), false)
	w.num("IOMaximumBandwidth", int64(r.IOMaximumBandwidth), false)
}

// objectWriter appends JSON objects, leaving out what is empty.
type objectWriter struct {
	b   []byte
	err error
}

func (w *objectWriter) open(name string) {
	if name != "" {
		w.key(name)
	}
	w.b = append(w.b, '{')
}

func (w *objectWriter) close() { w.b = append(w.b, '}') }

func (w *objectWriter) key(name string) {
	if w.b[len(w.b)-1] != '{' {
		w.b = append(w.b, ',')
	}
	w.b = append(append(append(w.b, '"'), name...), '"', ':')
}

func (w *objectWriter) str(name, v string) {
	if v != "" {
		w.key(name)
		w.b = appendString(w.b, v)
	}
}

func (w *objectWriter) boolean(name string, v bool) {
	w.key(name)
	w.b = strconv.AppendBool(w.b, v)
}

func (w *objectWriter) flag(name string, v bool) {
	if v {
		w.boolean(name, v)
	}
}

func (w *objectWriter) num(name string, v int64, zero bool) {
	if v != 0 || zero {
		w.key(name)
		w.b = strconv.AppendInt(w.b, v, 10)
	}
}

func (w *objectWriter) strs(name string, v []string) {
	if len(v) == 0 {
		return
	}
	w.key(name)
	w.b = append(w.b, '[')
	for i, s := range v {
		if i > 0 {
			w.b = append(w.b, ',')
		}
		w.b = appendString(w.b, s)
	}
	w.b = append(w.b, ']')
}

func (w *objectWriter) strMap(name string, m map[string]string) {
	if len(m) == 0 {
		return
	}
	w.open(name)
	for k, v := range m {
		if w.b[len(w.b)-1] != '{' {
			w.b = append(w.b, ',')
		}
		w.b = appendString(w.b, k)
		w.b = append(w.b, ':')
		w.b = appendString(w.b, v)
	}
	w.close()
}

// rare writes a value that is seldom there with encoding/json.
func (w *objectWriter) rare(name string, v any, set bool) {
	if !set {
		return
	}
	b, err := json.Marshal(v)
	if err != nil && w.err == nil {
		w.err = err
	}
	w.key(name)
	w.b = append(w.b, b...)
}

// appendString quotes as JSON does; bytes that are no UTF-8 become U+FFFD, as encoding/json makes them.
func appendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	for i := 0; i < len(s); {
		c := s[i]
		switch {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
			i++
		case c < 0x20 || c == 0x7f:
			b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
			i++
		case c < utf8.RuneSelf:
			b = append(b, c)
			i++
		default:
			r, n := utf8.DecodeRuneInString(s[i:])
			b = utf8.AppendRune(b, r)
			i += n
		}
	}
	return append(b, '"')
}
