package wire

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"unicode/utf8"

	"agl-otel.internal/agentlightning/internal/identify"
)

// Objects of OTLP/JSON are the messages of OTLP, so that depths are the same; a key may be written in either way.
var (
	// An escaped backslash, a surrogate pair, or an unpaired surrogate.
	jsonSurrogate = regexp.MustCompile(`\\\\|\\u[dD][89abAB][[:xdigit:]]{2}\\u[dD][c-fC-F][[:xdigit:]]{2}|\\u[dD][89a-fA-F][[:xdigit:]]{2}`)

	jsonID   = regexp.MustCompile(`"(trace|span|parentSpan|parent_span)_?[Ii]d"\s*:\s*"([^"]*)"`)
	jsonKeys = [...]struct{ groups, scopes, items []string }{
		{[]string{"resourceSpans", "resource_spans"}, []string{"scopeSpans", "scope_spans"}, []string{"spans"}},
		{[]string{"resourceLogs", "resource_logs"}, []string{"scopeLogs", "scope_logs"}, []string{"logRecords", "log_records"}},
	}
	jsonOwners = map[string]struct{ request, path string }{ // of the fields of requests
		"resourceSpans": {"ExportTraceServiceRequest", "/v1/traces"}, "resource_spans": {"ExportTraceServiceRequest", "/v1/traces"},
		"resourceLogs": {"ExportLogsServiceRequest", "/v1/logs"}, "resource_logs": {"ExportLogsServiceRequest", "/v1/logs"},
		"resourceMetrics": {"ExportMetricsServiceRequest", "/v1/metrics"}, "resource_metrics": {"ExportMetricsServiceRequest", "/v1/metrics"},
	}
	jsonIDs = [...]struct {
		keys   []string
		digits int
		reason string
	}{
		{[]string{"traceId", "trace_id"}, 32, identify.ReasonTraceID},
		{[]string{"spanId", "span_id"}, 16, identify.ReasonSpanID},
		{[]string{"parentSpanId", "parent_span_id"}, 16, identify.ReasonParentID},
	}
)

var errTooLargeToClean = fmt.Errorf("it has ids that are none, or deep values, and more than %d bytes of JSON: send smaller batches", MaxCleanedJSON)

const blanks = " \t\r\n" // between the tokens of JSON

type object = map[string]any

// checkSignal fails where a text of the outermost object, with `rest` behind it, is the key of another signal's items: parsers would skip them
// as an unknown field, and they would be lost.
func checkSignal(request string, text, rest []byte) error {
	owner, known := jsonOwners[string(text)]
	if !known || owner.request == request {
		return nil
	}
	value, isKey := bytes.CutPrefix(bytes.TrimLeft(rest, blanks), []byte(":"))
	if !isKey || isNothing(bytes.TrimLeft(value, blanks)) {
		return nil
	}
	return fmt.Errorf("this is no %s as OTLP/JSON: it has %s, which belong to %s", request, text, owner.path)
}

// isNothing says whether a JSON value that begins here has nothing in it.
func isNothing(value []byte) bool {
	for _, nothing := range [...]string{"null", "false", "0", `""`} {
		if bytes.HasPrefix(value, []byte(nothing)) {
			return true
		}
	}
	list, isList := bytes.CutPrefix(value, []byte("["))
	of, isObject := bytes.CutPrefix(value, []byte("{"))
	return isList && bytes.HasPrefix(bytes.TrimLeft(list, blanks), []byte("]")) ||
		isObject && bytes.HasPrefix(bytes.TrimLeft(of, blanks), []byte("}"))
}

// CleanJSON is Clean for OTLP/JSON. A text that is none (an unpaired surrogate, bytes that are no UTF-8) gets or keeps bytes that are none:
// parsers would make it U+FFFD, and nobody would refuse its item.
func CleanJSON(request string, body []byte, grow func(int64) error) ([]byte, error) {
	deepest, count, err := checkJSON(request, body)
	if err != nil {
		return nil, err
	}
	if err := grow(int64(count) * messageBytes); err != nil {
		return nil, err
	}
	body = withoutHalfPairs(body)
	deep := deepest > MaxDepth
	if !deep && idsAreWhole(body) {
		return body, nil
	}
	if len(body) > MaxCleanedJSON {
		return nil, errTooLargeToClean
	}
	given, noText := body, ""
	if !utf8.Valid(body) {
		noText = rand.Text()
		body = bytes.ToValidUTF8(body, []byte(noText))
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber() // 64-bit integers
	var tree object
	if err := decoder.Decode(&tree); err != nil {
		if deep {
			return nil, ErrNested // the standard library has a bound, too
		}
		return given, nil // the receiver says what is wrong
	}
	cleanable := false
	for _, keys := range jsonKeys {
		for _, group := range objects(tree, keys.groups) {
			cleanable = true
			reason := jsonHolder(group, "resource", belowGroup, "")
			for _, scope := range objects(group, keys.scopes) {
				reason := jsonHolder(scope, "scope", belowScope, reason)
				for _, item := range objects(scope, keys.items) {
					cleanItem(item, reason)
				}
			}
		}
	}
	if deep && !cleanable {
		return nil, ErrNested
	}
	cleaned, err := json.Marshal(tree)
	if noText != "" {
		cleaned = bytes.ReplaceAll(cleaned, []byte(noText), []byte{0xff})
	}
	return cleaned, err
}

func withoutHalfPairs(body []byte) []byte {
	if !bytes.Contains(body, []byte(`\ud`)) && !bytes.Contains(body, []byte(`\uD`)) {
		return body
	}
	return jsonSurrogate.ReplaceAllFunc(body, func(found []byte) []byte {
		if len(found) == len(`\ud800`) {
			return []byte{0xff}
		}
		return found
	})
}

func jsonHolder(group object, name string, below int, reason string) string {
	holder, _ := group[name].(object)
	if holder == nil || depth(holder) <= below-1 {
		return reason
	}
	delete(holder, "attributes")
	return identify.ReasonNesting
}

func cleanItem(item object, reason string) {
	for _, id := range jsonIDs {
		if !whole(item, id.keys, id.digits) && reason == "" {
			reason = id.reason
		}
	}
	for _, link := range objects(item, []string{"links"}) {
		for _, id := range jsonIDs[:2] {
			whole(link, id.keys, id.digits)
		}
	}
	if depth(item) > belowItem {
		for _, key := range []string{"attributes", "events", "links", "body"} {
			delete(item, key)
		}
		if reason == "" {
			reason = identify.ReasonNesting
		}
	}
	if reason != "" {
		attributes, _ := item["attributes"].([]any)
		mark := object{"key": identify.AttrInvalid, "value": object{"stringValue": reason}}
		item["attributes"] = append([]any{mark}, attributes...)
	}
}

// whole says whether an id is one, and takes it away where it is none.
func whole(item object, keys []string, digits int) bool {
	good := true
	for _, key := range keys {
		text, is := item[key].(string)
		if !is || text == "" {
			continue
		}
		if _, err := hex.DecodeString(text); err != nil || len(text) != digits {
			delete(item, key)
			good = false
		}
	}
	return good
}

func objects(of object, keys []string) []object {
	var found []object
	for _, key := range keys {
		list, _ := of[key].([]any)
		for _, one := range list {
			if inner, is := one.(object); is {
				found = append(found, inner)
			}
		}
	}
	return found
}

// depth is how many objects are inside each other below this one.
func depth(value any) int {
	deepest := 0
	below := func(one any) {
		levels := depth(one)
		if _, is := one.(object); is {
			levels++
		}
		deepest = max(deepest, levels)
	}
	switch inner := value.(type) {
	case object:
		for _, one := range inner {
			below(one)
		}
	case []any:
		for _, one := range inner {
			below(one)
		}
	}
	return deepest
}

func idsAreWhole(body []byte) bool {
	for { // one after the other: there may be millions
		found := jsonID.FindSubmatchIndex(body)
		if found == nil {
			return true
		}
		digits := 16
		if string(body[found[2]:found[3]]) == "trace" {
			digits = 32
		}
		id := body[found[4]:found[5]]
		if _, err := hex.DecodeString(string(id)); err != nil || len(id) != 0 && len(id) != digits {
			return false
		}
		body = body[found[1]:]
	}
}
