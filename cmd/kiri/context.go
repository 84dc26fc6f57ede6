package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/pflag"
)

func cmdContext() *command {
	return &command{
		name: "context", use: "[use]", short: "Make the docker context \"kiri\", and with \"use\" select it",
		example: `  kiri context            then: docker --context kiri ps
  kiri context use        then: docker ps
  docker context use default   to go back`,
		max: 1,
		run: func(c *cli, _ *pflag.FlagSet) func([]string) error {
			return func(args []string) error {
				if len(args) == 1 && args[0] != "use" {
					// ls, rm, inspect and the like are docker's.
					return c.handOver(append([]string{"context"}, args...), unknownCommand(append([]string{"context"}, args...)))
				}
				return c.makeContext(len(args) == 1)
			}
		},
	}
}

// makeContext writes the context's file in docker's store, where the docker CLI, compose and IDEs find it. It needs no docker CLI.
func (c *cli) makeContext(use bool) error {
	host := c.Host()
	meta, err := json.Marshal(map[string]any{
		"Name":      prog,
		"Metadata":  map[string]string{"Description": "kiri, a container engine"},
		"Endpoints": map[string]any{"docker": map[string]any{"Host": host, "SkipTLSVerify": false}},
	})
	if err != nil {
		return fmt.Errorf("encoding the context: %w", err)
	}
	// The store keeps a context in a directory named by the SHA-256 of its name.
	sum := sha256.Sum256([]byte(prog))
	dir := filepath.Join(c.configDir(), "contexts", "meta", hex.EncodeToString(sum[:]))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("making the docker context: %w", err)
	}
	if err := replaceFile(filepath.Join(dir, "meta.json"), meta, 0o644); err != nil {
		return fmt.Errorf("making the docker context: %w", err)
	}
	fmt.Fprintf(c.err, "The docker context %q is %s\n", prog, host)
	if !use {
		fmt.Fprintf(c.err, "Use it with: docker --context %s ..., or select it with: %s context use\n", prog, prog)
		fmt.Fprintln(c.out, prog)
		return nil
	}
	if err := c.selectContext(); err != nil {
		return err
	}
	fmt.Fprintf(c.err, "Current context is now %q\n", prog)
	if v := os.Getenv("DOCKER_HOST"); v != "" {
		fmt.Fprintf(c.err, "Warning: DOCKER_HOST=%s overrides the context; unset it\n", v)
	}
	fmt.Fprintln(c.out, prog)
	return nil
}

// selectContext sets currentContext in config.json and keeps everything else that is there.
func (c *cli) selectContext() error {
	path := filepath.Join(c.configDir(), "config.json")
	cfg := map[string]json.RawMessage{}
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("selecting the docker context: %w", err)
	}
	if len(b) > 0 {
		if err := json.Unmarshal(b, &cfg); err != nil {
			return fmt.Errorf("selecting the docker context: reading %s: %w", path, err)
		}
	}
	cfg["currentContext"] = json.RawMessage(`"` + prog + `"`)
	out, err := json.MarshalIndent(cfg, "", "\t")
	if err != nil {
		return fmt.Errorf("selecting the docker context: %w", err)
	}
	mode := fs.FileMode(0o600) // it may hold credentials
	if st, err := os.Stat(path); err == nil {
		mode = st.Mode().Perm()
	}
	if err := replaceFile(path, out, mode); err != nil {
		return fmt.Errorf("selecting the docker context: %w", err)
	}
	return nil
}

// replaceFile writes a file whole or not at all. A link is followed, as users keep their config elsewhere.
func replaceFile(path string, b []byte, mode fs.FileMode) error {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(b)
	if err == nil {
		err = f.Chmod(mode)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
