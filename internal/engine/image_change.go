package engine

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	dockerspec "github.com/moby/docker-image-spec/specs-go/v1"
)

// applyChanges applies Dockerfile instructions to an image's configuration: `docker import --change`, and commit's.
// Each change is one instruction, or several on lines of their own. Which ones may be used, and the errors' texts, are
// Docker's.
func applyChanges(cfg *dockerspec.DockerOCIImageConfig, changes []string) error {
	for _, change := range changes {
		for _, line := range logicalLines(change) {
			word, rest := cutWord(line)
			f := instructions[strings.ToLower(word)]
			if f == nil {
				return invalid("%s is not a valid change command", strings.ToLower(word))
			}
			if rest == "" {
				return invalid("%s requires at least one argument", strings.ToUpper(word))
			}
			if err := f(cfg, rest); err != nil {
				return invalid("%s: %w", strings.ToUpper(word), err)
			}
		}
	}
	return nil
}

// logicalLines splits a text into instructions: comments and empty lines are left out, a backslash at a line's end
// joins the next one to it.
func logicalLines(s string) []string {
	var list []string
	joined := ""
	for line := range strings.SplitSeq(strings.ReplaceAll(s, "\r\n", "\n"), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if before, ok := strings.CutSuffix(line, `\`); ok {
			joined += before
			continue
		}
		list = append(list, joined+line)
		joined = ""
	}
	if joined != "" {
		list = append(list, joined)
	}
	return list
}

func cutWord(s string) (word, rest string) {
	i := strings.IndexAny(s, " \t")
	if i < 0 {
		return s, ""
	}
	return s[:i], strings.TrimSpace(s[i:])
}

var instructions map[string]func(*dockerspec.DockerOCIImageConfig, string) error

func init() { // a literal would refer to itself through ONBUILD
	instructions = map[string]func(*dockerspec.DockerOCIImageConfig, string) error{
		"cmd":         func(c *dockerspec.DockerOCIImageConfig, s string) error { c.Cmd = runForm(c, s); return nil },
		"entrypoint":  changeEntrypoint,
		"env":         changeEnv,
		"expose":      changeExpose,
		"healthcheck": changeHealthcheck,
		"label":       changeLabel,
		"onbuild":     changeOnBuild,
		"stopsignal":  changeStopSignal,
		"user":        changeUser,
		"volume":      changeVolume,
		"workdir":     changeWorkdir,
	}
}

// runForm reads the exec form, a JSON array, or the shell form, which is run by the image's shell.
func runForm(c *dockerspec.DockerOCIImageConfig, s string) []string {
	if list, ok := jsonArray(s); ok {
		return list
	}
	shell := c.Shell
	if len(shell) == 0 {
		shell = []string{"/bin/sh", "-c"}
	}
	return append(slices.Clone(shell), s)
}

func jsonArray(s string) ([]string, bool) {
	if !strings.HasPrefix(s, "[") {
		return nil, false
	}
	var list []string
	if json.Unmarshal([]byte(s), &list) != nil {
		return nil, false
	}
	return list, true
}

func changeEntrypoint(c *dockerspec.DockerOCIImageConfig, s string) error {
	c.Entrypoint = runForm(c, s)
	return nil
}

// changeEnv reads `A=b C="d e"` or the old form `A b c`.
func changeEnv(c *dockerspec.DockerOCIImageConfig, s string) error {
	pairs, err := keyValues(c, s)
	if err != nil {
		return err
	}
	for _, p := range pairs {
		c.Env = slices.DeleteFunc(c.Env, func(e string) bool { return strings.HasPrefix(e, p[0]+"=") })
		c.Env = append(c.Env, p[0]+"="+p[1])
	}
	return nil
}

func changeLabel(c *dockerspec.DockerOCIImageConfig, s string) error {
	pairs, err := keyValues(c, s)
	if err != nil {
		return err
	}
	if c.Labels == nil {
		c.Labels = map[string]string{}
	}
	for _, p := range pairs {
		c.Labels[p[0]] = p[1]
	}
	return nil
}

// keyValues reads pairs in either form. All words of one instruction see the environment before it.
func keyValues(c *dockerspec.DockerOCIImageConfig, s string) ([][2]string, error) {
	words, err := splitWords(s)
	if err != nil {
		return nil, err
	}
	var pairs [][2]string
	if !strings.Contains(words[0], "=") {
		key, rest := cutWord(s)
		if rest == "" {
			return nil, fmt.Errorf("must have two arguments")
		}
		words = []string{key + "=" + rest}
	}
	for _, w := range words {
		key, val, ok := strings.Cut(w, "=")
		if !ok {
			return nil, fmt.Errorf("can't find = in %q: must be of the form: name=value", w)
		}
		if key, err = expand(c.Env, key); err != nil {
			return nil, err
		}
		if key == "" {
			return nil, fmt.Errorf("names can not be blank")
		}
		if val, err = expand(c.Env, val); err != nil {
			return nil, err
		}
		pairs = append(pairs, [2]string{key, val})
	}
	return pairs, nil
}

func changeExpose(c *dockerspec.DockerOCIImageConfig, s string) error {
	words, err := expandWords(c, s)
	if err != nil {
		return err
	}
	ports := map[string]struct{}{}
	for _, w := range words {
		numbers, proto, ok := strings.Cut(strings.ToLower(w), "/")
		if !ok {
			proto = "tcp"
		}
		if proto != "tcp" && proto != "udp" && proto != "sctp" {
			return fmt.Errorf("invalid proto: %s", proto)
		}
		first, last, ranged := strings.Cut(numbers, "-")
		if !ranged {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 16)
		to, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || from == 0 || to < from {
			return fmt.Errorf("invalid containerPort: %s", w)
		}
		for p := from; p <= to; p++ {
			ports[fmt.Sprintf("%d/%s", p, proto)] = struct{}{}
		}
	}
	if c.ExposedPorts == nil {
		c.ExposedPorts = map[string]struct{}{}
	}
	maps.Copy(c.ExposedPorts, ports)
	return nil
}

func changeVolume(c *dockerspec.DockerOCIImageConfig, s string) error {
	list, ok := jsonArray(s)
	if !ok {
		var err error
		if list, err = expandWords(c, s); err != nil {
			return err
		}
	}
	if c.Volumes == nil {
		c.Volumes = map[string]struct{}{}
	}
	for _, v := range list {
		if v = strings.TrimSpace(v); v == "" {
			return fmt.Errorf("specified volume can not be an empty string")
		}
		c.Volumes[v] = struct{}{}
	}
	return nil
}

func changeUser(c *dockerspec.DockerOCIImageConfig, s string) error {
	words, err := expandWords(c, s)
	if err != nil {
		return err
	}
	if len(words) != 1 {
		return fmt.Errorf("requires exactly one argument")
	}
	c.User = words[0]
	return nil
}

func changeStopSignal(c *dockerspec.DockerOCIImageConfig, s string) error {
	words, err := expandWords(c, s)
	if err != nil {
		return err
	}
	if len(words) != 1 {
		return fmt.Errorf("requires exactly one argument")
	}
	if _, err := parseSignal(words[0]); err != nil {
		return err
	}
	c.StopSignal = words[0]
	return nil
}

func changeWorkdir(c *dockerspec.DockerOCIImageConfig, s string) error {
	words, err := expandWords(c, s)
	if err != nil {
		return err
	}
	if len(words) != 1 {
		return fmt.Errorf("requires exactly one argument")
	}
	dir := words[0]
	if !path.IsAbs(dir) {
		dir = path.Join("/", c.WorkingDir, dir)
	}
	c.WorkingDir = path.Clean(dir)
	return nil
}

func changeOnBuild(c *dockerspec.DockerOCIImageConfig, s string) error {
	switch word, _ := cutWord(s); strings.ToUpper(word) {
	case "ONBUILD":
		return fmt.Errorf("chaining ONBUILD via `ONBUILD ONBUILD` isn't allowed")
	case "MAINTAINER", "FROM":
		return fmt.Errorf("%s isn't allowed as an ONBUILD trigger", strings.ToUpper(word))
	}
	c.OnBuild = append(c.OnBuild, s)
	return nil
}

// changeHealthcheck reads `[--interval=d ...] CMD command` or `NONE`.
func changeHealthcheck(c *dockerspec.DockerOCIImageConfig, s string) error {
	h := &dockerspec.HealthcheckConfig{}
	for strings.HasPrefix(s, "--") {
		var flag string
		flag, s = cutWord(s)
		name, val, ok := strings.Cut(flag[2:], "=")
		if !ok {
			return fmt.Errorf("missing a value on flag: %s", name)
		}
		if name == "retries" {
			n, err := strconv.ParseInt(val, 10, 32)
			if err != nil || n < 0 {
				return fmt.Errorf("--retries must be at least 0 (not %s)", val)
			}
			h.Retries = int(n)
			continue
		}
		to := map[string]*time.Duration{"interval": &h.Interval, "timeout": &h.Timeout, "start-period": &h.StartPeriod, "start-interval": &h.StartInterval}[name]
		if to == nil {
			return fmt.Errorf("unknown flag: %s", name)
		}
		d, err := time.ParseDuration(val)
		if err != nil {
			return err
		}
		if d < 0 || d > 0 && d < time.Millisecond {
			return fmt.Errorf("interval %q cannot be less than 1ms", name)
		}
		*to = d
	}
	word, rest := cutWord(s)
	switch strings.ToUpper(word) {
	case "NONE":
		if rest != "" {
			return fmt.Errorf("NONE takes no arguments")
		}
		h.Test = []string{"NONE"}
	case "CMD":
		if rest == "" {
			return fmt.Errorf("missing command after HEALTHCHECK CMD")
		}
		if list, ok := jsonArray(rest); ok {
			h.Test = append([]string{"CMD"}, list...)
		} else {
			h.Test = []string{"CMD-SHELL", rest}
		}
	default:
		return fmt.Errorf("unknown type %q in HEALTHCHECK (try CMD)", strings.ToUpper(word))
	}
	c.Healthcheck = h
	return nil
}

// expandWords splits into words and expands each.
func expandWords(c *dockerspec.DockerOCIImageConfig, s string) ([]string, error) {
	words, err := splitWords(s)
	if err != nil {
		return nil, err
	}
	for i := range words {
		if words[i], err = expand(c.Env, words[i]); err != nil {
			return nil, err
		}
	}
	return words, nil
}

// splitWords splits at blanks outside of quotes. Quotes and backslashes stay: expand takes them away.
func splitWords(s string) ([]string, error) {
	var words []string
	var word strings.Builder
	var quote byte
	inWord := false
	for i := 0; i < len(s); i++ {
		ch := s[i]
		switch {
		case ch == '\\' && quote != '\'' && i+1 < len(s):
			word.WriteByte(ch)
			i++
			word.WriteByte(s[i])
			inWord = true
			continue
		case quote != 0:
			if ch == quote {
				quote = 0
			}
		case ch == '"' || ch == '\'':
			quote = ch
		case ch == ' ' || ch == '\t':
			if inWord {
				words = append(words, word.String())
				word.Reset()
				inWord = false
			}
			continue
		}
		word.WriteByte(ch)
		inWord = true
	}
	if quote != 0 {
		return nil, fmt.Errorf("unexpected end of statement while looking for matching %s-quote", map[byte]string{'"': "double", '\'': "single"}[quote])
	}
	if inWord {
		words = append(words, word.String())
	}
	if len(words) == 0 {
		return nil, fmt.Errorf("requires at least one argument")
	}
	return words, nil
}

// expand takes quotes and backslashes away and puts in variables: $NAME, ${NAME}, ${NAME:-word} and ${NAME:+word}.
func expand(env []string, s string) (string, error) {
	var out strings.Builder
	var quote byte
	for i := 0; i < len(s); i++ {
		ch := s[i]
		switch {
		case ch == '\\' && quote != '\'' && i+1 < len(s):
			// Within double quotes a backslash is one unless it stands before a character that means something there.
			if quote == '"' && !strings.ContainsRune("\"$\\", rune(s[i+1])) {
				out.WriteByte(ch)
			}
			i++
			out.WriteByte(s[i])
		case quote == 0 && (ch == '"' || ch == '\''):
			quote = ch
		case ch == quote:
			quote = 0
		case ch == '$' && quote != '\'':
			val, n, err := variable(env, s[i:])
			if err != nil {
				return "", err
			}
			out.WriteString(val)
			i += n - 1
		default:
			out.WriteByte(ch)
		}
	}
	return out.String(), nil
}

// variable expands the variable at the beginning of s and tells how many bytes it took.
func variable(env []string, s string) (string, int, error) {
	name := func(s string) int {
		n := 0
		for n < len(s) && (s[n] == '_' || s[n] >= 'a' && s[n] <= 'z' || s[n] >= 'A' && s[n] <= 'Z' || n > 0 && s[n] >= '0' && s[n] <= '9') {
			n++
		}
		return n
	}
	if !strings.HasPrefix(s, "${") {
		n := name(s[1:])
		if n == 0 {
			return "$", 1, nil
		}
		return lookup(env, s[1:1+n]), 1 + n, nil
	}
	depth, end := 0, -1
	for i := 1; i < len(s) && end < 0; i++ {
		switch s[i] {
		case '{':
			depth++
		case '}':
			if depth--; depth == 0 {
				end = i
			}
		}
	}
	n := name(s[2:])
	if end < 0 || n == 0 {
		return "", 0, fmt.Errorf("bad substitution in %q", s)
	}
	val, op := lookup(env, s[2:2+n]), s[2+n:end]
	switch {
	case op == "":
	case strings.HasPrefix(op, ":-"), strings.HasPrefix(op, ":+"):
		if (val == "") == (op[1] == '-') {
			word, err := expand(env, op[2:])
			return word, end + 1, err
		}
		if op[1] == '+' {
			val = ""
		}
	default:
		return "", 0, fmt.Errorf("unsupported modifier in %q", s[:end+1])
	}
	return val, end + 1, nil
}

func lookup(env []string, name string) string {
	for _, e := range slices.Backward(env) {
		if k, v, _ := strings.Cut(e, "="); k == name {
			return v
		}
	}
	return ""
}
