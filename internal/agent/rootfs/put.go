package rootfs

import (
	"context"
	"fmt"
	"os"
	"path"

	"golang.org/x/sys/unix"

	"runkiri.com/kiri/internal/wire"
)

// minHoles is the size in bytes from which zeros in a file that a client sends become holes.
const minHoles = 1 << 20

// putOptions are how a client's tar is unpacked.
type putOptions struct {
	noOverwrite bool  // wire.Archive.NoOverwriteDirNonDir
	owner       *User // everything belongs to this user; nil: to whom the tar says
}

// Put unpacks the tar in, which may be compressed, into the directory p of root. The tar's names cannot leave that
// directory; links that are in it, or come with the tar, are resolved in root. The tree may be in use by a container
// meanwhile. owner is given for wire.Archive.CopyUIDGID.
//
// Errors: wire.NotFound if there is no p, wire.Invalid if it is no directory or the archive is to blame.
func Put(ctx context.Context, root *os.File, p string, in *os.File, noOverwriteDirNonDir bool, owner *User) error {
	clean := path.Clean("/" + p)
	top, err := openat2(fdOf(root), clean, unix.O_PATH|unix.O_DIRECTORY, inRoot)
	if err == unix.ENOTDIR {
		return wire.Errorf(wire.Invalid, "extraction point is not a directory")
	}
	if err != nil {
		return notFound(p, err)
	}
	defer unix.Close(top)
	r, err := newCancelReader(ctx, in)
	if err != nil {
		return err
	}
	defer r.close()
	a := newApplier(fdOf(root))
	defer a.close()
	a.dirs.top, a.dirs.at = top, clean+"/"
	a.put = &putOptions{noOverwrite: noOverwriteDirNonDir, owner: owner}
	a.chowns = true
	src, err := decompress(r)
	if err == nil {
		err = a.apply(src)
	} else {
		err = damaged(err)
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return fmt.Errorf("unpacking into %s: %w", p, err)
	}
	return nil
}
