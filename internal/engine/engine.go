// Package engine holds what must be remembered: containers, images, volumes, networks and events, their state
// machines and rules. It knows no HTTP and no Linux: effects happen in an agent, reached through package wire.
//
// Errors are errdefs sentinels wrapped with context; only package dockerapi turns them into status codes.
package engine

import (
	"fmt"
	"log/slog"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/go-units"
)

// Filters are Docker's list filters: name, then the set of values. All values of one name are or-ed (labels are
// and-ed), names are and-ed. The form on the wire, both old and new, is dockerapi's to decode.
type Filters map[string]map[string]bool

// NotBuilt is the error of a request that Docker knows and kiri does not serve yet: status 501, naming what.
func NotBuilt(what string) error {
	return fmt.Errorf("%s is not supported by kiri yet: %w", what, cerrdefs.ErrNotImplemented)
}

// Config is everything the daemon's flags and daemon.json may set.
type Config struct {
	DataRoot  string // durable state
	ExecRoot  string // state until reboot: sockets, the agent's state files
	InitPath  string // the kiri-init binary
	Version   string // of kiri, told by version and info
	GitCommit string
	BuildTime string
	Log       *slog.Logger // nil discards

	Debug       bool // told by info only
	LiveRestore bool // Close leaves containers running

	ShutdownTimeout int // seconds that Close gives a container without a stop timeout of its own; 0 is 15, as dockerd

	Bridge string // interface name of the default bridge; "" is kiri's default
	BIP    string // the bridge's own address in CIDR form, from which its subnet follows; "" chooses one
	MTU    int    // of the default bridge; 0 is 1500

	DNS        []string
	DNSSearch  []string
	DNSOptions []string

	InsecureRegistries []string
	RegistryMirrors    []string

	DefaultUlimits        map[string]*units.Ulimit
	DefaultShmSize        int64 // bytes; 0 is 64 MiB
	DefaultIpcMode        string
	DefaultCgroupnsMode   string
	DefaultAddressPools   []AddressPool
	CgroupParent          string
	NoNewPrivileges       bool
	SeccompProfile        string // a profile in Docker's JSON form, or "unconfined"; "" is the built-in one
	Init                  bool   // --init for containers that do not say
	LogDriver             string // "" is json-file
	LogOpts               map[string]string
	Labels                []string // of the daemon, KEY=VALUE
	MaxConcurrentDownload int
}

// AddressPool is an entry of default-address-pools.
type AddressPool struct {
	Base string // CIDR
	Size int    // prefix length of each subnet
}
