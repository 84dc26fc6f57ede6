package main

import (
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/pflag"
)

// maxAtOnce bounds the calls that one command has under way, as Docker's CLI bounds them.
const maxAtOnce = 50

// forEach calls do for every name, many at once, prints the names that worked in the order given, and joins the errors.
func (c *cli) forEach(names []string, do func(name string) error) error {
	if _, err := c.client(); err != nil {
		return err
	}
	errs := make([]error, len(names))
	slots := make(chan struct{}, maxAtOnce)
	var wg sync.WaitGroup
	for i, name := range names {
		slots <- struct{}{}
		wg.Go(func() {
			errs[i] = do(name)
			<-slots
		})
	}
	wg.Wait()
	for i, name := range names {
		if errs[i] == nil {
			fmt.Fprintln(c.out, name)
		}
	}
	return errors.Join(errs...)
}

// post is the call that most of the commands below consist of.
func (c *cli) post(name, action string, q url.Values) error {
	return c.c.call("POST", idPath("/containers/", name, "/"+action), q, nil, nil)
}

func cmdStop() *command    { return stopCommand("stop", "Stop one or more running containers") }
func cmdRestart() *command { return stopCommand("restart", "Restart one or more containers") }

func stopCommand(name, short string) *command {
	return &command{
		name: name, long: []string{"container " + name}, use: "[OPTIONS] CONTAINER [CONTAINER...]", short: short,
		example: "  kiri " + name + " web\n  kiri " + name + " -t 2 web db", min: 1, max: -1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			signal := f.StringP("signal", "s", "", "Signal to send to the container")
			timeout := f.IntP("timeout", "t", 0, "Seconds to wait before killing the container")
			f.IntVar(timeout, "time", 0, "Seconds to wait before killing the container")
			f.Lookup("time").Hidden = true
			return func(args []string) error {
				q := url.Values{}
				if *signal != "" {
					q.Set("signal", *signal)
				}
				if f.Changed("timeout") || f.Changed("time") {
					q.Set("t", strconv.Itoa(*timeout))
				}
				return c.forEach(args, func(id string) error { return c.post(id, name, q) })
			}
		},
	}
}

func cmdKill() *command {
	return &command{
		name: "kill", long: []string{"container kill"}, use: "[OPTIONS] CONTAINER [CONTAINER...]", short: "Kill one or more running containers",
		example: "  kiri kill web\n  kiri kill -s HUP web", min: 1, max: -1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			signal := f.StringP("signal", "s", "", "Signal to send to the container")
			return func(args []string) error {
				q := url.Values{}
				if *signal != "" {
					q.Set("signal", *signal)
				}
				return c.forEach(args, func(id string) error { return c.post(id, "kill", q) })
			}
		},
	}
}

func cmdPause() *command {
	return plainCommand("pause", "Pause all processes within one or more containers")
}
func cmdUnpause() *command {
	return plainCommand("unpause", "Unpause all processes within one or more containers")
}

func plainCommand(name, short string) *command {
	return &command{
		name: name, long: []string{"container " + name}, use: "CONTAINER [CONTAINER...]", short: short, example: "  kiri " + name + " web", min: 1, max: -1,
		run: func(c *cli, _ *pflag.FlagSet) func([]string) error {
			return func(args []string) error {
				return c.forEach(args, func(id string) error { return c.post(id, name, nil) })
			}
		},
	}
}

func cmdRename() *command {
	return &command{
		name: "rename", long: []string{"container rename"}, use: "CONTAINER NEW_NAME", short: "Rename a container", example: "  kiri rename web old-web", min: 2, max: 2,
		run: func(c *cli, _ *pflag.FlagSet) func([]string) error {
			return func(args []string) error {
				if strings.TrimSpace(args[0]) == "" || strings.TrimSpace(args[1]) == "" {
					return errors.New("Error: Neither old nor new names may be empty")
				}
				if _, err := c.client(); err != nil {
					return err
				}
				if err := c.post(args[0], "rename", url.Values{"name": {args[1]}}); err != nil {
					return errors.Join(err, errors.New("Error: failed to rename container named "+args[0]))
				}
				return nil
			}
		},
	}
}

func cmdRm() *command {
	return &command{
		name: "rm", long: []string{"container rm", "container remove"}, use: "[OPTIONS] CONTAINER [CONTAINER...]", short: "Remove one or more containers",
		example: "  kiri rm web\n  kiri rm -f $(kiri ps -aq)", min: 1, max: -1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			force := f.BoolP("force", "f", false, "Force the removal of a running container (uses SIGKILL)")
			link := f.BoolP("link", "l", false, "Remove the specified link")
			volumes := f.BoolP("volumes", "v", false, "Remove anonymous volumes associated with the container")
			return func(args []string) error {
				q := url.Values{}
				for name, on := range map[string]bool{"force": *force, "link": *link, "v": *volumes} {
					if on {
						q.Set(name, "1")
					}
				}
				missing := true // every error so far was "no such container"
				err := c.forEach(args, func(id string) error {
					id = strings.Trim(id, "/")
					if id == "" {
						return errors.New("container name cannot be empty")
					}
					return c.c.call("DELETE", idPath("/containers/", id, ""), q, nil, nil)
				})
				for _, e := range unjoin(err) {
					missing = missing && isStatus(e, 404)
				}
				if err != nil && *force && missing {
					return &status{0, err.Error()} // rm -f of what is not there is done already, as with docker
				}
				return err
			}
		},
	}
}

func unjoin(err error) []error {
	if j, ok := err.(interface{ Unwrap() []error }); ok {
		return j.Unwrap()
	}
	if err == nil {
		return nil
	}
	return []error{err}
}

func cmdWait() *command {
	return &command{
		name: "wait", long: []string{"container wait"}, use: "CONTAINER [CONTAINER...]", short: "Block until one or more containers stop, then print their exit codes",
		example: "  kiri wait job", min: 1, max: -1,
		run: func(c *cli, _ *pflag.FlagSet) func([]string) error {
			return func(args []string) error {
				cl, err := c.client()
				if err != nil {
					return err
				}
				var errs []error
				for _, id := range args {
					res, err := cl.do(&request{method: "POST", path: idPath("/containers/", id, "/wait")})
					if err == nil {
						var code int
						if code, err = exitCode(res); err == nil {
							fmt.Fprintln(c.out, code)
							continue
						}
					}
					errs = append(errs, err)
				}
				return errors.Join(errs...)
			}
		},
	}
}

func cmdStart() *command {
	return &command{
		name: "start", long: []string{"container start"}, use: "[OPTIONS] CONTAINER [CONTAINER...]", short: "Start one or more stopped containers",
		example: "  kiri start web\n  kiri start -ai job", min: 1, max: -1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			attach := f.BoolP("attach", "a", false, "Attach STDOUT/STDERR and forward signals")
			interactive := f.BoolP("interactive", "i", false, "Attach container's STDIN")
			keys := f.String("detach-keys", "", "Override the key sequence for detaching a container")
			return func(args []string) error {
				if _, err := c.client(); err != nil {
					return err
				}
				if *attach || *interactive {
					if len(args) > 1 {
						return errors.New("you cannot start and attach multiple containers at once")
					}
					return c.startAttached(args[0], *attach, *interactive, *keys)
				}
				var failed []string
				for _, id := range args {
					if err := c.post(id, "start", nil); err != nil {
						fmt.Fprintln(c.err, err)
						failed = append(failed, id)
						continue
					}
					fmt.Fprintln(c.out, id)
				}
				if len(failed) > 0 {
					return errors.New("Error: failed to start containers: " + strings.Join(failed, ", "))
				}
				return nil
			}
		},
	}
}

// containerState is what attach and start need of an inspect.
type containerState struct {
	ID    string `json:"Id"`
	State struct {
		Running, Paused, Restarting bool
		ExitCode                    int
	}
	Config struct{ Tty, OpenStdin bool }

	HostConfig struct{ AutoRemove bool }
}

func (c *cli) containerState(name string) (*containerState, error) {
	var s containerState
	if err := c.c.call("GET", idPath("/containers/", name, "/json"), nil, nil, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

func (c *cli) startAttached(name string, output, input bool, keys string) error {
	s, err := c.containerState(name)
	if err != nil {
		return err
	}
	input = input && s.Config.OpenStdin
	if err := c.checkTTY(input, s.Config.Tty); err != nil {
		return err
	}
	attaching := c.c.send(&request{method: "POST", path: idPath("/containers/", s.ID, "/attach"), query: attachQuery(input, true, true, keys), hijack: true})
	condition := "next-exit"
	switch {
	case s.HostConfig.AutoRemove:
		condition = "removed"
	case s.State.Running:
		condition = "not-running"
	}
	waiting := c.c.send(&request{method: "POST", path: idPath("/containers/", s.ID, "/wait"), query: url.Values{"condition": {condition}}})
	if !s.Config.Tty {
		c.proxySignals(s.ID)()
	}
	st, err := attaching.upgrade()
	if err != nil {
		return err
	}
	defer st.conn.Close()
	waited, err := waiting.answer()
	if err != nil {
		return err
	}
	if err := c.post(s.ID, "start", nil); err != nil {
		return err
	}
	if s.Config.Tty && c.outIsTerminal() {
		defer c.followSize("/containers/"+s.ID+"/resize", false)()
	}
	return c.pumpToExit(st, s, input, keys, waited)
}

// pumpToExit shows a container's output until it ends and gives its exit code.
func (c *cli) pumpToExit(st *stream, s *containerState, input bool, keys string, waited *response) error {
	p := &pump{stream: st, tty: s.Config.Tty, keys: c.detachKeys(keys), out: c.out, err: c.err}
	if input {
		p.in = c.in
	}
	if err := c.pump(p); err != nil {
		return err
	}
	code, err := exitCode(waited)
	if err != nil {
		return err
	}
	return exitWith(code)
}

func cmdAttach() *command {
	return &command{
		name: "attach", long: []string{"container attach"}, use: "[OPTIONS] CONTAINER", short: "Attach local standard input, output, and error streams to a running container",
		example: "  kiri attach web\n  kiri attach --no-stdin --sig-proxy=false web", min: 1, max: 1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			keys := f.String("detach-keys", "", "Override the key sequence for detaching a container")
			noStdin := f.Bool("no-stdin", false, "Do not attach STDIN")
			proxy := f.Bool("sig-proxy", true, "Proxy all received signals to the process")
			return func(args []string) error {
				cl, err := c.client()
				if err != nil {
					return err
				}
				s, err := c.containerState(args[0])
				if err != nil {
					return err
				}
				switch {
				case !s.State.Running:
					return &status{1, "You cannot attach to a stopped container, start it first"}
				case s.State.Paused:
					return &status{1, "You cannot attach to a paused container, unpause it first"}
				case s.State.Restarting:
					return &status{1, "You cannot attach to a restarting container, wait until it is running"}
				}
				input := s.Config.OpenStdin && !*noStdin
				if err := c.checkTTY(input, s.Config.Tty); err != nil {
					return err
				}
				waiting := cl.send(&request{method: "POST", path: idPath("/containers/", s.ID, "/wait")})
				attaching := cl.send(&request{method: "POST", path: idPath("/containers/", s.ID, "/attach"), query: attachQuery(input, true, true, *keys), hijack: true})
				st, err := attaching.upgrade()
				if err != nil {
					return err
				}
				defer st.conn.Close()
				if *proxy && !s.Config.Tty {
					c.proxySignals(s.ID)()
				}
				waited, err := waiting.answer()
				if err != nil {
					return err
				}
				if s.Config.Tty && c.outIsTerminal() {
					defer c.followSize("/containers/"+s.ID+"/resize", true)()
				}
				return c.pumpToExit(st, s, input, *keys, waited)
			}
		},
	}
}
