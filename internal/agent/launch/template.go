//go:build linux && (amd64 || arm64)

package launch

func (c *compiler) templateProgram()  {}
func (p *Plan) templateFlags() uint64 { return 0 }
