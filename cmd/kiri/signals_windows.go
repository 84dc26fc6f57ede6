package main

import (
	"net/url"
	"os"
	"os/signal"
	"time"
)

// proxySignals sends an interrupt on to the container; ready waits until it is caught.
func (c *cli) proxySignals(id string) (ready func()) {
	ch := make(chan os.Signal, 16)
	signal.Notify(ch, os.Interrupt)
	go func() {
		for range ch {
			// The container may not run yet or any more; the signal is lost then as it is with docker.
			_ = c.c.call("POST", idPath("/containers/", id, "/kill"), url.Values{"signal": {"SIGINT"}}, nil, nil)
		}
	}()
	return func() {}
}

// sizeChanges gives a channel that receives when the terminal's size may have changed. Windows has no signal for it.
func sizeChanges() (<-chan os.Signal, func()) {
	ch := make(chan os.Signal, 1)
	t := time.NewTicker(250 * time.Millisecond)
	quit := make(chan struct{})
	go func() {
		for {
			select {
			case <-t.C:
				select {
				case ch <- os.Interrupt:
				default:
				}
			case <-quit:
				return
			}
		}
	}()
	return ch, func() {
		t.Stop()
		close(quit)
	}
}
