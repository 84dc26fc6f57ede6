package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// How long the CLI waits for a daemon it started, and after what time it says so.
const (
	startLimit = 60 * time.Second
	startQuiet = time.Second
)

// startDaemon starts `kiri daemon` in the background, waits until its socket answers and gives the first connection. why is the error of
// the dial that found no daemon; it is returned with a remedy when no daemon may be started.
func (c *cli) startDaemon(cl *client, why error) (*client, *clientConn, error) {
	remedy := func(s string) (*client, *clientConn, error) { return nil, nil, fmt.Errorf("%w\n%s", why, s) }
	switch {
	case isPermission(why):
		return nil, nil, why
	case c.global.noStart:
		return remedy("Start it with: kiri daemon")
	case runtime.GOOS != "linux":
		return remedy("The daemon does not start by itself on " + runtime.GOOS + " yet: name a running one with --host or KIRI_HOST")
	case strings.TrimPrefix(cl.host, "unix://") == systemSocket:
		return remedy("Start the service with: systemctl start kiri.socket")
	case os.Geteuid() != 0:
		return remedy("The daemon needs root: start it with sudo kiri daemon, or name a running one with --host or KIRI_HOST")
	}
	dir := filepath.Dir(filepath.Dir(homeSocket()))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return remedy(fmt.Sprintf("It was not started: %v", err))
	}
	logPath := filepath.Join(dir, "daemon.log")
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return remedy(fmt.Sprintf("It was not started: %v", err))
	}
	defer log.Close()
	from, err := log.Seek(0, 2)
	if err != nil {
		return remedy(fmt.Sprintf("It was not started: %v", err))
	}
	self, err := os.Executable()
	if err != nil {
		return remedy(fmt.Sprintf("It was not started: %v", err))
	}
	cmd := exec.Command(self, "daemon")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = "/"
	cmd.SysProcAttr = ownSession()
	if err := cmd.Start(); err != nil {
		return remedy(fmt.Sprintf("It was not started: %v", err))
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	begin := time.Now()
	said := false
	pause := time.Millisecond
	var died error
	var diedAt time.Time
	for {
		cc, err := cl.dial()
		if err == nil {
			return cl, cc, nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
			return nil, nil, err
		}
		// Of two commands that start a daemon at once one daemon is refused; its command waits for the other's a little longer.
		if died != nil && time.Since(diedAt) > 2*time.Second {
			return remedy(fmt.Sprintf("It was started and ended at once (%v). Its last words in %s:\n%s", died, logPath, lastWords(logPath, from)))
		}
		if !said && time.Since(begin) > startQuiet {
			said = true
			fmt.Fprintf(c.err, "Starting the kiri daemon (log: %s) ...\n", logPath)
		}
		if time.Since(begin) > startLimit {
			return remedy(fmt.Sprintf("It was started %s ago and does not answer; see %s", startLimit, logPath))
		}
		select {
		case err := <-exited:
			died, diedAt = err, time.Now()
			if died == nil {
				died = errors.New("exit status 0")
			}
		case <-time.After(pause):
			pause = min(2*pause, 50*time.Millisecond)
		}
	}
}

// lastWords gives the last lines that a daemon wrote into its log.
func lastWords(path string, from int64) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	if int64(len(b)) >= from {
		b = b[from:]
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-10):], "\n")
}
