package registry

import (
	"runtime"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// ParsePlatform reads "os", "arch", "os/arch" or "os/arch/variant", as `--platform` has it, in normal form. An
// operating system alone gets the architecture def, an architecture alone the system linux.
func ParsePlatform(s, def string) (ocispec.Platform, error) {
	var p ocispec.Platform
	parts := strings.Split(s, "/")
	for _, part := range parts {
		if part == "" || strings.Trim(part, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") != "" {
			return p, bad("%q is an invalid platform", s)
		}
	}
	switch len(parts) {
	case 1:
		if isOS(strings.ToLower(parts[0])) {
			p.OS, p.Architecture = parts[0], def
		} else if n := Normalize(ocispec.Platform{OS: "linux", Architecture: parts[0]}); isArch(n.Architecture) {
			return n, nil
		} else {
			return p, bad("%q: unknown operating system or architecture", s)
		}
	case 2:
		p.OS, p.Architecture = parts[0], parts[1]
	case 3:
		p.OS, p.Architecture, p.Variant = parts[0], parts[1], parts[2]
	default:
		return p, bad("%q is an invalid platform", s)
	}
	return Normalize(p), nil
}

// FormatPlatform is ParsePlatform's inverse.
func FormatPlatform(p ocispec.Platform) string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

// DefaultPlatform is linux on arch; "" is the architecture of this program.
func DefaultPlatform(arch string) ocispec.Platform {
	if arch == "" {
		arch = runtime.GOARCH
	}
	return Normalize(ocispec.Platform{OS: "linux", Architecture: arch})
}

// Normalize replaces the usual aliases: x86_64 is amd64, aarch64 and arm64/v8 are arm64, arm alone is arm/v7.
func Normalize(p ocispec.Platform) ocispec.Platform {
	p.OS = strings.ToLower(p.OS)
	if p.OS == "macos" {
		p.OS = "darwin"
	}
	p.Architecture, p.Variant = strings.ToLower(p.Architecture), strings.ToLower(p.Variant)
	switch p.Architecture {
	case "x86_64", "x86-64":
		p.Architecture = "amd64"
	case "i386", "i486", "i586", "i686":
		p.Architecture, p.Variant = "386", ""
	case "aarch64":
		p.Architecture = "arm64"
	case "armhf":
		p.Architecture, p.Variant = "arm", "v7"
	case "armel":
		p.Architecture, p.Variant = "arm", "v6"
	}
	switch p.Architecture {
	case "amd64":
		if p.Variant == "v1" {
			p.Variant = ""
		}
	case "arm64":
		if p.Variant == "8" || p.Variant == "v8" {
			p.Variant = ""
		}
	case "arm":
		switch p.Variant {
		case "", "7":
			p.Variant = "v7"
		case "5", "6", "8":
			p.Variant = "v" + p.Variant
		}
	}
	return p
}

// Rank tells how well an image of platform have runs where want is asked for: 0 is the very same, higher is a worse
// fit, -1 does not run. An older variant runs on a newer one, 386 on amd64 and 32-bit arm on arm64, as Docker has it.
func Rank(want, have ocispec.Platform) int {
	want, have = Normalize(want), Normalize(have)
	if want.OS != have.OS {
		return -1
	}
	for i, c := range runsOn(want) {
		if c == [2]string{have.Architecture, have.Variant} {
			return i
		}
	}
	return -1
}

// Same tells whether the two are the same platform, aliases aside.
func Same(a, b ocispec.Platform) bool {
	a, b = Normalize(a), Normalize(b)
	return a.OS == b.OS && a.Architecture == b.Architecture && a.Variant == b.Variant
}

// runsOn lists architecture and variant of what runs on p, the best first.
func runsOn(p ocispec.Platform) [][2]string {
	list := [][2]string{{p.Architecture, p.Variant}}
	older := func(arch string, variants ...string) {
		for _, v := range variants {
			if arch != p.Architecture || v < p.Variant {
				list = append(list, [2]string{arch, v})
			}
		}
	}
	switch p.Architecture {
	case "amd64":
		older("amd64", "v4", "v3", "v2", "")
		older("386", "")
	case "arm":
		older("arm", "v7", "v6", "v5")
	case "arm64":
		older("arm64", "")
		older("arm", "v8", "v7", "v6", "v5")
	}
	return list
}

func isOS(s string) bool {
	switch s {
	case "linux", "windows", "darwin", "freebsd", "macos":
		return true
	}
	return false
}

func isArch(s string) bool {
	switch s {
	case "386", "amd64", "arm", "arm64", "loong64", "mips", "mipsle", "mips64", "mips64le", "ppc64", "ppc64le", "riscv64", "s390x":
		return true
	}
	return false
}
