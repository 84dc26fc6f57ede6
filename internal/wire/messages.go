// Package wire is the contract between the daemon and its agents: frames, messages, the codec and the transports.
// Both ends use these declarations and no others.
//
// The first frame on a connection is Hello, whose first field is the version. The two ends must have the same
// Version: daemon and agent are one release, and after an upgrade the daemon replaces an older agent (Retire) and
// the new one adopts its containers.
//
// Control frames are small. Bytes travel on streams: on the host a stream is a descriptor that comes with the
// request (a pipe, a socket, or the client's own connection), so that no process only copies.
package wire

import "fmt"

// Version is the version of this contract. Any change to a message changes it.
const Version = 1

// Kind names a message on the wire.
type Kind uint16

// Message is anything a frame can carry.
type Message interface {
	Kind() Kind
	// Fields walks every field, in order.
	Fields(c *Coder)
}

// Replies have the high bit set, so that a reader can tell them from the other end's requests.
const replyBit Kind = 0x8000

func isReply(k Kind) bool { return k&replyBit != 0 }

const (
	// connection
	KindHello  Kind = 1
	KindRetire Kind = 2
	KindAck    Kind = 3
	KindAdopt  Kind = 4

	// containers
	KindRun     Kind = 16
	KindSignal  Kind = 17
	KindFreeze  Kind = 18
	KindUpdate  Kind = 19
	KindExec    Kind = 20
	KindResize  Kind = 21
	KindAttach  Kind = 22
	KindLogs    Kind = 23
	KindStats   Kind = 24
	KindTop     Kind = 25
	KindPlan    Kind = 26
	KindRemove  Kind = 27
	KindArchive Kind = 28
	KindChanges Kind = 29

	// layers and volumes
	KindUnpack       Kind = 48
	KindLayers       Kind = 49
	KindRemoveLayer  Kind = 50
	KindVolume       Kind = 51
	KindRemoveVolume Kind = 52

	// unasked, from the agent
	KindExited Kind = 80
	KindOOM    Kind = 81

	KindOK           = replyBit | 0x7f00
	KindError        = replyBit | 0x7f01
	KindHelloReply   = replyBit | KindHello
	KindRunReply     = replyBit | KindRun
	KindExecReply    = replyBit | KindExec
	KindStatsReply   = replyBit | KindStats
	KindTopReply     = replyBit | KindTop
	KindPlanReply    = replyBit | KindPlan
	KindArchiveReply = replyBit | KindArchive
	KindChangesReply = replyBit | KindChanges
	KindUnpackReply  = replyBit | KindUnpack
	KindLayersReply  = replyBit | KindLayers
	KindVolumeReply  = replyBit | KindVolume
)

// New returns an empty message of kind k, to decode into.
func New(k Kind) (Message, error) {
	switch k {
	case KindHello:
		return new(Hello), nil
	case KindRetire:
		return new(Retire), nil
	case KindAck:
		return new(Ack), nil
	case KindAdopt:
		return new(Adopt), nil
	case KindRun:
		return new(Run), nil
	case KindSignal:
		return new(Signal), nil
	case KindFreeze:
		return new(Freeze), nil
	case KindUpdate:
		return new(Update), nil
	case KindExec:
		return new(Exec), nil
	case KindResize:
		return new(Resize), nil
	case KindAttach:
		return new(Attach), nil
	case KindLogs:
		return new(Logs), nil
	case KindStats:
		return new(Stats), nil
	case KindTop:
		return new(Top), nil
	case KindPlan:
		return new(Plan), nil
	case KindRemove:
		return new(Remove), nil
	case KindArchive:
		return new(Archive), nil
	case KindChanges:
		return new(Changes), nil
	case KindUnpack:
		return new(Unpack), nil
	case KindLayers:
		return new(Layers), nil
	case KindRemoveLayer:
		return new(RemoveLayer), nil
	case KindVolume:
		return new(Volume), nil
	case KindRemoveVolume:
		return new(RemoveVolume), nil
	case KindExited:
		return new(Exited), nil
	case KindOOM:
		return new(OOM), nil
	case KindOK:
		return new(OK), nil
	case KindError:
		return new(Error), nil
	case KindHelloReply:
		return new(HelloReply), nil
	case KindRunReply:
		return new(RunReply), nil
	case KindExecReply:
		return new(ExecReply), nil
	case KindStatsReply:
		return new(StatsReply), nil
	case KindTopReply:
		return new(TopReply), nil
	case KindPlanReply:
		return new(PlanReply), nil
	case KindArchiveReply:
		return new(ArchiveReply), nil
	case KindChangesReply:
		return new(ChangesReply), nil
	case KindUnpackReply:
		return new(UnpackReply), nil
	case KindLayersReply:
		return new(LayersReply), nil
	case KindVolumeReply:
		return new(VolumeReply), nil
	}
	return nil, fmt.Errorf("unknown frame kind %d", k)
}

// OK is the reply of a request that has nothing to say but that it is done.
type OK struct{}

func (*OK) Kind() Kind      { return KindOK }
func (*OK) Fields(c *Coder) {}

// Hello opens a connection. The agent answers HelloReply, or an Error of class Conflict if another daemon is connected.
type Hello struct {
	Version uint32 // of this contract; read before anything else is trusted
	Daemon  string // the daemon's version, for the agent's log
}

func (*Hello) Kind() Kind { return KindHello }
func (m *Hello) Fields(c *Coder) {
	c.U32(&m.Version)
	c.Str(&m.Daemon)
}

// HelloReply tells what the agent is and what runs under it.
type HelloReply struct {
	Version       uint32
	Agent         string // the agent's version
	PID           int    // in the agent's own PID namespace
	Kernel        string // uname -r
	Arch          string // GOARCH
	CgroupVersion int    // 2, or 1 for hybrid and v1 hosts, as `docker info` tells it
	Bridge        Bridge // the default bridge
	NCPU          int
	MemTotal      int64 // bytes
	Warnings      []string
	Features      []string // what this kernel lacks or has, as words: "swap", "cpuset", ...
	Containers    []Running
}

func (*HelloReply) Kind() Kind { return KindHelloReply }
func (m *HelloReply) Fields(c *Coder) {
	c.U32(&m.Version)
	c.Str(&m.Agent)
	c.Int(&m.PID)
	c.Str(&m.Kernel)
	c.Str(&m.Arch)
	c.Int(&m.CgroupVersion)
	m.Bridge.fields(c)
	c.Int(&m.NCPU)
	c.I64(&m.MemTotal)
	c.Strs(&m.Warnings)
	c.Strs(&m.Features)
	List(c, &m.Containers, func(c *Coder, r *Running) { r.fields(c) })
}

// Bridge describes the default bridge network.
type Bridge struct {
	Name    string // interface
	Subnet  string // CIDR
	Gateway string
	MTU     int
}

func (b *Bridge) fields(c *Coder) {
	c.Str(&b.Name)
	c.Str(&b.Subnet)
	c.Str(&b.Gateway)
	c.Int(&b.MTU)
}

// Running is a container, or the exit of one, that an agent holds for its daemon: all of them are listed in
// HelloReply, so that a new daemon learns what runs and what ended while there was none.
type Running struct {
	ID        string
	Run       uint64 // which start of this container: Run.Run
	Reply     RunReply
	Paused    bool
	Exited    *Exited // the main process has ended and no Ack has come
	Execs     []string
	StdioLost bool // adopted without its pipes: output since the agent's end went nowhere
}

func (r *Running) fields(c *Coder) {
	c.Str(&r.ID)
	c.U64(&r.Run)
	r.Reply.Fields(c)
	c.Bool(&r.Paused)
	Opt(c, &r.Exited, func(c *Coder, e *Exited) { e.Fields(c) })
	c.Strs(&r.Execs)
	c.Bool(&r.StdioLost)
}

// Retire asks the agent to end and leave everything running: sent before an upgrade and at the daemon's own clean
// end. The agent answers OK and exits; the daemon keeps the descriptors it got with each RunReply for the next agent.
type Retire struct{}

func (*Retire) Kind() Kind      { return KindRetire }
func (*Retire) Fields(c *Coder) {}

// Ack tells the agent that the daemon has recorded an exit; the agent forgets the container's process.
type Ack struct {
	ID   string
	Run  uint64
	Exec string // "" for the main process
}

func (*Ack) Kind() Kind { return KindAck }
func (m *Ack) Fields(c *Coder) {
	c.Str(&m.ID)
	c.U64(&m.Run)
	c.Str(&m.Exec)
}

// Adopt hands a container of an agent that is gone to this one. The descriptors are those of its RunReply, in the
// same order, as far as the daemon has them. The agent finds the rest (cgroup, log position, namespaces) in the
// state file that the earlier agent wrote in the exec root. The answer is OK; an exit in the meantime follows as Exited.
type Adopt struct {
	ID    string
	Run   uint64
	Stdin bool // a stdin pipe is among the descriptors
}

func (*Adopt) Kind() Kind { return KindAdopt }
func (m *Adopt) Fields(c *Coder) {
	c.Str(&m.ID)
	c.U64(&m.Run)
	c.Bool(&m.Stdin)
}

// Signal sends a signal to the main process, or to an exec's, by pidfd.
type Signal struct {
	ID     string
	Exec   string // "" for the main process
	Signal int
	All    bool // every process of the container, by cgroup.kill if Signal is SIGKILL
	Keep   bool // the container is started again when it has ended: its writable layer stays in spite of Run.Remove
}

func (*Signal) Kind() Kind { return KindSignal }
func (m *Signal) Fields(c *Coder) {
	c.Str(&m.ID)
	c.Str(&m.Exec)
	c.Int(&m.Signal)
	c.Bool(&m.All)
	c.Bool(&m.Keep)
}

// Freeze pauses (On) or resumes a container by the cgroup freezer; OK comes once the kernel says it is so.
type Freeze struct {
	ID string
	On bool
}

func (*Freeze) Kind() Kind { return KindFreeze }
func (m *Freeze) Fields(c *Coder) {
	c.Str(&m.ID)
	c.Bool(&m.On)
}

// Update changes the limits of a running container.
type Update struct {
	ID        string
	Resources Resources
}

func (*Update) Kind() Kind { return KindUpdate }
func (m *Update) Fields(c *Coder) {
	c.Str(&m.ID)
	m.Resources.fields(c)
}

// Resize sets the size of a terminal, in characters. One that comes before the process runs is kept for it.
type Resize struct {
	ID     string
	Exec   string
	Height uint32
	Width  uint32
}

func (*Resize) Kind() Kind { return KindResize }
func (m *Resize) Fields(c *Coder) {
	c.Str(&m.ID)
	c.Str(&m.Exec)
	c.U32(&m.Height)
	c.U32(&m.Width)
}

// Attach connects the stream that comes with it (descriptor 0: the client's connection or a socket to the daemon)
// to the stdio of a container. It may be sent before Run: the stream then waits for the container's Run and gets
// every byte from the first on.
//
// The agent owns the stream from then on and shuts it down when the container's output ends (or, without stdout and
// stderr, when stdin does). A stream whose reader stalls is buffered up to 1 MiB, then holds up that container's
// output, as Docker's attach does.
type Attach struct {
	ID         string
	Stdin      bool // bytes from the stream go to the container's stdin
	Stdout     bool
	Stderr     bool
	Framed     bool   // Docker's 8-byte multiplexing header before each chunk; not with a TTY
	Logs       bool   // replay the log first
	Stream     bool   // then follow; without it the stream ends after the replay
	DetachKeys []byte // bytes typed on stdin that end the attach and not the container; only with a TTY
	Buffered   []byte // bytes the HTTP server had already read from the client's connection: they come first
}

func (*Attach) Kind() Kind { return KindAttach }
func (m *Attach) Fields(c *Coder) {
	c.Str(&m.ID)
	c.Bool(&m.Stdin)
	c.Bool(&m.Stdout)
	c.Bool(&m.Stderr)
	c.Bool(&m.Framed)
	c.Bool(&m.Logs)
	c.Bool(&m.Stream)
	c.Bytes(&m.DetachKeys)
	c.Bytes(&m.Buffered)
}

// Logs reads the log of a container, running or not, into descriptor 0, and closes it at the end.
type Logs struct {
	ID         string
	Log        LogConfig
	Stdout     bool
	Stderr     bool
	Framed     bool
	Follow     bool // ends when the container's output does, or when the reader closes its end
	Timestamps bool
	Details    bool
	Tail       int64 // lines, -1 for all
	Since      int64 // Unix ns, 0 for the beginning
	Until      int64 // Unix ns, 0 for no end
}

func (*Logs) Kind() Kind { return KindLogs }
func (m *Logs) Fields(c *Coder) {
	c.Str(&m.ID)
	m.Log.fields(c)
	c.Bool(&m.Stdout)
	c.Bool(&m.Stderr)
	c.Bool(&m.Framed)
	c.Bool(&m.Follow)
	c.Bool(&m.Timestamps)
	c.Bool(&m.Details)
	c.I64(&m.Tail)
	c.I64(&m.Since)
	c.I64(&m.Until)
}

// Stats asks for the counters of a container's cgroup and interfaces.
type Stats struct{ ID string }

func (*Stats) Kind() Kind        { return KindStats }
func (m *Stats) Fields(c *Coder) { c.Str(&m.ID) }

// StatsReply holds raw counters; the daemon makes Docker's JSON of them. Times are ns, sizes bytes.
type StatsReply struct {
	At            int64 // Unix ns
	CPUTotal      uint64
	CPUUser       uint64
	CPUSystem     uint64
	CPUPeriods    uint64
	CPUThrottled  uint64
	ThrottledTime uint64
	SystemCPU     uint64 // the host's, as /proc/stat counts it
	OnlineCPUs    uint32
	Memory        uint64
	MemoryLimit   uint64
	MemoryMax     uint64 // v1 only
	MemoryFailcnt uint64 // v1 only
	MemoryStat    map[string]string
	PIDs          uint64
	PIDsLimit     uint64
	BlkioBytes    []BlkioEntry
	BlkioOps      []BlkioEntry
	Interfaces    []InterfaceStats
}

func (*StatsReply) Kind() Kind { return KindStatsReply }
func (m *StatsReply) Fields(c *Coder) {
	c.I64(&m.At)
	for _, v := range []*uint64{&m.CPUTotal, &m.CPUUser, &m.CPUSystem, &m.CPUPeriods, &m.CPUThrottled, &m.ThrottledTime, &m.SystemCPU} {
		c.U64(v)
	}
	c.U32(&m.OnlineCPUs)
	for _, v := range []*uint64{&m.Memory, &m.MemoryLimit, &m.MemoryMax, &m.MemoryFailcnt} {
		c.U64(v)
	}
	c.StrMap(&m.MemoryStat)
	c.U64(&m.PIDs)
	c.U64(&m.PIDsLimit)
	entry := func(c *Coder, e *BlkioEntry) {
		c.U64(&e.Major)
		c.U64(&e.Minor)
		c.Str(&e.Op)
		c.U64(&e.Value)
	}
	List(c, &m.BlkioBytes, entry)
	List(c, &m.BlkioOps, entry)
	List(c, &m.Interfaces, func(c *Coder, i *InterfaceStats) {
		c.Str(&i.Name)
		for _, v := range []*uint64{&i.RxBytes, &i.RxPackets, &i.RxErrors, &i.RxDropped, &i.TxBytes, &i.TxPackets, &i.TxErrors, &i.TxDropped} {
			c.U64(v)
		}
	})
}

// BlkioEntry is one counter of one device.
type BlkioEntry struct {
	Major, Minor uint64
	Op           string // "read", "write", ...
	Value        uint64
}

// InterfaceStats are the counters of one interface, seen from inside the container.
type InterfaceStats struct {
	Name                                    string
	RxBytes, RxPackets, RxErrors, RxDropped uint64
	TxBytes, TxPackets, TxErrors, TxDropped uint64
}

// Top asks for the processes of a container. PIDs are the host's.
type Top struct{ ID string }

func (*Top) Kind() Kind        { return KindTop }
func (m *Top) Fields(c *Coder) { c.Str(&m.ID) }

// TopReply lists the processes of the container's cgroup.
type TopReply struct{ PIDs []int }

func (*TopReply) Kind() Kind { return KindTopReply }
func (m *TopReply) Fields(c *Coder) {
	List(c, &m.PIDs, (*Coder).Int)
}

// Plan asks for the printed launch program of a running container: `kiri debug plan`.
type Plan struct{ ID string }

func (*Plan) Kind() Kind        { return KindPlan }
func (m *Plan) Fields(c *Coder) { c.Str(&m.ID) }

// PlanReply is the program as text, one operation a line.
type PlanReply struct{ Text string }

func (*PlanReply) Kind() Kind        { return KindPlanReply }
func (m *PlanReply) Fields(c *Coder) { c.Str(&m.Text) }

// Remove deletes what is left of a stopped container on the agent's side: its writable layer, logs and state. Quiet
// if there is nothing.
type Remove struct {
	ID string
}

func (*Remove) Kind() Kind        { return KindRemove }
func (m *Remove) Fields(c *Coder) { c.Str(&m.ID) }

// Archive moves a tree in or out of a container as a tar stream on descriptor 0. With Put the stream is read and
// unpacked at Path (a directory), else Path is written to it; with Stat only the answer matters and there is no stream.
// The answer, ArchiveReply, comes when all is done.
type Archive struct {
	ID                   string
	Spec                 *Run // layers, mounts, user: how to mount the root if the container does not run; nil: Conflict then
	Path                 string
	Put                  bool
	Stat                 bool
	CopyUIDGID           bool
	NoOverwriteDirNonDir bool
	Export               bool // the whole root, as `docker export`: mounts left out
	Layer                bool // what was changed against Spec.Layers, as the tar of a layer
}

func (*Archive) Kind() Kind { return KindArchive }
func (m *Archive) Fields(c *Coder) {
	c.Str(&m.ID)
	Opt(c, &m.Spec, func(c *Coder, r *Run) { r.Fields(c) })
	c.Str(&m.Path)
	c.Bool(&m.Put)
	c.Bool(&m.Stat)
	c.Bool(&m.CopyUIDGID)
	c.Bool(&m.NoOverwriteDirNonDir)
	c.Bool(&m.Export)
	c.Bool(&m.Layer)
}

// ArchiveReply describes the file at Path.
type ArchiveReply struct {
	Name       string
	Size       int64  // bytes
	Mode       uint32 // Go's fs.FileMode
	ModTime    int64  // Unix ns
	LinkTarget string // a path inside the container
}

func (*ArchiveReply) Kind() Kind { return KindArchiveReply }
func (m *ArchiveReply) Fields(c *Coder) {
	c.Str(&m.Name)
	c.I64(&m.Size)
	c.U32(&m.Mode)
	c.I64(&m.ModTime)
	c.Str(&m.LinkTarget)
}

// Changes asks what a container changed against its image. The list, which has no limit, is written to descriptor 0:
// paths, each behind a letter and a blank (C changed, A added, D deleted) and with a NUL at its end.
type Changes struct {
	ID   string
	Size bool // count the writable layer's bytes instead; no descriptor then
	Spec *Run // its layers and mounts, if the container does not run
}

func (*Changes) Kind() Kind { return KindChanges }
func (m *Changes) Fields(c *Coder) {
	c.Str(&m.ID)
	c.Bool(&m.Size)
	Opt(c, &m.Spec, func(c *Coder, r *Run) { r.Fields(c) })
}

// ChangesReply comes when the list is written.
type ChangesReply struct {
	Size int64 // bytes of the writable layer, with Changes.Size
}

func (*ChangesReply) Kind() Kind { return KindChangesReply }
func (m *ChangesReply) Fields(c *Coder) {
	c.I64(&m.Size)
}

// Unpack makes a layer of the stream on descriptor 0, a tar that may be compressed. The agent verifies the digest of
// the decompressed bytes and keeps the layer only if it matches; a layer that is there already is left alone and
// the stream is drained. A stream that is cut short leaves nothing. The layer is durable when the answer comes.
type Unpack struct {
	DiffID string   // "sha256:<hex>" of the uncompressed tar; "" to learn it (import)
	Below  []string // DiffIDs of the layers under it, lowest first: for hard links into them
	Import bool     // the stream is a root file system from a user, not a layer: no whiteouts
}

func (*Unpack) Kind() Kind { return KindUnpack }
func (m *Unpack) Fields(c *Coder) {
	c.Str(&m.DiffID)
	c.Strs(&m.Below)
	c.Bool(&m.Import)
}

// UnpackReply tells what the layer holds.
type UnpackReply struct {
	DiffID string
	Size   int64 // bytes of file content, as Docker counts a layer's size
}

func (*UnpackReply) Kind() Kind { return KindUnpackReply }
func (m *UnpackReply) Fields(c *Coder) {
	c.Str(&m.DiffID)
	c.I64(&m.Size)
}

// Layers lists the layers that are whole.
type Layers struct{}

func (*Layers) Kind() Kind      { return KindLayers }
func (*Layers) Fields(c *Coder) {}

// LayersReply is the answer to Layers.
type LayersReply struct{ Layers []UnpackReply }

func (*LayersReply) Kind() Kind { return KindLayersReply }
func (m *LayersReply) Fields(c *Coder) {
	List(c, &m.Layers, func(c *Coder, l *UnpackReply) { l.Fields(c) })
}

// RemoveLayer deletes a layer that no image and no container uses (the daemon's to know). Quiet if it is not there.
type RemoveLayer struct{ DiffID string }

func (*RemoveLayer) Kind() Kind        { return KindRemoveLayer }
func (m *RemoveLayer) Fields(c *Coder) { c.Str(&m.DiffID) }

// Volume makes sure the directory of a local volume exists.
type Volume struct {
	Name    string
	Size    bool // also count its bytes
	Options map[string]string
}

func (*Volume) Kind() Kind { return KindVolume }
func (m *Volume) Fields(c *Coder) {
	c.Str(&m.Name)
	c.Bool(&m.Size)
	c.StrMap(&m.Options)
}

// VolumeReply tells where a volume is and, if asked, how large.
type VolumeReply struct {
	Path string
	Size int64 // bytes, -1 if not asked
}

func (*VolumeReply) Kind() Kind { return KindVolumeReply }
func (m *VolumeReply) Fields(c *Coder) {
	c.Str(&m.Path)
	c.I64(&m.Size)
}

// RemoveVolume deletes a volume's directory and all in it. Quiet if it is not there.
type RemoveVolume struct{ Name string }

func (*RemoveVolume) Kind() Kind        { return KindRemoveVolume }
func (m *RemoveVolume) Fields(c *Coder) { c.Str(&m.Name) }

// Exited tells that a process has ended and its output has been drained to the log and the attached streams. It is
// repeated in HelloReply until Ack.
type Exited struct {
	ID        string
	Run       uint64
	Exec      string // "" for the main process
	Code      int    // 0-255; 128+n if killed by signal n
	At        int64  // Unix ns
	OOMKilled bool
	CodeLost  bool // the process ended while neither agent nor daemon lived and the kernel could not tell the code
}

func (*Exited) Kind() Kind { return KindExited }
func (m *Exited) Fields(c *Coder) {
	c.Str(&m.ID)
	c.U64(&m.Run)
	c.Str(&m.Exec)
	c.Int(&m.Code)
	c.I64(&m.At)
	c.Bool(&m.OOMKilled)
	c.Bool(&m.CodeLost)
}

// OOM tells that the kernel killed a process of the container for memory.
type OOM struct{ ID string }

func (*OOM) Kind() Kind        { return KindOOM }
func (m *OOM) Fields(c *Coder) { c.Str(&m.ID) }
