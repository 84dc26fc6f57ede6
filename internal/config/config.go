// Package config reads how the daemon is to run: dockerd's flags and the file daemon.json, merged by dockerd's
// rules. An option that kiri cannot honour is refused by name, never ignored.
package config

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/docker/go-units"
	"github.com/spf13/pflag"
)

// Config is what the flags and the file say. Names are those of dockerd's options.
type Config struct {
	// Of the daemon itself.
	Hosts      []string
	DataRoot   string
	ExecRoot   string
	Pidfile    string
	Group      string // owner of unix sockets: a name or number; "" is the daemon's own
	InitPath   string // the kiri-init binary; "" is the one beside this program
	ConfigFile string
	System     bool // run as the machine's service rather than as one user's: other default places
	Validate   bool // only check the configuration
	Debug      bool
	LogLevel   string
	LogFormat  string // "text" or "json"
	TLS        bool
	TLSVerify  bool
	TLSCACert  string
	TLSCert    string
	TLSKey     string

	// Of the engine.
	Bridge              string
	BIP                 string
	MTU                 int
	DNS                 []string
	DNSSearch           []string
	DNSOptions          []string
	InsecureRegistries  []string
	RegistryMirrors     []string
	DefaultUlimits      map[string]*units.Ulimit
	DefaultShmSize      int64 // bytes
	DefaultIpcMode      string
	DefaultCgroupnsMode string
	DefaultAddressPools []AddressPool
	CgroupParent        string
	NoNewPrivileges     bool
	SeccompProfile      string // what the option says: a path, "builtin" or "unconfined"
	Init                bool
	LogDriver           string
	LogOpts             map[string]string
	Labels              []string
	LiveRestore         bool
	ShutdownTimeout     int // seconds
	MaxDownloads        int
}

// AddressPool is one of default-address-pools.
type AddressPool struct {
	Base string `json:"base"` // CIDR
	Size int    `json:"size"` // prefix length
}

// ErrHelp is returned for --help, after the help was printed.
var ErrHelp = pflag.ErrHelp

// Load reads the flags in args and the configuration file they name, or the default one if there is any.
func Load(args []string) (*Config, error) {
	c := &Config{}
	opts := c.options()
	flags := flagSet(opts)
	flags.BoolVar(&c.System, "system", false, "run as the machine's service: data in /var/lib/kiri, socket in /run/kiri")
	flags.StringVar(&c.ConfigFile, "config-file", "", "daemon configuration file (default ~/.kiri/daemon.json)")
	flags.BoolVar(&c.Validate, "validate", false, "validate the configuration and exit")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if flags.NArg() > 0 {
		return nil, fmt.Errorf("%q is not an option of the daemon, and it takes no arguments", flags.Arg(0))
	}
	place, err := places(c.System)
	if err != nil {
		return nil, err
	}
	file, asked := c.ConfigFile, flags.Changed("config-file")
	if !asked {
		file = place.configFile
	}
	if err := mergeFile(opts, flags, file, asked); err != nil {
		return nil, fmt.Errorf("unable to configure the daemon with file %s: %w", file, err)
	}
	c.ConfigFile = file
	if err := refuse(opts, flags); err != nil {
		return nil, err
	}
	c.complete(place)
	if err := c.check(); err != nil {
		return nil, err
	}
	return c, nil
}

// place is where things are kept unless told otherwise.
type place struct{ dataRoot, execRoot, configFile, group string }

func places(system bool) (place, error) {
	if system {
		return place{dataRoot: "/var/lib/kiri", execRoot: "/run/kiri", configFile: "/etc/kiri/daemon.json", group: "kiri"}, nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return place{}, fmt.Errorf("finding the home directory, where kiri keeps its data unless --system is given: %w", err)
	}
	root := filepath.Join(home, ".kiri")
	return place{dataRoot: root, execRoot: filepath.Join(root, "run"), configFile: filepath.Join(root, "daemon.json")}, nil
}

func (c *Config) complete(p place) {
	if c.DataRoot == "" {
		c.DataRoot = p.dataRoot
		if c.ExecRoot == "" {
			c.ExecRoot = p.execRoot
		}
	}
	if c.ExecRoot == "" { // the data root was moved: two daemons must not share what is left by default
		c.ExecRoot = filepath.Join(c.DataRoot, "run")
	}
	if c.Pidfile == "" {
		c.Pidfile = filepath.Join(c.ExecRoot, "kiri.pid")
	}
	if len(c.Hosts) == 0 {
		c.Hosts = []string{"unix://" + filepath.Join(c.ExecRoot, "docker.sock")}
	}
	if c.Group == "" {
		c.Group = p.group
	}
	if c.LogLevel == "" {
		c.LogLevel = "info"
	}
	if c.LogFormat == "" {
		c.LogFormat = "text"
	}
}

// Level is the log level that log-level and debug together ask for.
func (c *Config) Level() slog.Level {
	if c.Debug {
		return slog.LevelDebug
	}
	return logLevels[c.LogLevel]
}

// logLevels are dockerd's words; slog has nothing above error.
var logLevels = map[string]slog.Level{
	"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError, "fatal": slog.LevelError,
}

// check refuses values that cannot be, so that a typing error is told at once and not by the first container.
func (c *Config) check() error {
	if _, ok := logLevels[c.LogLevel]; !ok {
		return fmt.Errorf("invalid logging level: %s", c.LogLevel)
	}
	if c.LogFormat != "text" && c.LogFormat != "json" {
		return fmt.Errorf("invalid log format: %s", c.LogFormat)
	}
	for _, dir := range []struct{ name, path string }{{"data-root", c.DataRoot}, {"exec-root", c.ExecRoot}} {
		if !filepath.IsAbs(dir.path) {
			return fmt.Errorf("%s %q must be an absolute path", dir.name, dir.path)
		}
	}
	for _, h := range c.Hosts {
		if _, err := ParseHost(h); err != nil {
			return err
		}
	}
	return errors.Join(c.checkTLS(), c.checkNetwork(), c.checkContainers(), c.checkRegistries(), checkLabels(c.Labels))
}

// checkTLS: whoever reaches the API is root on this machine, so a port is only opened for those who show a
// certificate.
func (c *Config) checkTLS() error {
	complete := c.TLSVerify && c.TLSCACert != "" && c.TLSCert != "" && c.TLSKey != ""
	for _, h := range c.Hosts {
		if strings.HasPrefix(h, "tcp://") && !complete {
			return fmt.Errorf("refusing to listen on %s without mutual TLS: whoever reaches the port is root here; give --tlsverify together with --tlscacert, --tlscert and --tlskey", h)
		}
	}
	if (c.TLS || c.TLSVerify) && !complete {
		return errors.New("TLS needs --tlsverify with all of --tlscacert, --tlscert and --tlskey; without client certificates it is not offered")
	}
	return nil
}

func (c *Config) checkNetwork() error {
	if c.Bridge == "none" {
		return errors.New("bridge none is not supported by kiri: there is always a default bridge")
	}
	if c.BIP != "" {
		p, err := netip.ParsePrefix(c.BIP)
		if err != nil {
			return fmt.Errorf("invalid bip %q: must be an address with a prefix length", c.BIP)
		}
		if !p.Addr().Is4() || p.Addr() == p.Masked().Addr() {
			return fmt.Errorf("invalid bip %q: must be the bridge's own IPv4 address within its subnet", c.BIP)
		}
	}
	if c.MTU < 0 {
		return fmt.Errorf("invalid default MTU: %d", c.MTU)
	}
	for _, s := range c.DNS {
		if _, err := netip.ParseAddr(s); err != nil {
			return fmt.Errorf("%s is not an ip address", s)
		}
	}
	for _, p := range c.DefaultAddressPools {
		base, err := netip.ParsePrefix(p.Base)
		if err != nil || p.Size < base.Bits() || p.Size > base.Addr().BitLen() {
			return fmt.Errorf("invalid address pool base=%s,size=%d", p.Base, p.Size)
		}
	}
	return nil
}

func (c *Config) checkContainers() error {
	if !slices.Contains([]string{"", "json-file", "local", "none"}, c.LogDriver) {
		return fmt.Errorf("log driver %q is not supported by kiri: choose json-file, local or none", c.LogDriver)
	}
	if !slices.Contains([]string{"", "private", "shareable"}, c.DefaultIpcMode) {
		return fmt.Errorf("IPC mode %q is not supported as default value; choose private or shareable", c.DefaultIpcMode)
	}
	if !slices.Contains([]string{"", "private", "host"}, c.DefaultCgroupnsMode) {
		return fmt.Errorf("default cgroup namespace mode (%s) is invalid; choose private or host", c.DefaultCgroupnsMode)
	}
	if c.DefaultShmSize < 0 {
		return fmt.Errorf("default-shm-size %d is negative", c.DefaultShmSize)
	}
	if c.ShutdownTimeout < 0 {
		return fmt.Errorf("shutdown-timeout %d is negative", c.ShutdownTimeout)
	}
	if c.MaxDownloads < 0 {
		return fmt.Errorf("invalid max concurrent downloads: %d", c.MaxDownloads)
	}
	return nil
}

func (c *Config) checkRegistries() error {
	for _, m := range c.RegistryMirrors {
		u, err := url.Parse(m)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
			return fmt.Errorf("invalid mirror: %q must be an http or https address without query", m)
		}
		if u.User != nil {
			return fmt.Errorf("invalid mirror: username/password not allowed in URI %q", u.Redacted())
		}
	}
	for _, r := range c.InsecureRegistries {
		if strings.Contains(r, "://") {
			return fmt.Errorf("insecure registry %s should not contain '://'", r)
		}
	}
	return nil
}

func checkLabels(labels []string) error {
	seen := map[string]string{}
	for _, l := range labels {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return fmt.Errorf("bad attribute format: %s", l)
		}
		if old, there := seen[k]; there && old != v {
			return fmt.Errorf("conflict labels for %s=%s and %s=%s", k, v, k, old)
		}
		seen[k] = v
	}
	return nil
}

// Changed names the options whose values differ in other. How much is logged is not among them: it needs no restart.
func (c *Config) Changed(other *Config) []string {
	old, now := c.options(), other.options()
	var names []string
	for i := range old {
		switch old[i].key {
		case "debug", "log-level":
			continue
		}
		if old[i].value.String() != now[i].value.String() {
			names = append(names, old[i].key)
		}
	}
	return names
}
