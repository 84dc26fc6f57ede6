package main

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"sync"

	"golang.org/x/term"
)

// newLogger logs lines of text, or JSON, to f; coloured if f is a terminal.
func newLogger(f *os.File, format string, level slog.Leveler) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	switch {
	case format == "json":
		return slog.New(slog.NewJSONHandler(f, opts))
	case term.IsTerminal(int(f.Fd())) && os.Getenv("NO_COLOR") == "":
		return slog.New(newColourHandler(f, opts))
	}
	return slog.New(slog.NewTextHandler(f, opts))
}

// colourHandler is slog's text with the time and a coloured level in front.
type colourHandler struct {
	shared *colourState
	text   slog.Handler // writes into shared.buf
}

type colourState struct {
	mu  sync.Mutex // guards buf and w
	buf bytes.Buffer
	w   io.Writer
}

func newColourHandler(w io.Writer, opts *slog.HandlerOptions) *colourHandler {
	s := &colourState{w: w}
	plain := *opts
	plain.ReplaceAttr = func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && (a.Key == slog.TimeKey || a.Key == slog.LevelKey) {
			return slog.Attr{} // in front instead
		}
		return a
	}
	return &colourHandler{s, slog.NewTextHandler(&s.buf, &plain)}
}

func (h *colourHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return h.text.Enabled(ctx, l)
}
func (h *colourHandler) WithAttrs(a []slog.Attr) slog.Handler {
	return &colourHandler{h.shared, h.text.WithAttrs(a)}
}
func (h *colourHandler) WithGroup(name string) slog.Handler {
	return &colourHandler{h.shared, h.text.WithGroup(name)}
}

func (h *colourHandler) Handle(ctx context.Context, r slog.Record) error {
	colour := "\x1b[36m" // cyan
	switch {
	case r.Level >= slog.LevelError:
		colour = "\x1b[31m" // red
	case r.Level >= slog.LevelWarn:
		colour = "\x1b[33m" // yellow
	case r.Level < slog.LevelInfo:
		colour = "\x1b[90m" // grey
	}
	h.shared.mu.Lock()
	defer h.shared.mu.Unlock()
	h.shared.buf.Reset()
	h.shared.buf.WriteString(r.Time.Format("15:04:05.000 ") + colour + r.Level.String() + "\x1b[0m ")
	if err := h.text.Handle(ctx, r); err != nil {
		return err
	}
	_, err := h.shared.w.Write(h.shared.buf.Bytes())
	return err
}
