package registry

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"syscall"

	"runkiri.com/kiri/internal/reference"
)

// readTags reads one page of a repository's tags; next is the path of the page after it, "" for the last.
func readTags(resp *http.Response) (tags []string, next string, err error) {
	defer drain(resp.Body)
	if resp.StatusCode != http.StatusOK {
		return nil, "", responseError(resp)
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, MaxManifest+1))
	if err != nil {
		return nil, "", fmt.Errorf("reading tags: %w", err)
	}
	var doc struct {
		Tags []string `json:"tags"`
	}
	if len(b) > MaxManifest {
		return nil, "", fmt.Errorf("reading tags: over %d bytes", MaxManifest)
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		return nil, "", fmt.Errorf("reading tags: %w", err)
	}
	// Link: </v2/name/tags/list?n=100&last=x>; rel="next"
	link := resp.Header.Get("Link")
	if i, j := strings.IndexByte(link, '<'), strings.IndexByte(link, '>'); i >= 0 && j > i && strings.Contains(link[j:], "next") {
		if u, err := url.Parse(link[i+1 : j]); err == nil && u.RawQuery != "" {
			next = "tags/list?" + u.RawQuery // only the query: a registry does not choose where we ask
		}
	}
	return doc.Tags, next, nil
}

// identifier is what a manifest is asked for by: the digest if ref has one, else the tag.
func identifier(ref reference.Named) string {
	if d, ok := ref.(reference.Digested); ok {
		return d.Digest().String()
	}
	if t, ok := reference.TagNameOnly(ref).(reference.Tagged); ok {
		return t.Tag()
	}
	return "latest"
}

func isRefused(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }
