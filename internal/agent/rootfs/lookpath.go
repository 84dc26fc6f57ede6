package rootfs

import (
	"errors"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// DefaultPath is the PATH of a container whose environment has none, as Docker sets it.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// LookPath finds the program arg0 in root as runc does for Docker: a name with a slash is taken as it is, from cwd if
// it is relative, any other is searched in the PATH of env. What it returns is for execve after chdir to cwd. mounts
// are seen in their places.
//
// Errors (Docker turns them into exit codes 127 and 126, and clients search for the words):
//
//	wire.NoCommand      exec: "x": executable file not found in $PATH
//	                    exec: "/x": stat /x: no such file or directory
//	wire.NotExecutable  exec: "/x": permission denied
//	                    exec: "/x": is a directory
//
// Whether u may execute is judged by the file's mode alone; execve has the last word.
func LookPath(root *os.File, cwd string, env []string, arg0 string, u *User, mounts ...MountAt) (string, error) {
	v := NewView(root)
	for _, m := range mounts {
		if err := v.Add(m); err != nil {
			return "", err
		}
	}
	return v.LookPath(cwd, env, arg0, u)
}

// LookPath is the function of the same name in a view.
func (v *View) LookPath(cwd string, env []string, arg0 string, u *User) (string, error) {
	if strings.ContainsRune(arg0, '/') {
		err := v.executable(fromCwd(cwd, arg0), u)
		if err == nil {
			return arg0, nil
		}
		return "", commandError(arg0, err)
	}
	if arg0 == "" {
		return "", wire.Errorf(wire.NoCommand, "exec: %q: executable file not found in $PATH", arg0)
	}
	search, set := DefaultPath, false
	for _, e := range env {
		if value, ok := strings.CutPrefix(e, "PATH="); ok {
			search, set = value, true
		}
	}
	if set && search == "" {
		return "", wire.Errorf(wire.NoCommand, "exec: %q: executable file not found in $PATH", arg0)
	}
	for dir := range strings.SplitSeq(search, ":") {
		p := strings.TrimRight(fromCwd(cwd, dir), "/") + "/" + arg0
		if v.executable(p, u) == nil {
			return p, nil
		}
	}
	return "", wire.Errorf(wire.NoCommand, "exec: %q: executable file not found in $PATH", arg0)
}

// fromCwd makes p absolute.
func fromCwd(cwd, p string) string {
	if strings.HasPrefix(p, "/") {
		return p
	}
	return "/" + cwd + "/" + p
}

// executable tells whether u may execute the file p: nil, EISDIR, EACCES or why it cannot be found.
func (v *View) executable(p string, u *User) error {
	fd, err := v.open(p, unix.O_PATH)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := fstatPath(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return unix.EISDIR
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return unix.EACCES
	}
	bit := uint32(0o001)
	switch {
	case u == nil || u.UID == 0:
		bit = 0o111
	case u.UID == st.Uid:
		bit = 0o100
	case u.GID == st.Gid || slices.Contains(u.Groups, st.Gid):
		bit = 0o010
	}
	if st.Mode&bit == 0 {
		return unix.EACCES
	}
	return nil
}

// commandError is the error for a command that was named by its path.
func commandError(arg0 string, err error) error {
	switch {
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EISDIR):
		return wire.Errorf(wire.NotExecutable, "exec: %q: %w", arg0, err)
	case errors.Is(err, unix.ENOENT):
		return wire.Errorf(wire.NoCommand, "exec: %q: stat %s: %w", arg0, arg0, err)
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENAMETOOLONG), errors.Is(err, unix.EINVAL):
		return wire.Errorf(wire.NotExecutable, "exec: %q: stat %s: %w", arg0, arg0, err)
	}
	return wire.Errorf(wire.Internal, "exec: %q: stat %s: %w", arg0, arg0, err)
}
