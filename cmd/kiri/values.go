package main

import (
	"fmt"
	"math/big"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/blkiodev"
	"github.com/moby/moby/api/types/container"
)

// The flag values of Docker's CLI, as pflag.Value. Each checks its argument when it is set, so that the error names the flag.

// listValue gathers the arguments of a flag that may be given several times.
type listValue struct {
	vals  *[]string
	check func(string) (string, error)
	typ   string
}

func list(p *[]string, check func(string) (string, error)) *listValue {
	return &listValue{p, check, "list"}
}

func (l *listValue) String() string { return "" }
func (l *listValue) Type() string   { return l.typ }
func (l *listValue) Set(v string) error {
	if l.check != nil {
		var err error
		if v, err = l.check(v); err != nil {
			return err
		}
	}
	*l.vals = append(*l.vals, v)
	return nil
}

// mapValue gathers NAME=VALUE arguments; the last one of a name wins.
type mapValue struct {
	m     *map[string]string
	check func(string) error
}

func (m *mapValue) String() string { return "map[]" }
func (m *mapValue) Type() string   { return "map" }
func (m *mapValue) Set(v string) error {
	if m.check != nil {
		if err := m.check(v); err != nil {
			return err
		}
	}
	if *m.m == nil {
		*m.m = map[string]string{}
	}
	k, val, _ := strings.Cut(v, "=")
	(*m.m)[k] = val
	return nil
}

// bytesValue is a size in bytes with Docker's binary units: 64m is 64 * 1024 * 1024.
type bytesValue struct {
	n    *int64
	swap bool // -1 means no limit
}

func (b *bytesValue) String() string { return "" }
func (b *bytesValue) Type() string   { return "bytes" }
func (b *bytesValue) Set(v string) error {
	if b.swap && v == "-1" {
		*b.n = -1
		return nil
	}
	n, err := units.RAMInBytes(v)
	if err != nil {
		return err
	}
	*b.n = n
	return nil
}

// cpusValue is a decimal number of CPUs kept in billionths.
type cpusValue struct{ n *int64 }

func (c *cpusValue) String() string { return "" }
func (c *cpusValue) Type() string   { return "decimal" }
func (c *cpusValue) Set(v string) error {
	r, ok := new(big.Rat).SetString(v)
	if !ok {
		return fmt.Errorf("failed to parse %v as a rational number", v)
	}
	nano := r.Mul(r, big.NewRat(1e9, 1))
	if !nano.IsInt() || !nano.Num().IsInt64() {
		return fmt.Errorf("value is too precise")
	}
	*c.n = nano.Num().Int64()
	return nil
}

type ulimitValue struct{ limits *map[string]*container.Ulimit }

func (u *ulimitValue) String() string { return "[]" }
func (u *ulimitValue) Type() string   { return "ulimit" }
func (u *ulimitValue) Set(v string) error {
	l, err := units.ParseUlimit(v)
	if err != nil {
		return err
	}
	if *u.limits == nil {
		*u.limits = map[string]*container.Ulimit{}
	}
	(*u.limits)[l.Name] = l
	return nil
}

// throttleValue is DEVICE:RATE; bps rates take units.
type throttleValue struct {
	devs *[]*blkiodev.ThrottleDevice
	bps  bool
}

func (t *throttleValue) String() string { return "[]" }
func (t *throttleValue) Type() string   { return "list" }
func (t *throttleValue) Set(v string) error {
	dev, rate, ok := strings.Cut(v, ":")
	if !ok || dev == "" {
		return fmt.Errorf("bad format: %s", v)
	}
	if !strings.HasPrefix(dev, "/dev/") {
		return fmt.Errorf("bad format for device path: %s", v)
	}
	var n uint64
	if t.bps {
		b, err := units.RAMInBytes(rate)
		if err != nil || b < 0 {
			return fmt.Errorf("invalid rate for device: %s. The correct format is <device-path>:<number>[<unit>]. Number must be a positive integer. Unit is optional and can be kb, mb, or gb", v)
		}
		n = uint64(b)
	} else {
		var err error
		if n, err = strconv.ParseUint(rate, 10, 64); err != nil {
			return fmt.Errorf("invalid rate for device: %s. The correct format is <device-path>:<number>. Number must be a positive integer", v)
		}
	}
	*t.devs = append(*t.devs, &blkiodev.ThrottleDevice{Path: dev, Rate: n})
	return nil
}

type weightValue struct{ devs *[]*blkiodev.WeightDevice }

func (w *weightValue) String() string { return "[]" }
func (w *weightValue) Type() string   { return "list" }
func (w *weightValue) Set(v string) error {
	dev, weight, ok := strings.Cut(v, ":")
	if !ok || dev == "" {
		return fmt.Errorf("bad format: %s", v)
	}
	if !strings.HasPrefix(dev, "/dev/") {
		return fmt.Errorf("bad format for device path: %s", v)
	}
	n, err := strconv.ParseUint(weight, 10, 16)
	if err != nil || n > 0 && (n < 10 || n > 1000) {
		return fmt.Errorf("invalid weight for device: %s", v)
	}
	*w.devs = append(*w.devs, &blkiodev.WeightDevice{Path: dev, Weight: uint16(n)})
	return nil
}

// gpuValue refuses: kiri has no device drivers, and a flag that is taken and does nothing would be worse than an error.
type gpuValue struct{}

func (gpuValue) String() string { return "" }
func (gpuValue) Type() string   { return "gpu-request" }
func (gpuValue) Set(string) error {
	return fmt.Errorf("kiri has no GPU driver: pass the device nodes with --device instead")
}

// filterValue is NAME=VALUE with Docker's check, kept as the API wants it.
type filterValue struct{ f filters }

type filters map[string][]string

func (f filterValue) String() string { return "" }
func (f filterValue) Type() string   { return "filter" }
func (f filterValue) Set(v string) error {
	if v == "" {
		return nil
	}
	name, val, ok := strings.Cut(v, "=")
	if !ok {
		return fmt.Errorf("bad format of filter (expected name=value)")
	}
	name = strings.ToLower(strings.TrimSpace(name))
	val = strings.TrimSpace(val)
	if !slices.Contains(f.f[name], val) {
		f.f[name] = append(f.f[name], val)
	}
	return nil
}

func checkAttach(v string) (string, error) {
	s := strings.ToLower(v)
	if s == "stdin" || s == "stdout" || s == "stderr" {
		return s, nil
	}
	return v, fmt.Errorf("valid streams are STDIN, STDOUT and STDERR")
}

func checkEnv(v string) (string, error) {
	name, _, ok := strings.Cut(v, "=")
	if name == "" {
		return "", fmt.Errorf("invalid environment variable: %s", v)
	}
	if ok {
		return v, nil
	}
	// A bare name takes the value of the caller's environment; where it has none, the name alone asks the engine to unset it.
	if val, ok := lookupEnv(name); ok {
		return name + "=" + val, nil
	}
	return v, nil
}

func checkLabel(v string) (string, error) {
	name, _, _ := strings.Cut(v, "=")
	if strings.TrimLeft(name, " \t") == "" {
		return "", fmt.Errorf("invalid label '%s': empty name", v)
	}
	return v, nil
}

func checkHost(v string) (string, error) {
	name, ip, ok := strings.Cut(v, "=")
	if !ok {
		name, ip, ok = strings.Cut(v, ":")
	}
	if !ok || name == "" {
		return "", fmt.Errorf("bad format for add-host: %q", v)
	}
	if ip == "host-gateway" {
		return name + ":" + ip, nil
	}
	if len(ip) > 2 && ip[0] == '[' && ip[len(ip)-1] == ']' {
		ip = ip[1 : len(ip)-1]
	}
	if _, err := checkIP(ip); err != nil {
		return "", fmt.Errorf("invalid IP address in add-host: %q", ip)
	}
	return name + ":" + ip, nil
}

func checkIP(v string) (string, error) {
	a, err := parseIP(strings.TrimSpace(v))
	if err != nil {
		return "", fmt.Errorf("IP address is not correctly formatted: %s", v)
	}
	return a.String(), nil
}

func checkDNSSearch(v string) (string, error) {
	v = strings.Trim(v, " ")
	if v == "." {
		return v, nil
	}
	name := strings.TrimSuffix(v, ".")
	ok := len(name) > 0 && len(name) < 255
	for _, label := range strings.Split(name, ".") {
		if label == "" || strings.ContainsFunc(label, func(r rune) bool {
			return r != '-' && r != '_' && (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z')
		}) {
			ok = false
		}
	}
	if !ok {
		return "", fmt.Errorf("%s is not a valid domain", v)
	}
	return name, nil
}

func checkLink(v string) (string, error) {
	if v == "" {
		return "", fmt.Errorf("empty string specified for links")
	}
	if parts := strings.Split(v, ":"); len(parts) > 2 {
		return "", fmt.Errorf("bad format for links: %s", v)
	}
	return v, nil
}

// namespacedSysctls are those that belong to a namespace a container has of its own; others would change the host.
func checkSysctl(v string) error {
	name, _, _ := strings.Cut(v, "=")
	switch name {
	case "kernel.msgmax", "kernel.msgmnb", "kernel.msgmni", "kernel.sem", "kernel.shmall", "kernel.shmmax", "kernel.shmmni", "kernel.shm_rmid_forced":
	default:
		if !strings.HasPrefix(name, "net.") && !strings.HasPrefix(name, "fs.mqueue.") {
			return fmt.Errorf("sysctl '%s' is not allowed", v)
		}
	}
	if !strings.Contains(v, "=") {
		return fmt.Errorf("sysctl '%s' is not allowed", v)
	}
	return nil
}

func checkDeviceRule(v string) (string, error) {
	f := strings.Split(v, " ")
	ok := len(f) == 3 && len(f[0]) == 1 && strings.Contains("acb", f[0])
	if ok {
		major, minor, colon := strings.Cut(f[1], ":")
		number := func(s string) bool {
			return s == "*" || s != "" && strings.Trim(s, "0123456789") == ""
		}
		ok = colon && number(major) && number(minor) && len(f[2]) >= 1 && len(f[2]) <= 3 && strings.Trim(f[2], "rwm") == ""
	}
	if !ok {
		return v, fmt.Errorf("invalid device cgroup format '%s'", v)
	}
	return v, nil
}

// parseDevice reads HOST[:CONTAINER][:MODE].
func parseDevice(v string) (container.DeviceMapping, error) {
	d := container.DeviceMapping{CgroupPermissions: "rwm"}
	bad := fmt.Errorf("bad format for path: %s", v)
	mode := func(s string) bool { return s != "" && len(s) <= 3 && strings.Trim(s, "rwm") == "" }
	p := strings.Split(v, ":")
	switch len(p) {
	case 1:
	case 2:
		if mode(p[1]) {
			d.CgroupPermissions = p[1]
		} else {
			d.PathInContainer = p[1]
		}
	case 3:
		if !mode(p[2]) {
			return d, fmt.Errorf("bad mode specified: %s", p[2])
		}
		d.PathInContainer, d.CgroupPermissions = p[1], p[2]
	default:
		return d, bad
	}
	d.PathOnHost = p[0]
	if d.PathInContainer == "" {
		d.PathInContainer = d.PathOnHost
	}
	if !path.IsAbs(d.PathOnHost) {
		return d, bad
	}
	if !path.IsAbs(d.PathInContainer) {
		return d, fmt.Errorf("%s is not an absolute path", d.PathInContainer)
	}
	return d, nil
}
