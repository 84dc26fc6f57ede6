package config

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// load runs Load in a home of its own, with a configuration file of that content; "" is none.
func load(t *testing.T, file string, args ...string) (*Config, error) {
	t.Helper()
	home := t.TempDir()
	t.Setenv("HOME", home)
	if file != "" {
		path := filepath.Join(home, "daemon.json")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append([]string{"--config-file", path}, args...)
	}
	return Load(args)
}

func TestDefaults(t *testing.T) {
	c, err := load(t, "")
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(os.Getenv("HOME"), ".kiri")
	if c.DataRoot != root || c.ExecRoot != root+"/run" || c.Pidfile != root+"/run/kiri.pid" || c.ConfigFile != root+"/daemon.json" ||
		!reflect.DeepEqual(c.Hosts, []string{"unix://" + root + "/run/docker.sock"}) || c.Group != "" || c.Level() != slog.LevelInfo {
		t.Errorf("%+v", c)
	}
	c, err = load(t, "", "--system")
	if err != nil {
		t.Fatal(err)
	}
	if c.DataRoot != "/var/lib/kiri" || c.ExecRoot != "/run/kiri" || c.Hosts[0] != "unix:///run/kiri/docker.sock" || c.Group != "kiri" {
		t.Errorf("%+v", c)
	}
	c, err = load(t, "", "--data-root", "/x")
	if err != nil {
		t.Fatal(err)
	}
	if c.ExecRoot != "/x/run" || c.Hosts[0] != "unix:///x/run/docker.sock" {
		t.Errorf("a daemon with another data root shares something: %+v", c)
	}
}

func TestFlagsAndFile(t *testing.T) {
	file := `{"hosts":["unix:///a.sock"],"debug":true,"dns":["1.1.1.1","::1"],"dns-opts":["ndots:1"],"log-driver":"local","log-opts":{"max-size":"1k"},
		"default-ulimits":{"nofile":{"Hard":20,"Soft":10,"Name":"nofile"}},"default-shm-size":"1M","mtu":1400,"bip":"10.1.0.1/24",
		"default-address-pools":[{"base":"10.2.0.0/16","size":24}],"labels":["a=b"],"live-restore":true,"insecure-registries":["reg:5000"],
		"iptables":true,"storage-driver":"overlay2","exec-opts":["native.cgroupdriver=cgroupfs"],"features":{"buildkit":true,"cdi":false},"runtimes":{},
		"userland-proxy":false,"experimental":false,"shutdown-timeout":7}`
	fromFile, err := load(t, file)
	if err != nil {
		t.Fatal(err)
	}
	fromFlags, err := load(t, "", "-H", "unix:///a.sock", "-D", "--dns", "1.1.1.1", "--dns=::1", "--dns-opt", "ndots:1", "--log-driver", "local",
		"--log-opt", "max-size=1k", "--default-ulimit", "nofile=10:20", "--default-shm-size", "1M", "--mtu", "1400", "--bip", "10.1.0.1/24",
		"--default-address-pool", "base=10.2.0.0/16,size=24", "--label", "a=b", "--live-restore", "--insecure-registry", "reg:5000",
		"--iptables", "--storage-driver", "overlay2", "--exec-opt", "native.cgroupdriver=cgroupfs", "--feature", "buildkit=true",
		"--userland-proxy=false", "--shutdown-timeout", "7")
	if err != nil {
		t.Fatal(err)
	}
	fromFile.DataRoot, fromFile.ExecRoot, fromFile.Pidfile, fromFile.ConfigFile = "", "", "", ""
	fromFlags.DataRoot, fromFlags.ExecRoot, fromFlags.Pidfile, fromFlags.ConfigFile = "", "", "", ""
	if !reflect.DeepEqual(fromFile, fromFlags) {
		t.Errorf("from the file %+v\nfrom flags %+v", fromFile, fromFlags)
	}
	if fromFlags.DefaultShmSize != 1<<20 || fromFlags.DefaultUlimits["nofile"].Soft != 10 || fromFlags.LogOpts["max-size"] != "1k" || fromFlags.Level() != slog.LevelDebug {
		t.Errorf("%+v", fromFlags)
	}
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		file string
		args []string
		text string
	}{
		{`{"debug":true}`, []string{"--debug"}, "the following directives are specified both as a flag and in the configuration file: debug: (from flag: true, from file: true)"},
		{`{"hosts":["unix:///a"],"mtu":1}`, []string{"-H", "unix:///b", "--mtu", "2"}, "configuration file: hosts: (from flag: [unix:///b], from file: [\"unix:///a\"]), mtu: (from flag: 2, from file: 1)"},
		{`{"nope":1,"also":2}`, nil, "the following directives don't match any configuration option: also, nope"},
		{`{"debug":1}`, nil, "debug: json: cannot unmarshal number"},
		{`{"debug":`, nil, "invalid JSON: unexpected end of JSON input"},
		{`[]`, nil, "invalid JSON"},
		{`{"default-ulimits":{"nofile":{"Name":"nproc"}}}`, nil, "ulimit nofile has the name nproc"},
		{`{"default-ulimits":{"nofile":null}}`, nil, "ulimit nofile is null"},
		{`{"runtimes":{"x":{"path":"/y"}}}`, nil, "not supported by kiri: runtimes=path=/y"},
		{`{"userns-remap":"default"}`, nil, "not supported by kiri: userns-remap=default"},
		{`{"iptables":false}`, nil, "not supported by kiri: iptables=false (only true is)"},
		{"", []string{"--userns-remap", "default"}, "not supported by kiri: --userns-remap=default"},
		{"", []string{"--ipv6"}, "not supported by kiri: --ipv6=true (only false is)"},
		{"", []string{"--storage-driver", "btrfs"}, "--storage-driver=btrfs"},
		{"", []string{"--nope"}, "unknown flag: --nope"},
		{"", []string{"extra"}, `"extra" is not an option`},
		{"", []string{"--config-file", "/does/not/exist"}, "no such file or directory"},
		{"", []string{"-H", "/run/x.sock"}, "must begin with unix://"},
		{"", []string{"-H", "unix://x.sock"}, "absolute path"},
		{"", []string{"-H", "unix:///" + strings.Repeat("x", 108)}, "at most 107 bytes"},
		{"", []string{"-H", "npipe:////./pipe/x"}, "must begin with"},
		{"", []string{"-H", "fd://x"}, "number of a descriptor"},
		{"", []string{"-H", "tcp://1.2.3.4:99999"}, "no port"},
		{"", []string{"-H", "tcp://0.0.0.0:2375"}, "refusing to listen on tcp://0.0.0.0:2375 without mutual TLS: whoever reaches the port is root here; give --tlsverify together with --tlscacert, --tlscert and --tlskey"},
		{"", []string{"-H", "tcp://0.0.0.0:2375", "--tls", "--tlscert", "a", "--tlskey", "b"}, "without mutual TLS"},
		{"", []string{"-H", "tcp://0.0.0.0:2375", "--tlsverify", "--tlscert", "a", "--tlskey", "b"}, "without mutual TLS"},
		{"", []string{"--tls"}, "TLS needs --tlsverify"},
		{"", []string{"-l", "loud"}, "invalid logging level: loud"},
		{"", []string{"--log-format", "xml"}, "invalid log format: xml"},
		{"", []string{"--log-driver", "syslog"}, `log driver "syslog" is not supported by kiri: choose json-file, local or none`},
		{"", []string{"--data-root", "x"}, "must be an absolute path"},
		{"", []string{"--bip", "10.0.0.1"}, "invalid bip"},
		{"", []string{"--bip", "10.0.0.0/8"}, "the bridge's own IPv4 address"},
		{"", []string{"-b", "none"}, "not supported by kiri"},
		{"", []string{"--dns", "one"}, "one is not an ip address"},
		{"", []string{"--label", "x"}, "bad attribute format: x"},
		{"", []string{"--label", "x=1", "--label", "x=2"}, "conflict labels for x=2 and x=1"},
		{"", []string{"--default-ulimit", "x=1"}, "invalid ulimit type"},
		{"", []string{"--default-address-pool", "base=10.0.0.0/16,size=8"}, "invalid address pool"},
		{"", []string{"--default-address-pool", "size=x"}, "invalid size value"},
		{"", []string{"--default-ipc-mode", "host"}, "IPC mode"},
		{"", []string{"--registry-mirror", "mirror.test"}, "invalid mirror"},
		{"", []string{"--registry-mirror", "https://u:p@mirror.test"}, "username/password not allowed"},
		{"", []string{"--insecure-registry", "http://reg"}, "should not contain '://'"},
		{"", []string{"--shutdown-timeout=-1"}, "is negative"},
	} {
		_, err := load(t, c.file, c.args...)
		if err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s %q: %v, want %q", c.file, c.args, err, c.text)
		}
	}
	if _, err := load(t, "", "--help"); !errors.Is(err, ErrHelp) {
		t.Errorf("--help: %v", err)
	}
}

func TestHosts(t *testing.T) {
	for s, want := range map[string]Host{
		"unix:///a":        {"unix", "/a"},
		"tcp://:2376":      {"tcp", ":2376"},
		"tcp://1.2.3.4":    {"tcp", "1.2.3.4:2376"},
		"tcp://[::1]:2377": {"tcp", "[::1]:2377"},
		"fd://":            {"fd", ""},
		"fd://*":           {"fd", ""},
		"fd://3":           {"fd", "3"},
	} {
		if got, err := ParseHost(s); err != nil || got != want {
			t.Errorf("%s: %v %v", s, got, err)
		}
	}
	if _, err := load(t, "", "-H", "tcp://127.0.0.1", "--tlsverify", "--tlscacert=a", "--tlscert=b", "--tlskey=c", "-H", "fd://"); err != nil {
		t.Error(err)
	}
}

func TestFileForms(t *testing.T) {
	for _, file := range []string{"{}", " ", "\xef\xbb\xbf{}", `{"runtimes":null,"storage-opts":[],"authorization-plugins":[],"http-proxy":""}`} {
		if _, err := load(t, file); err != nil {
			t.Errorf("%q: %v", file, err)
		}
	}
	if _, err := load(t, `{"labels":["`+strings.Repeat("x", maxFile)+`"]}`); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("a huge file: %v", err)
	}
}

func TestChanged(t *testing.T) {
	a, err := load(t, `{"debug":true,"labels":["a=b"],"mtu":1400}`)
	if err != nil {
		t.Fatal(err)
	}
	b, err := load(t, `{"labels":["a=c"],"dns":["1.1.1.1"],"mtu":1400,"log-level":"warn"}`, "--data-root", a.DataRoot)
	if err != nil {
		t.Fatal(err)
	}
	if got := a.Changed(b); !reflect.DeepEqual(got, []string{"dns", "labels"}) {
		t.Errorf("changed: %v", got)
	}
}

func FuzzFile(f *testing.F) {
	f.Add(`{"hosts":["unix:///a"],"default-ulimits":{"nofile":{"Name":"nofile"}},"default-shm-size":5}`)
	f.Add(`{"features":{"a":[{"b":null}]},"log-opts":null}`)
	f.Fuzz(func(t *testing.T, file string) {
		path := filepath.Join(t.TempDir(), "daemon.json")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := Load([]string{"--config-file", path, "--data-root", "/x"})
		if (c == nil) == (err == nil) {
			t.Errorf("%v %v", c, err)
		}
	})
}
