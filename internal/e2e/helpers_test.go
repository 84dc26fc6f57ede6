package e2e

import (
	"io"
	"os"
	"testing"
)

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// tarOf returns an uncompressed tar of files.
func tarOf(t *testing.T, files ...file) []byte {
	t.Helper()
	r, err := layerOf(t, files...).Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
