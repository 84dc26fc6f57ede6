package rootfs

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

func TestLookPath(t *testing.T) {
	each(t, func(t *testing.T, g *cage, v *View) {
		root := g.top + "/root"
		plant(t, root, "usr/bin/", "bin -> usr/bin", "usr/bin/tool", "usr/bin/plain", "usr/bin/private", "usr/bin/group", "usr/bin/link -> /usr/bin/tool",
			"usr/bin/out -> ../../../canary", "usr/bin/dangling -> nowhere", "usr/local/bin/", "usr/local/bin/tool", "usr/bin/dir/", "app/", "app/run.sh",
			"etc/", "etc/passwd", "usr/bin/loop -> loop", "usr/local/bin/plain")
		for p, mode := range map[string]os.FileMode{"usr/bin/plain": 0o644, "usr/bin/private": 0o700, "usr/bin/group": 0o710, "etc/passwd": 0o644} {
			if err := os.Chmod(root+"/"+p, mode); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chown(root+"/usr/bin/group", 0, 55); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mkfifo(root+"/usr/bin/fifo", 0o777); err != nil {
			t.Fatal(err)
		}
		user := &User{UID: 1000, GID: 1000, Groups: []uint32{1000, 55}}
		path := []string{"A=b", "PATH=/usr/bin:/bin"}
		for _, c := range []struct {
			cwd   string
			env   []string
			arg   string
			u     *User
			want  string
			class wire.Class
			text  string
		}{
			{"/", nil, "tool", nil, "/usr/local/bin/tool", 0, ""},
			{"/", path, "tool", user, "/usr/bin/tool", 0, ""},
			{"/", []string{"PATH=/nowhere:/etc/passwd:/bin/"}, "tool", user, "/bin/tool", 0, ""},
			{"/", []string{"PATH=/usr/bin", "PATH=/usr/local/bin"}, "tool", user, "/usr/local/bin/tool", 0, ""}, // the last counts
			{"/", []string{"PATH=/usr/bin:/usr/local/bin"}, "plain", user, "/usr/local/bin/plain", 0, ""},
			{"/app", []string{"PATH=:/usr/bin"}, "run.sh", user, "//app/run.sh", 0, ""},
			{"/", path, "link", user, "/usr/bin/link", 0, ""},
			{"/", path, "group", user, "/usr/bin/group", 0, ""},
			{"/", path, "private", &User{}, "/usr/bin/private", 0, ""},
			{"/", path, "/app/run.sh", user, "/app/run.sh", 0, ""},
			{"/app", path, "./run.sh", user, "./run.sh", 0, ""},
			{"/app", path, "../usr/bin/tool", user, "../usr/bin/tool", 0, ""},
			{"/app", path, "../../../../usr/bin/tool", user, "../../../../usr/bin/tool", 0, ""},

			{"/", path, "nothing", user, "", wire.NoCommand, `exec: "nothing": executable file not found in $PATH`},
			{"/", path, "", user, "", wire.NoCommand, `exec: "": executable file not found in $PATH`},
			{"/", []string{"PATH="}, "tool", user, "", wire.NoCommand, `exec: "tool": executable file not found in $PATH`},
			{"/", path, "plain", user, "", wire.NoCommand, `exec: "plain": executable file not found in $PATH`},
			{"/", path, "private", user, "", wire.NoCommand, `exec: "private": executable file not found in $PATH`},
			{"/", path, "dir", user, "", wire.NoCommand, `exec: "dir": executable file not found in $PATH`},
			{"/", path, "fifo", user, "", wire.NoCommand, `exec: "fifo": executable file not found in $PATH`},
			{"/", path, "out", user, "", wire.NoCommand, `exec: "out": executable file not found in $PATH`},
			{"/", path, "/no/such", user, "", wire.NoCommand, `exec: "/no/such": stat /no/such: no such file or directory`},
			{"/", path, "./run.sh", user, "", wire.NoCommand, `exec: "./run.sh": stat ./run.sh: no such file or directory`},
			{"/", path, "/usr/bin/dangling", user, "", wire.NoCommand, `exec: "/usr/bin/dangling": stat /usr/bin/dangling: no such file or directory`},
			{"/", path, "/usr/bin/out", user, "", wire.NoCommand, `exec: "/usr/bin/out": stat /usr/bin/out: no such file or directory`},
			{"/", path, "/etc/passwd", user, "", wire.NotExecutable, `exec: "/etc/passwd": permission denied`},
			{"/", path, "/etc/passwd", &User{}, "", wire.NotExecutable, `exec: "/etc/passwd": permission denied`},
			{"/", path, "/usr/bin/private", user, "", wire.NotExecutable, `exec: "/usr/bin/private": permission denied`},
			{"/", path, "/etc", user, "", wire.NotExecutable, `exec: "/etc": is a directory`},
			{"/", path, "/", user, "", wire.NotExecutable, `exec: "/": is a directory`},
			{"/", path, "/etc/passwd/x", user, "", wire.NotExecutable, `exec: "/etc/passwd/x": stat /etc/passwd/x: not a directory`},
			{"/", path, "/usr/bin/loop", user, "", wire.NotExecutable, `exec: "/usr/bin/loop": stat /usr/bin/loop: too many levels of symbolic links`},
		} {
			got, err := v.LookPath(c.cwd, c.env, c.arg, c.u)
			if c.text == "" {
				if err != nil || got != c.want {
					t.Errorf("%q in %s with %v: %q, %v, want %q", c.arg, c.cwd, c.env, got, err, c.want)
				}
				continue
			}
			if err == nil || err.Error() != c.text || wire.ClassOf(err) != c.class {
				t.Errorf("%q: %q, %v of class %d\nwant %s of class %d", c.arg, got, err, wire.ClassOf(err), c.text, c.class)
			}
		}
	})
}
