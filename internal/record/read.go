package record

import (
	"errors"
	"fmt"
	"os"
	"strings"
)

// maxRecord is the largest record that is read, in bytes: beyond it a file is taken for damaged.
const maxRecord = 16 << 20

// readAll reads every record of the directory into s.loaded and s.files, and clears away what a crash left.
func (s *Store[T]) readAll() error {
	entries, err := os.ReadDir(s.dir.path)
	if err != nil {
		return fmt.Errorf("reading records: %w", err)
	}
	found := map[string]map[string]bool{} // suffixes by name
	for _, e := range entries {
		name, ext := split(e.Name())
		if ext == "" || CheckName(name) != nil {
			continue
		}
		if found[name] == nil {
			found[name] = map[string]bool{}
		}
		found[name][ext] = true
	}
	for name, exts := range found {
		var st state
		var v *T
		for _, ext := range []string{extNew, extNew2} {
			if !exts[ext] {
				continue
			}
			u, gen := s.read(name + ext)
			if u == nil {
				continue
			}
			older := ext
			if v == nil || gen > st.gen {
				older, st.new, st.gen, v = st.new, ext, gen, u
			}
			if older != "" { // a Put was cut short before it had dropped the one before
				if err := s.dir.unlink(name + older); err != nil {
					return fmt.Errorf("reading records: %w", err)
				}
			}
		}
		if exts[extOld] {
			if v != nil {
				st.old = true
			} else if u, gen := s.read(name + extOld); u != nil {
				st.old, st.gen, v = true, gen, u
			}
		}
		if v == nil {
			continue
		}
		s.files[name] = st
		s.loaded[name] = v
		if st.new != "" { // a crash came before its sync
			s.pending[name] = true
			s.arm()
		}
	}
	return nil
}

// read reads one file; a damaged one is set aside, told, and nil.
func (s *Store[T]) read(file string) (*T, uint64) {
	v := new(T)
	b, err := s.dir.read(file, maxRecord)
	var gen uint64
	if err == nil {
		gen, err = decode(b, v)
	}
	if err == nil {
		return v, gen
	}
	if !errors.Is(err, errDamaged) { // a disk that cannot be read now may be readable later
		s.log.Error("a record cannot be read and is left out", "dir", s.dir.path, "file", file, "error", err)
		return nil, 0
	}
	aside := file + extDamaged
	if rerr := s.dir.rename(file, aside); rerr != nil {
		s.log.Error("a damaged record cannot be set aside", "dir", s.dir.path, "file", file, "error", rerr)
	}
	s.log.Error("a damaged record is set aside", "dir", s.dir.path, "file", file, "as", aside, "cause", err)
	return nil, 0
}

// split cuts a file's name into a record's name and the suffix, "" if it has none of ours.
func split(file string) (name, ext string) {
	for _, ext := range []string{extOld, extNew, extNew2} {
		if name, ok := strings.CutSuffix(file, ext); ok {
			return name, ext
		}
	}
	return file, ""
}
