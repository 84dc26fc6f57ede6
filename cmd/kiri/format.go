package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"text/template"
	"unicode/utf8"
)

// templateFuncs are the functions that --format templates may call, Docker's set.
func templateFuncs() template.FuncMap {
	return template.FuncMap{
		"json": func(v any) (string, error) {
			var b bytes.Buffer
			enc := json.NewEncoder(&b)
			enc.SetEscapeHTML(false)
			err := enc.Encode(v)
			return strings.TrimSpace(b.String()), err
		},
		"split":    strings.Split,
		"join":     func(v []string, sep string) string { return strings.Join(v, sep) },
		"title":    func(s string) string { return upperFirst(s) },
		"lower":    strings.ToLower,
		"upper":    strings.ToUpper,
		"pad":      pad,
		"truncate": func(s string, n int) string { return truncate(s, n) },
		"println":  fmt.Sprintln,
	}
}

// upperFirst makes the first letter of each word a capital, as strings.Title did.
func upperFirst(s string) string {
	up := true
	return strings.Map(func(r rune) rune {
		was := up
		up = r == ' ' || r == '\t' || r == '\n' || r == '-' || r == '/'
		if was {
			return []rune(strings.ToUpper(string(r)))[0]
		}
		return r
	}, s)
}

func pad(s string, prefix, suffix int) string {
	if s == "" {
		return s
	}
	return strings.Repeat(" ", max(prefix, 0)) + s + strings.Repeat(" ", max(suffix, 0))
}

func truncate(s string, n int) string {
	if n < 0 || len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// A field of a table is also a key of its JSON form.
type field[T any] struct {
	name   string // as templates call it
	header string // above the column
	value  func(*T) any
}

// printRows prints rows as --format asks: "json", a template, or "table TEMPLATE" with a header line and aligned columns. wrap gives the
// value that a template sees for a row: one with a method for each field.
func printRows[T any](c *cli, format string, fields []field[T], rows []*T, wrap func(*T) any) error {
	if format == "json" {
		for _, row := range rows {
			b, err := rowJSON(fields, row)
			if err != nil {
				return err
			}
			if _, err := c.out.Write(append(b, '\n')); err != nil {
				return err
			}
		}
		return nil
	}
	body, table := strings.CutPrefix(format, "table")
	body = strings.NewReplacer(`\t`, "\t", `\n`, "\n").Replace(strings.TrimSpace(body))
	t, err := template.New("").Funcs(templateFuncs()).Parse(body)
	if err != nil {
		return fmt.Errorf("failed to parse template: %w", err)
	}
	var out io.Writer = c.out
	var flush func() error
	if table {
		tw := tabwriter.NewWriter(c.out, 10, 1, 3, ' ', 0)
		out, flush = tw, tw.Flush
		headers := headerRow{}
		for _, f := range fields {
			headers[f.name] = f.header
		}
		// Functions over a column, such as json, are for its values; the header is the plain text.
		funcs := templateFuncs()
		funcs["json"] = func(v any) any { return v }
		ht, err := template.New("").Funcs(funcs).Parse(body)
		if err != nil {
			return fmt.Errorf("failed to parse template: %w", err)
		}
		if err := ht.Execute(out, headers); err != nil {
			return fmt.Errorf("failed to execute template: %w", err)
		}
		fmt.Fprintln(out)
	}
	for _, row := range rows {
		if err := t.Execute(out, wrap(row)); err != nil {
			return fmt.Errorf("failed to execute template: %w", err)
		}
		fmt.Fprintln(out)
	}
	if flush != nil {
		return flush()
	}
	return nil
}

// rowJSON writes a row as an object with its fields in order.
func rowJSON[T any](fields []field[T], row *T) ([]byte, error) {
	b := []byte{'{'}
	for i, f := range fields {
		v, err := json.Marshal(f.value(row))
		if err != nil {
			return nil, err
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(appendString(b, f.name), ':'), v...)
	}
	return append(b, '}'), nil
}

// headerRow is what a table's template sees for the header line.
type headerRow map[string]string

// Label makes a heading of the last part of a label's name.
func (headerRow) Label(name string) string {
	return strings.NewReplacer("-", " ", "_", " ").Replace(name[strings.LastIndexByte(name, '.')+1:])
}

// printValue prints one value for --format: "json" or a template.
func (c *cli) printValue(format string, v any) error {
	if format == "json" {
		format = "{{json .}}"
	}
	t, err := template.New("").Funcs(templateFuncs()).Parse(format)
	if err != nil {
		return &status{64, "template parsing error: " + err.Error()}
	}
	var b bytes.Buffer
	if err := t.Execute(&b, v); err != nil {
		return &status{1, "template parsing error: " + err.Error()}
	}
	b.WriteByte('\n')
	_, err = c.out.Write(b.Bytes())
	return err
}
