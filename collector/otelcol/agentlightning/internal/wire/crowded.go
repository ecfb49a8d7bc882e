package wire

import (
	"bytes"
	"fmt"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"agl-otel.internal/agentlightning/internal/refusals"
)

// Bounds of a request of very many next to empty parts: an item costs the collector what it costs, however few bytes it takes, and a
// kilobyte of gzip can unfold to a million. Those of protobuf are collector/crowded.py's, too.
const (
	maxParts       = 65_536 // resources, scopes, spans, log records, metrics and data points of one request
	fewParts       = 1024
	leastBytes     = 16 // of a part, on average, where there are more than a few
	leastJSONBytes = 8  // of a JSON object, likewise

	maxMessages       = 1 << 21 // of all kinds; an attribute is two
	maxObjects        = 1 << 22 // in JSON, where each value of a list is one
	leastMessageBytes = 4       // likewise: an attribute with a name of one letter has nine
	maxValues         = 1 << 23 // of lists (token ids, log-probs), and counts of exponential histograms: what they take is small, and real

	messageBytes = 64 // that a message takes beside its own bytes when it is parsed, about
	valueBytes   = 16

	// MaxCleanedJSON is how large a body in JSON may be of which one item does not parse: to mend it, all of it becomes a tree.
	MaxCleanedJSON = 8 << 20
)

// level is a message that parts are in: the fields of it that are looked into, and whether they are parts.
type level struct {
	fields []field
	parts  bool
}

var (
	itemLevels  = []level{{[]field{1}, true}, {[]field{2}, true}, {[]field{2}, true}}
	pointLevels = append(slices.Clip(itemLevels), level{[]field{5, 7, 9, 10, 11}, false}, level{[]field{1}, true}) // of the kinds of metrics
)

func crowded(format string, values ...any) error {
	return refusals.CrowdedError{Err: fmt.Errorf(format, values...)}
}

func crowdedParts(parts, size int) error {
	if parts > maxParts {
		return crowded("it has more than %d resources, scopes and items in %d bytes: send smaller batches", maxParts, size)
	}
	return crowded("it has %d resources, scopes and items in %d bytes; a request with more than %d needs %d bytes for each: "+
		"send smaller batches", parts, size, fewParts, leastBytes)
}

// checkParts fails where a request is too crowded; what cannot be read is left to its reader.
func checkParts(request string, body []byte) error {
	if len(body) <= fewParts*leastBytes {
		return nil
	}
	levels, parts := itemLevels, 0
	if request == "ExportMetricsServiceRequest" {
		levels = pointLevels
	}
	countParts(body, levels, &parts)
	if parts > maxParts || parts*leastBytes > len(body) {
		return crowdedParts(parts, len(body))
	}
	return nil
}

// countParts stops above maxParts.
func countParts(raw []byte, levels []level, parts *int) {
	for len(raw) > 0 && *parts <= maxParts {
		number, kind, tag := protowire.ConsumeTag(raw)
		if tag < 0 {
			return
		}
		raw = raw[tag:]
		if kind != protowire.BytesType {
			size := protowire.ConsumeFieldValue(number, kind, raw)
			if size < 0 {
				return
			}
			raw = raw[size:]
			continue
		}
		content, size := protowire.ConsumeBytes(raw)
		cut := size < 0 // the parts before the end count all the same
		if cut {
			_, head := protowire.ConsumeVarint(raw)
			if head < 0 {
				return
			}
			content = raw[head:]
		}
		if slices.Contains(levels[0].fields, number) {
			if levels[0].parts {
				*parts++
			}
			if len(levels) > 1 {
				countParts(content, levels[1:], parts)
			}
		}
		if cut {
			return
		}
		raw = raw[size:]
	}
}

// survey walks all messages of a request once: how many there are, and what is wrong with them.
type survey struct {
	messages, values int
	most             int  // messages; the walk ends beyond it
	deep             bool // nested too deeply
	odd              bool // see message.normal
	malformed        bool // not all of it is protobuf
}

// surveyed fails where the messages of a request are too many or next to empty.
func surveyed(body []byte, schema *message) (s survey, err error) {
	s.most = maxMessages
	if len(body) > fewParts*leastBytes {
		s.most = min(s.most, len(body)/leastMessageBytes)
	}
	s.walk(body, schema, MaxDepth)
	switch {
	case s.messages > s.most:
		return s, crowded("it has more than %d attributes, events, points and the like in %d bytes: send smaller batches", s.most, len(body))
	case s.values > maxValues:
		return s, crowded("it has more than %d values in lists: send smaller batches", maxValues)
	}
	return s, nil
}

// size is what the messages take when they are parsed, beside their bytes.
func (s *survey) size() int64 { return int64(s.messages)*messageBytes + int64(s.values)*valueBytes }

func (s *survey) walk(raw []byte, schema *message, depth int) {
	var last field // of the oneof
	joined := false
	err := each(raw, func(f value) bool {
		if schema.foreign(f) {
			s.odd = true
			return true
		}
		inner, is := schema.inside[f.number]
		if schema.oneof != nil && slices.Contains(schema.oneof, f.number) {
			s.odd = s.odd || is && last == f.number
			last = f.number
		}
		if f.number == schema.joined {
			s.odd, joined = s.odd || joined, true
		}
		if !is || f.kind != protowire.BytesType {
			return true
		}
		switch {
		case schema.list:
			s.values++
		case inner.packed:
			s.values += len(f.content)
			fallthrough
		default:
			s.messages++
		}
		if depth == 0 {
			s.deep = true
		} else if inner.known != "" {
			s.walk(f.content, inner, depth-1)
		}
		return s.messages <= s.most && s.values <= maxValues
	})
	s.malformed = s.malformed || err != nil
}

// partPath is the way to items, and to the data points of a metric.
const partPath = "{[{[{[{{[{"

// checkJSON is checkParts and surveyed for OTLP/JSON, and checkSignal. It gives at least the depth of a text that is not parsed yet: brackets
// count, too, as parsers go down there.
func checkJSON(request string, body []byte) (deepest, objects int, err error) {
	objects = bytes.Count(body, []byte("{"))
	if objects > fewParts && objects*leastJSONBytes > len(body) {
		return 0, 0, crowded("it has %d objects in %d bytes; a request with more than %d needs %d bytes for each: send smaller batches",
			objects, len(body), fewParts, leastJSONBytes)
	}
	if objects > maxObjects {
		return 0, 0, crowded("it has more than %d objects in %d bytes: send smaller batches", maxObjects, len(body))
	}
	open, parts := 0, 0
	path := 0 // how many of the open brackets, from the outermost on, are those of partPath
	inText, escaped := false, false
	text := 0 // where the last text began
	for at, b := range body {
		switch {
		case escaped:
			escaped = false
		case b == '\\':
			escaped = inText
		case b == '"':
			if inText && open == 1 {
				if err := checkSignal(request, body[text:at], body[at+1:]); err != nil {
					return 0, 0, err
				}
			}
			inText, text = !inText, at+1
		case inText:
		case b == '{' || b == '[':
			if path == open && path < len(partPath) && b == partPath[path] {
				path++
				if path == 3 || path == 5 || path == 7 || path == len(partPath) {
					parts++
				}
			}
			open++
			deepest = max(deepest, open)
		case b == '}' || b == ']':
			open--
			path = min(path, max(open, 0))
		}
	}
	if parts > maxParts {
		return 0, 0, crowdedParts(parts, len(body))
	}
	return deepest, objects, nil
}
