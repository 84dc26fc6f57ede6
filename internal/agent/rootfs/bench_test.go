package rootfs

import (
	"archive/tar"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"runkiri.com/kiri/internal/wire"
)

// benchLayer writes a tar of about 200 MB in 10,000 files of 500 directories, sizes as in a distribution: most are
// small, some are large; a third of the bytes does not compress.
func benchLayer(b *testing.B) string {
	b.Helper()
	rnd := rand.New(rand.NewPCG(1, 2))
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(rnd.Uint32())
	}
	text := make([]byte, 1<<20)
	words := []string{"the ", "kernel ", "of ", "a ", "container\n", "is ", "0123456789 ", "return nil; "}
	for i := 0; i < len(text); {
		i += copy(text[i:], words[rnd.IntN(len(words))])
	}
	name := filepath.Join(b.TempDir(), "layer.tar")
	f, err := os.Create(name)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	w := tar.NewWriter(f)
	for i := range 10000 {
		if i%20 == 0 {
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: fmt.Sprintf("usr/d%d/", i/20), Mode: 0o755, ModTime: testTime}); err != nil {
				b.Fatal(err)
			}
		}
		size := rnd.IntN(8 << 10)
		if i%10 == 0 {
			size = rnd.IntN(320 << 10)
		}
		src := text
		if rnd.IntN(3) == 0 {
			src = noise
		}
		at := rnd.IntN(len(src) - size)
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("usr/d%d/file%d", i/20, i), Mode: 0o644, Size: int64(size), ModTime: testTime}); err != nil {
			b.Fatal(err)
		}
		if _, err := w.Write(src[at : at+size]); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	return name
}

// BenchmarkUnpack compares one layer's Unpack, durable at its end, with tar -x of the same file and the sync that
// makes it durable. Nothing is deleted before the end: ext4 looks at every inode that was freed in the last minutes
// when it makes a new one (recently_deleted, up to 70 % of the time of a tar -x after an rm -r of the same tree).
func BenchmarkUnpack(b *testing.B) {
	layer := benchLayer(b)
	for _, tool := range []string{"gzip", "zstd"} {
		if out, err := exec.Command(tool, "-k", layer).CombinedOutput(); err != nil {
			b.Fatalf("%s: %v: %s", tool, err, out)
		}
	}
	for _, form := range []string{"", ".gz", ".zst"} {
		b.Run("kiri"+form, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				s := newStore(b)
				b.StartTimer()
				in, err := os.Open(layer + form)
				if err != nil {
					b.Fatal(err)
				}
				r, err := s.Unpack(context.Background(), &wire.Unpack{Import: true}, in)
				in.Close()
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(r.Size)
			}
		})
		for _, sync := range []bool{false, true} {
			b.Run(fmt.Sprintf("tar%s/sync=%v", form, sync), func(b *testing.B) {
				for b.Loop() {
					dir := b.TempDir() + "/x"
					if err := os.Mkdir(dir, 0o755); err != nil {
						b.Fatal(err)
					}
					if out, err := exec.Command("tar", "-C", dir, "-xf", layer+form).CombinedOutput(); err != nil {
						b.Fatalf("%v: %s", err, out)
					}
					if sync {
						if err := exec.Command("sync", "-f", dir).Run(); err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}

// BenchmarkMount is what a container's start pays for its root, and its end for the removal.
func BenchmarkMount(b *testing.B) {
	for _, volatile := range []bool{false, true} {
		b.Run(fmt.Sprintf("volatile=%v", volatile), func(b *testing.B) {
			s := newStore(b)
			id := unpack(b, s, nil, file("f", "x"))
			for b.Loop() {
				mnt, err := s.MountWith("c", []string{id}, MountOptions{Volatile: volatile})
				if err != nil {
					b.Fatal(err)
				}
				mnt.Close()
				if err := s.RemoveContainer("c"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkLookups(b *testing.B) {
	s := newStore(b)
	id := unpack(b, s, nil, dir("usr/bin", 0o755), symlink("bin", "usr/bin"), entry{Header: tar.Header{Name: "usr/bin/true", Mode: 0o755}, data: "x"}, dir("etc", 0o755), file("etc/passwd", testPasswd), file("etc/group", testGroup))
	mnt, err := s.Mount("c", []string{id}, false)
	if err != nil {
		b.Fatal(err)
	}
	defer mnt.Close()
	b.Run("user", func(b *testing.B) {
		for b.Loop() {
			if _, err := LookupUser(mnt, "", nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("path", func(b *testing.B) {
		for b.Loop() {
			if _, err := LookPath(mnt, "/", nil, "true", nil); err != nil {
				b.Fatal(err)
			}
		}
	})
}
