package bench

import (
	"os/exec"
	"testing"
)

func TestTrueProgramRuns(t *testing.T) {
	dir := t.TempDir()
	if err := trueRoot(dir); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(dir + "/bin/true").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}
