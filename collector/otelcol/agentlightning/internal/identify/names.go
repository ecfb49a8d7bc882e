package identify

// Names on the wire, and the words of a refusal: those of hook/agl_otel_hook/conventions.py and collector/identify.py (a test compares them).
const (
	AttrRolloutID  = "agentlightning.rollout_id"
	AttrAttemptID  = "agentlightning.attempt_id"
	AttrSequenceID = "agentlightning.span_sequence_id"
	// AttrInvalid is set on a span that is refused: it says why.
	AttrInvalid = "agentlightning.invalid"
	// SpanLLM is the name of a model call as the proxy saw it, and begins the keys of its attributes.
	SpanLLM = "agentlightning.llm"
	// Train begins the names of the spans of a training run, and the keys of their attributes.
	Train = "agentlightning.train"
	// AttrRewardGiven is set on a reward that the runner gives; it counts before all that the agent emitted.
	AttrRewardGiven = "agentlightning.reward.given"
	// Feedback begins the keys of a log record that came as feedback.
	Feedback = "agentlightning.feedback"

	HeaderRolloutID = "agl-rollout-id"
	HeaderAttemptID = "agl-attempt-id"
	HeaderAck       = "agl-ack"
	// HeaderInherit says, with InheritNone, that what names no rollout gets none by its trace or parent.
	HeaderInherit = "agl-inherit"
	InheritNone   = "none"

	// SpanAttempt is the name of an attempt's root span.
	SpanAttempt = "agentlightning.attempt"
	// SpanSeal is the name of the span with which a process says how many spans it has ended.
	SpanSeal = "agentlightning.seal"
	// TrainingFigures begins the names of metrics of what a trainer found.
	TrainingFigures = "agl.training."
)

// Why a span or record is refused.
const (
	ReasonTraceID   = "trace id is not 16 bytes (in JSON 32 hexadecimal digits) or all zero"
	ReasonSpanID    = "span id is not 8 bytes (in JSON 16 hexadecimal digits) or all zero"
	ReasonTimestamp = "timestamp before 2000 or more than a day ahead (they are Unix nanoseconds)"
	ReasonRolloutID = "rollout id breaks the rule [A-Za-z0-9._:-]{1,128}"
	ReasonAttemptID = "attempt id breaks the rule [A-Za-z0-9._:-]{1,128}"
	ReasonParentID  = "parent span id is not 8 bytes (in JSON 16 hexadecimal digits)"
	ReasonText      = "text is no UTF-8"
	ReasonNesting   = "attributes are nested too deeply"
	ReasonWire      = "it cannot be read: its bytes are no protobuf"
	ReasonKey       = "the sender's key is bound to another attempt"
	ReasonTraining  = "only trainers send figures of training: an agent's key does not"
	ReasonGiven     = "only the runner marks a reward as given: an agent's key does not"
	ReasonProxy     = "only the proxy sends agentlightning.llm and its attributes: an agent's key does not"
	ReasonFeedback  = "only the stack's own route takes feedback: an agent's key does not send agentlightning.feedback"
	ReasonStep      = "only trainers send agentlightning.train and its attributes: an agent's key does not"
	// ReasonSize is of this body only: the Python collector bounds the request instead.
	ReasonSize = "span or record is larger than max_item_bytes"
)

const (
	// EarliestUnixNano is 2000-01-01: ClickHouse would wrap what is far off to another year.
	EarliestUnixNano = 946_684_800_000_000_000
	// AheadNano is how far ahead of the clock a timestamp may be: a day.
	AheadNano = 24 * 3600 * 1_000_000_000
	// MaxSequence is where explicit sequence numbers end: they must survive a double.
	MaxSequence = 1 << 53
)
