//go:build linux && (amd64 || arm64)

package launch

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestQuick(t *testing.T) {
	th, err := NewThread(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer th.Close()
	p, err := Compile(&Spec{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Args: []string{"sh", "-c", "echo hello $$; pwd; cat /proc/self/status"}, Path: "/bin/sh", Env: []string{"A=b"}, Caps: CapsFor(DefaultCaps(), 0), Stdout: os.Stdout, Stderr: os.Stderr, NoNewPrivs: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + p.String())
	pr, err := th.Start(p)
	t.Log(pr, err)
	var si unix.WaitStatus
	unix.Wait4(pr.PID, &si, 0, nil)
	t.Log(si)
}
