package dockerapi

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

// Each line is a field, by its path in the answer, and the versions between which it must be there with that value.
// A value "-" means that the field is not there.
func TestAnswersOfEachVersion(t *testing.T) {
	_, client := serveUnix(t, &fakeEngine{})
	const all = maxVersion
	for _, c := range []struct {
		path, field string
		from, to    version
		want        any
	}{
		{"/containers/x/json", "Config.Image", 24, all, "a&b"},
		{"/containers/x/json", "NetworkSettings.IPAddress", 24, 51, "172.17.0.2"},
		{"/containers/x/json", "NetworkSettings.IPAddress", 52, all, "-"},
		{"/containers/x/json", "NetworkSettings.IPPrefixLen", 24, 51, 16.0},
		{"/containers/x/json", "NetworkSettings.Bridge", 24, 51, ""},
		{"/containers/x/json", "NetworkSettings.SecondaryIPAddresses", 24, 51, nil},
		{"/containers/x/json", "NetworkSettings.SecondaryIPAddresses", 52, all, "-"},
		{"/containers/x/json", "NetworkSettings.Networks.bridge.IPAddress", 24, all, "172.17.0.2"},
		{"/containers/x/json", "NetworkSettings.Networks.bridge.DNSNames.0", 44, all, "web"},
		{"/containers/x/json", "NetworkSettings.Networks.bridge.DNSNames", 24, 43, "-"},
		{"/containers/x/json", "NetworkSettings.Networks.bridge.GwPriority", 24, 47, "-"},
		{"/containers/x/json", "NetworkSettings.Networks.bridge.Aliases", 24, all, nil},
		{"/containers/x/json", "NetworkSettings.Networks.mine.Aliases.1", 24, 44, fakeID[:12]},
		{"/containers/x/json", "NetworkSettings.Networks.mine.Aliases.1", 45, all, "-"},
		{"/containers/x/json", "Config.OnBuild", 24, 51, nil},
		{"/containers/x/json", "Config.OnBuild", 52, all, "-"},
		{"/containers/x/json", "Config.Healthcheck.StartInterval", 44, all, 5.0},
		{"/containers/x/json", "Config.Healthcheck.StartInterval", 24, 43, "-"},
		{"/containers/x/json", "GraphDriver.Name", 24, 51, "overlayfs"},
		{"/containers/x/json", "ImageManifestDescriptor.size", 48, all, 9007199254740993.0},
		{"/containers/x/json", "ImageManifestDescriptor", 24, 47, "-"},
		{"/containers/x/json", "HostConfig.Annotations.a", 43, all, "b"},
		{"/containers/x/json", "HostConfig.Annotations", 24, 42, "-"},
		{"/containers/x/json", "HostConfig.KernelMemory", 24, 41, 0.0},
		{"/containers/x/json", "HostConfig.KernelMemory", 42, all, "-"},
		{"/containers/x/json", "HostConfig.KernelMemoryTCP", 40, 41, 0.0},
		{"/containers/x/json", "HostConfig.KernelMemoryTCP", 24, 39, "-"},
		{"/containers/x/json", "HostConfig.CgroupnsMode", 41, all, "private"},
		{"/containers/x/json", "HostConfig.CgroupnsMode", 24, 40, "-"},
		{"/containers/json", "0.Health.Status", 52, all, "healthy"},
		{"/containers/json", "0.Health", 24, 51, "-"},
		{"/images/json", "0.Containers", 51, all, 2.0},
		{"/images/json", "0.Containers", 24, 50, -1.0},
		{"/images/json", "0.VirtualSize", 24, 43, 5.0},
		{"/images/json", "0.VirtualSize", 44, all, "-"},
		{"/images/json", "0.RepoTags.0", 24, 42, "<none>:<none>"},
		{"/images/json", "0.RepoDigests.0", 24, 42, "<none>@<none>"},
		{"/images/json", "0.Descriptor", 24, 47, "-"},
		{"/images/x/json", "VirtualSize", 24, 43, 9007199254740993.0},
		{"/images/x/json", "Created", 24, 43, "0001-01-01T00:00:00Z"},
		{"/images/x/json", "Created", 44, all, "-"},
		{"/images/x/json", "Container", 24, 44, ""},
		{"/images/x/json", "ContainerConfig.Cmd", 24, 44, nil},
		{"/images/x/json", "ContainerConfig", 45, all, "-"},
		{"/images/x/json", "Config.Hostname", 24, 49, ""},
		{"/images/x/json", "Config.Hostname", 50, all, "-"},
		{"/images/x/json", "Config.Cmd", 24, 51, nil},
		{"/images/x/json", "Config.Cmd", 52, all, "-"},
		{"/images/x/json", "Parent", 24, 51, ""},
		{"/images/x/json", "Parent", 52, all, "-"},
		{"/images/x/json", "Descriptor", 24, 47, "-"},
		{"/images/x/json", "Identity", 24, 52, "-"},
		{"/info", "SecurityOptions.0", 25, all, "name=seccomp,profile=builtin"},
		{"/info", "SecurityOptions.0", 24, 24, "seccomp"},
		{"/info", "RuncCommit.Expected", 24, 48, "r1"},
		{"/info", "RuncCommit.Expected", 49, all, "-"},
		{"/info", "BridgeNfIptables", 24, 49, false},
		{"/info", "BridgeNfIptables", 50, all, "-"},
		{"/info", "KernelMemory", 24, 41, true},
		{"/info", "KernelMemory", 42, all, "-"},
		{"/info", "KernelMemoryTCP", 40, 41, true},
		{"/info", "PidsLimit", 40, all, true},
		{"/info", "PidsLimit", 24, 39, "-"},
		{"/info", "CgroupVersion", 41, all, "2"},
		{"/info", "Containerd", 24, 45, "-"},
		{"/info", "Runtimes.kiri.status", 24, 43, "-"},
		{"/version", "ApiVersion", 24, all, MaxVersion},
		{"/version", "MinAPIVersion", 25, all, MinVersion},
		{"/version", "Components.0.Details.ApiVersion", 35, all, MaxVersion},
		{"/version", "Components", 24, 34, "-"},
		{"/networks", "0.Containers", 24, 27, nil},
		{"/networks", "0.Containers", 28, all, "-"},
		{"/networks", "0.EnableIPv4", 48, all, true},
		{"/networks", "0.EnableIPv4", 24, 47, "-"},
		{"/networks/x", "Status", 24, 51, "-"},
		{"/containers/x/stats?stream=0", "os_type", 52, all, "linux"},
		{"/containers/x/stats?stream=0", "os_type", 24, 51, "-"},
		{"/system/df", "LayersSize", 25, 52, 7.0},
		{"/system/df", "LayersSize", 53, all, "-"},
		{"/system/df", "Images.0.Id", 25, 52, "sha256:1"},
		{"/system/df", "Images.0.VirtualSize", 25, 43, 7.0},
		{"/system/df", "Images.0.Containers", 25, 52, 3.0},
		{"/system/df", "Volumes", 25, 52, nil},
		{"/system/df", "BuilderSize", 25, 41, 0.0},
		{"/system/df", "BuilderSize", 42, all, "-"},
		{"/system/df", "ImageUsage.TotalSize", 52, all, 7.0},
		{"/system/df", "ImageUsage.Items", 52, all, "-"},
		{"/system/df", "ImageUsage", 25, 51, "-"},
		{"/system/df?verbose=1", "ImageUsage.Items.0.Id", 52, all, "sha256:1"},
		{"/system/df?verbose=1", "LayersSize", 52, all, "-"},
		{"/system/df?type=image", "Containers", 42, 52, nil},
		{"/system/df?type=image", "LayersSize", 42, 52, 7.0},
		{"/volumes", "Volumes", 24, all, []any{}},
		{"/images/x/history", "", 24, all, []any{}},
	} {
		for _, v := range []version{c.from, c.to} {
			resp, body := do(t, client, "GET", "/v"+v.String()+c.path, "")
			if resp.StatusCode != 200 {
				t.Errorf("%s in %s: %s %s", c.path, v, resp.Status, body)
				continue
			}
			var tree any
			if err := json.Unmarshal([]byte(body), &tree); err != nil {
				t.Fatalf("%s in %s: %v", c.path, v, err)
			}
			if got := field(tree, c.field); !reflect.DeepEqual(got, c.want) {
				t.Errorf("%s in %s: %s is %#v, want %#v", c.path, v, c.field, got, c.want)
			}
		}
	}
	// Numbers beyond 2^53 come through a change of shape digit by digit, and & is not escaped.
	_, body := do(t, client, "GET", "/v1.51/containers/x/json", "")
	if !strings.Contains(body, `"size":9007199254740993`) || !strings.Contains(body, `"a&b"`) {
		t.Errorf("damaged: %s", body)
	}
}

// field walks down a decoded answer; "-" if there is nothing of that name.
func field(tree any, path string) any {
	if path == "" {
		return tree
	}
	for _, name := range strings.Split(path, ".") {
		switch n := tree.(type) {
		case map[string]any:
			v, there := n[name]
			if !there {
				return "-"
			}
			tree = v
		case []any:
			var i int
			if _, err := fmt.Sscan(name, &i); err != nil || i >= len(n) {
				return "-"
			}
			tree = n[i]
		default:
			return "-"
		}
	}
	return tree
}

func TestCreateOfEachVersion(t *testing.T) {
	f := &fakeEngine{}
	_, client := serveUnix(t, f)
	post := func(v version, body string) (int, string) {
		t.Helper()
		f.created = nil
		resp, answer := do(t, client, "POST", "/v"+v.String()+"/containers/create?platform=linux/amd64", body)
		return resp.StatusCode, answer
	}
	check := func(v version, body string, ok func() bool) {
		t.Helper()
		if code, answer := post(v, body); code != 201 || !ok() {
			t.Errorf("%s: %s gives %d %s %+v", v, body, code, answer, f.created)
		}
	}
	refused := func(v version, body, text string) {
		t.Helper()
		if code, answer := post(v, body); code != 400 || !strings.Contains(answer, text) || f.created != nil {
			t.Errorf("%s: %s gives %d %s", v, body, code, answer)
		}
	}
	if _, answer := post(57, `{"Image":"bb"}`); answer != `{"Id":"`+fakeID+`","Warnings":[]}`+"\n" {
		t.Errorf("answer %q", answer)
	}
	check(40, `{"Image":"bb"}`, func() bool { return f.platform == "" })
	check(41, `{"Image":"bb"}`, func() bool { return f.platform == "linux/amd64" })
	check(24, `{"Image":"bb","Cmd":"a b","Entrypoint":"c"}`, func() bool { return f.created.Cmd[0] == "a b" && f.created.Entrypoint[0] == "c" })
	check(57, `{"Image":"bb","Cmd":["a","b"],"Entrypoint":null}`, func() bool { return len(f.created.Cmd) == 2 && f.created.Entrypoint == nil })
	check(57, `{"Image":"bb","Entrypoint":[]}`, func() bool { return f.created.Entrypoint != nil })
	check(57, `{"Image":"bb"}`, func() bool { return f.created.HostConfig != nil && f.created.NetworkingConfig != nil })
	check(39, `{"Image":"bb"}`, func() bool { return f.created.HostConfig.IpcMode == "shareable" })
	check(40, `{"Image":"bb"}`, func() bool { return f.created.HostConfig.IpcMode == "" })
	check(41, `{"Image":"bb","HostConfig":{"ConsoleSize":[1,2]}}`, func() bool { return f.created.HostConfig.ConsoleSize == [2]uint{} })
	check(42, `{"Image":"bb","HostConfig":{"ConsoleSize":[1,2]}}`, func() bool { return f.created.HostConfig.ConsoleSize == [2]uint{1, 2} })
	check(42, `{"Image":"bb","HostConfig":{"Annotations":{"a":"b"}}}`, func() bool { return f.created.HostConfig.Annotations == nil })
	check(41, `{"Image":"bb","HostConfig":{"Mounts":[{"Type":"bind","BindOptions":{"CreateMountpoint":true},"TmpfsOptions":{}}]}}`, func() bool {
		m := f.created.HostConfig.Mounts[0]
		return !m.BindOptions.CreateMountpoint && m.TmpfsOptions == nil
	})
	check(24, `{"Image":"bb","HostConfig":{"AutoRemove":true}}`, func() bool { return !f.created.HostConfig.AutoRemove })
	check(25, `{"Image":"bb","HostConfig":{"AutoRemove":true}}`, func() bool { return f.created.HostConfig.AutoRemove })
	check(24, `{"Image":"bb","HostConfig":{"KernelMemory":5}}`, func() bool { return true })
	refused(43, `{"Image":"bb","HostConfig":{"Mounts":[{"Type":"bind","BindOptions":{"ReadOnlyForceRecursive":true}}]}}`, "needs API v1.44")
	refused(44, `{"Image":"bb","HostConfig":{"Mounts":[{"Type":"volume","VolumeOptions":{"Subpath":"a"}}]}}`, "needs API v1.45")
	refused(47, `{"Image":"bb","HostConfig":{"Mounts":[{"Type":"image"}]}}`, "needs API v1.48")
	refused(43, `{"Image":"bb","NetworkingConfig":{"EndpointsConfig":{"b":{},"a":{}}}}`, "multiple network endpoints: a, b")

	mac := func(name string) func() bool {
		return func() bool {
			ep := f.created.NetworkingConfig.EndpointsConfig[name]
			return ep != nil && ep.MacAddress.String() == "02:42:ac:11:00:02"
		}
	}
	check(43, `{"Image":"bb","MacAddress":"02:42:ac:11:00:02"}`, mac("default"))
	check(44, `{"Image":"bb","MacAddress":"02:42:ac:11:00:02","HostConfig":{"NetworkMode":"mine"}}`, mac("mine"))
	check(51, `{"Image":"bb","MacAddress":"02:42:ac:11:00:02","NetworkingConfig":{"EndpointsConfig":{"mine":null}}}`, mac("mine"))
	check(43, `{"Image":"bb","NetworkingConfig":{"EndpointsConfig":{"mine":{"MacAddress":"02:42:ac:11:00:02"}}}}`, func() bool {
		return f.created.NetworkingConfig.EndpointsConfig["mine"].MacAddress == nil
	})
	check(57, `{"Image":"bb","MacAddress":"02:42:ac:11:00:02"}`, func() bool { return len(f.created.NetworkingConfig.EndpointsConfig) == 0 })
	refused(44, `{"Image":"bb","MacAddress":"02:42:ac:11:00:02","NetworkingConfig":{"EndpointsConfig":{"mine":{"MacAddress":"02:42:ac:11:00:03"}}}}`, "must match the endpoint-specific MAC address")
	refused(44, `{"Image":"bb","MacAddress":"02:42:ac:11:00:02","HostConfig":{"NetworkMode":"host"}}`, "conflicting options")
	if _, answer := post(44, `{"Image":"bb","MacAddress":"02:42:ac:11:00:02"}`); !strings.Contains(answer, "deprecated") {
		t.Errorf("no warning: %s", answer)
	}

	do(t, client, "POST", "/v1.41/containers/x/exec", `{"Cmd":"true","ConsoleSize":[1,2],"WorkingDir":"/a"}`)
	if f.execReq.ConsoleSize != nil || f.execReq.Cmd[0] != "true" || f.execReq.WorkingDir != "/a" {
		t.Errorf("exec in 1.41: %+v", f.execReq)
	}
	do(t, client, "POST", "/v1.42/containers/x/exec", `{"Cmd":["true"],"ConsoleSize":[1,2]}`)
	if f.execReq.ConsoleSize == nil {
		t.Errorf("exec in 1.42: %+v", f.execReq)
	}
}
