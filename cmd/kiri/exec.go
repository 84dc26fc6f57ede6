package main

import (
	"errors"
	"strings"

	"github.com/spf13/pflag"
)

func cmdExec() *command {
	return &command{
		name: "exec", long: []string{"container exec"}, use: "[OPTIONS] CONTAINER COMMAND [ARG...]",
		short: "Execute a command in a running container",
		example: `  kiri exec web ls /etc
  kiri exec -it web sh`,
		min: 2, max: -1, posix: true,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			o := &execFlags{}
			f.BoolVarP(&o.detach, "detach", "d", false, "Detached mode: run command in the background")
			f.StringVar(&o.keys, "detach-keys", "", "Override the key sequence for detaching a container")
			f.VarP(list(&o.env, checkEnv), "env", "e", "Set environment variables")
			f.Var(list(&o.envFile, nil), "env-file", "Read in a file of environment variables")
			f.BoolVarP(&o.interactive, "interactive", "i", false, "Keep STDIN open even if not attached")
			f.BoolVar(&o.privileged, "privileged", false, "Give extended privileges to the command")
			f.BoolVarP(&o.tty, "tty", "t", false, "Allocate a pseudo-TTY")
			f.StringVarP(&o.user, "user", "u", "", "Username or UID (format: \"<name|uid>[:<group|gid>]\")")
			f.StringVarP(&o.workdir, "workdir", "w", "", "Working directory inside the container")
			return func(args []string) error { return c.exec(o, args[0], args[1:]) }
		},
	}
}

type execFlags struct {
	detach, interactive, privileged, tty bool
	keys, user, workdir                  string
	env, envFile                         []string
}

func (c *cli) exec(o *execFlags, name string, args []string) error {
	env, err := envOf(o.envFile, o.env)
	if err != nil {
		return err
	}
	stdin := o.interactive && !o.detach
	if err := c.checkTTY(stdin, o.tty && !o.detach); err != nil {
		return err
	}
	cl, err := c.client()
	if err != nil {
		return err
	}
	size := func(w *objectWriter) {
		if h, wd := c.ttySize(); o.tty && h > 0 && wd > 0 {
			w.rare("ConsoleSize", [2]uint{h, wd}, true)
		}
	}
	w := &objectWriter{}
	w.open("")
	w.str("User", o.user)
	w.flag("Privileged", o.privileged)
	w.flag("Tty", o.tty)
	w.flag("AttachStdin", stdin)
	w.flag("AttachStdout", !o.detach)
	w.flag("AttachStderr", !o.detach)
	w.flag("Detach", o.detach)
	w.str("DetachKeys", o.keys)
	w.strs("Env", env)
	w.str("WorkingDir", o.workdir)
	w.strs("Cmd", args)
	size(w)
	w.close()
	var created struct {
		ID string `json:"Id"`
	}
	if err := cl.call("POST", idPath("/containers/", name, "/exec"), nil, w.b, &created); err != nil {
		return err
	}
	if created.ID == "" {
		return errors.New("exec ID empty")
	}
	start := &objectWriter{}
	start.open("")
	start.boolean("Detach", o.detach)
	start.boolean("Tty", o.tty)
	size(start)
	start.close()
	path := idPath("/exec/", created.ID, "/start")
	if o.detach {
		return execError(cl.call("POST", path, nil, start.b, nil))
	}
	s, err := cl.send(&request{method: "POST", path: path, body: start.b, hijack: true}).upgrade()
	if err != nil {
		return execError(err)
	}
	defer s.conn.Close()
	if o.tty && c.outIsTerminal() {
		defer c.followSize("/exec/"+created.ID+"/resize", false)()
	}
	p := &pump{stream: s, tty: o.tty, keys: c.detachKeys(o.keys), out: c.out, err: c.err}
	if stdin {
		p.in = c.in
	}
	if err := c.pump(p); err != nil {
		if errors.Is(err, errDetached) {
			return nil
		}
		return err
	}
	var done struct{ ExitCode *int }
	if err := cl.call("GET", idPath("/exec/", created.ID, "/json"), nil, nil, &done); err != nil {
		// The container, and its execs with it, may be gone by now.
		if isStatus(err, 404) {
			return exitWith(exitNotFound)
		}
		return err
	}
	if done.ExitCode == nil {
		return nil
	}
	return exitWith(*done.ExitCode)
}

// execError gives a command that could not be started its exit code.
func execError(err error) error {
	if err == nil {
		return nil
	}
	msg := err.Error()
	switch {
	case strings.Contains(msg, "executable file not found"), strings.Contains(msg, "no such file or directory"):
		return &status{exitNotFound, msg}
	case strings.Contains(msg, "permission denied"), strings.Contains(msg, "is a directory"):
		return &status{exitNotExecutable, msg}
	}
	return err
}
