package identify

import (
	"strconv"

	"go.opentelemetry.io/collector/pdata/pcommon"
)

// level is what one place (a span, its resource, the request's metadata) says of ids.
type level struct {
	rollout, attempt string
	sequence         int64
	explicit         bool // there is a sequence number
	named            bool // one of the three keys is there, whatever its value
	numbered         bool // and so is the one of the number
	reason           string
}

// Of an attribute key given twice, the first counts.
func levelOf(attributes pcommon.Map) level {
	var rollout, attempt, sequence pcommon.Value
	var hasRollout, hasAttempt, hasSequence bool
	for key, value := range attributes.All() {
		switch key {
		case AttrRolloutID:
			if !hasRollout {
				rollout, hasRollout = value, true
			}
		case AttrAttemptID:
			if !hasAttempt {
				attempt, hasAttempt = value, true
			}
		case AttrSequenceID:
			if !hasSequence {
				sequence, hasSequence = value, true
			}
		}
	}
	var found level
	if hasRollout {
		found.rollout = text(rollout)
	}
	if hasAttempt {
		found.attempt = text(attempt)
	}
	if hasSequence {
		found.sequence, found.explicit = integer(sequence)
	}
	found.named, found.numbered = hasRollout || hasAttempt || hasSequence, hasSequence
	return checked(found)
}

func checked(l level) level {
	if l.rollout != "" {
		if !ValidID(l.rollout) {
			l.reason = ReasonRolloutID
		} else if l.attempt != "" && !ValidID(l.attempt) {
			l.reason = ReasonAttemptID
		}
	}
	return l
}

// text is an id as text: strings and integers are ids; anything else becomes a text that no id may have.
func text(value pcommon.Value) string {
	switch value.Type() {
	case pcommon.ValueTypeEmpty:
		return ""
	case pcommon.ValueTypeStr:
		return value.Str()
	case pcommon.ValueTypeInt:
		return strconv.FormatInt(value.Int(), 10)
	default:
		return "<" + value.Type().String() + ">"
	}
}

func integer(value pcommon.Value) (int64, bool) {
	number := int64(-1)
	switch value.Type() {
	case pcommon.ValueTypeInt:
		number = value.Int()
	case pcommon.ValueTypeStr:
		digits := value.Str()
		if len(digits) == 0 || len(digits) > 16 {
			return 0, false
		}
		number = 0
		for i := range len(digits) {
			if digits[i] < '0' || digits[i] > '9' {
				return 0, false
			}
			number = number*10 + int64(digits[i]-'0')
		}
	default:
	}
	if number < 0 || number >= MaxSequence {
		return 0, false
	}
	return number, true
}

// ValidID says whether a rollout or attempt may be called so.
func ValidID(id string) bool {
	if id == "" || len(id) > 128 {
		return false
	}
	for i := range len(id) {
		c := id[i]
		letter := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
		if !letter && !('0' <= c && c <= '9') && c != '.' && c != '_' && c != ':' && c != '-' {
			return false
		}
	}
	return true
}
