package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// prog is the name that messages and help carry.
const prog = "kiri"

// cli is one run of the command line: where it talks to and what it writes to.
type cli struct {
	in       *os.File
	out, err io.Writer
	args     []string // as given, without the program's name
	global   globals
	c        *client
	config   *dockerConfig
}

// globals are the options in front of the command.
type globals struct {
	host      string
	configDir string
	tls       bool
	tlsVerify bool
	tlsCA     string
	tlsCert   string
	tlsKey    string
	noStart   bool
	debug     bool
}

// A command is one native subcommand. Its flags are made only when it is the one called: a run pays for no other command.
type command struct {
	name    string   // "run", or "container ls" where the short form has another name
	long    []string // other spellings, each as a whole: "container run"
	use     string   // what follows the name in the usage line
	short   string
	example string
	min     int // operands
	max     int // -1: any number
	// posix: options end at the first operand, because what follows is a command line of its own
	posix bool
	// run makes its flags in f and gives the function to call once they are parsed
	run func(c *cli, f *pflag.FlagSet) func(args []string) error
}

// commands lists the native commands in the order `kiri help` prints them. It is a function so that nothing is built before main.
func commands() []*command {
	return []*command{
		cmdRun(), cmdExec(), cmdPs(), cmdLogs(), cmdPull(), cmdImages(),
		cmdCreate(), cmdStart(), cmdStop(), cmdRestart(), cmdKill(), cmdPause(), cmdUnpause(), cmdRename(), cmdRm(), cmdAttach(),
		cmdWait(), cmdInspect(), cmdContainerInspect(), cmdImageInspect(), cmdRmi(), cmdTag(), cmdImport(),
		cmdVersion(), cmdInfo(), cmdContext(), cmdDebugPlan(), cmdBench(),
	}
}

// runCLI runs every command but the daemon and gives the exit code.
func runCLI(args []string) int {
	// A command lives for milliseconds; collecting its garbage would cost more than the garbage. The limit turns the collector back on
	// for the few that live long or hold much (logs -f, a large import).
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(64 << 20)
	c := &cli{in: os.Stdin, out: os.Stdout, err: os.Stderr, args: args}
	return c.exit(c.dispatch(args))
}

// exit prints an error the way Docker's CLI does and turns it into an exit code.
func (c *cli) exit(err error) int {
	if err == nil {
		return 0
	}
	code := 1
	var s *status
	if errors.As(err, &s) {
		code = s.code
	}
	if msg := err.Error(); msg != "" {
		fmt.Fprintln(c.err, msg)
	}
	return code
}

// dispatch reads the global options, finds the command and runs it, or hands the line to the docker CLI.
func (c *cli) dispatch(args []string) error {
	rest, err := c.parseGlobals(args)
	if err != nil {
		return err
	}
	if len(rest) == 0 {
		c.printHelp(c.out)
		return nil
	}
	switch rest[0] {
	case "help":
		return c.help(rest[1:])
	case "-h", "--help":
		c.printHelp(c.out)
		return nil
	case "-v", "--version":
		c.printVersionLine()
		return nil
	}
	cmd, operands := findCommand(rest)
	if cmd == nil {
		return c.handOver(rest, unknownCommand(rest))
	}
	f := newFlagSet(cmd)
	call := cmd.run(c, f)
	if err := f.Parse(operands); err != nil {
		var unknown *pflag.NotExistError
		switch {
		case errors.Is(err, pflag.ErrHelp):
			c.printCommandHelp(c.out, cmd, f)
			return nil
		case errors.As(err, &unknown):
			return c.handOver(rest, usageError(cmd, err))
		}
		return usageError(cmd, err)
	}
	if err := cmd.checkArgs(f.Args()); err != nil {
		return err
	}
	return call(f.Args())
}

// findCommand matches the longest spelling: `container ls -a` before `container`.
func findCommand(args []string) (*command, []string) {
	all := commands()
	for n := min(2, len(args)); n > 0; n-- {
		name := strings.Join(args[:n], " ")
		for _, cmd := range all {
			if cmd.name == name || slices.Contains(cmd.long, name) {
				return cmd, args[n:]
			}
		}
	}
	return nil, nil
}

func newFlagSet(cmd *command) *pflag.FlagSet {
	f := pflag.NewFlagSet(cmd.name, pflag.ContinueOnError)
	f.SetInterspersed(!cmd.posix)
	f.SortFlags = true
	f.Usage = func() {}
	f.SetOutput(io.Discard)
	return f
}

func usageError(cmd *command, err error) error {
	return &status{exitEngine, err.Error() + "\n\n" + cmd.usageLine() + "\n\nRun '" + prog + " " + cmd.name + " --help' for more information"}
}

func (cmd *command) usageLine() string {
	return "Usage:  " + strings.TrimSpace(prog+" "+cmd.name+" "+cmd.use)
}

// checkArgs counts operands, with the words of Docker's CLI.
func (cmd *command) checkArgs(args []string) error {
	n := len(args)
	if n >= cmd.min && (cmd.max < 0 || n <= cmd.max) {
		return nil
	}
	plural := func(n int) string {
		if n == 1 {
			return "1 argument"
		}
		return fmt.Sprint(n, " arguments")
	}
	want, see := "", "Run"
	switch {
	case cmd.max == 0:
		want = "accepts no arguments"
	case cmd.min == cmd.max:
		want = "requires " + plural(cmd.min)
	case cmd.max < 0:
		want, see = "requires at least "+plural(cmd.min), "See"
	default:
		want = fmt.Sprintf("requires at least %d and at most %d arguments", cmd.min, cmd.max)
		if cmd.min == 0 {
			want = "requires at most " + plural(cmd.max)
		}
	}
	return &status{1, fmt.Sprintf("%s: '%s %s' %s\n\n%s\n\n%s '%s %s --help' for more information", prog, prog, cmd.name, want, cmd.usageLine(), see, prog, cmd.name)}
}

func unknownCommand(args []string) error {
	name := args[0]
	if len(args) > 1 && !strings.HasPrefix(args[1], "-") && isGroup(name) {
		name += " " + args[1]
	}
	return &status{1, fmt.Sprintf("%s: unknown command: %s %s\n\nRun '%s --help' for more information", prog, prog, name, prog)}
}

// isGroup tells the words that are only the first half of a command.
func isGroup(name string) bool {
	return slices.Contains([]string{"builder", "buildx", "checkpoint", "compose", "config", "container", "context", "debug", "image", "manifest", "network",
		"node", "plugin", "secret", "service", "stack", "swarm", "system", "trust", "volume"}, name)
}

// parseGlobals reads the options before the command, which are Docker's.
func (c *cli) parseGlobals(args []string) ([]string, error) {
	if v := os.Getenv("KIRI_NO_DAEMON"); v != "" && v != "0" {
		c.global.noStart = true
	}
	c.global.host = os.Getenv("KIRI_HOST")
	if len(args) == 0 || !strings.HasPrefix(args[0], "-") {
		return args, nil // the common case makes no flag set
	}
	f := pflag.NewFlagSet(prog, pflag.ContinueOnError)
	f.SetInterspersed(false)
	f.Usage = func() {}
	f.SetOutput(io.Discard)
	c.addGlobals(f)
	help := f.BoolP("help", "h", false, "Print usage")
	ver := f.BoolP("version", "v", false, "Print version information and quit")
	docker := f.StringP("context", "c", "", "")
	if err := f.Parse(args); err != nil {
		return nil, &status{exitEngine, err.Error() + "\n\nUsage:  " + prog + " [OPTIONS] COMMAND [ARG...]\n\nRun '" + prog + " --help' for more information"}
	}
	if *docker != "" {
		return nil, errors.New(prog + ": --context is docker's: kiri always talks to kiri. Use --host to name another socket, or docker --context " + *docker)
	}
	switch {
	case *help:
		return []string{"--help"}, nil
	case *ver:
		return []string{"--version"}, nil
	}
	return f.Args(), nil
}

// addGlobals names the options in front of the command, for parsing and for `kiri --help`.
func (c *cli) addGlobals(f *pflag.FlagSet) {
	g := &c.global
	f.StringVarP(&g.host, "host", "H", g.host, "Daemon socket to connect to (default: $KIRI_HOST, else kiri's own)")
	f.StringVar(&g.configDir, "config", "", "Location of the docker client's config files (default \"~/.docker\")")
	f.BoolVarP(&g.debug, "debug", "D", false, "Enable debug mode")
	f.StringP("log-level", "l", "info", "Set the logging level (\"debug\", \"info\", \"warn\", \"error\", \"fatal\")")
	f.BoolVar(&g.noStart, "no-start", g.noStart, "Never start the daemon")
	f.BoolVar(&g.tls, "tls", false, "Use TLS; implied by --tlsverify")
	f.StringVar(&g.tlsCA, "tlscacert", "", "Trust certs signed only by this CA")
	f.StringVar(&g.tlsCert, "tlscert", "", "Path to TLS certificate file")
	f.StringVar(&g.tlsKey, "tlskey", "", "Path to TLS key file")
	f.BoolVar(&g.tlsVerify, "tlsverify", false, "Use TLS and verify the remote")
}
