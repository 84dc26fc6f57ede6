package config

import (
	"fmt"
	"slices"

	"github.com/spf13/pflag"
)

// option is one of dockerd's options: as a flag, as a key of daemon.json, or both.
type option struct {
	flag  string // "" is in the file only
	short string
	key   string // in the file; "" is a flag only
	usage string
	value value
}

// options lists every option of dockerd. What kiri honours is bound to a field of c; the rest is held to the values
// that describe what kiri does anyway.
func (c *Config) options() []option {
	return []option{
		{"host", "H", "hosts", "daemon socket to listen on: unix://, fd:// or, with TLS, tcp://", (*listValue)(&c.Hosts)},
		{"data-root", "", "data-root", "root directory of persistent state", (*stringValue)(&c.DataRoot)},
		{"exec-root", "", "exec-root", "root directory of state until reboot", (*stringValue)(&c.ExecRoot)},
		{"pidfile", "p", "pidfile", "path of the daemon's PID file", (*stringValue)(&c.Pidfile)},
		{"group", "G", "group", "group of the unix socket", (*stringValue)(&c.Group)},
		{"init-path", "", "init-path", "path of the kiri-init binary (default: beside this program)", (*stringValue)(&c.InitPath)},
		{"debug", "D", "debug", "log at debug level", (*boolValue)(&c.Debug)},
		{"log-level", "l", "log-level", "logging level: debug, info, warn, error, fatal", (*stringValue)(&c.LogLevel)},
		{"log-format", "", "log-format", "logging format: text, json", (*stringValue)(&c.LogFormat)},
		{"tls", "", "tls", "use TLS; implied by --tlsverify", (*boolValue)(&c.TLS)},
		{"tlsverify", "", "tlsverify", "use TLS and verify the client", (*boolValue)(&c.TLSVerify)},
		{"tlscacert", "", "tlscacert", "trust only clients with a certificate signed by this CA", (*stringValue)(&c.TLSCACert)},
		{"tlscert", "", "tlscert", "path of the TLS certificate", (*stringValue)(&c.TLSCert)},
		{"tlskey", "", "tlskey", "path of the TLS key", (*stringValue)(&c.TLSKey)},

		{"bridge", "b", "bridge", "name of the default bridge, which kiri makes", (*stringValue)(&c.Bridge)},
		{"bip", "", "bip", "address and prefix length of the default bridge", (*stringValue)(&c.BIP)},
		{"mtu", "", "mtu", "MTU of the default bridge", (*intValue)(&c.MTU)},
		{"dns", "", "dns", "DNS server to use", (*listValue)(&c.DNS)},
		{"dns-opt", "", "dns-opts", "DNS option to use", (*listValue)(&c.DNSOptions)},
		{"dns-search", "", "dns-search", "DNS search domain to use", (*listValue)(&c.DNSSearch)},
		{"insecure-registry", "", "insecure-registries", "registry that may speak HTTP or have an unknown certificate", (*listValue)(&c.InsecureRegistries)},
		{"registry-mirror", "", "registry-mirrors", "mirror of the default registry", (*listValue)(&c.RegistryMirrors)},
		{"default-ulimit", "", "default-ulimits", "ulimit of containers that set none: name=soft:hard", &ulimitValue{&c.DefaultUlimits}},
		{"default-shm-size", "", "default-shm-size", "size of /dev/shm of containers that set none", (*sizeValue)(&c.DefaultShmSize)},
		{"default-ipc-mode", "", "default-ipc-mode", "IPC mode of containers that set none: private, shareable", (*stringValue)(&c.DefaultIpcMode)},
		{"default-cgroupns-mode", "", "default-cgroupns-mode", "cgroup namespace mode of containers that set none: private, host", (*stringValue)(&c.DefaultCgroupnsMode)},
		{"default-address-pool", "", "default-address-pools", "pool of subnets for networks: base=CIDR,size=PREFIX", &poolValue{&c.DefaultAddressPools}},
		{"cgroup-parent", "", "cgroup-parent", "parent cgroup of all containers", (*stringValue)(&c.CgroupParent)},
		{"no-new-privileges", "", "no-new-privileges", "set no-new-privileges for containers by default", (*boolValue)(&c.NoNewPrivileges)},
		{"seccomp-profile", "", "seccomp-profile", "seccomp profile: a path, builtin or unconfined", (*stringValue)(&c.SeccompProfile)},
		{"init", "", "init", "run an init inside containers by default", (*boolValue)(&c.Init)},
		{"log-driver", "", "log-driver", "log driver of containers that set none: json-file, local, none", (*stringValue)(&c.LogDriver)},
		{"log-opt", "", "log-opts", "option of the log driver: name=value", &mapValue{&c.LogOpts}},
		{"label", "", "labels", "label of the daemon: key=value", (*listValue)(&c.Labels)},
		{"live-restore", "", "live-restore", "leave containers running when the daemon ends", (*boolValue)(&c.LiveRestore)},
		{"shutdown-timeout", "", "shutdown-timeout", "seconds that containers get to stop when the daemon ends", (*intValue)(&c.ShutdownTimeout)},
		{"max-concurrent-downloads", "", "max-concurrent-downloads", "layers of a pull fetched at once", (*intValue)(&c.MaxDownloads)},

		// What follows is not kiri's to choose.
		fixed("add-runtime", "runtimes"),
		fixed("allow-nondistributable-artifacts", "allow-nondistributable-artifacts"),
		fixed("allow-direct-routing", "allow-direct-routing", "false"),
		fixed("authorization-plugin", "authorization-plugins"),
		fixed("bip6", "bip6"),
		fixed("bridge-accept-fwmark", "bridge-accept-fwmark"),
		fixed("cdi-spec-dir", "cdi-spec-dirs"),
		fixed("cluster-advertise", "cluster-advertise"),
		fixed("cluster-store", "cluster-store"),
		fixed("cluster-store-opt", "cluster-store-opts"),
		fixed("containerd", "containerd"),
		fixed("containerd-namespace", "containerd-namespace"),
		fixed("containerd-plugins-namespace", "containerd-plugins-namespace"),
		fixed("cpu-rt-period", "cpu-rt-period", "0"),
		fixed("cpu-rt-runtime", "cpu-rt-runtime", "0"),
		fixed("cri-containerd", "cri-containerd", "false"),
		fixed("default-gateway", "default-gateway"),
		fixed("default-gateway-v6", "default-gateway-v6"),
		fixed("default-network-opt", "default-network-opts"),
		fixed("default-runtime", "default-runtime", "runc", "io.containerd.runc.v2"),
		fixed("exec-opt", "exec-opts", "native.cgroupdriver=cgroupfs"),
		fixed("experimental", "experimental", "false"),
		fixed("feature", "features", "buildkit", "buildkit=true", "containerd-snapshotter", "containerd-snapshotter=true"),
		fixed("firewall-backend", "firewall-backend", "nftables"),
		fixed("fixed-cidr", "fixed-cidr"),
		fixed("fixed-cidr-v6", "fixed-cidr-v6"),
		fixed("host-gateway-ip", "host-gateway-ips"),
		fixed("http-proxy", "http-proxy"),
		fixed("https-proxy", "https-proxy"),
		fixed("icc", "icc", "true"),
		fixed("ip", "ip", "0.0.0.0"),
		fixed("ip-forward", "ip-forward", "true"),
		fixed("ip-forward-no-drop", "ip-forward-no-drop", "true"),
		fixed("ip-masq", "ip-masq", "true"),
		fixed("ip6tables", "ip6tables", "true"),
		fixed("iptables", "iptables", "true"),
		fixed("ipv6", "ipv6", "false"),
		fixed("max-concurrent-uploads", "max-concurrent-uploads"),
		fixed("max-download-attempts", "max-download-attempts"),
		fixed("metrics-addr", "metrics-addr"),
		fixed("network-control-plane-mtu", "network-control-plane-mtu"),
		fixed("network-diagnostic-port", "network-diagnostic-port", "0"),
		fixed("no-proxy", "no-proxy"),
		fixed("node-generic-resource", "node-generic-resources"),
		fixed("nri-opt", "nri-opts"),
		fixed("oom-score-adjust", "oom-score-adjust", "0"),
		fixed("raw-logs", "raw-logs", "false"),
		fixed("rootless", "rootless", "false"),
		fixed("selinux-enabled", "selinux-enabled", "false"),
		fixed("storage-driver", "storage-driver", "overlay2", "overlayfs"),
		fixed("storage-opt", "storage-opts"),
		fixed("swarm-default-advertise-addr", "swarm-default-advertise-addr"),
		fixed("userland-proxy", "userland-proxy", "true", "false"),
		fixed("userland-proxy-path", "userland-proxy-path"),
		fixed("userns-remap", "userns-remap"),
		fixed("", "builder"),
		fixed("", "proxies"),
		fixed("", "min-api-version", "1.24"),
	}
}

// fixed is an option that kiri does not have. It may still be given with one of the values that say what kiri does,
// so that a daemon.json from a Docker host need not be emptied first.
func fixed(flag, key string, harmless ...string) option {
	return option{flag: flag, key: key, value: &fixedValue{harmless: harmless}}
}

func flagSet(opts []option) *pflag.FlagSet {
	fs := pflag.NewFlagSet("kiri daemon", pflag.ContinueOnError)
	fs.SortFlags = false
	fs.Usage = func() {
		fmt.Printf("Usage:  kiri daemon [OPTIONS]\n\nRun the engine, which answers the Docker Engine API\n\nOptions:\n%s", fs.FlagUsages())
	}
	for _, o := range opts {
		if o.flag == "" {
			continue
		}
		f := fs.VarPF(o.value, o.flag, o.short, o.usage)
		if _, is := o.value.(*boolValue); is {
			f.NoOptDefVal = "true"
		}
		if v, is := o.value.(*fixedValue); is {
			f.Hidden = true
			if slices.Contains(v.harmless, "true") || slices.Contains(v.harmless, "false") { // a boolean
				f.NoOptDefVal = "true"
			}
		}
	}
	return fs
}
