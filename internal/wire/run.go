package wire

// Run is the one frame that starts a container: everything already decided, nothing Docker-shaped left to interpret.
// What depends on the root file system (user, command path, working directory) is resolved by the agent inside it.
//
// The answer is RunReply, sent when execve has succeeded. A command that is not there is an Error of class NoCommand,
// one that cannot be executed NotExecutable, a mount source that is missing Invalid. After an error nothing is left.
type Run struct {
	ID   string // 64 hex digits
	Name string // for messages
	Run  uint64 // which start of this container; comes back in Exited

	Layers   []string // DiffIDs, lowest first
	ReadOnly bool     // root file system

	Args       []string // command and arguments
	Env        []string // whole; if it has no PATH, Docker's default is used for the look-up
	Cwd        string   // "" is /; made if it is missing
	User       string   // "", name, uid, each with :group; looked up in the image's passwd and group
	Groups     []string // --group-add: names or ids
	TTY        bool
	Height     uint32 // characters; 0 unknown
	Width      uint32
	OpenStdin  bool
	StdinOnce  bool // stdin is closed when the first attached stream closes its side
	Init       bool // run kiri-init as PID 1 over the command
	Hostname   string
	Domainname string
	Log        LogConfig
	Remove     bool // nobody will look at this container again: delete its writable layer as soon as it has exited

	Mounts        []Mount
	ShmSize       int64 // bytes
	MaskedPaths   []string
	ReadonlyPaths []string

	Privileged  bool
	Caps        []string // effective set of a root process, as CAP_CHOWN; sorted by number
	NoNewPrivs  bool
	Seccomp     string // "" Docker's default for Caps, "unconfined", or a profile in Docker's JSON form
	AppArmor    string // profile, "" for none
	Devices     []Device
	DeviceRules []string // "c 10:229 rwm", added to the default set
	Rlimits     []Rlimit
	Sysctls     map[string]string
	OOMScoreAdj int

	Net    NetConfig
	PID    string // "" private, "host", or a container's id
	IPC    string // "" private, "shareable", "none", "host", or a container's id
	UTS    string // "" private or "host"
	Cgroup string // "" private or "host"

	CgroupParent string // "" kiri's own
	Resources    Resources
}

func (*Run) Kind() Kind { return KindRun }

// Fields implements Message.
func (m *Run) Fields(c *Coder) {
	c.Str(&m.ID)
	c.Str(&m.Name)
	c.U64(&m.Run)
	c.Strs(&m.Layers)
	c.Bool(&m.ReadOnly)
	c.Strs(&m.Args)
	c.Strs(&m.Env)
	c.Str(&m.Cwd)
	c.Str(&m.User)
	c.Strs(&m.Groups)
	c.Bool(&m.TTY)
	c.U32(&m.Height)
	c.U32(&m.Width)
	c.Bool(&m.OpenStdin)
	c.Bool(&m.StdinOnce)
	c.Bool(&m.Init)
	c.Str(&m.Hostname)
	c.Str(&m.Domainname)
	m.Log.fields(c)
	c.Bool(&m.Remove)
	List(c, &m.Mounts, func(c *Coder, v *Mount) { v.fields(c) })
	c.I64(&m.ShmSize)
	c.Strs(&m.MaskedPaths)
	c.Strs(&m.ReadonlyPaths)
	c.Bool(&m.Privileged)
	c.Strs(&m.Caps)
	c.Bool(&m.NoNewPrivs)
	c.Str(&m.Seccomp)
	c.Str(&m.AppArmor)
	List(c, &m.Devices, func(c *Coder, v *Device) {
		c.Str(&v.Source)
		c.Str(&v.Target)
		c.Str(&v.Access)
	})
	c.Strs(&m.DeviceRules)
	List(c, &m.Rlimits, func(c *Coder, v *Rlimit) {
		c.Str(&v.Name)
		c.U64(&v.Soft)
		c.U64(&v.Hard)
	})
	c.StrMap(&m.Sysctls)
	c.Int(&m.OOMScoreAdj)
	m.Net.fields(c)
	c.Str(&m.PID)
	c.Str(&m.IPC)
	c.Str(&m.UTS)
	c.Str(&m.Cgroup)
	c.Str(&m.CgroupParent)
	m.Resources.fields(c)
}

// RunReply tells that the command runs. On the host descriptors come with it, for the daemon to hold so that they
// outlive the agent: 0 the pidfd; with a TTY 1 the terminal's master; else 1 stdout's read end, 2 stderr's read end
// and, with OpenStdin but not StdinOnce, 3 stdin's write end: held by the daemon, the stdin of a StdinOnce container
// would never end.
type RunReply struct {
	PID       int   // the main process in the agent's PID namespace
	StartedAt int64 // Unix ns
	Endpoint  Endpoint
	Cgroup    string // path below the cgroup root
}

func (*RunReply) Kind() Kind { return KindRunReply }

// Fields implements Message.
func (m *RunReply) Fields(c *Coder) {
	c.Int(&m.PID)
	c.I64(&m.StartedAt)
	m.Endpoint.fields(c)
	c.Str(&m.Cgroup)
}

// Mount puts something at Target, a path inside the container that the agent resolves within its root.
type Mount struct {
	Type         string // "bind", "volume" or "tmpfs"
	Source       string // bind: a host path; volume: a volume's name; tmpfs: ""
	Target       string
	ReadOnly     bool
	Recursive    string // of ReadOnly: "" recursive where the kernel can, "writable", "disabled", "readonly" (or fail)
	Propagation  string // "" is rprivate; Docker's words
	CreateSource bool   // bind: make a missing source directory, as -v does and --mount does not
	NonRecursive bool   // bind: leave the mounts below the source out
	NoCopy       bool   // volume: do not fill an empty volume from the image
	Subpath      string // volume: a directory in it
	Options      string // tmpfs: mount options, "size=64m,mode=1777"
}

func (m *Mount) fields(c *Coder) {
	c.Str(&m.Type)
	c.Str(&m.Source)
	c.Str(&m.Target)
	c.Bool(&m.ReadOnly)
	c.Str(&m.Recursive)
	c.Str(&m.Propagation)
	c.Bool(&m.CreateSource)
	c.Bool(&m.NonRecursive)
	c.Bool(&m.NoCopy)
	c.Str(&m.Subpath)
	c.Str(&m.Options)
}

// Device makes a host device available in the container.
type Device struct {
	Source string // on the host; a directory brings all devices in it
	Target string
	Access string // of "rwm"
}

// Rlimit is one resource limit by its lower-case name, "nofile". ^uint64(0) is unlimited.
type Rlimit struct {
	Name string
	Soft uint64
	Hard uint64
}

// LogConfig says how a container's output is kept.
type LogConfig struct {
	Driver  string            // "json-file", "local" or "none"
	Options map[string]string // of the driver: max-size, max-file, ...
	Attrs   map[string]string // labels and env asked for by the driver's options: `logs --details`
}

func (l *LogConfig) fields(c *Coder) {
	c.Str(&l.Driver)
	c.StrMap(&l.Options)
	c.StrMap(&l.Attrs)
}

// NetConfig says which network namespace a container gets and what is written in its resolver files.
type NetConfig struct {
	Mode       string   // "none", "host", "bridge" or "container"
	Container  string   // with "container": the id whose namespace is joined
	Address    string   // an IPv4 address asked for; "" any
	MAC        string   // asked for; "" any
	DNS        []string // servers; none given: the host's
	DNSSearch  []string
	DNSOptions []string
	ExtraHosts []string // "name:address"
	Ports      []Port
}

func (n *NetConfig) fields(c *Coder) {
	c.Str(&n.Mode)
	c.Str(&n.Container)
	c.Str(&n.Address)
	c.Str(&n.MAC)
	c.Strs(&n.DNS)
	c.Strs(&n.DNSSearch)
	c.Strs(&n.DNSOptions)
	c.Strs(&n.ExtraHosts)
	List(c, &n.Ports, func(c *Coder, p *Port) { p.fields(c) })
}

// Port publishes a port of the container on the host.
type Port struct {
	Proto         string // "tcp", "udp" or "sctp"
	ContainerPort int
	HostIP        string // "" all
	HostPort      int    // 0: any that is free; the answer has the number
}

func (p *Port) fields(c *Coder) {
	c.Str(&p.Proto)
	c.Int(&p.ContainerPort)
	c.Str(&p.HostIP)
	c.Int(&p.HostPort)
}

// Endpoint is where a container sits on the default bridge; all empty for the other modes.
type Endpoint struct {
	Address   string // IPv4
	PrefixLen int
	Gateway   string
	MAC       string
	Interface string // the host's end
	Ports     []Port // as published
}

func (e *Endpoint) fields(c *Coder) {
	c.Str(&e.Address)
	c.Int(&e.PrefixLen)
	c.Str(&e.Gateway)
	c.Str(&e.MAC)
	c.Str(&e.Interface)
	List(c, &e.Ports, func(c *Coder, p *Port) { p.fields(c) })
}

// Resources are the limits of a cgroup. Zero values mean "not set"; in Update they leave the limit as it is.
type Resources struct {
	Memory             int64 // bytes
	MemorySwap         int64 // bytes of memory and swap together, -1 unlimited
	MemoryReservation  int64
	MemorySwappiness   *int64
	OOMKillDisable     bool
	CPUShares          uint64
	CPUPeriod          uint64 // us
	CPUQuota           int64  // us, -1 unlimited
	CPURealtimePeriod  int64
	CPURealtimeRuntime int64
	CpusetCpus         string
	CpusetMems         string
	PidsLimit          *int64 // 0 or -1 unlimited
	BlkioWeight        uint16
	BlkioWeightDevice  []BlkioLimit
	ReadBps            []BlkioLimit
	WriteBps           []BlkioLimit
	ReadIOps           []BlkioLimit
	WriteIOps          []BlkioLimit
}

// BlkioLimit is a limit on one device, by the device's path on the host.
type BlkioLimit struct {
	Path string
	Rate uint64
}

func (r *Resources) fields(c *Coder) {
	c.I64(&r.Memory)
	c.I64(&r.MemorySwap)
	c.I64(&r.MemoryReservation)
	Opt(c, &r.MemorySwappiness, (*Coder).I64)
	c.Bool(&r.OOMKillDisable)
	c.U64(&r.CPUShares)
	c.U64(&r.CPUPeriod)
	c.I64(&r.CPUQuota)
	c.I64(&r.CPURealtimePeriod)
	c.I64(&r.CPURealtimeRuntime)
	c.Str(&r.CpusetCpus)
	c.Str(&r.CpusetMems)
	Opt(c, &r.PidsLimit, (*Coder).I64)
	w := uint32(r.BlkioWeight)
	c.U32(&w)
	r.BlkioWeight = uint16(w)
	for _, l := range []*[]BlkioLimit{&r.BlkioWeightDevice, &r.ReadBps, &r.WriteBps, &r.ReadIOps, &r.WriteIOps} {
		List(c, l, func(c *Coder, v *BlkioLimit) {
			c.Str(&v.Path)
			c.U64(&v.Rate)
		})
	}
}

// IsZero tells whether nothing is limited.
func (r *Resources) IsZero() bool {
	return r.Memory == 0 && r.MemorySwap == 0 && r.MemoryReservation == 0 && r.MemorySwappiness == nil &&
		!r.OOMKillDisable && r.CPUShares == 0 && r.CPUPeriod == 0 && r.CPUQuota == 0 && r.CPURealtimePeriod == 0 &&
		r.CPURealtimeRuntime == 0 && r.CpusetCpus == "" && r.CpusetMems == "" && r.PidsLimit == nil && r.BlkioWeight == 0 &&
		len(r.BlkioWeightDevice)+len(r.ReadBps)+len(r.WriteBps)+len(r.ReadIOps)+len(r.WriteIOps) == 0
}

// Exec starts another process in a running container. The stream, descriptor 0, is the client's connection, as in
// Attach; without a stream (detached) stdio is /dev/null. The answer is ExecReply once execve has succeeded; the end
// is told by Exited with this Exec, after all output is on the stream.
type Exec struct {
	ID         string // container
	Exec       string // 64 hex digits
	Args       []string
	Env        []string // added to the container's own
	Cwd        string   // "" is the container's
	User       string   // "" is the container's, with its groups
	TTY        bool
	Height     uint32
	Width      uint32
	Privileged bool
	Stdin      bool
	Stdout     bool
	Stderr     bool
	Framed     bool
	Detach     bool
	DetachKeys []byte
	Buffered   []byte // as in Attach
}

func (*Exec) Kind() Kind { return KindExec }

// Fields implements Message.
func (m *Exec) Fields(c *Coder) {
	c.Str(&m.ID)
	c.Str(&m.Exec)
	c.Strs(&m.Args)
	c.Strs(&m.Env)
	c.Str(&m.Cwd)
	c.Str(&m.User)
	c.Bool(&m.TTY)
	c.U32(&m.Height)
	c.U32(&m.Width)
	c.Bool(&m.Privileged)
	c.Bool(&m.Stdin)
	c.Bool(&m.Stdout)
	c.Bool(&m.Stderr)
	c.Bool(&m.Framed)
	c.Bool(&m.Detach)
	c.Bytes(&m.DetachKeys)
	c.Bytes(&m.Buffered)
}

// ExecReply tells that the process runs.
type ExecReply struct {
	PID int // in the agent's PID namespace
}

func (*ExecReply) Kind() Kind        { return KindExecReply }
func (m *ExecReply) Fields(c *Coder) { c.Int(&m.PID) }
