package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/term"
	"runkiri.com/kiri/internal/bench"
)

// benchFlags are those of `kiri bench`.
type benchFlags struct {
	runs, warmup, together        int
	image, network, command, only string
	path                          string
	json, rootfs, machine         string
	sockets                       []string
}

func cmdBench() *command {
	return &command{
		name:  "bench",
		use:   "[OPTIONS]",
		short: "Measure the life of a container beside other engines and beside the kernel",
		example: `  kiri bench --network bridge --runs 30
  kiri bench --only kiri --json results.json
  kiri bench --socket mine=/run/mine/docker.sock --image busybox`,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			var b benchFlags
			f.IntVar(&b.runs, "runs", 50, "Timed runs, after 5 warm-up runs")
			f.IntVar(&b.warmup, "warmup", 5, "Runs before the timed ones")
			f.StringVar(&b.image, "image", "alpine:latest", "The image to run; pull it on each engine first")
			f.StringVar(&b.command, "command", "true", "The command to run in it")
			f.StringVar(&b.network, "network", "none", "The network each container gets: none or bridge")
			f.StringVar(&b.only, "only", "", "Measure one engine: kiri, docker, desktop, orbstack, podman, colima, rancher or a --socket name")
			f.StringVar(&b.path, "path", "", "Measure one path: api, docker or kiri (the two commands)")
			f.StringArrayVar(&b.sockets, "socket", nil, "Add an engine, or say where one listens: name=path")
			f.StringVar(&b.json, "json", "", "Write the results to this file, in the form of bench/results.json")
			f.IntVar(&b.together, "together", 0, "Also start this many containers at once on each engine")
			f.StringVar(&b.rootfs, "rootfs", "", "Directory with a static /bin/true, /proc and /dev for the floor (default: one made for the run)")
			f.StringVar(&b.machine, "machine", "", "Words that describe this machine in the results")
			return func([]string) error { return c.bench(&b) }
		},
	}
}

func (c *cli) bench(b *benchFlags) error {
	if b.network != "none" && b.network != "bridge" {
		return fmt.Errorf("--network %s: want none or bridge", b.network)
	}
	if b.runs < 1 || b.warmup < 0 || b.together < 0 {
		return errors.New("--runs wants at least 1, --warmup and --together at least 0")
	}
	paths := map[string]bench.Path{"": "", "api": bench.PathAPI, "docker": bench.PathCLI, "kiri": bench.PathKiri}
	one, ok := paths[b.path]
	if !ok {
		return fmt.Errorf("--path %s: want api, docker or kiri", b.path)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	path, _ := strings.CutPrefix(c.Host(), "unix://")
	engines, err := bench.Find(path, b.sockets)
	if err != nil {
		return err
	}
	if b.only != "" {
		engines = slices.DeleteFunc(engines, func(e bench.Engine) bool { return e.Key != b.only })
		if len(engines) == 0 {
			return fmt.Errorf("--only %s: no such engine answers on its socket; --socket %s=PATH says where it listens", b.only, b.only)
		}
	}
	if len(engines) == 0 {
		return fmt.Errorf("no engine answers on its socket; kiri's own is expected at %s (start it with `kiri daemon`)", path)
	}
	r := &bench.Results{Updated: time.Now().Format("2006-01-02"), Machine: b.machine}
	if r.Machine == "" {
		r.Machine = fmt.Sprintf("%s/%s, %d CPUs", runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	}
	r.Note = "p50 of the timed runs in ms; engines and paths interleaved in random order in one run"

	floor, err := bench.NewFloor(b.rootfs)
	if err != nil {
		fmt.Fprintf(c.err, "%s: no floor: %v\n", prog, err)
	} else {
		defer floor.Close()
	}
	rows, err := bench.Lifecycle(ctx, engines, bench.Options{
		Runs: b.runs, Warmup: b.warmup, Image: b.image, Network: b.network, Command: b.command, Floor: floor, Only: one, Progress: c.benchProgress(),
	})
	if err != nil {
		return err
	}
	kernel := map[string]bench.Samples{}
	if floor != nil {
		maps.Copy(kernel, floor.Samples())
	}
	under := kernel[bench.FloorNone]
	if b.network == "bridge" {
		under = kernel[bench.FloorBridge]
	}
	r.Lifecycle = bench.LifecycleOf{
		Test: b.image + " -> " + b.command + " -> exit -> removed", Runs: b.runs,
		Rows: bench.LifecycleRows(rows, b.network, under),
	}
	if b.together > 0 {
		r.Together = &bench.TogetherOf{Containers: b.together}
		for _, e := range engines {
			took, err := bench.Together(ctx, e, b.together, bench.Options{Image: b.image, Network: b.network, Command: b.command})
			v := bench.TogetherValue{Engine: e.Name, Status: "measured"}
			if err != nil {
				v.Status = "failed: " + err.Error()
			} else {
				v.PerSecond = float64(int(float64(b.together)/took.Seconds()*10+0.5)) / 10
			}
			r.Together.Rows = append(r.Together.Rows, v)
		}
	}
	prims, err := bench.Primitives(max(b.runs, 100))
	if err != nil {
		fmt.Fprintf(c.err, "%s: not every kernel primitive could be measured: %v\n", prog, err)
	}
	maps.Copy(kernel, prims)
	r.Floor = bench.RowSet{Note: "the kernel alone, no engine around it; same run", Rows: bench.Values(bench.FloorNames, kernel)}
	r.Primitives = bench.RowSet{Note: "the building blocks of a container start, one at a time", Rows: bench.Values(bench.PrimitiveNames, kernel)}
	c.printBench(r)
	if b.json != "" {
		return r.Write(b.json)
	}
	return nil
}

// benchProgress says which round runs, on a terminal only.
func (c *cli) benchProgress() func(int, int) {
	f, ok := c.err.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil
	}
	return func(round, rounds int) {
		fmt.Fprintf(f, "\rround %d of %d", round, rounds)
		if round == rounds {
			fmt.Fprint(f, "\r\x1b[K")
		}
	}
}

func (c *cli) printBench(r *bench.Results) {
	fmt.Fprintf(c.out, "%s, p50 of %d runs, ms\n\n", r.Lifecycle.Test, r.Lifecycle.Runs)
	w := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ENGINE\tPATH\tNETWORK\tP50\tP99\tMEAN\tTIMES KIRI\tTIMES FLOOR")
	for _, l := range r.Lifecycle.Rows {
		if l.P50 == 0 {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", l.Engine, l.Path, l.Network, l.Status)
			continue
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%.2f\t%.2f\t%.2f\t%s\t%s\n", l.Engine, l.Path, l.Network, l.P50, l.P99, l.Mean, times(l.Times), times(l.Floors))
		if l.Status != "measured" {
			fmt.Fprintf(w, "\t%s\n", l.Status)
		}
	}
	w.Flush()
	if r.Together != nil {
		fmt.Fprintf(c.out, "\n%d at once\n\n", r.Together.Containers)
		fmt.Fprintln(w, "ENGINE\tCONTAINERS A SECOND")
		for _, v := range r.Together.Rows {
			if v.Status != "measured" {
				fmt.Fprintf(w, "%s\t%s\n", v.Engine, v.Status)
				continue
			}
			fmt.Fprintf(w, "%s\t%.1f\n", v.Engine, v.PerSecond)
		}
		w.Flush()
	}
	fmt.Fprint(c.out, "\nThe kernel alone, ms\n\n")
	fmt.Fprintln(w, "WHAT\tP50\tP99")
	for _, set := range []bench.RowSet{r.Floor, r.Primitives} {
		for _, v := range set.Rows {
			fmt.Fprintf(w, "%s\t%.3f\t%.3f\n", v.Metric, v.P50, v.P99)
		}
	}
	w.Flush()
}

func times(f float64) string {
	if f == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", f)
}
