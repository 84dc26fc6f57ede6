package dockerapi

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
)

// The Go SDK of the API's owners, at the versions it can speak.
func TestSDK(t *testing.T) {
	f := &fakeEngine{}
	path, _ := serveUnix(t, f)
	for _, v := range []string{"1.40", "1.44", "1.51", "1.52", "1.57", ""} {
		t.Run("version "+v, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			opts := []client.Opt{client.WithHost("unix://" + path)}
			if v != "" {
				opts = append(opts, client.WithAPIVersion(v))
			}
			c, err := client.New(opts...)
			if err != nil {
				t.Skipf("the SDK does not speak %s: %v", v, err)
			}
			defer c.Close()
			ping, err := c.Ping(ctx, client.PingOptions{})
			if err != nil || ping.APIVersion != MaxVersion || ping.BuilderVersion != "2" || ping.OSType != "linux" {
				t.Errorf("ping: %+v %v", ping, err)
			}
			created, err := c.ContainerCreate(ctx, client.ContainerCreateOptions{Config: &container.Config{Image: "bb", Cmd: []string{"true"}}, Name: "a"})
			if err != nil || created.ID != fakeID || f.created.Cmd[0] != "true" {
				t.Errorf("create: %+v %v", created, err)
			}
			wait := c.ContainerWait(ctx, created.ID, client.ContainerWaitOptions{Condition: container.WaitConditionNextExit})
			if _, err := c.ContainerStart(ctx, created.ID, client.ContainerStartOptions{}); err != nil {
				t.Errorf("start: %v", err)
			}
			select {
			case r := <-wait.Result:
				if r.StatusCode != 37 {
					t.Errorf("wait: %+v", r)
				}
			case err := <-wait.Error:
				t.Errorf("wait: %v", err)
			}
			inspect, err := c.ContainerInspect(ctx, created.ID, client.ContainerInspectOptions{})
			if err != nil || inspect.Container.Config.Image != "a&b" {
				t.Errorf("inspect: %+v %v", inspect, err)
			}
			if _, err := c.ContainerInspect(ctx, "nope", client.ContainerInspectOptions{}); err == nil || !strings.Contains(err.Error(), "No such container: nope") {
				t.Errorf("inspect of nothing: %v", err)
			}
			attached, err := c.ContainerAttach(ctx, created.ID, client.ContainerAttachOptions{Stream: true, Stdin: true, Stdout: true})
			if err != nil {
				t.Fatalf("attach: %v", err)
			}
			defer attached.Close()
			io.WriteString(attached.Conn, "hello")
			if err := attached.CloseWrite(); err != nil {
				t.Error(err)
			}
			if b, err := io.ReadAll(attached.Reader); err != nil || string(b) != "hellobye" {
				t.Errorf("attach: %q %v", b, err)
			}
			exec, err := c.ExecCreate(ctx, created.ID, client.ExecCreateOptions{Cmd: []string{"true"}})
			if err != nil {
				t.Fatalf("exec: %v", err)
			}
			if _, err := c.ExecStart(ctx, exec.ID, client.ExecStartOptions{Detach: true}); err != nil {
				t.Errorf("exec start: %v", err)
			}
			pull, err := c.ImagePull(ctx, "bb:1", client.ImagePullOptions{})
			if err != nil {
				t.Fatalf("pull: %v", err)
			}
			if err := pull.Wait(ctx); err != nil || f.pulled != "docker.io/library/bb:1" {
				t.Errorf("pull of %s: %v", f.pulled, err)
			}
			events := c.Events(ctx, client.EventsListOptions{})
			if e := <-events.Messages; e.Action != "start" || e.Actor.ID != fakeID {
				t.Errorf("event %+v", e)
			}
			for name, call := range map[string]func() error{
				"info":     func() error { _, err := c.Info(ctx, client.InfoOptions{}); return err },
				"version":  func() error { _, err := c.ServerVersion(ctx, client.ServerVersionOptions{}); return err },
				"list":     func() error { _, err := c.ContainerList(ctx, client.ContainerListOptions{}); return err },
				"images":   func() error { _, err := c.ImageList(ctx, client.ImageListOptions{}); return err },
				"image":    func() error { _, err := c.ImageInspect(ctx, "bb"); return err },
				"volumes":  func() error { _, err := c.VolumeList(ctx, client.VolumeListOptions{}); return err },
				"networks": func() error { _, err := c.NetworkList(ctx, client.NetworkListOptions{}); return err },
				"usage":    func() error { _, err := c.DiskUsage(ctx, client.DiskUsageOptions{}); return err },
			} {
				if err := call(); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
}

// What a request costs from a Go client through a unix socket and back, with an engine that does nothing.
func BenchmarkRequest(b *testing.B) {
	path, _ := serveUnix(b, &fakeEngine{})
	body := `{"Hostname":"","Domainname":"","User":"","AttachStdin":false,"AttachStdout":true,"AttachStderr":true,"Tty":false,"OpenStdin":false,` +
		`"StdinOnce":false,"Env":null,"Cmd":["true"],"Image":"alpine","Volumes":{},"WorkingDir":"","Entrypoint":null,"Labels":{},"HostConfig":` +
		`{"Binds":null,"ContainerIDFile":"","LogConfig":{"Type":"","Config":{}},"NetworkMode":"default","PortBindings":{},"RestartPolicy":` +
		`{"Name":"no","MaximumRetryCount":0},"AutoRemove":true,"VolumeDriver":"","VolumesFrom":null,"ConsoleSize":[40,120],"CapAdd":null,` +
		`"CapDrop":null,"CgroupnsMode":"","Dns":[],"DnsOptions":[],"DnsSearch":[],"ExtraHosts":null,"GroupAdd":null,"IpcMode":"","Cgroup":"",` +
		`"Links":null,"OomScoreAdj":0,"PidMode":"","Privileged":false,"PublishAllPorts":false,"ReadonlyRootfs":false,"SecurityOpt":null,` +
		`"UTSMode":"","UsernsMode":"","ShmSize":0,"Isolation":"","CpuShares":0,"Memory":0,"NanoCpus":0,"CgroupParent":"","BlkioWeight":0,` +
		`"BlkioWeightDevice":[],"BlkioDeviceReadBps":[],"BlkioDeviceWriteBps":[],"BlkioDeviceReadIOps":[],"BlkioDeviceWriteIOps":[],` +
		`"CpuPeriod":0,"CpuQuota":0,"CpuRealtimePeriod":0,"CpuRealtimeRuntime":0,"CpusetCpus":"","CpusetMems":"","Devices":[],` +
		`"DeviceCgroupRules":null,"DeviceRequests":null,"MemoryReservation":0,"MemorySwap":0,"MemorySwappiness":-1,"OomKillDisable":false,` +
		`"PidsLimit":0,"Ulimits":[],"CpuCount":0,"CpuPercent":0,"IOMaximumIOps":0,"IOMaximumBandwidth":0,"MaskedPaths":null,"ReadonlyPaths":null},` +
		`"NetworkingConfig":{"EndpointsConfig":{"default":{"IPAMConfig":null,"Links":null,"Aliases":null,"MacAddress":"","NetworkID":"",` +
		`"EndpointID":"","Gateway":"","IPAddress":"","IPPrefixLen":0,"IPv6Gateway":"","GlobalIPv6Address":"","GlobalIPv6PrefixLen":0,` +
		`"DriverOpts":null,"DNSNames":null}}}}`
	for name, request := range map[string]string{
		"ping":            "GET /_ping HTTP/1.1\r\nHost: d\r\n\r\n",
		"start":           "POST /v1.51/containers/" + fakeID + "/start HTTP/1.1\r\nHost: d\r\nContent-Length: 0\r\n\r\n",
		"create":          fmt.Sprintf("POST /v1.51/containers/create?name=a HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body),
		"inspect":         "GET /v1.57/containers/x/json HTTP/1.1\r\nHost: d\r\n\r\n",
		"inspect in 1.51": "GET /v1.51/containers/x/json HTTP/1.1\r\nHost: d\r\n\r\n",
	} {
		b.Run(name, func(b *testing.B) {
			conn := dial(b, path)
			conn.SetDeadline(time.Time{})
			buf := make([]byte, 64<<10)
			b.ReportAllocs()
			for b.Loop() {
				io.WriteString(conn, request)
				if n, err := conn.Read(buf); err != nil || n < 100 {
					b.Fatal(n, err)
				}
			}
		})
	}
}

// BenchmarkSocket is the floor under BenchmarkRequest: a byte there and back between two goroutines.
func BenchmarkSocket(b *testing.B) {
	l, err := net.Listen("unix", b.TempDir()+"/s")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err == nil {
			io.Copy(conn, onlyReader{conn})
		}
	}()
	conn, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	buf := make([]byte, 200)
	for b.Loop() {
		conn.Write(buf)
		if _, err := io.ReadFull(conn, buf); err != nil {
			b.Fatal(err)
		}
	}
}

// onlyReader keeps io.Copy from splicing.
type onlyReader struct{ io.Reader }
