package engine

import (
	"context"
	"sync"
	"time"

	"github.com/moby/moby/api/types/jsonstream"
)

// progressEvery is how often a pull's numbers are told: Docker's own pace.
const progressEvery = 100 * time.Millisecond

// reporter tells a client of a pull's progress in the words that Docker's clients know. One message at a time, and
// none after close.
type reporter struct {
	mu   sync.Mutex
	emit func(jsonstream.Message)
}

func newReporter(emit func(jsonstream.Message)) *reporter { return &reporter{emit: emit} }

func (r *reporter) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.emit = nil
}

func (r *reporter) send(m jsonstream.Message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.emit != nil {
		r.emit(m)
	}
}

func (r *reporter) message(id, status string) {
	r.send(jsonstream.Message{ID: id, Status: status})
}

// layer is Docker's form for a layer's state without numbers: an empty progressDetail is there all the same.
func (r *reporter) layer(id, status string) {
	r.send(jsonstream.Message{ID: id, Status: status, Progress: &jsonstream.Progress{}})
}

// shown is what a client has been told of one flight.
type shown struct {
	id    string
	phase int32
	bytes int64
	secs  int64
	ended bool
}

// follow tells of flights until all have ended well, or until the first failure, which it returns.
func (r *reporter) follow(ctx context.Context, flights []*flight) error {
	list := make([]shown, len(flights))
	for i, f := range flights {
		list[i] = shown{id: shortID(f.desc.Digest.Encoded()), phase: -1}
		r.layer(list[i].id, "Pulling fs layer")
	}
	ended := make(chan int)
	stop := make(chan struct{})
	defer close(stop)
	for i, f := range flights {
		go func() {
			select {
			case <-f.done:
			case <-stop:
				return
			}
			select {
			case ended <- i:
			case <-stop:
			}
		}()
	}
	tick := time.NewTicker(progressEvery)
	defer tick.Stop()
	for left := len(flights); left > 0; {
		select {
		case <-tick.C:
			for i, f := range flights {
				if !list[i].ended {
					r.tell(f, &list[i])
				}
			}
		case i := <-ended:
			if err := flights[i].err; err != nil {
				return err
			}
			r.tell(flights[i], &list[i])
			list[i].ended = true
			left--
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// tell sends what has changed about one flight. Phases that passed between two looks are told in their order, all but
// those with numbers, which would be stale.
func (r *reporter) tell(f *flight, s *shown) {
	phase := f.phase.Load()
	if phase == phaseExists {
		r.layer(s.id, "Already exists")
		s.phase = phase
		return
	}
	if phase == phaseWaiting && s.phase < phaseWaiting {
		r.layer(s.id, "Waiting")
	}
	passed := func(p int32) bool { return s.phase < p && phase >= p }
	if phase == phaseDownloading {
		if n := f.bytes.Load(); n != s.bytes || s.phase != phase {
			r.send(jsonstream.Message{ID: s.id, Status: "Downloading", Progress: &jsonstream.Progress{Current: n, Total: f.desc.Size}})
			s.bytes = n
		}
	}
	if passed(phaseVerifying) {
		r.layer(s.id, "Verifying Checksum")
	}
	if passed(phaseDownloaded) {
		r.layer(s.id, "Download complete")
	}
	if phase == phaseExtracting {
		// From 1, because a client shows no number for 0 of 0.
		if secs := 1 + (time.Now().UnixNano()-f.since.Load())/int64(time.Second); secs != s.secs || s.phase != phase {
			r.send(jsonstream.Message{ID: s.id, Status: "Extracting", Progress: &jsonstream.Progress{Current: secs, Units: "s"}})
			s.secs = secs
		}
	}
	if passed(phaseComplete) {
		r.layer(s.id, "Pull complete")
	}
	s.phase = phase
}
