// Package key knows the keys with which agents send telemetry. They are made from the stack's token, so that collectors know them without
// being told; agl_otel/net/auth.py makes the same ones (golden vectors: collector/conformance/keys).
package key

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"go.opentelemetry.io/collector/client"

	"agl-otel.internal/agentlightning/internal/identify"
)

const (
	digits      = 40 // hexadecimal, of a signature
	boundPrefix = "aglo-"
	rolloutName = "agentlightning.key.rollout_id"
	attemptName = "agentlightning.key.attempt_id"
)

// Shared is the key of whoever sends for many attempts.
func Shared(token string) string { return "agl-" + sign(token, "otlp") }

// Bound is the key of an agent that was started for one attempt.
func Bound(token string, ids identify.IDs) string {
	named := ids.Rollout + "/" + ids.Attempt
	return boundPrefix + named + "-" + sign(token, "otlp\x00"+named)
}

// ReadBound gives the attempt that a key is bound to; false where it is no such key of a stack with this token.
func ReadBound(token, key string) (identify.IDs, bool) {
	named, is := strings.CutPrefix(key, boundPrefix)
	end := strings.LastIndexByte(named, '-')
	if !is || end < 0 {
		return identify.IDs{}, false
	}
	rollout, attempt, _ := strings.Cut(named[:end], "/")
	ids := identify.IDs{Rollout: rollout, Attempt: attempt}
	valid := identify.ValidID(rollout) && identify.ValidID(attempt) && hmac.Equal([]byte(key), []byte(Bound(token, ids)))
	return ids, valid
}

func sign(token, purpose string) string {
	mac := hmac.New(sha256.New, []byte(token))
	mac.Write([]byte(purpose))
	return hex.EncodeToString(mac.Sum(nil))[:digits]
}

// Holder is what an authenticated sender with an agent's key is known by in client.Info; without ids where the key is bound to no attempt.
type Holder struct{ IDs identify.IDs }

var _ client.AuthData = Holder{}

// GetAttribute implements client.AuthData.
func (h Holder) GetAttribute(name string) any {
	switch name {
	case rolloutName:
		return h.IDs.Rollout
	case attemptName:
		return h.IDs.Attempt
	default:
		return nil
	}
}

// GetAttributeNames implements client.AuthData.
func (Holder) GetAttributeNames() []string { return []string{rolloutName, attemptName} }

// BoundTo gives the attempt that a sender's key is bound to; nil where it is bound to none.
func BoundTo(info client.Info) *identify.IDs {
	if holder, ok := info.Auth.(Holder); ok && holder.IDs != (identify.IDs{}) {
		return &holder.IDs
	}
	return nil
}

// OfAgent says whether a sender showed an agent's key, bound or not, and not the stack's token.
func OfAgent(info client.Info) bool {
	_, ok := info.Auth.(Holder)
	return ok
}
