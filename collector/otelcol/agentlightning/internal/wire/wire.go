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

var errMalformed = errors.New(identify.ReasonWire)

// ErrNested is what a request is refused with whose deep value belongs to no item that could be kept.
var ErrNested = errors.New(identify.ReasonNesting)

type field = protowire.Number

// message says which fields of a message there are, and which of them are messages themselves.
type message struct {
	known  string             // of each field that pdata knows, by number: the letter of its wire type, or - for none
	inside map[field]*message // lists of texts, and packed counts, are among them to be counted
	oneof  []field            // fields of which only the last counts
	joined field              // a message that pdata does not merge where it is given again, because it consists of a oneof

	list   bool // its messages are the values of a list
	packed bool // it holds packed numbers, a byte each at least
}

// Wire types: v a varint, 8 and 4 so many bytes, b bytes; p and q are lists of varints and of eight bytes, packed or not.
var (
	anyValue = &message{known: "bvv8bbbv", oneof: []field{1, 2, 3, 4, 5, 6, 7, 8}}
	keyValue = &message{known: "bbv", inside: inside{2: anyValue}, joined: 2}
	texts    = &message{} // no message, but a text: none of its bytes is looked at
	leaf     = func(known string) *message { return &message{known: known} }
	holder   = func(known string, attributes field) *message {
		return &message{known: known, inside: inside{attributes: keyValue}}
	}
	entity     = &message{known: "bbbb", inside: inside{3: texts, 4: texts}}
	resource   = &message{known: "bvb", inside: inside{1: keyValue, 3: entity}}
	scope      = holder("bbbv", 3)
	exemplar   = holder("-88bb8b", 7)
	buckets    = &message{known: "vp", packed: true}
	numberData = &message{known: "-888b8bv", inside: inside{7: keyValue, 5: exemplar}} // data points of gauges and sums
	histogram  = &message{known: "-8888qqbbv88", inside: inside{9: keyValue, 8: exemplar}}
	exponents  = &message{known: "b8888v8bbvb888", inside: inside{1: keyValue, 11: exemplar, 8: buckets, 9: buckets}}
	summary    = &message{known: "-8888bbv", inside: inside{7: keyValue, 6: leaf("88")}}
	points     = func(known string, data *message) *message { return &message{known: known, inside: inside{1: data}} }
	metric     = &message{known: "bbb-b-b-bbbb", oneof: []field{5, 7, 9, 10, 11}, inside: inside{
		5: points("b", numberData), 7: points("bvv", numberData), 9: points("bv", histogram), 10: points("bv", exponents), 11: points("b", summary),
		12: keyValue, // metadata
	}}
	span = &message{known: "bbbbbv88bvbvbvb4", inside: inside{9: keyValue, 11: holder("8bbv", 3), 13: holder("bbbbv4", 4), 15: leaf("-bv")}}
	line = &message{known: "8vb-bbv4bb8b", inside: inside{5: anyValue, 6: keyValue}, joined: 5} // of a log: its body, its attributes

	requests = map[string]*message{ // by the name of the request's type
		"ExportTraceServiceRequest":   grouped(span),
		"ExportLogsServiceRequest":    grouped(line),
		"ExportMetricsServiceRequest": grouped(metric),
	}
)

type inside = map[field]*message

func init() {
	anyValue.inside = inside{5: {known: "b", inside: inside{1: anyValue}, list: true}, 6: points("b", keyValue)}
}

// grouped is a request of items below scopes below resources.
func grouped(item *message) *message {
	part := &message{known: "bbb", inside: inside{1: scope, 2: item}}
	return points("b", &message{known: "bbb", inside: inside{1: resource, 2: part}})
}

// kind of items: which of their fields are ids, and what is left of one whose values are nested too deeply.
type kind struct {
	item       *message
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
func Clean(request string, body []byte, grow func(int64) error) (cleaned []byte, err error) {
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
	if found.malformed && !items {
		return nil, errMalformed
	}
	if found.odd {
		defer func() { cleaned = schema.normal(cleaned) }()
	}
	if !deep && !found.malformed && (!items || of.wellFormed(body)) {
		return body, nil
	}
	c := cleaner{kind: of}
	cleaned = c.rebuild(body, func(out []byte, f value) []byte {
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
	raw, reason := c.holder(raw, resource, 1, belowGroup, "")
	return c.rebuild(raw, func(out []byte, f value) []byte {
		if f.number != 2 || f.kind != protowire.BytesType {
			return append(out, f.raw...)
		}
		part, reason := c.holder(f.content, scope, 3, belowScope, reason)
		return f.with(out, c.rebuild(part, func(out []byte, f value) []byte {
			if f.number != 2 || f.kind != protowire.BytesType {
				return append(out, f.raw...)
			}
			return f.with(out, c.item(f.content, reason))
		}))
	})
}

// holder takes the attributes of a resource or scope (field 1 of its group) away where they are nested too deeply, and all of it where it is
// no message: then that is why all items of the group are refused.
func (c *cleaner) holder(raw []byte, schema *message, attributes field, below int, reason string) ([]byte, string) {
	rebuilt := c.rebuild(raw, func(out []byte, f value) []byte {
		if f.number != 1 || f.kind != protowire.BytesType {
			return append(out, f.raw...)
		}
		if !schema.parses(f.content, below-1) {
			reason = identify.ReasonWire
			return f.with(out, nil)
		}
		if shallow(f.content, schema, below-1) {
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
	spoiled := !shallow(raw, c.kind.item, belowItem)
	if reason == "" {
		reason = c.broken(raw)
	}
	if reason == "" && spoiled {
		reason = identify.ReasonNesting
	}
	if !c.kind.item.parses(raw, belowItem) {
		spoiled, reason = true, identify.ReasonWire
	}
	var built []byte
	if reason != "" { // in front: of a key given twice the first counts
		built = protowire.AppendBytes(protowire.AppendTag(nil, c.attributes, protowire.BytesType), invalid(reason))
	}
	_ = each(raw, func(f value) bool { // up to where it does not parse, if it does not
		switch {
		case c.wrong(f) != "" || (spoiled && !slices.Contains(c.kept, f.number)):
		case c.links != 0 && f.number == c.links && f.kind == protowire.BytesType:
			built = f.with(built, c.rebuild(f.content, func(out []byte, f value) []byte {
				if wrongLink(f) {
					return out
				}
				return append(out, f.raw...)
			}))
		default:
			built = append(built, f.raw...)
		}
		return true
	})
	return built
}

// broken says which id of an item has another length than ids have: the first in the order of their checks. Of an id given twice the last
// counts.
func (k kind) broken(item []byte) string {
	found := map[field]string{}
	_ = each(item, func(f value) bool {
		if f.kind == protowire.BytesType {
			found[f.number] = k.wrong(f)
		}
		return true
	})
	for _, one := range k.ids {
		if reason := found[one.field]; reason != "" {
			return reason
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
func shallow(raw []byte, schema *message, depth int) bool {
	good := true
	_ = each(raw, func(f value) bool {
		if inner, is := schema.inside[f.number]; is && f.kind == protowire.BytesType {
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
