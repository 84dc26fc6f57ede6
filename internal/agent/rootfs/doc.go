// Package rootfs keeps what containers stand on: layers, writable directories and volumes on disk, their overlay
// mounts, and everything that has to be looked up inside a root file system that nobody may trust.
//
// # On disk
//
//	layers/N/layer        what the layer is: DiffID, size, attributes of its root (text, see layerInfo)
//	layers/N/fs/          its files, in overlayfs' own form (0:0 devices for whiteouts, trusted.overlay.opaque)
//	layers/+N/            a layer in the making; layers/-N/ one on its way out; both are swept by OpenStore
//	layers/empty/         a directory that stays empty: the lower layer of an image that has none
//	containers/+N/        the root of a container to come (Prepared); swept by OpenStore
//	containers/ID/upper   the container's writable layer; work is overlayfs' own, logs lie beside them
//	mountpoints/          the lowest layer of every container: what the engine mounts things on
//	volumes/NAME/_data    a local volume, in Docker's layout
//
// N is a short number in base 36, because mount options are limited (256 bytes each for fsconfig, one page for
// mount(2)) and images may have more than a hundred layers.
//
// # Durability
//
// A layer is durable when Unpack answers: the whole tree and the metadata file are on disk (one syncfs for all the
// layers that are ready at that moment) before the directory gets its final name, and that name is on disk (fsync of
// layers/) before the answer. So after a power cut a layer is whole or is not there. fsync of each file instead was
// measured and left: 2,000 files of 20 KB on ext4 took 1.0 to 1.8 s unsynced, 1.6 to 2.8 s with one syncfs, 2.7 to 4.6 s
// with an fsync each (a busy machine of two cores). Containers' writable layers and volumes are never synced by kiri;
// that is for the programs in them.
//
// # Trust
//
// A layer is unpacked by a child process that has the layer's directory as its whole file system (UnpackMain). All
// other look-ups in a root go through descriptors: openat2 with RESOLVE_IN_ROOT and RESOLVE_NO_MAGICLINKS, or the
// same walk by hand where mounts that are not attached yet have to be seen (View).
package rootfs
