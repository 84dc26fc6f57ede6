package registrytest

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
)

// Front stands before a registry and passes requests on, but for those that Fault answers itself.
type Front struct {
	Addr string // host:port

	// Fault is asked first; true means that it has answered. It may be called by several goroutines at once.
	Fault func(f *Front, w http.ResponseWriter, r *http.Request) bool
	// Cut ends the connection of an answer after so many bytes of the body; nil or a negative result cuts nothing.
	Cut func(r *http.Request) int64
	// Hold stops an answer after so many bytes of the body and calls the function, whose return lets it go on; nil or a
	// negative number holds nothing.
	Hold func(r *http.Request) (int64, func())
	// NoRange hides the server's ability to send parts.
	NoRange bool

	back  string
	mu    sync.Mutex
	sent  map[string]int64 // bytes of bodies by path
	asked map[string]int   // requests by method and path
}

// NewFront starts one before the registry at addr, "" for none, for the length of the test.
func NewFront(t testing.TB, addr string) *Front {
	t.Helper()
	f := &Front{back: addr, sent: map[string]int64{}, asked: map[string]int{}}
	s := httptest.NewServer(f)
	// Connections may hang on purpose.
	t.Cleanup(func() { s.CloseClientConnections(); s.Config.Close() })
	f.Addr = strings.TrimPrefix(s.URL, "http://")
	return f
}

// Sent is the number of body bytes sent for paths that contain part.
func (f *Front) Sent(part string) int64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	var n int64
	for p, m := range f.sent {
		if strings.Contains(p, part) {
			n += m
		}
	}
	return n
}

// Asked is the number of requests whose "METHOD path" contains part.
func (f *Front) Asked(part string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := 0
	for p, m := range f.asked {
		if strings.Contains(p, part) {
			n += m
		}
	}
	return n
}

// Reset sets the counters back.
func (f *Front) Reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.sent)
	clear(f.asked)
}

// Change changes the front's fields while requests from another process may come.
func (f *Front) Change(set func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	set()
}

// ServeHTTP implements http.Handler.
func (f *Front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	f.asked[r.Method+" "+r.URL.Path]++
	fault, hold, cutAt, noRange := f.Fault, f.Hold, f.Cut, f.NoRange
	f.mu.Unlock()
	if fault != nil && fault(f, w, r) {
		return
	}
	u := url.URL{Scheme: "http", Host: f.back, Path: r.URL.Path, RawQuery: r.URL.RawQuery}
	req, err := http.NewRequestWithContext(r.Context(), r.Method, u.String(), r.Body)
	if err != nil {
		panic(err)
	}
	req.Header = r.Header.Clone()
	req.Header.Del("Authorization")
	if noRange {
		req.Header.Del("Range")
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	defer resp.Body.Close()
	for k, v := range resp.Header {
		w.Header()[k] = v
	}
	if noRange {
		w.Header().Del("Accept-Ranges")
	}
	w.WriteHeader(resp.StatusCode)
	var body io.Reader = resp.Body
	cut := int64(-1)
	if cutAt != nil {
		cut = cutAt(r)
	}
	if cut >= 0 {
		body = io.LimitReader(body, cut)
	}
	var n int64
	if hold != nil {
		if at, held := hold(r); at >= 0 {
			n, _ = io.CopyN(w, body, at)
			w.(http.Flusher).Flush()
			held()
		}
	}
	m, _ := io.Copy(w, body)
	n += m
	f.mu.Lock()
	f.sent[r.URL.Path] += n
	f.mu.Unlock()
	if cut >= 0 && n == cut {
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}
