// Package e2e holds the tests of whole containers: a real daemon and agent, a real registry server, real clients
// (docker, docker compose, the Go SDK) and payloads that report what they see from inside. It has no code of its own.
package e2e
