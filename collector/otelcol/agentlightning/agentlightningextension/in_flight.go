package agentlightningextension

import (
	"fmt"
	"sync"
)

// inFlight bounds the bytes of requests in memory, packed and unpacked, like agl_otel/net/in_flight.py.
type inFlight struct {
	limit int64

	mu    sync.Mutex
	bytes int64
}

// fullError is the refusal of a request for which there is no memory; its client may send it again later.
type fullError struct{ held, limit int64 }

func (f fullError) Error() string {
	return fmt.Sprintf("%d bytes of requests are being taken already (AGL_MAX_IN_FLIGHT_BYTES %d): send it again later", f.held, f.limit)
}

// hold is the share of one request.
type hold struct {
	inFlight *inFlight
	bytes    int64
}

// grow adds bytes to the hold, or returns a fullError. A request that is alone always gets them.
func (h *hold) grow(size int64) error {
	h.inFlight.mu.Lock()
	defer h.inFlight.mu.Unlock()
	if h.inFlight.bytes > h.bytes && h.inFlight.bytes+size > h.inFlight.limit {
		return fullError{h.inFlight.bytes, h.inFlight.limit}
	}
	h.bytes += size
	h.inFlight.bytes += size
	return nil
}

// shrink gives bytes back.
func (h *hold) shrink(size int64) {
	h.inFlight.mu.Lock()
	defer h.inFlight.mu.Unlock()
	h.bytes -= size
	h.inFlight.bytes -= size
}

// release gives all bytes back.
func (h *hold) release() { h.shrink(h.bytes) }
