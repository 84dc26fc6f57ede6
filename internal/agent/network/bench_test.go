//go:build linux

package network

import (
	"testing"

	"runkiri.com/kiri/internal/wire"
)

func BenchmarkNew(b *testing.B) {
	for _, kind := range []string{"none", "bridge"} {
		b.Run(kind, func(b *testing.B) {
			asHost(b)
			n := open(b, Config{})
			var made []*Sandbox
			for b.Loop() {
				s, err := n.New(kind, wire.NetConfig{})
				if err != nil {
					b.Fatal(err)
				}
				made = append(made, s)
			}
			for _, s := range made {
				s.NS.Close()
				n.Release(s.Endpoint)
			}
		})
	}
}
