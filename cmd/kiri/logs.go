package main

import (
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

func cmdLogs() *command {
	return &command{
		name: "logs", long: []string{"container logs"}, use: "[OPTIONS] CONTAINER", short: "Fetch the logs of a container",
		example: "  kiri logs -f --tail 20 web\n  kiri logs --since 10m web", min: 1, max: 1,
		run: func(c *cli, f *pflag.FlagSet) func([]string) error {
			details := f.Bool("details", false, "Show extra details provided to logs")
			follow := f.BoolP("follow", "f", false, "Follow log output")
			since := f.String("since", "", "Show logs since timestamp (e.g. \"2013-01-02T13:23:37Z\") or relative (e.g. \"42m\" for 42 minutes)")
			until := f.String("until", "", "Show logs before a timestamp (e.g. \"2013-01-02T13:23:37Z\") or relative (e.g. \"42m\" for 42 minutes)")
			tail := f.StringP("tail", "n", "all", "Number of lines to show from the end of the logs")
			stamps := f.BoolP("timestamps", "t", false, "Show timestamps")
			return func(args []string) error {
				cl, err := c.client()
				if err != nil {
					return err
				}
				q := url.Values{"stdout": {"1"}, "stderr": {"1"}, "tail": {*tail}}
				for name, on := range map[string]bool{"details": *details, "follow": *follow, "timestamps": *stamps} {
					if on {
						q.Set(name, "1")
					}
				}
				now := time.Now()
				for name, v := range map[string]string{"since": *since, "until": *until} {
					if v == "" {
						continue
					}
					t, err := logTime(v, now)
					if err != nil {
						return fmt.Errorf("invalid value for %q: %w", name, err)
					}
					q.Set(name, t)
				}
				res, err := cl.do(&request{method: "GET", path: idPath("/containers/", args[0], "/logs"), query: q})
				if err != nil {
					return err
				}
				defer res.Close()
				// Since API 1.42 the content type tells frames from the raw output of a terminal.
				raw := res.Type == "application/vnd.docker.raw-stream"
				if !atLeast(cl.prefix, 42) {
					s, err := c.containerState(args[0])
					if err != nil {
						return err
					}
					raw = s.Config.Tty
				}
				if raw {
					_, err = io.Copy(c.out, res)
					return err
				}
				return demux(c.out, c.err, res)
			}
		},
	}
}

// atLeast tells whether a version prefix such as /v1.44 is of 1.minor or later.
func atLeast(prefix string, minor int) bool {
	n, err := strconv.Atoi(strings.TrimPrefix(prefix, "/v1."))
	return err == nil && n >= minor
}

// logTime turns what a user writes into seconds since 1970 with a fraction: a duration before now, a Unix time, or a date in RFC 3339 or a
// shortened form of it, read in local time when it has no zone.
func logTime(v string, now time.Time) (string, error) {
	if d, err := time.ParseDuration(v); err == nil {
		return unixTime(now.Add(-d)), nil
	}
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02Z07:00"} {
		if t, err := time.Parse(layout, v); err == nil {
			return unixTime(t), nil
		}
	}
	for _, layout := range []string{"2006-01-02T15:04:05.999999999", "2006-01-02T15:04", "2006-01-02T15", "2006-01-02"} {
		if t, err := time.ParseInLocation(layout, v, time.Local); err == nil {
			return unixTime(t), nil
		}
	}
	sec, frac, _ := strings.Cut(v, ".")
	if _, err := strconv.ParseInt(sec, 10, 64); err != nil || strings.Trim(frac, "0123456789") != "" {
		return "", fmt.Errorf("failed to parse value as time or duration: %q", v)
	}
	return v, nil
}

func unixTime(t time.Time) string { return fmt.Sprintf("%d.%09d", t.Unix(), t.Nanosecond()) }
