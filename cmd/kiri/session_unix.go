//go:build unix

package main

import "syscall"

// ownSession detaches a child from this terminal: a Ctrl-C here is not meant for the daemon.
func ownSession() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setsid: true} }
