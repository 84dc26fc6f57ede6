package engine

import (
	"net"
	"time"
)

// StreamOpener takes the client's connection over from the HTTP server. The engine calls it once, when it is sure
// that it will stream; an error returned before the call is an ordinary HTTP error. tty tells which content type the
// answer's header names: raw with a terminal, multiplexed without.
//
// It returns the connection and the bytes that the server had read from it already. A *net.UnixConn is handed to the
// agent by descriptor and then closed here; any other connection is relayed.
type StreamOpener func(tty bool) (conn net.Conn, buffered []byte, err error)

// RemoveOptions are those of DELETE /containers/{name}.
type RemoveOptions struct {
	Force   bool // kill it first if it runs
	Volumes bool // remove its anonymous volumes too
	Link    bool // remove the link of that name, not a container
}

// ListOptions are those of GET /containers/json.
type ListOptions struct {
	All     bool
	Size    bool
	Limit   int // the newest so many, running or not; 0 is no limit
	Filters Filters
}

// AttachOptions are those of POST /containers/{name}/attach.
type AttachOptions struct {
	Stdin, Stdout, Stderr bool
	Logs                  bool // replay the log first
	Stream                bool // then follow
	DetachKeys            string
}

// LogsOptions are those of GET /containers/{name}/logs.
type LogsOptions struct {
	Stdout, Stderr bool
	Follow         bool
	Timestamps     bool
	Details        bool
	Tail           string    // lines; anything that is no number, such as "all", is all
	Since, Until   time.Time // zero is no bound
}

// ExecStartOptions are the body of POST /exec/{id}/start.
type ExecStartOptions struct {
	Detach      bool
	Tty         bool
	ConsoleSize *[2]uint // height, width in characters
}

// ArchivePutOptions are those of PUT /containers/{name}/archive.
type ArchivePutOptions struct {
	NoOverwriteDirNonDir bool
	CopyUIDGID           bool
}

// CommitOptions are those of POST /commit.
type CommitOptions struct {
	Repo, Tag, Comment, Author string
	Changes                    []string
	NoPause                    bool
}

// EventsOptions are those of GET /events. A zero Until never ends; a zero Since tells no past events.
type EventsOptions struct {
	Since, Until time.Time
	Filters      Filters
}

// DiskUsageOptions says which objects GET /system/df counts; none set counts all.
type DiskUsageOptions struct {
	Containers, Images, Volumes, BuildCache bool
	Verbose                                 bool // fill the lists of items too
}
