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
	for _, e := range entries {
		name, ext := split(e.Name())
		if CheckName(name) != nil {
			continue
		}
		st := s.files[name]
		switch ext {
		case extOld:
			st.old = true
		case extNew:
			st.new = true
		case extTmp: // a Put that was cut short: never promised to anybody
			if err := s.dir.unlink(e.Name()); err != nil {
				s.log.Warn("a half-written record cannot be removed", "dir", s.dir.path, "file", e.Name(), "error", err)
			}
			continue
		default:
			continue
		}
		s.files[name] = st
	}
	for name, st := range s.files {
		var v *T
		if st.new {
			if v = s.read(name + extNew); v == nil {
				st.new = false
			}
		}
		if st.old && v == nil {
			if v = s.read(name + extOld); v == nil {
				st.old = false
			}
		}
		if v == nil {
			delete(s.files, name)
			continue
		}
		s.files[name] = st
		s.loaded[name] = v
		if st.new { // a crash came before its sync
			s.pending[name] = true
			s.arm()
		}
	}
	return nil
}

// read reads one file; a damaged one is set aside, told, and nil.
func (s *Store[T]) read(file string) *T {
	v := new(T)
	b, err := s.dir.read(file, maxRecord)
	if err == nil {
		err = decode(b, v)
	}
	if err == nil {
		return v
	}
	if !errors.Is(err, errDamaged) { // a disk that cannot be read now may be readable later
		s.log.Error("a record cannot be read and is left out", "dir", s.dir.path, "file", file, "error", err)
		return nil
	}
	aside := file + extDamaged
	if rerr := s.dir.rename(file, aside); rerr != nil {
		s.log.Error("a damaged record cannot be set aside", "dir", s.dir.path, "file", file, "error", rerr)
	}
	s.log.Error("a damaged record is set aside", "dir", s.dir.path, "file", file, "as", aside, "cause", err)
	return nil
}

// split cuts a file's name into a record's name and the suffix, "" if it has none of ours.
func split(file string) (name, ext string) {
	for _, ext := range []string{extOld, extNew, extTmp} {
		if name, ok := strings.CutSuffix(file, ext); ok {
			return name, ext
		}
	}
	return file, ""
}
