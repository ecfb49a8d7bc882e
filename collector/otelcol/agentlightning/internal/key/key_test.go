package key

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/client"

	"agl-otel.internal/agentlightning/internal/identify"
)

type vector struct {
	Name    string `json:"name"`
	Token   string `json:"token"`
	Rollout string `json:"rollout"`
	Attempt string `json:"attempt"`
	Key     string `json:"key"`
}

func TestKeysAreThoseOfTheGoldenVectors(t *testing.T) {
	raw, err := os.ReadFile("../../../../conformance/keys/keys.json")
	require.NoError(t, err)
	var file struct {
		Keys    []vector `json:"keys"`
		Refused []vector `json:"refused"`
	}
	require.NoError(t, json.Unmarshal(raw, &file))
	require.NotEmpty(t, file.Keys)
	for _, v := range file.Keys {
		ids := identify.IDs{Rollout: v.Rollout, Attempt: v.Attempt}
		require.Equal(t, v.Key, Bound(v.Token, ids))
		read, ok := ReadBound(v.Token, v.Key)
		require.True(t, ok)
		require.Equal(t, ids, read)
	}
	require.NotEmpty(t, file.Refused)
	for _, v := range file.Refused {
		_, ok := ReadBound(v.Token, v.Key)
		require.False(t, ok, v.Name)
	}
}

func TestAHolderIsKnownByItsAttempt(t *testing.T) {
	ids := identify.IDs{Rollout: "ro-1", Attempt: "at-1"}
	require.Equal(t, &ids, BoundTo(client.Info{Auth: Holder{ids}}))
	require.Nil(t, BoundTo(client.Info{}))
	for _, name := range (Holder{}).GetAttributeNames() {
		require.NotNil(t, Holder{ids}.GetAttribute(name))
	}
}
