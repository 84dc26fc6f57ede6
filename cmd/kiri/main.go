// Command kiri is the engine's command line, and with `kiri daemon` the engine itself.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"runkiri.com/kiri/internal/config"
)

// Set by the linker: -X main.version=... -X main.gitCommit=... -X main.buildTime=...
var (
	version   = "0.1.0-dev"
	gitCommit = ""
	buildTime = ""
)

func main() {
	err := run(context.Background(), os.Args[1:])
	if err == nil || errors.Is(err, config.ErrHelp) {
		return
	}
	fmt.Fprintln(os.Stderr, "kiri:", err)
	os.Exit(1)
}

func run(ctx context.Context, args []string) error {
	command := ""
	if len(args) > 0 {
		command = args[0]
	}
	switch command {
	case "daemon":
		return runDaemon(ctx, args[1:])
	case "":
		return errors.New("no command given; try kiri daemon --help")
	default:
		return fmt.Errorf("unknown command %q", command)
	}
}
