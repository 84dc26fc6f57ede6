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
	args := os.Args[1:]
	if len(args) == 0 || args[0] != "daemon" {
		os.Exit(runCLI(args))
	}
	err := runDaemon(context.Background(), args[1:])
	if err == nil || errors.Is(err, config.ErrHelp) {
		return
	}
	fmt.Fprintln(os.Stderr, "kiri:", err)
	os.Exit(1)
}
