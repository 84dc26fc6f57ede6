package engine

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	rt "runkiri.com/kiri/internal/registry/registrytest"
)

// TestPullKilled pulls in a process of its own that is killed, really, when a blob is at some point of its way. The next
// process has no half image, and goes on from there.
func TestPullKilled(t *testing.T) {
	if spec := os.Getenv("KIRI_PULL_KILL"); spec != "" {
		var dir, ref string
		if _, err := fmt.Sscan(spec, &dir, &ref); err != nil {
			t.Fatal(err)
		}
		b := &bench{t: t, dir: dir, running: map[string]bool{}}
		b.open()
		_, err := b.pull(ref, PullOptions{})
		t.Fatalf("the pull ended before it was killed: %v", err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	addr := rt.Start(t)
	const size = 2 << 20
	small, big := rt.GzipLayer(rt.File{Name: "s", Body: []byte("s")}), rt.GzipLayer(rt.File{Name: "b", Body: rt.Random(2, size)})
	rt.Push(t, addr+"/x:1", rt.Image(t, false, nil, small, big))
	blob := blobOf(t, big)
	for _, at := range []int64{0, 1, size / 2, size} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			b := newImages(t)
			b.close()
			front := rt.NewFront(t, addr)
			cmd := exec.Command(exe, "-test.run=^TestPullKilled$")
			cmd.Env = append(os.Environ(), "KIRI_PULL_KILL="+b.dir+" "+front.Addr+"/x:1")
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			started := make(chan struct{})
			// The server sends so much and then waits until the client is dead.
			hold := func(r *http.Request) (int64, func()) {
				if !strings.HasSuffix(r.URL.Path, blob) {
					return -1, nil
				}
				return at, func() {
					part := b.dir + "/content/ingest/" + strings.TrimPrefix(blob, "sha256:")
					until(t, "the part to be on the disk", func() bool {
						fi, err := os.Stat(part)
						return at == 0 || err == nil && fi.Size() >= min(at, size)*9/10
					})
					<-started
					cmd.Process.Signal(syscall.SIGKILL)
					<-r.Context().Done()
				}
			}
			front.Change(func() { front.Hold = hold })
			err := cmd.Start()
			if err != nil {
				t.Fatal(err)
			}
			close(started)
			err = cmd.Wait()
			var exit *exec.ExitError
			if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("the pulling process: %v\n%s", err, out.String())
			}
			front.Change(func() { front.Hold = nil })
			b.open()
			if list, err := b.s.list(ImageListOptions{}); err != nil || len(list) != 0 {
				t.Errorf("a half image is there: %+v, %v", list, err)
			}
			front.Reset()
			b.mustPull(front.Addr + "/x:1")
			n, _ := big.Size()
			if sent := front.Sent(blob); sent > n-at*9/10+1 {
				t.Errorf("%d bytes of %d were fetched again after %d had come", sent, n, at)
			}
			if got := b.read(front.Addr+"/x:1", "s"); got != "s" {
				t.Errorf("the image holds %q", got)
			}
		})
	}
}
