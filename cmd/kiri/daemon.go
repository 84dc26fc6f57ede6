package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"runkiri.com/kiri/internal/config"
	"runkiri.com/kiri/internal/dockerapi"
	"runkiri.com/kiri/internal/engine"
	"runkiri.com/kiri/internal/timerslack"
)

// gcPercent lets the heap, of which a megabyte or two lives, grow to some 8 MB between collections. A quiet daemon
// gives all of that back (idle).
const gcPercent = 200

// runDaemon is `kiri daemon`: it returns when the daemon has ended.
func runDaemon(ctx context.Context, args []string) error {
	cfg, err := config.Load(args)
	if err != nil {
		return err
	}
	if cfg.Validate {
		fmt.Println("configuration OK")
		return nil
	}
	debug.SetGCPercent(gcPercent)
	runtime.GOMAXPROCS(max(8, runtime.NumCPU())) // as in the agent: some threads wait for the disk, requests must not
	d := &daemon{args: args, cfg: cfg, level: new(slog.LevelVar)}
	d.level.Set(cfg.Level())
	d.log = newLogger(os.Stderr, cfg.LogFormat, d.level)
	return d.run(ctx)
}

// daemon is one running engine with its listeners.
type daemon struct {
	args  []string // to read the configuration again
	cfg   *config.Config
	level *slog.LevelVar
	log   *slog.Logger

	engine    *engine.Engine
	listeners []net.Listener
	servers   sync.WaitGroup
}

// run starts everything in an order in which a failure leaves nothing behind and touches no running container:
// directories, the lock that a second daemon would fail on, sockets, and only then the engine.
func (d *daemon) run(ctx context.Context) (err error) {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(signals)

	for _, dir := range []string{d.cfg.DataRoot, d.cfg.ExecRoot, filepath.Dir(d.cfg.Pidfile)} {
		if err := makeDir(dir); err != nil {
			return err
		}
	}
	pidfile, err := lockPidfile(d.cfg.Pidfile)
	if err != nil {
		return err
	}
	defer func() {
		pidfile.Truncate(0) // stays, empty: removing it would let two daemons hold locks on two files of one name
		pidfile.Close()
	}()

	init, err := findInit(d.cfg.InitPath)
	if err != nil {
		return err
	}
	defer d.closeListeners()
	if err := d.listen(); err != nil {
		return err
	}
	engineConfig, err := d.engineConfig(init)
	if err != nil {
		return err
	}
	opening, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	if d.engine, err = engine.Open(opening, engineConfig); err != nil {
		return fmt.Errorf("starting the engine: %w", err)
	}

	base, hangUp := context.WithCancel(context.Background())
	defer hangUp()
	server := d.serve(base)
	notify("READY=1")
	d.log.Info("kiri is ready", "version", version, "data", d.cfg.DataRoot, "pid", os.Getpid())

	for {
		select {
		case s := <-signals:
			if s == syscall.SIGHUP {
				d.reload()
				continue
			}
			d.log.Info("ending", "signal", s.String())
		case <-ctx.Done():
		}
		break
	}
	go func() { // a second signal does not wait for containers
		for s := range signals {
			if s != syscall.SIGHUP {
				d.log.Warn("ending at once", "signal", s.String())
				os.Exit(1)
			}
		}
	}()
	notify("STOPPING=1")
	return d.end(server, hangUp)
}

// end closes the engine while clients are still connected, so that a wait learns of its container's end, and then
// the connections.
func (d *daemon) end(server *http.Server, hangUp context.CancelFunc) error {
	d.closeListeners()
	server.SetKeepAlivesEnabled(false)
	err := d.engine.Close(context.Background())
	hangUp()
	grace, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if server.Shutdown(grace) != nil {
		server.Close()
	}
	d.servers.Wait()
	if err != nil {
		return fmt.Errorf("closing the engine: %w", err)
	}
	return nil
}

// serve answers on every listener. base is the parent of all requests' contexts.
func (d *daemon) serve(base context.Context) *http.Server {
	api := dockerapi.New(d.engine, version, d.log)
	if err := timerslack.Relax(time.Millisecond); err != nil { // needs CAP_SYS_NICE; without it things are only slower
		d.log.Debug("timers stay precise", "error", err)
	}
	idle := newIdle(d.log)
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			idle.touch()
			api.ServeHTTP(w, r)
		}),
		BaseContext:    func(net.Listener) context.Context { return base },
		ErrorLog:       log.New(logWriter{d.log}, "", 0),
		MaxHeaderBytes: 64 << 10,
		// HTTP/2 would bring its tables along for no client that asks for it.
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
	}
	for _, l := range d.listeners {
		d.servers.Go(func() {
			if err := server.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
				d.log.Error("serving", "address", l.Addr().String(), "error", err)
			}
		})
		d.log.Info("listening", "address", l.Addr().Network()+"://"+l.Addr().String())
	}
	idle.touch()
	return server
}

// logWriter turns what net/http says about broken connections into lines of the debug log.
type logWriter struct{ log *slog.Logger }

func (w logWriter) Write(b []byte) (int, error) {
	w.log.Debug("http", "message", strings.TrimSpace(string(b)))
	return len(b), nil
}

func (d *daemon) closeListeners() {
	for _, l := range d.listeners {
		l.Close()
	}
}

// engineConfig is the part of the configuration that the engine works with.
func (d *daemon) engineConfig(init string) (engine.Config, error) {
	c := d.cfg
	seccomp, err := seccompProfile(c.SeccompProfile)
	if err != nil {
		return engine.Config{}, err
	}
	pools := make([]engine.AddressPool, 0, len(c.DefaultAddressPools))
	for _, p := range c.DefaultAddressPools {
		pools = append(pools, engine.AddressPool{Base: p.Base, Size: p.Size})
	}
	return engine.Config{
		DataRoot:              c.DataRoot,
		ExecRoot:              c.ExecRoot,
		InitPath:              init,
		Version:               version,
		GitCommit:             gitCommit,
		BuildTime:             buildTime,
		Log:                   d.log,
		Debug:                 c.Debug,
		LiveRestore:           c.LiveRestore,
		ShutdownTimeout:       c.ShutdownTimeout,
		Bridge:                c.Bridge,
		BIP:                   c.BIP,
		MTU:                   c.MTU,
		DNS:                   c.DNS,
		DNSSearch:             c.DNSSearch,
		DNSOptions:            c.DNSOptions,
		InsecureRegistries:    c.InsecureRegistries,
		RegistryMirrors:       c.RegistryMirrors,
		DefaultUlimits:        c.DefaultUlimits,
		DefaultShmSize:        c.DefaultShmSize,
		DefaultIpcMode:        c.DefaultIpcMode,
		DefaultCgroupnsMode:   c.DefaultCgroupnsMode,
		DefaultAddressPools:   pools,
		CgroupParent:          c.CgroupParent,
		NoNewPrivileges:       c.NoNewPrivileges,
		SeccompProfile:        seccomp,
		Init:                  c.Init,
		LogDriver:             c.LogDriver,
		LogOpts:               c.LogOpts,
		Labels:                c.Labels,
		MaxConcurrentDownload: c.MaxDownloads,
	}, nil
}

// seccompProfile turns the option into a profile: "" for the built-in one, "unconfined", or what the file holds.
func seccompProfile(option string) (string, error) {
	switch option {
	case "", "builtin":
		return "", nil
	case "unconfined":
		return option, nil
	}
	f, err := os.Open(option)
	if err != nil {
		return "", fmt.Errorf("opening seccomp profile: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return "", fmt.Errorf("reading seccomp profile %s: %w", option, err)
	}
	return string(b), nil
}

// reload reads the configuration again and applies what can change while running: how much is logged. What else has
// changed is named, so that nobody believes it to hold.
func (d *daemon) reload() {
	cfg, err := config.Load(d.args)
	if err != nil {
		d.log.Error("configuration not reloaded", "error", err)
		return
	}
	d.level.Set(cfg.Level())
	d.log.Info("configuration reloaded", "file", cfg.ConfigFile, "level", cfg.Level().String())
	if names := d.cfg.Changed(cfg); len(names) > 0 {
		d.log.Warn("some changes need a restart of the daemon", "options", strings.Join(names, ", "))
	}
}

// findInit returns the path of kiri-init: the one that is asked for, or the one beside this program.
func findInit(asked string) (string, error) {
	if asked != "" {
		if _, err := os.Stat(asked); err != nil {
			return "", fmt.Errorf("finding kiri-init: %w", err)
		}
		return filepath.Abs(asked)
	}
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("finding kiri-init: %w", err)
	}
	if real, err := filepath.EvalSymlinks(self); err == nil {
		self = real
	}
	path := filepath.Join(filepath.Dir(self), "kiri-init")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("kiri-init is not beside %s; install it there or give --init-path", self)
	}
	return path, nil
}
