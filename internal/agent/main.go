//go:build linux

package agent

import (
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"
	"runkiri.com/kiri/internal/timerslack"
)

// Main is `kiri-init agent`: it runs until a daemon retires it or SIGTERM comes, and returns the exit code. Containers
// go on in either case.
func Main(args []string, version string) int {
	cfg, err := parseFlags(args, os.Stderr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kiri-init agent:", err)
		return 2
	}
	cfg.Version = version
	if err := runAgent(cfg); err != nil {
		fmt.Fprintln(os.Stderr, "kiri-init agent:", err)
		return 1
	}
	return 0
}

func parseFlags(args []string, out io.Writer) (Config, error) {
	var cfg Config
	fs := flag.NewFlagSet("kiri-init agent", flag.ContinueOnError)
	fs.SetOutput(out)
	fs.StringVar(&cfg.DataRoot, "data-root", "", "directory for what outlives a reboot: layers, logs, volumes")
	fs.StringVar(&cfg.ExecRoot, "exec-root", "", "directory for what does not: the socket, state files")
	fs.StringVar(&cfg.Network.Bridge, "bridge", "", "interface of the default bridge (kiri0)")
	fs.StringVar(&cfg.Network.Table, "nft-table", "", "nf_tables table (kiri)")
	fs.StringVar(&cfg.Network.Subnet, "subnet", "", "address and prefix of the default bridge (the first free of 172.17.0.0/16 and on)")
	fs.IntVar(&cfg.Network.MTU, "mtu", 0, "MTU of the default bridge (the uplink's)")
	if err := fs.Parse(args); err != nil {
		return cfg, err
	}
	if fs.NArg() > 0 {
		return cfg, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	for name, dir := range map[string]*string{"--data-root": &cfg.DataRoot, "--exec-root": &cfg.ExecRoot} {
		if *dir == "" {
			return cfg, fmt.Errorf("%s is missing", name)
		}
		abs, err := filepath.Abs(*dir)
		if err != nil {
			return cfg, fmt.Errorf("%s: %w", name, err)
		}
		*dir = abs
	}
	return cfg, nil
}

func runAgent(cfg Config) error {
	if err := Seal(); err != nil {
		return err
	}
	// A session of its own: a signal to the daemon's group, or its terminal's end, is not for us. It fails if we
	// lead a group already, which is as good.
	unix.Setsid()
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("becoming non-dumpable: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("becoming a subreaper: %w", err)
	}
	unix.Umask(0o022)
	debug.SetGCPercent(200) // 8 MB between collections; what is left over goes back when it is quiet
	// Much of what runs beside starts waits in the kernel without the scheduler knowing better (grace periods of RCU,
	// locks of mounts and interfaces), each holding one of its processors until the monitor takes it away. With only as
	// many as there are CPUs, the answer to a start or the news of an exit sat behind that for up to 1.5 ms.
	runtime.GOMAXPROCS(max(16, runtime.NumCPU()))
	if err := timerslack.Relax(time.Millisecond); err != nil {
		return err
	}
	lock, err := Lock(cfg.ExecRoot)
	if err != nil {
		return err
	}
	defer lock.Close()
	a, err := New(cfg)
	if err != nil {
		return err
	}
	s, err := a.Listen()
	if err != nil {
		a.closeAll()
		return err
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT)
	signal.Ignore(unix.SIGHUP, unix.SIGPIPE)
	stop := make(chan struct{})
	go func() {
		<-signals
		close(stop)
	}()
	debug.FreeOSMemory()
	return s.Serve(stop)
}

// Seal makes sure that this process runs from a sealed memfd, and executes itself again from one if it does not. So
// there is no file on the host behind /proc/PID/exe that a container could get hold of, and nothing that a write to
// the installed binary could change under us.
func Seal() error {
	exe, err := os.Open("/proc/self/exe")
	if err != nil {
		return fmt.Errorf("opening this program: %w", err)
	}
	defer exe.Close()
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if got, err := unix.FcntlInt(exe.Fd(), unix.F_GET_SEALS, 0); err == nil && got&seals == seals {
		os.Unsetenv(sealedEnv)
		return nil
	}
	if os.Getenv(sealedEnv) != "" {
		return fmt.Errorf("this program was executed from a memfd and does not run from one")
	}
	fd, err := unix.MemfdCreate("kiri-init", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|mfdExec)
	if err == unix.EINVAL { // before Linux 6.3 all of them are executable
		fd, err = unix.MemfdCreate("kiri-init", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return fmt.Errorf("making a memfd: %w", err)
	}
	mem := os.NewFile(uintptr(fd), "kiri-init")
	defer mem.Close()
	// By read and write: pages that are spliced in may stay pinned for a while, and pinned pages cannot be sealed.
	if _, err := io.Copy(struct{ io.Writer }{mem}, struct{ io.Reader }{exe}); err != nil {
		return fmt.Errorf("copying this program to a memfd: %w", err)
	}
	if err := unix.Fchmod(fd, 0o755); err != nil {
		return fmt.Errorf("making the memfd executable: %w", err)
	}
	// With --init the file is PID 1 of a container, whose root could take the mode away from everybody.
	err = addSeals(fd, seals|unix.F_SEAL_EXEC)
	if err == unix.EINVAL { // before Linux 6.3
		err = addSeals(fd, seals)
	}
	if err != nil {
		return fmt.Errorf("sealing the memfd: %w", err)
	}
	env := append(os.Environ(), sealedEnv+"=1")
	return fmt.Errorf("executing the memfd: %w", execFD(fd, os.Args, env))
}

// addSeals seals a memfd. The kernel says EBUSY when it has found pages in use five times over; on a busy machine who
// moves pages about may hold one for a moment, so that is no answer yet.
func addSeals(fd, seals int) (err error) {
	for range 20 {
		if _, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != unix.EBUSY {
			return err
		}
	}
	return err
}

const (
	mfdExec   = 0x10
	sealedEnv = "KIRI_SEALED" // keeps a kernel that will not do it from a loop
)
