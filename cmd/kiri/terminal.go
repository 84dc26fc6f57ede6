package main

import (
	"io"
	"os"

	"golang.org/x/term"
)

func isTerminal(f *os.File) bool { return f != nil && term.IsTerminal(int(f.Fd())) }

// writerIsTerminal tells whether progress and colour make sense.
func writerIsTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isTerminal(f)
}

func (c *cli) outIsTerminal() bool { return writerIsTerminal(c.out) }

// ttySize gives the size of the terminal in characters, 0 when there is none.
func (c *cli) ttySize() (height, width uint) {
	f, ok := c.out.(*os.File)
	if !ok {
		return 0, 0
	}
	w, h, err := term.GetSize(int(f.Fd()))
	if err != nil || w < 0 || h < 0 {
		return 0, 0
	}
	return uint(h), uint(w)
}

// followSize tells the engine the terminal's size now and after each change, until the returned function is called. With nudge the first
// call is made with one row and column more, so that a program that was there before redraws.
func (c *cli) followSize(path string, nudge bool) (stop func()) {
	send := func(extra uint) {
		if h, w := c.ttySize(); h > 0 && w > 0 {
			// A container that has just ended has no size; nothing else can go wrong that the stream would not show.
			_ = c.c.call("POST", path, sizeQuery(h+extra, w+extra), nil, nil)
		}
	}
	if nudge {
		send(1)
	}
	changes, done := sizeChanges()
	quit := make(chan struct{})
	go func() {
		send(0)
		for {
			select {
			case <-changes:
				send(0)
			case <-quit:
				return
			}
		}
	}()
	return func() {
		done()
		close(quit)
	}
}
