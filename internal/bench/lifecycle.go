package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"
)

// Path is a way to an engine: its API, or a command.
type Path string

const (
	PathAPI  Path = "Engine API" // create, wait for removal, start, on the engine's socket
	PathCLI  Path = "docker CLI" // docker run --rm IMAGE true
	PathKiri Path = "kiri CLI"   // kiri run --rm IMAGE true
)

// Options say what is measured.
type Options struct {
	Runs    int    // timed runs
	Warmup  int    // runs before them
	Image   string // must be on every engine
	Network string // "none" or "bridge"
	Command string // "true", found in the image's PATH
	Floor   *Floor // if not nil, measured in the same rounds
	Only    Path   // "" is every path
	// Progress, if not nil, is called before each round with its number (1 to Warmup+Runs).
	Progress func(round, rounds int)
}

// Row is one engine measured on one path.
type Row struct {
	Engine  Engine
	Path    Path
	Samples Samples
	Failed  error // why there are no (more) samples
}

type subject struct {
	row *Row
	run func(context.Context) error
}

// Lifecycle measures every engine on every path, interleaved: each round runs each of them once, in a new random
// order, so that heat and load fall on all alike. An engine that fails is reported in its row and left out from then
// on. The docker paths are left out where there is no docker command.
func Lifecycle(ctx context.Context, engines []Engine, o Options) ([]*Row, error) {
	docker, _ := exec.LookPath("docker")
	self, _ := os.Executable()
	var rows []*Row
	var subjects []subject
	add := func(e Engine, p Path, run func(context.Context) error) {
		if o.Only != "" && o.Only != p {
			return
		}
		r := &Row{Engine: e, Path: p}
		rows = append(rows, r)
		subjects = append(subjects, subject{r, run})
	}
	for _, e := range engines {
		api := newAPI(e.Socket)
		defer api.close()
		if err := api.hasImage(ctx, o.Image); err != nil {
			rows = append(rows, &Row{Engine: e, Path: PathAPI, Failed: err})
			continue
		}
		add(e, PathAPI, func(ctx context.Context) error { return api.runOnce(ctx, o) })
		if docker != "" {
			add(e, PathCLI, func(ctx context.Context) error { return command(ctx, docker, "DOCKER_HOST=unix://"+e.Socket, o) })
		}
		if e.Key == "kiri" && self != "" {
			add(e, PathKiri, func(ctx context.Context) error { return command(ctx, self, "KIRI_HOST=unix://"+e.Socket, o) })
		}
	}
	if len(subjects) == 0 {
		return rows, nil
	}
	rounds := o.Warmup + o.Runs
	for round := range rounds {
		if o.Progress != nil {
			o.Progress(round+1, rounds)
		}
		if o.Floor != nil {
			if err := o.Floor.Round(round >= o.Warmup); err != nil {
				return rows, fmt.Errorf("measuring the floor: %w", err)
			}
		}
		rand.Shuffle(len(subjects), func(i, j int) { subjects[i], subjects[j] = subjects[j], subjects[i] })
		for _, s := range subjects {
			if s.row.Failed != nil {
				continue
			}
			start := time.Now()
			err := s.run(ctx)
			took := time.Since(start)
			if ctx.Err() != nil {
				return rows, context.Cause(ctx)
			}
			if err != nil {
				s.row.Failed = err
			} else if round >= o.Warmup {
				s.row.Samples = append(s.row.Samples, took)
			}
		}
	}
	return rows, nil
}

// Together starts n containers at once through e's API and returns how long it took until all were gone.
func Together(ctx context.Context, e Engine, n int, o Options) (time.Duration, error) {
	api := newAPI(e.Socket)
	defer api.close()
	if err := api.hasImage(ctx, o.Image); err != nil {
		return 0, err
	}
	errs := make(chan error, n)
	start := time.Now()
	for range n {
		go func() { errs <- api.runOnce(ctx, o) }()
	}
	var all error
	failed := 0
	for range n {
		if err := <-errs; err != nil {
			failed++
			all = err
		}
	}
	took := time.Since(start)
	if all != nil {
		return took, fmt.Errorf("%d of %d failed, last: %w", failed, n, all)
	}
	return took, nil
}

// RoundTrip measures `docker version` against e: what the docker command costs before an engine does anything.
func RoundTrip(ctx context.Context, e Engine, runs int) (Samples, error) {
	docker, err := exec.LookPath("docker")
	if err != nil {
		return nil, err
	}
	var s Samples
	for range runs {
		start := time.Now()
		if err := call(ctx, docker, "DOCKER_HOST=unix://"+e.Socket, "version"); err != nil {
			return s, err
		}
		s = append(s, time.Since(start))
	}
	return s, nil
}

func command(ctx context.Context, program, env string, o Options) error {
	return call(ctx, program, env, "run", "--rm", "--network", o.Network, o.Image, o.Command)
}

func call(ctx context.Context, program, env string, args ...string) error {
	c := exec.CommandContext(ctx, program, args...)
	c.Env = append(os.Environ(), env, "DOCKER_CONTEXT=")
	var out bytes.Buffer
	c.Stderr = &out
	if err := c.Run(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, bytes.TrimSpace(out.Bytes()))
	}
	return nil
}

// api is a client with nothing between the measurement and the socket but net/http.
type api struct {
	http *http.Client
	t    *http.Transport
}

func newAPI(socket string) *api {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
		MaxIdleConnsPerHost: 256,
		DisableCompression:  true,
	}
	return &api{http: &http.Client{Transport: t}, t: t}
}

func (a *api) close() { a.t.CloseIdleConnections() }

func (a *api) do(ctx context.Context, method, path string, body, into any) error {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://engine"+path, r)
	if err != nil {
		return err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		var e struct{ Message string }
		json.NewDecoder(io.LimitReader(resp.Body, 1<<16)).Decode(&e)
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, e.Message)
	}
	if into != nil {
		if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
			return fmt.Errorf("%s %s: reading the answer: %w", method, path, err)
		}
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

func (a *api) hasImage(ctx context.Context, image string) error {
	if err := a.do(ctx, "GET", "/images/"+image+"/json", nil, nil); err != nil {
		return fmt.Errorf("image %s (pull it on each engine first): %w", image, err)
	}
	return nil
}

// runOnce is what `docker run --rm` asks of an engine, less the streams: create, wait for the removal, start.
func (a *api) runOnce(ctx context.Context, o Options) error {
	var created struct{ ID string }
	err := a.do(ctx, "POST", "/containers/create", map[string]any{
		"Image": o.Image, "Cmd": []string{o.Command},
		"HostConfig": map[string]any{"NetworkMode": o.Network, "AutoRemove": true},
	}, &created)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, "POST", "http://engine/containers/"+created.ID+"/wait?condition=removed", nil)
	if err != nil {
		return err
	}
	// An engine sends the header of wait as soon as it waits, which is when it is safe to start.
	resp, err := a.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := a.do(ctx, "POST", "/containers/"+created.ID+"/start", nil, nil); err != nil {
		return err
	}
	var ended struct {
		StatusCode int
		Error      *struct{ Message string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&ended); err != nil {
		return fmt.Errorf("waiting for %s: %w", created.ID, err)
	}
	io.Copy(io.Discard, resp.Body)
	if ended.Error != nil {
		return errors.New(ended.Error.Message)
	}
	if ended.StatusCode != 0 {
		return fmt.Errorf("container %s exited with %d", created.ID, ended.StatusCode)
	}
	return nil
}
