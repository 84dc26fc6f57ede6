package main

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/spf13/pflag"
)

// createFlags are the options of `create` beyond those that describe the container.
type createFlags struct {
	*containerFlags
	name     string
	platform string
	pull     string
	quiet    bool
}

func addCreateFlags(f *pflag.FlagSet) *createFlags {
	o := &createFlags{containerFlags: addContainerFlags(f)}
	f.StringVar(&o.name, "name", "", "Assign a name to the container")
	f.StringVar(&o.platform, "platform", "", "Set platform if server is multi-platform capable")
	f.StringVar(&o.pull, "pull", "missing", "Pull image before running (\"always\", \"missing\", \"never\")")
	f.BoolVarP(&o.quiet, "quiet", "q", false, "Suppress the pull output")
	return o
}

func cmdRun() *command {
	return &command{
		name: "run", long: []string{"container run"}, use: "[OPTIONS] IMAGE [COMMAND] [ARG...]",
		short: "Create and run a new container from an image",
		example: `  kiri run --rm alpine echo hello         one command, then nothing is left
  kiri run --rm -it alpine sh             a shell
  kiri run -d --name web -p 8080:80 nginx a server in the background
  kiri run --rm -v .:/src -w /src golang go test ./...`,
		min: 1, max: -1, posix: true,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			o := addCreateFlags(f)
			detach := f.BoolP("detach", "d", false, "Run container in background and print container ID")
			keys := f.String("detach-keys", "", "Override the key sequence for detaching a container")
			proxy := f.Bool("sig-proxy", true, "Proxy received signals to the process")
			return func(args []string) error { return c.runContainer(o, args, *detach, *proxy, *keys) }
		},
	}
}

func cmdCreate() *command {
	return &command{
		name: "create", long: []string{"container create"}, use: "[OPTIONS] IMAGE [COMMAND] [ARG...]",
		short: "Create a new container",
		example: `  kiri create --name web -p 8080:80 nginx
  kiri start -a web`,
		min: 1, max: -1, posix: true,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			o := addCreateFlags(f)
			return func(args []string) error {
				if err := checkPull(o.pull); err != nil {
					return &status{exitEngine, prog + ": " + err.Error() + "\n\nRun '" + prog + " create --help' for more information"}
				}
				cfg, host, nets, err := o.request(args[0], args[1:])
				if err != nil {
					return &status{exitEngine, prog + ": " + err.Error() + "\n\nRun '" + prog + " create --help' for more information"}
				}
				id, err := c.create(o, cfg, host, nets)
				if err != nil {
					return err
				}
				fmt.Fprintln(c.out, id)
				return nil
			}
		},
	}
}

func checkPull(v string) error {
	if v != "always" && v != "missing" && v != "never" {
		return fmt.Errorf(`invalid pull option: '%s': must be one of "always", "missing" or "never"`, v)
	}
	return nil
}

// create makes a container, pulling its image first when asked or when it is missing, and writes --cidfile.
func (c *cli) create(o *createFlags, cfg *container.Config, host *container.HostConfig, nets *network.NetworkingConfig) (id string, err error) {
	cl, err := c.client()
	if err != nil {
		return "", err
	}
	if o.cidfile != "" {
		if _, err := os.Stat(o.cidfile); err == nil {
			return "", fmt.Errorf("container ID file found, make sure the other container isn't running or delete %s", o.cidfile)
		}
		// Made before the container: if it cannot be written there must be no container.
		f, err := os.OpenFile(o.cidfile, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
		if err != nil {
			return "", fmt.Errorf("failed to create the container ID file: %w", err)
		}
		defer func() {
			_, werr := io.WriteString(f, id)
			if cerr := f.Close(); werr == nil {
				werr = cerr
			}
			if id == "" {
				os.Remove(o.cidfile)
			} else if err == nil && werr != nil {
				err = fmt.Errorf("failed to write the container ID to the file: %w", werr)
			}
		}()
	}
	docker, err := c.dockerConfig()
	if err != nil {
		return "", err
	}
	for k, v := range docker.proxyEnv(cl.host) {
		if !setsEnv(cfg.Env, k) {
			cfg.Env = append(cfg.Env, k+"="+v)
		}
	}
	body, err := encodeCreate(cfg, host, nets)
	if err != nil {
		return "", fmt.Errorf("encoding the request: %w", err)
	}
	query := url.Values{}
	if o.name != "" {
		query.Set("name", o.name)
	}
	if o.platform != "" {
		query.Set("platform", o.platform)
	}
	if o.pull == "always" {
		if err := c.pullFor(cfg.Image, o); err != nil {
			return "", err
		}
	}
	var res container.CreateResponse
	err = cl.call("POST", "/containers/create", query, body, &res)
	if isStatus(err, 404) && o.pull == "missing" && strings.Contains(strings.ToLower(err.Error()), "no such image") {
		// Standard output belongs to the container; all about the pull goes to standard error.
		fmt.Fprintf(c.err, "Unable to find image '%s' locally\n", taggedName(cfg.Image))
		if err := c.pullFor(cfg.Image, o); err != nil {
			return "", err
		}
		err = cl.call("POST", "/containers/create", query, body, &res)
	}
	if err != nil {
		return "", err
	}
	for _, w := range res.Warnings {
		fmt.Fprintln(c.err, "WARNING:", w)
	}
	return res.ID, nil
}

func setsEnv(env []string, name string) bool {
	for _, e := range env {
		if k, _, _ := strings.Cut(e, "="); k == name {
			return true
		}
	}
	return false
}

func (c *cli) pullFor(image string, o *createFlags) error {
	out := c.err
	if o.quiet {
		out = io.Discard
	}
	return c.pullImage(image, o.platform, out)
}

func (c *cli) runContainer(o *createFlags, args []string, detach, proxy bool, keys string) error {
	if err := checkPull(o.pull); err != nil {
		return runError(err)
	}
	cfg, host, nets, err := o.request(args[0], args[1:])
	if err != nil {
		return runError(err)
	}
	if detach {
		if len(o.attach) > 0 {
			return errors.New("conflicting options: cannot specify both --attach and --detach")
		}
		cfg.AttachStdin, cfg.AttachStdout, cfg.AttachStderr, cfg.StdinOnce = false, false, false, false
	} else if err := c.checkTTY(cfg.AttachStdin, cfg.Tty); err != nil {
		return err
	}
	if cfg.Tty {
		if h, w := c.ttySize(); h > 0 && w > 0 {
			host.ConsoleSize = [2]uint{h, w}
		}
	}
	id, err := c.create(o, cfg, host, nets)
	if err != nil {
		return runError(err)
	}
	cl := c.c
	if !cfg.AttachStdout && !cfg.AttachStderr {
		defer fmt.Fprintln(c.out, id)
	}
	if !cfg.AttachStdin && !cfg.AttachStdout && !cfg.AttachStderr {
		if err := cl.call("POST", idPath("/containers/", id, "/start"), nil, nil, nil); err != nil {
			return startError(err)
		}
		return nil
	}
	// Attach and wait must be registered before the start, or a quick container would be gone before anybody listens. Neither needs the
	// other, so both are under way at once.
	condition := "next-exit"
	if host.AutoRemove {
		condition = "removed"
	}
	attach := attachQuery(cfg.AttachStdin, cfg.AttachStdout, cfg.AttachStderr, keys)
	attaching := cl.send(&request{method: "POST", path: idPath("/containers/", id, "/attach"), query: attach, hijack: true})
	waiting := cl.send(&request{method: "POST", path: idPath("/containers/", id, "/wait"), query: url.Values{"condition": {condition}}})
	ready := func() {}
	if proxy && !cfg.Tty {
		ready = c.proxySignals(id)
	}
	s, err := attaching.upgrade()
	if err != nil {
		return runError(err)
	}
	defer s.conn.Close()
	waited, err := waiting.answer()
	if err != nil {
		return runError(err)
	}
	ready()
	if err := cl.call("POST", idPath("/containers/", id, "/start"), nil, nil, nil); err != nil {
		if host.AutoRemove {
			_, _ = exitCode(waited) // the container is gone when this answers; its code says nothing
		}
		return startError(err)
	}
	if cfg.Tty && c.outIsTerminal() {
		defer c.followSize("/containers/"+id+"/resize", false)()
	}
	p := &pump{stream: s, tty: cfg.Tty, keys: c.detachKeys(keys)}
	if cfg.AttachStdin {
		p.in = c.in
	}
	if cfg.AttachStdout {
		p.out = c.out
	}
	if cfg.AttachStderr {
		p.err = c.err
		if cfg.Tty {
			p.err = c.out
		}
	}
	if err := c.pump(p); err != nil {
		if errors.Is(err, errDetached) {
			return nil
		}
		return err
	}
	code, err := exitCode(waited)
	if err != nil {
		return runError(err)
	}
	return exitWith(code)
}

func attachQuery(stdin, stdout, stderr bool, keys string) url.Values {
	q := url.Values{"stream": {"1"}}
	for name, on := range map[string]bool{"stdin": stdin, "stdout": stdout, "stderr": stderr} {
		if on {
			q.Set(name, "1")
		}
	}
	if keys != "" {
		q.Set("detachKeys", keys)
	}
	return q
}

// exitCode reads the answer of a wait.
func exitCode(res *response) (int, error) {
	var w container.WaitResponse
	if err := decode(res, nil)(&w); err != nil {
		return exitEngine, err
	}
	if w.Error != nil && w.Error.Message != "" {
		return exitEngine, errors.New("Error waiting for container: " + w.Error.Message)
	}
	return int(w.StatusCode), nil
}

// checkTTY refuses -it without a terminal, before anything is made.
func (c *cli) checkTTY(stdin, tty bool) error {
	if stdin && tty && !isTerminal(c.in) {
		return errors.New("the input device is not a TTY")
	}
	return nil
}

// taggedName adds the tag that a name without one stands for.
func taggedName(image string) string {
	name := image[strings.LastIndexByte(image, '/')+1:]
	if strings.ContainsAny(name, ":@") {
		return image
	}
	return image + ":latest"
}

// sizeQuery is the size of a terminal as the resize calls take it.
func sizeQuery(h, w uint) url.Values {
	return url.Values{"h": {strconv.FormatUint(uint64(h), 10)}, "w": {strconv.FormatUint(uint64(w), 10)}}
}
