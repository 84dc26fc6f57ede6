package rootfs

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

const testPasswd = `root:x:0:0:root:/root:/bin/sh

# a comment
daemon:x:1:1::/usr/sbin:/sbin/nologin
app:x:1000:1001:App,,,:/home/app:/bin/sh
second:x:1000:2000::/second:
1234:x:4321:4321::/number:
broken:x:notanumber:0::/:/bin/sh
huge:x:99999999999:0::/:
short:x:5
  spaced:x:77:78::/spaced:/bin/sh  
nohome:x:88:88
`

const testGroup = `root:x:0:
bin:x:1:root,daemon
wheel:x:10:root,app
app:x:1001:
video:x:44:app,second
dup:x:44:app
99:x:9900:
broken:x:nope:app
last:x:2147483647:app`

func TestLookupUser(t *testing.T) {
	g := newCage(t)
	plant(t, g.top+"/root", "etc/")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(g.top+"/root/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("etc/passwd", testPasswd)
	write("etc/group", testGroup)
	root := os.NewFile(uintptr(mustDup(t, g.root)), "root")
	defer root.Close()
	for _, c := range []struct {
		user   string
		groups []string
		want   string // uid:gid groups home, or the error
	}{
		{"", nil, "0:0 [0 1 10] /root"},
		{"root", nil, "0:0 [0 1 10] /root"},
		{"0", nil, "0:0 [0 1 10] /root"},
		{"app", nil, "1000:1001 [1001 10 44 2147483647] /home/app"},
		{"1000", nil, "1000:1001 [1001 10 44 2147483647] /home/app"}, // the first with this id
		{"second", nil, "1000:2000 [2000 44] /second"},
		{"app:", nil, "1000:1001 [1001 10 44 2147483647] /home/app"},
		{"app:wheel", nil, "1000:10 [10] /home/app"},
		{"app:5", nil, "1000:5 [5] /home/app"},
		{"app:99", nil, "1000:99 [99] /home/app"}, // a number is an id, not a name
		{":wheel", nil, "0:10 [10] /root"},
		{"555", nil, "555:0 [0] /"},
		{"555:666", nil, "555:666 [666] /"},
		{"555:wheel", nil, "555:10 [10] /"},
		{"1234", nil, "1234:0 [0] /"}, // likewise
		{"spaced", nil, "77:78 [78] /spaced"},
		{"nohome", nil, "88:88 [88] "},
		{"app:wheel:more", nil, "1000:10 [10] /home/app"},
		{"app", []string{"1234", "root", "44"}, "1000:1001 [1001 10 44 2147483647 1234 0] /home/app"},
		{"555", []string{"video", "video", "7"}, "555:0 [0 44 7] /"},
		{"nobody", nil, "unable to find user nobody: no matching entries in passwd file"},
		{"broken", nil, "unable to find user broken: no matching entries in passwd file"},
		{"huge", nil, "unable to find user huge: no matching entries in passwd file"},
		{"short", nil, "unable to find user short: no matching entries in passwd file"},
		{"app:nogroup", nil, "unable to find group nogroup: no matching entries in group file"},
		{"app:broken", nil, "unable to find group broken: no matching entries in group file"},
		{"app", []string{"nogroup"}, "Unable to find group nogroup: no matching entries in group file"},
		{"-1", nil, "uids and gids must be in range 0-2147483647"},
		{"2147483648", nil, "uids and gids must be in range 0-2147483647"},
		{"4294967296", nil, "uids and gids must be in range 0-2147483647"}, // not the user 0
		{"1:4294967306", nil, "uids and gids must be in range 0-2147483647"},
		{"1:2147483648", nil, "uids and gids must be in range 0-2147483647"},
		{"1", []string{"-7"}, "uids and gids must be in range 0-2147483647"},
		{"99999999999999999999", nil, "unable to find user 99999999999999999999: no matching entries in passwd file"},
	} {
		u, err := LookupUser(root, c.user, c.groups)
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprintf("%d:%d %v %s", u.UID, u.GID, u.Groups, u.Home)
		} else if wire.ClassOf(err) != wire.Internal {
			t.Errorf("user %q: class %d", c.user, wire.ClassOf(err))
		}
		if got != c.want {
			t.Errorf("user %q groups %v\ngave %s\nwant %s", c.user, c.groups, got, c.want)
		}
	}
	g.check()
}

// Where the files are is up to the image: links stay inside, what is no file is not opened, what is missing is empty.
func TestLookupUserFiles(t *testing.T) {
	const missing = "unable to find user app: no matching entries in passwd file"
	for _, c := range []struct {
		name  string
		want  string // start of the error; "" found
		setup func(t *testing.T, root string)
	}{
		{"nothing there", missing, func(t *testing.T, root string) {}},
		{"/etc is a link", "", func(t *testing.T, root string) {
			plant(t, root, "usr/etc/", "etc -> usr/etc")
			os.WriteFile(root+"/usr/etc/passwd", []byte(testPasswd), 0o600)
		}},
		{"/etc is an absolute link", "", func(t *testing.T, root string) {
			plant(t, root, "usr/etc/", "etc -> /usr/etc")
			os.WriteFile(root+"/usr/etc/passwd", []byte(testPasswd), 0o600)
		}},
		{"passwd leads out", missing, func(t *testing.T, root string) {
			os.WriteFile(root+"/../passwd", []byte(testPasswd), 0o600)
			plant(t, root, "etc/", "etc/passwd -> ../../passwd")
		}},
		{"/etc is a file", missing, func(t *testing.T, root string) { plant(t, root, "etc") }},
		{"passwd is a FIFO", "unable to find user 0: /etc/passwd is not a regular file", func(t *testing.T, root string) {
			plant(t, root, "etc/")
			if err := unix.Mkfifo(root+"/etc/passwd", 0o600); err != nil {
				t.Fatal(err)
			}
		}},
		{"passwd is a directory", "unable to find user 0: /etc/passwd is not a regular file", func(t *testing.T, root string) { plant(t, root, "etc/passwd/") }},
		{"links in a ring", "unable to find user 0: opening /etc/passwd: too many levels of symbolic links", func(t *testing.T, root string) {
			plant(t, root, "etc/", "etc/passwd -> passwd")
		}},
		{"a line without end", "unable to find user 0: reading /etc/passwd: bufio.Scanner: token too long", func(t *testing.T, root string) {
			plant(t, root, "etc/")
			os.WriteFile(root+"/etc/passwd", []byte(strings.Repeat("x", maxAccountLine+1)), 0o600)
		}},
		{"too large", "unable to find user 0: /etc/passwd is larger than", func(t *testing.T, root string) {
			plant(t, root, "etc/")
			os.WriteFile(root+"/etc/passwd", []byte(strings.Repeat("\n", maxAccountFile+10)), 0o600)
		}},
		{"long line of members", "", func(t *testing.T, root string) {
			plant(t, root, "etc/")
			os.WriteFile(root+"/etc/passwd", []byte(testPasswd), 0o600)
			os.WriteFile(root+"/etc/group", []byte("g:x:5:"+strings.Repeat("someone,", 100000)+"app\n"), 0o600)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			needRoot(t)
			p := t.TempDir() + "/root"
			if err := os.Mkdir(p, 0o755); err != nil {
				t.Fatal(err)
			}
			c.setup(t, p)
			root, err := os.Open(p)
			if err != nil {
				t.Fatal(err)
			}
			defer root.Close()
			u, err := LookupUser(root, "app", nil)
			if c.want != "" {
				if err == nil || !strings.HasPrefix(err.Error(), c.want) {
					t.Errorf("%+v, %v", u, err)
				}
				return
			}
			if err != nil || u.UID != 1000 {
				t.Errorf("%+v, %v", u, err)
			}
			if c.name == "long line of members" && len(u.Groups) != 2 {
				t.Errorf("groups %v", u.Groups)
			}
		})
	}
}

func FuzzAccounts(f *testing.F) {
	f.Add(testPasswd, testGroup, "app:wheel", "44")
	f.Add(testPasswd, testGroup, "", "nogroup")
	f.Add("::::::\n:", ":::,,,", ":", "")
	f.Add("a:b:1:2", "", "a", "-1")
	root, err := os.Open(f.TempDir())
	if err != nil {
		f.Fatal(err)
	}
	defer root.Close()
	if err := os.Mkdir(root.Name()+"/etc", 0o755); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, passwd, group, user, add string) {
		if err := os.WriteFile(root.Name()+"/etc/passwd", []byte(passwd), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(root.Name()+"/etc/group", []byte(group), 0o600); err != nil {
			t.Fatal(err)
		}
		u, err := LookupUser(root, user, []string{add})
		if err != nil {
			return
		}
		if u.UID > maxID || u.GID > maxID || len(u.Groups) == 0 || u.Groups[0] != u.GID {
			t.Errorf("%+v", u)
		}
		name, _, _ := strings.Cut(user, ":")
		if u.UID == 0 && name != "" && name != "0" && !strings.Contains(passwd, ":0") && !strings.Contains(passwd, ":+0") {
			var n int
			if _, err := fmt.Sscan(name, &n); err != nil || n != 0 {
				t.Errorf("%q became root: %+v", user, u)
			}
		}
	})
}
