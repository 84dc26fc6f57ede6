//go:build linux

// kiri-init is the agent of kiri: what makes containers and looks after them. It is started by the daemon; the same
// program is the init process of containers with --init and the child that unpacks layers.
package main

import (
	"fmt"
	"os"

	"runkiri.com/kiri/internal/agent"
	"runkiri.com/kiri/internal/agent/launch"
	"runkiri.com/kiri/internal/agent/rootfs"
)

// version is set by the linker: -X main.version=...
var version = "0.1.0-dev"

func main() { os.Exit(run()) }

func run() int {
	if os.Args[0] == launch.InitName {
		return launch.InitMain(os.Args)
	}
	if len(os.Args) < 2 {
		usage(os.Stderr)
		return 2
	}
	switch os.Args[1] {
	case "agent":
		return agent.Main(os.Args[2:], version)
	case "init":
		return launch.InitMain(os.Args[1:])
	case "unpack":
		return rootfs.UnpackMain()
	case "-v", "--version", "version":
		fmt.Println("kiri-init version " + version)
		return 0
	case "-h", "--help", "help":
		usage(os.Stdout)
		return 0
	}
	fmt.Fprintf(os.Stderr, "kiri-init: unknown command %q\n", os.Args[1])
	usage(os.Stderr)
	return 2
}

func usage(out *os.File) {
	fmt.Fprint(out, `Usage: kiri-init COMMAND

Commands:
  agent --data-root DIR --exec-root DIR   make and supervise containers for the daemon
  init -x PATH -- COMMAND [ARG...]        run a command as PID 1: pass signals on, reap orphans
  unpack                                  unpack one layer (started by the agent)
  --version                               print the version
`)
}
