//go:build linux && (amd64 || arm64)

// Command demo is `make demo`: it starts the engine in a temporary home, makes the image kiri/hello, runs it, says what a start cost beside
// the kernel's floor, and leaves nothing. It uses the programs beside itself: kiri, kiri-init, kiri-hello.
package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"runkiri.com/kiri/internal/bench"
)

const (
	image  = "kiri/hello"
	runs   = 40
	warmup = 5

	startLimit = 30 * time.Second
	stopLimit  = 30 * time.Second
)

func main() {
	// The first Ctrl-C ends the demo and cleans up; until that is done further ones change nothing.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := demo(ctx); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted; everything was cleaned up")
		}
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func demo(ctx context.Context) (err error) {
	if os.Geteuid() != 0 {
		return errors.New("needs root, because containers are made for real: sudo make demo")
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("finding the programs: %w", err)
	}
	bin := filepath.Dir(self)
	home, err := os.MkdirTemp("", "kiri-demo-")
	if err != nil {
		return fmt.Errorf("making a temporary home: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(home)) }()

	fmt.Printf("Starting the engine in %s\n", home)
	begin := time.Now()
	d, err := startDaemon(ctx, bin, home)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	fmt.Printf("  ready after %s\n", round(time.Since(begin)))

	kiri := func(stdin io.Reader, args ...string) (string, error) {
		c := exec.CommandContext(ctx, filepath.Join(bin, "kiri"), args...)
		c.Env = append(os.Environ(), "KIRI_HOST=unix://"+d.socket)
		c.Stdin = stdin
		c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
		c.WaitDelay = 5 * time.Second
		var errs bytes.Buffer
		c.Stderr = &errs
		out, err := c.Output()
		if err != nil {
			return "", fmt.Errorf("kiri %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(errs.Bytes()))
		}
		return string(out), nil
	}

	fmt.Printf("Making the image %s from one static program\n", image)
	archive, err := rootTar(filepath.Join(bin, "kiri-hello"))
	if err != nil {
		return err
	}
	id, err := kiri(bytes.NewReader(archive), "import", "--change", `CMD ["/hello"]`, "-", image)
	if err != nil {
		return err
	}
	fmt.Printf("  %s\n", strings.TrimSpace(id))

	fmt.Printf("Running it: kiri run --rm %s\n\n", image)
	out, err := kiri(nil, "run", "--rm", image)
	if err != nil {
		return err
	}
	fmt.Println(indent(out))

	fmt.Printf("Measuring %d runs of a program that does nothing, with a network, and the kernel alone in the same rounds\n", runs)
	return measure(ctx, d.socket)
}

// measure prints the time of a whole life (create, start, exit, removal) through the engine beside the kernel's floor.
func measure(ctx context.Context, socket string) error {
	floor, err := bench.NewFloor("")
	if err != nil {
		return fmt.Errorf("preparing the kernel's floor: %w", err)
	}
	defer floor.Close()
	rows, err := bench.Lifecycle(ctx, []bench.Engine{{Name: "kiri", Key: "demo", Socket: socket}}, bench.Options{
		Runs: runs, Warmup: warmup, Image: image, Network: "bridge", Command: "/bin/true", Floor: floor,
	})
	if err != nil {
		return err
	}
	under := floor.Samples()[bench.FloorBridge]
	for _, r := range rows {
		if r.Path != bench.PathAPI {
			continue
		}
		if r.Failed != nil {
			return r.Failed
		}
		fmt.Printf("\n  kiri, create to removed   %8s   p50 of %d\n", round(r.Samples.P50()), len(r.Samples))
		fmt.Printf("  the kernel's floor        %8s   one clone3 with the same namespaces, mounts, exec and wait\n", round(under.P50()))
		fmt.Printf("  times the floor           %8.2f\n\n", float64(r.Samples.P50())/float64(under.P50()))
	}
	return nil
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }

func indent(s string) string {
	var b strings.Builder
	for l := range strings.Lines(s) {
		b.WriteString("  | " + l)
	}
	return b.String()
}

// rootTar is the image's file system: the program, a program that does nothing, and the directories that a container expects.
func rootTar(program string) ([]byte, error) {
	hello, err := os.ReadFile(program)
	if err != nil {
		return nil, fmt.Errorf("reading the program of the image: %w", err)
	}
	nothing, err := bench.TrueProgram()
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, dir := range []string{"bin/", "dev/", "etc/", "proc/", "sys/", "tmp/"} {
		if err := w.WriteHeader(&tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
			return nil, fmt.Errorf("packing the image: %w", err)
		}
	}
	for _, f := range []struct {
		name string
		body []byte
	}{{"hello", hello}, {"bin/true", nothing}} {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(f.body))}); err != nil {
			return nil, fmt.Errorf("packing the image: %w", err)
		}
		if _, err := w.Write(f.body); err != nil {
			return nil, fmt.Errorf("packing the image: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("packing the image: %w", err)
	}
	return b.Bytes(), nil
}

type daemon struct {
	cmd    *exec.Cmd
	done   chan error
	socket string
	log    string
}

// startDaemon starts the engine and waits until it answers.
func startDaemon(ctx context.Context, bin, home string) (*daemon, error) {
	d := &daemon{socket: filepath.Join(home, "run", "docker.sock"), log: filepath.Join(home, "daemon.log"), done: make(chan error, 1)}
	log, err := os.Create(d.log)
	if err != nil {
		return nil, fmt.Errorf("making the engine's log: %w", err)
	}
	defer log.Close()
	d.cmd = exec.Command(filepath.Join(bin, "kiri"), "daemon", "--data-root", filepath.Join(home, "data"), "--exec-root", filepath.Join(home, "run"),
		"--host", "unix://"+d.socket, "--bridge", fmt.Sprintf("kdemo%d", os.Getpid()%100000))
	d.cmd.Stdout, d.cmd.Stderr = log, log
	// A Ctrl-C in the terminal is for the demo, which stops the engine in order.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := d.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the engine: %w", err)
	}
	go func() { d.done <- d.cmd.Wait() }()
	limit := time.After(startLimit)
	for {
		if c, err := net.Dial("unix", d.socket); err == nil {
			return d, c.Close()
		}
		select {
		case err := <-d.done:
			return nil, fmt.Errorf("the engine ended at its start: %v\n%s", err, d.words())
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), d.stop())
		case <-limit:
			return nil, errors.Join(fmt.Errorf("the engine does not answer after %s\n%s", startLimit, d.words()), d.stop())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (d *daemon) words() string {
	b, err := os.ReadFile(d.log)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// stop ends the engine, which takes its bridge, its agent and its containers along.
func (d *daemon) stop() error {
	if err := d.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stopping the engine: %w", err)
	}
	select {
	case err := <-d.done:
		if err != nil {
			return fmt.Errorf("stopping the engine: %w\n%s", err, d.words())
		}
	case <-time.After(stopLimit):
		err := d.cmd.Process.Kill()
		return errors.Join(fmt.Errorf("the engine did not stop within %s\n%s", stopLimit, d.words()), err)
	}
	return nil
}
