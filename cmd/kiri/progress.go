package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/jsonstream"
	"golang.org/x/term"
)

// showProgress prints a stream of progress messages until it ends: on a terminal one line a layer, redrawn in place, elsewhere only what
// says something new. An error in the stream is returned.
func showProgress(r io.Reader, out io.Writer) error {
	d := &progressDisplay{out: bufio.NewWriter(out), lines: map[string]int{}}
	if f, ok := out.(*os.File); ok && isTerminal(f) {
		d.terminal = true
		if w, _, err := term.GetSize(int(f.Fd())); err == nil {
			d.width = w
		}
	}
	return d.read(r)
}

func (d *progressDisplay) read(r io.Reader) error {
	defer d.out.Flush()
	dec := json.NewDecoder(r)
	for {
		// The old field "error" is read too: daemons before API 1.52 send it, some of them alone.
		var m struct {
			jsonstream.Message
			ErrorText string `json:"error"`
		}
		if err := dec.Decode(&m); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("reading progress from the daemon: %w", err)
		}
		if m.Error != nil {
			return errors.New(m.Error.Message)
		}
		if m.ErrorText != "" {
			return errors.New(m.ErrorText)
		}
		d.show(&m.Message)
		// The decoder holds whole messages that came together; only the screen of the last of them is worth a write.
		if rest, err := io.ReadAll(dec.Buffered()); err != nil || !bytes.ContainsRune(rest, '}') {
			d.out.Flush()
		}
	}
}

type progressDisplay struct {
	out      *bufio.Writer
	terminal bool
	width    int
	lines    map[string]int // layer -> its line, counted from the first
}

func (d *progressDisplay) show(m *jsonstream.Message) {
	if m.Stream != "" {
		d.out.WriteString(m.Stream)
		return
	}
	text := clean(m.Status)
	if m.ID != "" {
		text = clean(m.ID) + ": " + text
	}
	if !d.terminal {
		// A bar would be a thousand lines in a log; each state of a layer is said once.
		if m.Progress != nil && (m.Progress.Current > 0 || m.Progress.Total > 0) {
			return
		}
		if m.Status != "" {
			fmt.Fprintln(d.out, text)
		}
		return
	}
	if bar := progressBar(m.Progress, d.width); bar != "" {
		text += " " + bar
	}
	if m.ID == "" {
		fmt.Fprintf(d.out, "%s\r\n", text)
		// What came before stays above; layers that follow start anew below.
		d.lines = map[string]int{}
		return
	}
	line, known := d.lines[m.ID]
	if !known {
		line = len(d.lines)
		d.lines[m.ID] = line
		fmt.Fprint(d.out, "\n")
	}
	// Up to the layer's line, clear it, write, and down again.
	up := len(d.lines) - line
	fmt.Fprintf(d.out, "\x1b[%dA\x1b[2K\r%s\r\x1b[%dB", up, text, up)
}

// clean keeps a daemon or registry from writing escape sequences to the terminal.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return -1
		}
		return r
	}, s)
}

// progressBar draws as much of a bar as the terminal is wide enough for: the numbers alone under 110 columns.
func progressBar(p *jsonstream.Progress, width int) string {
	if p == nil || p.Current <= 0 && p.Total <= 0 {
		return ""
	}
	if p.Units != "" {
		if p.Total > 0 {
			return fmt.Sprintf("%d/%d %s", p.Current, p.Total, clean(p.Units))
		}
		return fmt.Sprintf("%d %s", p.Current, clean(p.Units))
	}
	current := units.HumanSize(float64(p.Current))
	if p.Total <= 0 {
		return current
	}
	numbers := fmt.Sprintf("%8v/%v", current, units.HumanSize(float64(p.Total)))
	if p.Current > p.Total {
		numbers = fmt.Sprintf("%8v", current) // the total was wrong
	}
	if width < 110 {
		return strings.TrimSpace(numbers)
	}
	const cells = 50
	done := int(min(p.Current, p.Total) * cells / p.Total)
	bar := strings.Repeat("=", done)
	if done < cells {
		bar += ">" + strings.Repeat(" ", cells-done-1)
	}
	if p.HideCounts {
		return "[" + bar + "]"
	}
	return "[" + bar + "] " + numbers
}
