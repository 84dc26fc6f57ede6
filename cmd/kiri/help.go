package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/term"
)

// help is `kiri help [COMMAND]`.
func (c *cli) help(args []string) error {
	if len(args) == 0 {
		c.printHelp(c.out)
		return nil
	}
	if args[0] == "daemon" {
		return errors.New("run '" + prog + " daemon --help'")
	}
	cmd, _ := findCommand(args)
	if cmd == nil {
		return c.handOver(append(args[:len(args):len(args)], "--help"), unknownCommand(args))
	}
	f := newFlagSet(cmd)
	cmd.run(c, f)
	c.printCommandHelp(c.out, cmd, f)
	return nil
}

// helpWidth is the terminal's width, within bounds that keep lines readable.
func (c *cli) helpWidth() int {
	if f, ok := c.out.(*os.File); ok {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			return min(w, 120)
		}
	}
	return 80
}

func (c *cli) printCommandHelp(w io.Writer, cmd *command, f *pflag.FlagSet) {
	fmt.Fprintf(w, "%s\n\n%s\n", cmd.usageLine(), cmd.short)
	if len(cmd.long) > 0 {
		names := append(append([]string{}, cmd.long...), cmd.name)
		fmt.Fprintf(w, "\nAliases:\n  %s %s\n", prog, strings.Join(names, ", "+prog+" "))
	}
	if cmd.example != "" {
		fmt.Fprintf(w, "\nExamples:\n%s\n", cmd.example)
	}
	if usage := f.FlagUsagesWrapped(c.helpWidth()); usage != "" {
		fmt.Fprintf(w, "\nOptions:\n%s", usage)
	}
}

func (c *cli) printHelp(w io.Writer) {
	fmt.Fprintf(w, "Usage:  %s [OPTIONS] COMMAND [ARG...]\n\nA container engine. Commands and options are Docker's, aimed at kiri.\n\nCommands:\n", prog)
	line := func(name, short string) { fmt.Fprintf(w, "  %-11s %s\n", name, short) }
	for _, cmd := range commands() {
		if !strings.Contains(cmd.name, " ") || strings.HasPrefix(cmd.name, "debug") {
			line(cmd.name, cmd.short)
		}
	}
	line("daemon", "Run the engine")
	line("help", "Show this, or the help of a command")
	fmt.Fprint(w, "\nAny other command of docker's (build, compose, cp, network, volume, ...) is handed to the docker CLI with kiri's socket.\n\nOptions:\n")
	f := pflag.NewFlagSet(prog, pflag.ContinueOnError)
	(&cli{}).addGlobals(f)
	f.BoolP("version", "v", false, "Print version information and quit")
	fmt.Fprint(w, f.FlagUsagesWrapped(c.helpWidth()))
	fmt.Fprintf(w, "\nRun '%s COMMAND --help' for more information on a command.\n", prog)
}
