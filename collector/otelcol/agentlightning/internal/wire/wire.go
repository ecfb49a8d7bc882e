// Package wire looks at OTLP requests before the receiver parses them, because the receiver refuses a whole request for what is wrong
// with one of its items: an id of another length. And it bounds how deeply a value is nested, because parsers, and all that walks a value
// after them, go one call deeper for each level: a request of some megabytes would end the process. And how many parts there are.
//
// Items that are wrong are rewritten so that they parse, with a mark that says what was wrong: the processor keeps them without ids.
package wire

import (
	"errors"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"

	"agl-otel.internal/agentlightning/internal/identify"
)

// MaxDepth is how many messages may be inside each other, that of the request not counted: what Python's protobuf reads.
const MaxDepth = 100

// ErrNested is what a request is refused with whose deep value belongs to no item that could be kept.
var ErrNested = errors.New(identify.ReasonNesting)

type field = protowire.Number

// message says which fields of a message are messages themselves. Lists of texts, and packed counts, are among them to be counted.
type message map[field]message

// Marks in a message, which are no fields.
const (
	lists  field = 0  // its messages are the values of a list
	counts field = -1 // it holds packed numbers, a byte each at least
)

var (
	anyValue   = message{}
	keyValue   = message{2: anyValue}
	holder     = func(attributes field) message { return message{attributes: keyValue} }
	texts      = message{}
	resource   = message{1: keyValue, 3: {3: texts, 4: texts}} // attributes, entities
	buckets    = message{counts: nil}
	numberData = message{7: keyValue, 5: holder(7)}                            // data points of gauges and sums
	metric     = message{5: {1: numberData}, 7: {1: numberData}, 12: keyValue, // gauge, sum, metadata
		9:  {1: {9: keyValue, 8: holder(7)}},                          // histogram
		10: {1: {1: keyValue, 11: holder(7), 8: buckets, 9: buckets}}, // exponential histogram
		11: {1: {7: keyValue, 6: {}}},                                 // summary
	}
	span = message{9: keyValue, 11: holder(3), 13: holder(4)} // attributes, events, links
	line = message{5: anyValue, 6: keyValue}                  // body, attributes

	requests = map[string]message{ // by the name of the request's type
		"ExportTraceServiceRequest":   grouped(span),
		"ExportLogsServiceRequest":    grouped(line),
		"ExportMetricsServiceRequest": grouped(metric),
	}
)

func init() {
	anyValue[5] = message{1: anyValue, lists: nil} // array
	anyValue[6] = message{1: keyValue}             // kvlist
}

// grouped is a request of items below scopes below resources.
func grouped(item message) message { return message{1: {1: resource, 2: {1: holder(3), 2: item}}} }

// kind of items: which of their fields are ids, and what is left of one whose values are nested too deeply.
type kind struct {
	item       message
	attributes field
	ids        []id
	kept       []field
	links      field // 0: it has none
}

type id struct {
	field  field
	size   int
	reason string
}

var kinds = map[string]kind{
	"ExportTraceServiceRequest": {span, 9, []id{
		{1, 16, identify.ReasonTraceID}, {2, 8, identify.ReasonSpanID}, {4, 8, identify.ReasonParentID},
	}, []field{1, 2, 4, 5, 6, 7, 8}, 13},
	"ExportLogsServiceRequest": {line, 6, []id{
		{9, 16, identify.ReasonTraceID}, {10, 8, identify.ReasonSpanID},
	}, []field{1, 2, 3, 8, 9, 10, 11}, 0},
}

// Clean gives the bytes of a request of this type so that they parse: those given, where nothing is wrong. Fails where they are no protobuf,
// where its parts are too many, and with ErrNested; and as `grow` does, which is asked for what parsed messages take beside their bytes.
func Clean(request string, body []byte, grow func(int64) error) ([]byte, error) {
	schema, known := requests[request]
	if !known {
		return body, nil
	}
	if err := checkParts(request, body); err != nil {
		return nil, err
	}
	found, err := surveyed(body, schema)
	if err != nil {
		return nil, err
	}
	if err := grow(found.size()); err != nil {
		return nil, err
	}
	deep := found.deep
	of, items := kinds[request]
	if deep && !items {
		return nil, ErrNested
	}
	if !deep && (!items || of.wellFormed(body)) {
		return body, nil
	}
	c := cleaner{kind: of}
	cleaned := c.rebuild(body, func(out []byte, f value) []byte {
		if f.number == 1 && f.kind == protowire.BytesType {
			return f.with(out, c.group(f.content))
		}
		return append(out, f.raw...)
	})
	return cleaned, c.err
}

// cleaner rewrites a request in which something is wrong.
type cleaner struct {
	kind
	err error
}

// Levels that are left below the messages in which items are.
const (
	belowGroup = MaxDepth - 1
	belowScope = belowGroup - 1
	belowItem  = belowScope - 1
)

func (c *cleaner) group(raw []byte) []byte {
	raw, reason := c.holder(raw, 1, belowGroup, "")
	return c.rebuild(raw, func(out []byte, f value) []byte {
		if f.number != 2 || f.kind != protowire.BytesType {
			return append(out, f.raw...)
		}
		scope, reason := c.holder(f.content, 3, belowScope, reason)
		return f.with(out, c.rebuild(scope, func(out []byte, f value) []byte {
			if f.number != 2 || f.kind != protowire.BytesType {
				return append(out, f.raw...)
			}
			return f.with(out, c.item(f.content, reason))
		}))
	})
}

// holder takes the attributes of a resource or scope (field 1 of its group) away where they are nested too deeply: then that is why all
// items of the group are refused.
func (c *cleaner) holder(raw []byte, attributes field, below int, reason string) ([]byte, string) {
	rebuilt := c.rebuild(raw, func(out []byte, f value) []byte {
		if f.number != 1 || f.kind != protowire.BytesType || shallow(f.content, holder(attributes), below-1) {
			return append(out, f.raw...)
		}
		reason = identify.ReasonNesting
		return f.with(out, c.rebuild(f.content, func(out []byte, f value) []byte {
			if f.number == attributes {
				return out
			}
			return append(out, f.raw...)
		}))
	})
	return rebuilt, reason
}

// item gives a span or record so that it parses, with the reason for which it is refused, if for any.
func (c *cleaner) item(raw []byte, reason string) []byte {
	deep := !shallow(raw, c.kind.item, belowItem)
	if reason == "" {
		reason = c.broken(raw)
	}
	if reason == "" && deep {
		reason = identify.ReasonNesting
	}
	var marked []byte
	if reason != "" { // in front: of a key given twice the first counts
		marked = protowire.AppendBytes(protowire.AppendTag(nil, c.attributes, protowire.BytesType), invalid(reason))
	}
	return append(marked, c.rebuild(raw, func(out []byte, f value) []byte {
		switch {
		case c.wrong(f) != "" || (deep && !slices.Contains(c.kept, f.number)):
			return out
		case c.links != 0 && f.number == c.links && f.kind == protowire.BytesType:
			return f.with(out, c.rebuild(f.content, func(out []byte, f value) []byte {
				if wrongLink(f) {
					return out
				}
				return append(out, f.raw...)
			}))
		default:
			return append(out, f.raw...)
		}
	})...)
}

// broken says which id of an item has another length than ids have: the first in the order of their checks.
func (k kind) broken(item []byte) string {
	found := map[string]bool{}
	_ = each(item, func(f value) bool {
		found[k.wrong(f)] = true
		return true
	})
	for _, one := range k.ids {
		if found[one.reason] {
			return one.reason
		}
	}
	return ""
}

func (k kind) wrong(f value) string {
	for _, one := range k.ids {
		if f.number == one.field && f.kind == protowire.BytesType && len(f.content) != 0 && len(f.content) != one.size {
			return one.reason
		}
	}
	return ""
}

// wrongLink: the id of a link that is none is left out, as it tells nothing of the span itself.
func wrongLink(f value) bool {
	return f.kind == protowire.BytesType && len(f.content) != 0 &&
		(f.number == 1 && len(f.content) != 16 || f.number == 2 && len(f.content) != 8)
}

// wellFormed says whether all ids of all items have their lengths.
func (k kind) wellFormed(body []byte) bool {
	good := true
	inside := func(number field, raw []byte, look func([]byte)) {
		_ = each(raw, func(f value) bool {
			if f.number == number && f.kind == protowire.BytesType {
				look(f.content)
			}
			return good
		})
	}
	inside(1, body, func(group []byte) {
		inside(2, group, func(scope []byte) {
			inside(2, scope, func(item []byte) {
				_ = each(item, func(f value) bool {
					good = k.wrong(f) == ""
					return good
				})
				if good && k.links != 0 {
					inside(k.links, item, func(link []byte) {
						_ = each(link, func(f value) bool {
							good = !wrongLink(f)
							return good
						})
					})
				}
			})
		})
	})
	return good
}

// shallow says whether no message of these bytes is more than `depth` levels down.
func shallow(raw []byte, schema message, depth int) bool {
	good := true
	_ = each(raw, func(f value) bool {
		if inner, is := schema[f.number]; is && f.kind == protowire.BytesType {
			good = depth > 0 && shallow(f.content, inner, depth-1)
		}
		return good
	})
	return good
}

func invalid(reason string) []byte {
	text := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), reason)
	pair := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), identify.AttrInvalid)
	return protowire.AppendBytes(protowire.AppendTag(pair, 2, protowire.BytesType), text)
}

// value is one field as it is on the wire.
type value struct {
	number  field
	kind    protowire.Type
	raw     []byte // with its tag
	content []byte // of bytes, texts and messages
}

// with appends the field with other content.
func (f value) with(out, content []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(out, f.number, f.kind), content)
}

// each visits the fields of a message, until one says that it is enough.
func each(raw []byte, visit func(value) bool) error {
	for len(raw) > 0 {
		number, kind, tag := protowire.ConsumeTag(raw)
		if tag < 0 {
			return protowire.ParseError(tag)
		}
		var f value
		size := 0
		if kind == protowire.BytesType {
			f.content, size = protowire.ConsumeBytes(raw[tag:])
		} else {
			size = protowire.ConsumeFieldValue(number, kind, raw[tag:])
		}
		if size < 0 {
			return protowire.ParseError(size)
		}
		f.number, f.kind, f.raw = number, kind, raw[:tag+size]
		if !visit(f) {
			return nil
		}
		raw = raw[tag+size:]
	}
	return nil
}

func (c *cleaner) rebuild(raw []byte, change func(out []byte, f value) []byte) []byte {
	built := make([]byte, 0, len(raw))
	err := each(raw, func(f value) bool {
		built = change(built, f)
		return true
	})
	if err != nil {
		c.err = err
	}
	return built
}
