package rootfs

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// User is who a process runs as.
type User struct {
	UID, GID uint32
	Groups   []uint32 // supplementary ones; as with Docker the first is GID
	Home     string
}

// Bounds on the image's passwd and group files.
const (
	maxAccountFile = 16 << 20 // bytes read of one
	maxAccountLine = 1 << 20  // a group's list of members may be long
	maxID          = 1<<31 - 1
	maxGroups      = 1 << 16 // NGROUPS_MAX of the kernel
)

var (
	errNoPasswd = errors.New("no matching entries in passwd file")
	errNoGroup  = errors.New("no matching entries in group file")
	errRange    = fmt.Errorf("uids and gids must be in range %d-%d", 0, maxID)
)

// LookupUser resolves Docker's user argument ("", name, uid, each with :group) and the groups added by --group-add in
// the passwd and group files of root. The rules and the words of the errors are Docker's (moby/sys/user):
//
//   - A number is always an id, never a name; one that passwd does not have is fine, with group 0 and home /.
//   - "" is uid 0, with the groups that root is a member of.
//   - An explicit group replaces the user's own and leaves out those the group file lists the user in.
//
// A missing file is an empty one. A line whose ids are no numbers is skipped (Docker takes them for 0).
//
// Errors are of class wire.Internal, because Docker answers 500 to them.
func LookupUser(root *os.File, user string, groups []string) (*User, error) {
	userArg, groupArg, _ := strings.Cut(user, ":")
	groupArg, _, _ = strings.Cut(groupArg, ":")
	u, name, err := findUser(root, userArg)
	if err != nil {
		return nil, err
	}
	member, extra, err := findGroups(root, groupArg, name, groups)
	if err != nil {
		return nil, err
	}
	if groupArg != "" {
		if len(member) == 0 {
			gid, err := strconv.Atoi(groupArg)
			if err != nil {
				return nil, fmt.Errorf("unable to find group %s: %w", groupArg, errNoGroup)
			}
			if gid < 0 || gid > maxID {
				return nil, errRange
			}
			member = []uint32{uint32(gid)}
		}
		u.GID, member = member[0], nil
	}
	u.Groups = []uint32{u.GID}
	for _, g := range append(member, extra...) {
		if !slices.Contains(u.Groups, g) {
			u.Groups = append(u.Groups, g)
		}
	}
	return u, nil
}

// findUser resolves the part before the colon. name is that of the passwd entry, "" without one.
func findUser(root *os.File, arg string) (u *User, name string, err error) {
	u = &User{Home: "/"}
	id, idErr := strconv.Atoi(arg)
	if arg == "" {
		id, idErr = 0, nil
	}
	found := false
	err = eachLine(root, "/etc/passwd", func(line []byte) bool {
		var f [6][]byte // name:password:UID:GID:GECOS:directory, passwd(5)
		if splitFields(line, f[:]) < 4 {
			return true
		}
		uid, ok1 := parseID(f[2])
		gid, ok2 := parseID(f[3])
		if !ok1 || !ok2 {
			return true
		}
		if idErr == nil && id != int(uid) || idErr != nil && string(f[0]) != arg {
			return true
		}
		u.UID, u.GID, name, found = uid, gid, string(f[0]), true
		u.Home = string(f[5])
		return false
	})
	if err != nil {
		return nil, "", fmt.Errorf("unable to find user %s: %w", strconv.Itoa(id), err)
	}
	if found || arg == "" {
		return u, name, nil
	}
	if idErr != nil {
		return nil, "", fmt.Errorf("unable to find user %s: %w", arg, errNoPasswd)
	}
	if id < 0 || id > maxID {
		return nil, "", errRange
	}
	u.UID = uint32(id)
	return u, "", nil
}

// findGroups reads the group file once. member are the groups that match groupArg or, without one, that have the
// user called name as a member; extra are those asked for by --group-add, in the order they were asked for.
func findGroups(root *os.File, groupArg, name string, add []string) (member, extra []uint32, err error) {
	if groupArg == "" && name == "" && len(add) == 0 {
		return nil, nil, nil
	}
	gidArg, gidErr := strconv.Atoi(groupArg)
	added := make([]*uint32, len(add))
	err = eachLine(root, "/etc/group", func(line []byte) bool {
		var f [4][]byte // group_name:password:GID:user_list, group(5)
		if splitFields(line, f[:]) < 3 {
			return true
		}
		gid, ok := parseID(f[2])
		if !ok {
			return true
		}
		switch {
		case groupArg != "":
			if gidErr == nil && gidArg == int(gid) || gidErr != nil && string(f[0]) == groupArg {
				member = append(member, gid)
			}
		case name != "":
			if hasMember(f[3], name) && len(member) < maxGroups {
				member = append(member, gid)
			}
		}
		for i, a := range add {
			if added[i] == nil && (string(f[0]) == a || strconv.FormatUint(uint64(gid), 10) == a) {
				added[i] = &gid
			}
		}
		return true
	})
	if err != nil {
		return nil, nil, fmt.Errorf("unable to find groups for spec %v: %w", name, err)
	}
	for i, a := range add {
		if added[i] == nil {
			gid, err := strconv.ParseInt(a, 10, 64)
			if err != nil {
				return nil, nil, fmt.Errorf("Unable to find group %s: %w", a, errNoGroup) //lint:ignore ST1005 Docker's words
			}
			if gid < 0 || gid > maxID {
				return nil, nil, errRange
			}
			id := uint32(gid)
			added[i] = &id
		}
		extra = append(extra, *added[i])
	}
	return member, extra, nil
}

// hasMember tells whether a comma separated list has name in it.
func hasMember(list []byte, name string) bool {
	for m := range bytes.SplitSeq(list, []byte(",")) {
		if string(m) == name {
			return true
		}
	}
	return false
}

// splitFields cuts a line at its colons into f and returns how many fields it filled; what is behind the last is
// dropped.
func splitFields(line []byte, f [][]byte) int {
	for i := range f {
		end := bytes.IndexByte(line, ':')
		if end < 0 {
			f[i] = line
			return i + 1
		}
		f[i], line = line[:end], line[end+1:]
	}
	return len(f)
}

// parseID reads a decimal id.
func parseID(b []byte) (uint32, bool) {
	id, err := strconv.ParseUint(string(b), 10, 32)
	return uint32(id), err == nil && id <= maxID
}

// eachLine calls do for each line of a file in root that is not empty, without the space around it, until do returns
// false. A file that is missing has none; one that is no regular file is an error, and is never opened.
func eachLine(root *os.File, p string, do func(line []byte) bool) error {
	f, err := openRegular(root, p)
	if isMissing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	sc := bufio.NewScanner(io.LimitReader(f, maxAccountFile+1))
	sc.Buffer(make([]byte, 4<<10), maxAccountLine)
	read := 0
	for sc.Scan() {
		if read += len(sc.Bytes()) + 1; read > maxAccountFile {
			return wire.Errorf(wire.Invalid, "%s is larger than %d bytes", p, maxAccountFile)
		}
		if line := bytes.TrimSpace(sc.Bytes()); len(line) > 0 && !do(line) {
			return nil
		}
	}
	if err := sc.Err(); err != nil {
		return fmt.Errorf("reading %s: %w", p, err)
	}
	return nil
}

// openRegular opens a regular file of root for reading. A FIFO would block and a device have effects, so the type is
// looked at before the file is really opened.
func openRegular(root *os.File, p string) (*os.File, error) {
	fd, err := openat2(fdOf(root), p, unix.O_PATH, inRoot)
	if err != nil {
		if isMissing(err) {
			return nil, err
		}
		return nil, fmt.Errorf("opening %s: %w", p, err)
	}
	defer unix.Close(fd)
	_, mode, err := identify(fd)
	if err == nil && mode&unix.S_IFMT != unix.S_IFREG {
		return nil, wire.Errorf(wire.Invalid, "%s is not a regular file", p)
	}
	if err == nil {
		var rfd int
		if rfd, err = reopen(fd, unix.O_RDONLY); err == nil {
			return os.NewFile(uintptr(rfd), p), nil
		}
	}
	return nil, fmt.Errorf("opening %s: %w", p, err)
}
