package rootfs

import (
	"testing"
)

func TestSmoke(t *testing.T) {
	s := newStore(t)
	a := unpack(t, s, nil, dir("./", 0o750), dir("etc/", 0o755), file("etc/hosts", "hello"), symlink("lib", "usr/lib"), dir("usr/lib", 0o755), file("lib/x", "in usr"))
	b := unpack(t, s, []string{a}, file("etc/.wh.hosts", ""), file("etc/new", "new"), hardlink("y", "usr/lib/x"))
	_, p := mounted(t, s, "c1", a, b)
	wantNames(t, p+"/etc", "new")
	wantContent(t, p+"/usr/lib/x", "in usr")
	wantContent(t, p+"/lib/x", "in usr")
	wantContent(t, p+"/y", "in usr")
}
