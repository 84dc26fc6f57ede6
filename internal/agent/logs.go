//go:build linux

package agent

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// logsRequest begins to write a log into the request's descriptor and answers at once.
func (a *Agent) logsRequest(_ context.Context, m *wire.Logs, f *wire.Frame) (_ *wire.Frame, err error) {
	if err := validID(m.ID); err != nil {
		return nil, err
	}
	file := f.Take(0)
	if file == nil {
		return nil, wire.Errorf(wire.Invalid, "logs without a stream")
	}
	fd, err := takeFD(file)
	if err != nil {
		return nil, err
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("making a stream non-blocking: %w", err)
	}
	out := os.NewFile(uintptr(fd), "logs")
	defer func() {
		if err != nil {
			out.Close()
		}
	}()
	if m.Log.Driver == logNone {
		return nil, wire.Errorf(wire.Unsupported, "configured logging driver does not support reading")
	}
	r := &logReader{q: m, out: out, limit: -1}
	var follower *follower
	if err := a.openForReading(m, r); err != nil {
		return nil, err
	}
	follower = r.f
	var gone *watch
	if follower != nil {
		// A reader that goes away while nothing is logged is noticed too.
		ch := make(chan struct{}, 1)
		r.gone = ch
		gone, err = a.loop.watch(fd, watchRead, func(events uint32) {
			if events&(unix.EPOLLHUP|unix.EPOLLERR) != 0 {
				select {
				case ch <- struct{}{}:
				default:
				}
			}
		})
		if err != nil {
			follower.close()
			closeAll(r.files)
			return nil, err
		}
	}
	go func() {
		defer out.Close()
		defer gone.stop()
		if follower != nil {
			defer follower.close()
			if m.Until != 0 {
				t := time.NewTimer(time.Until(time.Unix(0, m.Until)))
				defer t.Stop()
				r.until = t.C
			}
		}
		if err := r.run(); err != nil {
			a.logf("reading the log of container %s: %v", short(m.ID), err)
		}
		a.active()
	}()
	return okFrame(), nil
}

// openForReading opens the files of a log, and with Follow registers for what is still to come.
func (a *Agent) openForReading(m *wire.Logs, r *logReader) (err error) {
	c, _ := a.find(m.ID)
	if c != nil && c.phase.Load() == phaseStarting {
		<-c.decided
	}
	if c == nil || c.phase.Load() >= phaseExited || c.main.out == nil {
		r.files, err = openLogs(a.logPath(m.ID))
		return err
	}
	if m.Follow {
		r.f = &follower{wakes: make(chan struct{}, 1)}
	}
	log, err := c.main.out.openLogNow()
	if err != nil || log == nil {
		r.f = nil
		return err
	}
	r.files, r.limit, err = log.follow(r.f)
	if r.f != nil && r.f.log == nil { // it has ended since
		r.f = nil
	}
	return err
}
