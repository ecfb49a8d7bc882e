package wire

import (
	"bytes"
	"fmt"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"
)

// Bounds of a request of very many next to empty parts: an item costs the collector what it costs, however few bytes it takes, and a
// kilobyte of gzip can unfold to a million. The first four are those of collector/crowded.py.
const (
	maxParts       = 65_536 // resources, scopes, and spans, log records or metrics of one request
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

// levels are the fields that hold parts in a request, a resource, a scope: the same for each signal.
var levels = [...]field{1, 2, 2}

func crowdedParts(parts, size int) error {
	many := strconv.Itoa(parts)
	if parts > maxParts {
		many = fmt.Sprintf("more than %d", maxParts)
	}
	return fmt.Errorf("it has %s resources, scopes and items in %d bytes: send smaller batches", many, size)
}

// checkParts fails where a request is too crowded; what cannot be read is left to its reader.
func checkParts(body []byte) error {
	if len(body) <= fewParts*leastBytes {
		return nil
	}
	parts := 0
	countParts(body, 0, &parts)
	if parts > maxParts || parts*leastBytes > len(body) {
		return crowdedParts(parts, len(body))
	}
	return nil
}

// countParts stops above maxParts.
func countParts(raw []byte, level int, parts *int) {
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
		if number == levels[level] {
			*parts++
			if level+1 < len(levels) {
				countParts(content, level+1, parts)
			}
		}
		if cut {
			return
		}
		raw = raw[size:]
	}
}

// survey walks all messages of a request once: how many there are, and whether they are nested too deeply.
type survey struct {
	messages, values int
	most             int // messages; the walk ends beyond it
	deep             bool
}

// surveyed fails where the messages of a request are too many or next to empty.
func surveyed(body []byte, schema message) (s survey, err error) {
	s.most = maxMessages
	if len(body) > fewParts*leastBytes {
		s.most = min(s.most, len(body)/leastMessageBytes)
	}
	s.walk(body, schema, MaxDepth)
	switch {
	case s.messages > s.most:
		return s, fmt.Errorf("it has more than %d attributes, events, points and the like in %d bytes: send smaller batches", s.most, len(body))
	case s.values > maxValues:
		return s, fmt.Errorf("it has more than %d values in lists: send smaller batches", maxValues)
	}
	return s, nil
}

// size is what the messages take when they are parsed, beside their bytes.
func (s *survey) size() int64 { return int64(s.messages)*messageBytes + int64(s.values)*valueBytes }

func (s *survey) walk(raw []byte, schema message, depth int) {
	_, inList := schema[lists]
	_ = each(raw, func(f value) bool {
		inner, is := schema[f.number]
		if !is || f.kind != protowire.BytesType {
			return true
		}
		switch _, packed := inner[counts]; {
		case inList:
			s.values++
		case packed:
			s.values += len(f.content)
			fallthrough
		default:
			s.messages++
		}
		if depth == 0 {
			s.deep = true
		} else if len(inner) > 0 {
			s.walk(f.content, inner, depth-1)
		}
		return s.messages <= s.most && s.values <= maxValues
	})
}

// checkJSON is checkParts and surveyed for OTLP/JSON. It gives at least the depth of a text that is not parsed yet: brackets count, too,
// as parsers go down there.
func checkJSON(body []byte) (deepest, objects int, err error) {
	objects = bytes.Count(body, []byte("{"))
	if objects > maxObjects || objects > fewParts && objects*leastJSONBytes > len(body) {
		return 0, 0, fmt.Errorf("it has %d objects in %d bytes: send smaller batches", objects, len(body))
	}
	open, parts := 0, 0
	path := 0 // how many of the open brackets, from the outermost on, are {[{[{…: the way to items
	inText, escaped := false, false
	for _, b := range body {
		switch {
		case escaped:
			escaped = false
		case b == '\\':
			escaped = inText
		case b == '"':
			inText = !inText
		case inText:
		case b == '{' || b == '[':
			if path == open && (b == '{') == (open%2 == 0) {
				path++
				if path == 3 || path == 5 || path == 7 {
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
