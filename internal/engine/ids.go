package engine

import (
	"crypto/rand"
	"encoding/hex"
	"math/big"
	"slices"
	"strings"
)

// newID returns 64 random hex digits. Like Docker's, the first twelve are never all decimal, so that a short id used
// as a host name is not taken for a number.
func newID() string {
	var b [32]byte
	for {
		rand.Read(b[:]) // never fails (Go 1.24)
		id := hex.EncodeToString(b[:])
		if strings.ContainsAny(id[:12], "abcdef") {
			return id
		}
	}
}

func shortID(id string) string {
	if len(id) > 12 {
		return id[:12]
	}
	return id
}

// idIndex finds ids by prefix: a sorted list. Not safe for concurrent use.
type idIndex []string

func (x *idIndex) add(id string) {
	if i, found := slices.BinarySearch(*x, id); !found {
		*x = slices.Insert(*x, i, id)
	}
}

func (x *idIndex) remove(id string) {
	if i, found := slices.BinarySearch(*x, id); found {
		*x = slices.Delete(*x, i, i+1)
	}
}

// find returns the only id that begins with prefix, and how many (0, 1 or 2 for more) do.
func (x idIndex) find(prefix string) (string, int) {
	i, _ := slices.BinarySearch(x, prefix)
	if i == len(x) || !strings.HasPrefix(x[i], prefix) {
		return "", 0
	}
	if i+1 < len(x) && strings.HasPrefix(x[i+1], prefix) {
		return "", 2
	}
	return x[i], 1
}

func pick(words []string) string {
	n, err := rand.Int(rand.Reader, big.NewInt(int64(len(words))))
	if err != nil {
		return words[0]
	}
	return words[n.Int64()]
}

// randomName makes a container name of the form adjective_surname.
func randomName() string { return pick(adjectives) + "_" + pick(surnames) }

var adjectives = []string{
	"able", "agile", "airy", "alert", "amber", "ample", "apt", "ardent", "artful", "azure", "balmy", "bold", "brave",
	"breezy", "brief", "bright", "brisk", "calm", "candid", "careful", "cheery", "civil", "clear", "clever", "cosy",
	"crisp", "curious", "daring", "deft", "diligent", "dreamy", "eager", "early", "earnest", "easy", "epic", "even",
	"exact", "fair", "fleet", "fluent", "fond", "frank", "fresh", "gentle", "glad", "golden", "grand", "handy", "happy",
	"hardy", "honest", "humble", "ideal", "jolly", "jovial", "keen", "kind", "lively", "lucid", "lucky", "lunar", "lush",
	"mellow", "merry", "mighty", "mild", "modest", "neat", "nimble", "noble", "patient", "placid", "plucky", "poised",
	"polite", "prompt", "proud", "quick", "quiet", "rapid", "ready", "robust", "rosy", "serene", "sharp", "silent",
	"silver", "sincere", "smooth", "snug", "solid", "spry", "stable", "steady", "stoic", "sunny", "swift", "tidy",
	"tranquil", "trusty", "upbeat", "vivid", "warm", "wise", "witty", "zesty",
}

// surnames are of people who made computing, networks, mathematics and the sciences around them.
var surnames = []string{
	"abel", "agnesi", "allen", "ampere", "backus", "banach", "bartik", "berners", "bernoulli", "bohr", "boole", "borg",
	"brooks", "cantor", "carson", "cerf", "church", "clarke", "codd", "conway", "cray", "curie", "dahl", "davies", "diffie",
	"dijkstra", "earhart", "easley", "engelbart", "erdos", "euclid", "euler", "faraday", "feinler", "fermat", "fermi",
	"floyd", "fourier", "galois", "gauss", "germain", "godel", "goldberg", "granville", "hamilton", "hamming", "hardy",
	"hellman", "hertz", "hilbert", "hoare", "holberton", "hopper", "huffman", "hypatia", "iverson", "jacobi", "jennings",
	"johnson", "joule", "kahn", "kay", "keller", "kepler", "kernighan", "kilby", "knuth", "kovalevskaya", "lamarr", "lamport",
	"laplace", "leibniz", "liskov", "lovelace", "mandelbrot", "markov", "maxwell", "mccarthy", "mcilroy", "meitner", "mendel",
	"metcalfe", "milner", "minsky", "mirzakhani", "moore", "nash", "naur", "newell", "newton", "noether", "nygaard", "ohm",
	"pascal", "pauli", "perlis", "perlman", "planck", "postel", "rabin", "ramanujan", "riemann", "ritchie", "rivest", "sammet",
	"shamir", "shannon", "shaw", "simon", "snyder", "somerville", "spence", "stallman", "sutherland", "tanenbaum", "tarjan",
	"tesla", "thompson", "torvalds", "turing", "ullman", "vaughan", "volta", "watt", "weierstrass", "wiener", "wilkes", "wirth",
	"wozniak", "yao", "zuse",
}
