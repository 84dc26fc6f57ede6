package main

import (
	"io"

	"github.com/spf13/pflag"
)

func cmdDebugPlan() *command {
	return &command{
		name: "debug plan", use: "CONTAINER", short: "Print the launch program of a container: every system call between clone and exec",
		example: "  kiri debug plan web", min: 1, max: 1,
		run: func(c *cli, _ *pflag.FlagSet) func([]string) error {
			return func(args []string) error {
				cl, err := c.client()
				if err != nil {
					return err
				}
				res, err := cl.do(&request{method: "GET", path: idPath("/kiri/containers/", args[0], "/plan")})
				if err != nil {
					return err
				}
				defer res.Close()
				_, err = io.Copy(c.out, res)
				return err
			}
		},
	}
}
