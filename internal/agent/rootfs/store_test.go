package rootfs

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

func TestReopen(t *testing.T) {
	s := newStore(t)
	root := dir("./", 0o1750)
	root.Uid, root.Gid = 5, 6
	a := unpack(t, s, nil, root, file("a", "aaa"))
	b := unpack(t, s, []string{a}, file("b", "b"))
	if err := os.Mkdir(filepath.Join(s.root, "layers", "not-ours!"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(s.root, "layers", "+zz", "fs", "half"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(s.root, "layers", "-zy", "fs", "half"), 0o700); err != nil {
		t.Fatal(err)
	}
	torn := filepath.Join(s.root, "layers", "zx")
	if err := os.Mkdir(torn, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(torn+"/layer", []byte("kiri layer 1\ndiffid "), 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := OpenStore(s.root)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	layers, err := r.Layers()
	if err != nil || len(layers) != 2 {
		t.Fatalf("%v, %v", layers, err)
	}
	for _, l := range layers {
		if l.DiffID == a && l.Size != 3 || l.DiffID == b && l.Size != 1 {
			t.Errorf("layer %+v", l)
		}
	}
	mnt, p := mounted(t, r, "c", a, b)
	wantNames(t, p, "a", "b")
	var st unix.Stat_t
	if err := unix.Fstat(fdOf(mnt), &st); err != nil || st.Mode&0o7777 != 0o1750 || st.Uid != 5 || st.Gid != 6 {
		t.Errorf("root has mode %o owner %d:%d, %v", st.Mode, st.Uid, st.Gid, err)
	}
	mnt.Close()
	c := unpack(t, r, nil, file("c", "c"))
	if name := filepath.Base(filepath.Dir(layerPath(t, r, c))); name != "100" { // zz and one, in base 36
		t.Errorf("new layer is %s: numbers must not come twice", name)
	}
	if err := r.RemoveLayer(b); err != nil {
		t.Error(err)
	}
	if err := r.RemoveLayer(b); err != nil {
		t.Errorf("removing twice: %v", err)
	}
	if _, err := r.Mount("d", []string{a, b}, false); wire.ClassOf(err) != wire.NotFound {
		t.Errorf("mounting a layer that is gone: %v", err)
	}
	names, err := os.ReadDir(filepath.Join(s.root, "layers"))
	if err != nil || len(names) != 4 { // 1, 100, empty, not-ours!
		t.Errorf("%v, %v", names, err)
	}
}

func TestInfoText(t *testing.T) {
	l := layerInfo{DiffID: diffID(nil), Size: 12, HasRoot: true, Mode: 0o1777, UID: 3, GID: 4294967294}
	whole := l.text()
	got, err := parseInfo(whole)
	if err != nil || got != l {
		t.Errorf("%+v, %v", got, err)
	}
	for i := range len(whole) - 4 { // without "end\n" it is cut
		if _, err := parseInfo(whole[:i]); err == nil {
			t.Errorf("cut at %d: no error", i)
		}
	}
}

// helperStore is the environment variable that makes the test binary an agent that unpacks until it is killed.
const helperStore = "ROOTFS_TEST_AGENT"

// The agent is killed at random: the next one sweeps up, even while the dead one's child still writes.
func TestAgentKilled(t *testing.T) {
	if dir := os.Getenv(helperStore); dir != "" {
		agentUntilKilled(dir)
	}
	s := newStore(t)
	survivors := 0
	for i := range 12 {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestAgentKilled$")
		cmd.Env = append(os.Environ(), helperStore+"="+s.root)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 1)); err != nil { // it works
			t.Fatal(err)
		}
		time.Sleep(time.Duration(rand.IntN(250)) * time.Millisecond) // the random instant
		kids := children(t, cmd.Process.Pid)
		cmd.Process.Kill()
		r, err := OpenStore(s.root) // at once, before the child can have noticed
		if err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
		r.sweeps.Wait()
		layers, err := r.Layers()
		if err != nil {
			t.Fatal(err)
		}
		names, _ := os.ReadDir(filepath.Join(s.root, "layers"))
		if len(names) != len(layers)+1 {
			t.Fatalf("round %d: %d layers and %v", i, len(layers), names)
		}
		for _, l := range layers { // what is listed is whole
			wantContent(t, layerPath(t, r, l.DiffID)+"/last", "last")
			survivors++
			if err := r.RemoveLayer(l.DiffID); err != nil {
				t.Error(err)
			}
		}
		r.Close()
		for _, pid := range kids {
			if cmd, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.Contains(string(cmd), unpackArg) {
				t.Errorf("round %d: the unpack process %d outlived its agent", i, pid)
			}
		}
	}
	t.Logf("%d layers were whole when their agent was killed", survivors)
}

// The same with a stream that goes on, as the daemon's does: the child must not live on with it.
func TestAgentKilledStreamGoesOn(t *testing.T) {
	if dir := os.Getenv(helperStore); dir != "" {
		s, err := OpenStore(dir)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		_, err = s.Unpack(context.Background(), &wire.Unpack{Import: true}, os.NewFile(3, "stream"))
		fmt.Fprintln(os.Stderr, "not killed:", err)
		os.Exit(1)
	}
	s := newStore(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestAgentKilledStreamGoesOn$")
	cmd.Env = append(os.Environ(), helperStore+"="+s.root)
	cmd.ExtraFiles = []*os.File{r}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.Close()
	// More than a pipe holds: when it is written, the child has begun to read.
	if _, err := w.Write(pack(t, file("f", strings.Repeat("x", 1<<20)))[:1<<20]); err != nil {
		t.Fatal(err)
	}
	cmd.Process.Kill()
	cmd.Wait()
	next, err := OpenStore(s.root)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	swept := make(chan struct{})
	go func() { next.sweeps.Wait(); close(swept) }()
	select {
	case <-swept:
	case <-time.After(20 * time.Second):
		t.Fatal("the dead agent's child still holds its layer")
	}
	wantNames(t, filepath.Join(s.root, "layers"), "empty")
}

// agentUntilKilled unpacks one layer after the other.
func agentUntilKilled(dir string) {
	s, err := OpenStore(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("working")
	t := &testing.B{}
	for n := 0; ; n++ {
		var entries []entry
		for i := range 300 {
			entries = append(entries, file(fmt.Sprintf("d%d/f%d", i%10, i), fmt.Sprint(n)))
		}
		plain := pack(t, append(entries, file("last", "last"))...)
		r, w, err := os.Pipe()
		if err != nil {
			os.Exit(1)
		}
		go func() { w.Write(plain); w.Close() }()
		if _, err := s.Unpack(context.Background(), &wire.Unpack{DiffID: diffID(plain)}, r); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		r.Close()
	}
}

// A tree that is deeper than there are descriptors, or than a path can say, goes away all the same.
func TestRemoveDeepTree(t *testing.T) {
	s := newStore(t)
	if err := s.makeContainer("deep", nil); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(s.ContainerDir("deep")+"/upper", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2500 {
		if err := unix.Mkdirat(fd, "d", 0o700); err != nil {
			t.Fatal(err)
		}
		f, err := unix.Openat(fd, "f", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(i, err)
		}
		unix.Close(f)
		sub, err := unix.Openat(fd, "d", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
		fd = sub
	}
	unix.Close(fd)
	if err := s.RemoveContainer("deep"); err != nil {
		t.Fatal(err)
	}
	wantMissing(t, s.ContainerDir("deep"))
}

// Removing never enters a mount that somebody has made inside.
func TestRemoveStopsAtMounts(t *testing.T) {
	s := newStore(t)
	p, err := s.Volume("vol")
	if err != nil {
		t.Fatal(err)
	}
	precious := t.TempDir()
	for _, f := range []string{precious + "/file", p + "/other"} {
		if err := os.WriteFile(f, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(p+"/mnt", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(precious, p+"/mnt", "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	err = s.RemoveVolume("vol")
	if umountErr := unix.Unmount(p+"/mnt", 0); umountErr != nil {
		t.Fatal(umountErr)
	}
	if err == nil {
		t.Error("removed with a mount inside")
	}
	wantContent(t, precious+"/file", "x")
	if err := s.RemoveVolume("vol"); err != nil {
		t.Error(err)
	}
	wantMissing(t, p)
}
