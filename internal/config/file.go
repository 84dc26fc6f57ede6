package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// maxFile is the largest configuration file in bytes.
const maxFile = 1 << 20

// mergeFile adds what the file says to what the flags have set. An option in both is an error even if the values are
// equal, as in dockerd: nobody could tell which one counts. A file that nobody asked for need not be there.
func mergeFile(opts []option, flags *pflag.FlagSet, path string, asked bool) error {
	raw, err := readFile(path)
	if errors.Is(err, fs.ErrNotExist) && !asked {
		return nil
	}
	if err != nil {
		return err
	}
	members := map[string]json.RawMessage{}
	if len(bytes.TrimSpace(raw)) > 0 {
		if err := json.Unmarshal(raw, &members); err != nil {
			return fmt.Errorf("invalid JSON: %w", err)
		}
	}
	byKey := map[string]*option{}
	for i := range opts {
		if opts[i].key != "" {
			byKey[opts[i].key] = &opts[i]
		}
	}
	var unknown, conflicts []string
	for key, value := range members {
		o := byKey[key]
		if o == nil {
			unknown = append(unknown, key)
			continue
		}
		if o.flag != "" && flags.Changed(o.flag) {
			conflicts = append(conflicts, fmt.Sprintf("%s: (from flag: %s, from file: %s)", key, o.value, value))
			continue
		}
		if err := o.value.setJSON(value); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	slices.Sort(unknown)
	slices.Sort(conflicts)
	if len(unknown) > 0 {
		return fmt.Errorf("the following directives don't match any configuration option: %s", strings.Join(unknown, ", "))
	}
	if len(conflicts) > 0 {
		return fmt.Errorf("the following directives are specified both as a flag and in the configuration file: %s", strings.Join(conflicts, ", "))
	}
	return nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	if len(b) > maxFile {
		return nil, fmt.Errorf("larger than %d bytes", maxFile)
	}
	return bytes.TrimPrefix(b, []byte("\xef\xbb\xbf")), nil // editors on Windows write a byte order mark
}

// refuse tells which options were asked for that kiri does not have.
func refuse(opts []option, flags *pflag.FlagSet) error {
	var names []string
	for _, o := range opts {
		v, is := o.value.(*fixedValue)
		if !is || len(v.bad) == 0 {
			continue
		}
		name := o.key
		if o.flag != "" && flags.Changed(o.flag) {
			name = "--" + o.flag
		}
		text := fmt.Sprintf("%s=%s", name, strings.Join(v.bad, ","))
		if len(v.harmless) > 0 {
			text += fmt.Sprintf(" (only %s is)", strings.Join(v.harmless, " or "))
		}
		names = append(names, text)
	}
	if len(names) == 0 {
		return nil
	}
	return fmt.Errorf("not supported by kiri: %s", strings.Join(names, ", "))
}
