package dockerapi

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/pkg/authconfig"
	"github.com/moby/moby/api/types/jsonstream"
	"github.com/moby/moby/api/types/registry"

	"runkiri.com/kiri/internal/engine"
)

// progressLine is a message of a progress stream. Beside the fields of the API module it has the two texts that it
// has dropped: the API calls them deprecated since 1.48 but not gone, and clients still read "error" to learn that a
// pull failed.
type progressLine struct {
	jsonstream.Message
	ProgressText string `json:"progress,omitempty"`
	ErrorText    string `json:"error,omitempty"`
}

// progress writes a progress stream. Its header goes out with the first message, so that an error before it is an
// ordinary answer with a status.
type progress struct {
	c  *call
	mu sync.Mutex // messages come from several goroutines
}

func (p *progress) send(m jsonstream.Message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.c.began {
		p.c.begin("application/json")
	}
	line := progressLine{Message: m, ProgressText: bar(m.Progress)}
	if m.Error != nil {
		line.ErrorText = m.Error.Message
	}
	b, err := json.Marshal(line)
	if err != nil {
		p.c.s.log.Warn("encoding progress", "error", err)
		return
	}
	p.c.send(append(b, "\r\n"...)) // an error means that the client is gone, which ends the call's context too
}

// end finishes the stream. An error after the first message is the last one: the status can no longer tell.
func (p *progress) end(err error) error {
	p.mu.Lock()
	began := p.c.began
	p.mu.Unlock()
	switch {
	case err != nil && !began:
		return err
	case err != nil:
		code, text := status(err)
		e := &jsonstream.Error{Message: text}
		if code == http.StatusUnauthorized {
			e.Code = code
		}
		p.send(jsonstream.Message{Error: e})
	case !began:
		p.c.begin("application/json")
	}
	return nil
}

// bar draws the progress for clients that do not do so themselves, "[====>    ]  1.5MB/3MB", the box 51 characters wide.
func bar(p *jsonstream.Progress) string {
	if p == nil || p.Current <= 0 && p.Total <= 0 {
		return ""
	}
	size := func(n int64) string {
		if p.Units != "" {
			return fmt.Sprintf("%d %s", n, p.Units)
		}
		return units.HumanSize(float64(n))
	}
	if p.Total <= 0 {
		return fmt.Sprintf("%8s", size(p.Current))
	}
	done := int(50 * (float64(min(p.Current, p.Total)) / float64(p.Total)))
	text := fmt.Sprintf("[%s>%s] ", strings.Repeat("=", done), strings.Repeat(" ", 50-done))
	if !p.HideCounts {
		text += fmt.Sprintf("%8s/%s", size(p.Current), size(p.Total))
	}
	return text
}

// imageCreate pulls an image, or makes one of an archive.
func imageCreate(c *call) error {
	platform := ""
	if c.version >= 32 {
		platform = c.arg("platform")
	}
	if name := c.arg("fromImage"); name != "" {
		return c.pull(name, platform)
	}
	return c.importImage(platform)
}

func (c *call) pull(name, platform string) error {
	opts := engine.PullOptions{Platform: platform}
	switch tag := c.arg("tag"); {
	case strings.Contains(tag, ":"):
		name += "@" + tag
	case tag != "":
		name += ":" + tag
	default:
		// Without a tag in either place Docker's API pulls all tags of the repository.
		last := name[strings.LastIndexByte(name, '/')+1:]
		opts.AllTags = !strings.ContainsAny(last, ":@")
	}
	// A header that cannot be read is as good as none: the registry will say whether it wants one.
	if auth, err := authconfig.Decode(c.r.Header.Get(registry.AuthHeader)); err == nil && auth != nil {
		opts.Auth = *auth
	}
	p := &progress{c: c}
	return p.end(c.s.engine.ImagePull(c.ctx, name, opts, p.send))
}

func (c *call) importImage(platform string) error {
	opts := engine.ImportOptions{
		Ref:      c.arg("repo"),
		Message:  c.arg("message"),
		Platform: platform,
		Changes:  c.query["changes"],
	}
	if tag := c.arg("tag"); tag != "" && opts.Ref != "" {
		opts.Ref += ":" + tag
	}
	p := &progress{c: c}
	src := c.arg("fromSrc")
	var r io.Reader = c.r.Body
	if src != "-" && src != "" {
		body, err := c.download(src, p)
		if err != nil {
			return p.end(err)
		}
		defer body.Close()
		r = body
	} else if src == "" {
		return invalidf("either fromImage or fromSrc must be given")
	}
	_, err := c.s.engine.ImageImport(c.ctx, opts, r, p.send) // the last message tells the id
	return p.end(err)
}

// download opens an archive that the client names by its address. Only http and https are followed.
func (c *call) download(src string, p *progress) (io.ReadCloser, error) {
	if !strings.Contains(src, "://") {
		src = "http://" + src
	}
	u, err := url.Parse(src)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, invalidf("invalid import source %q", src)
	}
	req, err := http.NewRequestWithContext(c.ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, invalidf("invalid import source %q: %v", src, err)
	}
	client := &http.Client{Transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment, ResponseHeaderTimeout: time.Minute, DisableKeepAlives: true,
	}}
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("downloading %s: %w", u, err)
	}
	if resp.StatusCode >= 400 {
		resp.Body.Close()
		return nil, fmt.Errorf("downloading %s: the server answered %s", u, resp.Status)
	}
	p.send(jsonstream.Message{Status: "Downloading from " + u.String()})
	return resp.Body, nil
}
