package wire

import (
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// oldScopes is a field of resources in OTLP before 0.16, which pdata reads. Today it is unknown.
const oldScopes field = 1000

// letters has the wire types that a field of each letter may have.
var letters = map[byte][]protowire.Type{
	'v': {protowire.VarintType}, '8': {protowire.Fixed64Type}, '4': {protowire.Fixed32Type}, 'b': {protowire.BytesType},
	'p': {protowire.VarintType, protowire.BytesType}, 'q': {protowire.Fixed64Type, protowire.BytesType},
}

// foreign says whether a field is unknown by protobuf's rules, and pdata fails at it or reads it: a group, a known field of another wire type.
func (m *message) foreign(f value) bool {
	if f.kind == protowire.StartGroupType || f.number == oldScopes {
		return true
	}
	if int(f.number) > len(m.known) {
		return false
	}
	switch letter := m.known[f.number-1]; letter {
	case 'b':
		return f.kind != protowire.BytesType
	case '-':
		return false
	default:
		return !slices.Contains(letters[letter], f.kind)
	}
}

// parses says whether all messages in these bytes, down to a depth, are protobuf.
func (m *message) parses(raw []byte, depth int) bool {
	good := true
	err := each(raw, func(f value) bool {
		if inner, is := m.inside[f.number]; is && f.kind == protowire.BytesType && inner.known != "" && depth > 0 {
			good = inner.parses(f.content, depth-1)
		}
		return good
	})
	return good && err == nil
}

// normal writes a message that parses so that pdata reads what protobuf's rules say: without foreign fields, and with the messages of a oneof
// merged where it is given again with the same field.
func (m *message) normal(raw []byte) []byte {
	out := make([]byte, 0, len(raw))
	var joined, chosen *value
	_ = each(raw, func(f value) bool {
		inner := m.inside[f.number]
		switch {
		case m.foreign(f):
		case f.number == m.joined:
			joined = merged(joined, f)
		case slices.Contains(m.oneof, f.number):
			if inner == nil || chosen == nil || chosen.number != f.number {
				chosen = nil
			}
			chosen = merged(chosen, f)
		default:
			out = m.put(out, f)
		}
		return true
	})
	for _, f := range []*value{joined, chosen} {
		if f != nil {
			out = m.put(out, *f)
		}
	}
	return out
}

// put appends a field, with all in it normal.
func (m *message) put(out []byte, f value) []byte {
	if inner := m.inside[f.number]; inner != nil && inner.known != "" {
		return f.with(out, inner.normal(f.content))
	}
	return append(out, f.raw...)
}

// merged is a message given again: its bytes are those of the one before, then its own.
func merged(before *value, f value) *value {
	if before != nil {
		f.content = append(before.content, f.content...)
	} else {
		f.content = slices.Clip(f.content)
	}
	return &f
}
