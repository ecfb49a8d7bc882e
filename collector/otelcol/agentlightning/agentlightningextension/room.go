package agentlightningextension

import (
	"fmt"
	"sync"
)

// room bounds the bytes of requests that are in memory at one time, as they come and unpacked, as agl_otel/net/in_flight.py does.
type room struct {
	limit int64

	mu    sync.Mutex
	bytes int64
}

// noRoom is why a request is to be sent again later.
type noRoom struct{ held, limit int64 }

func (n noRoom) Error() string {
	return fmt.Sprintf("%d bytes of requests are being taken already (AGL_MAX_IN_FLIGHT_BYTES %d): send it again later", n.held, n.limit)
}

// place is what one request holds of the room.
type place struct {
	room  *room
	bytes int64
}

// grow holds so many bytes more. One request alone is always let in.
func (p *place) grow(size int64) error {
	p.room.mu.Lock()
	defer p.room.mu.Unlock()
	if p.room.bytes > p.bytes && p.room.bytes+size > p.room.limit {
		return noRoom{p.room.bytes, p.room.limit}
	}
	p.bytes += size
	p.room.bytes += size
	return nil
}

// shrink gives so many bytes back.
func (p *place) shrink(size int64) {
	p.room.mu.Lock()
	defer p.room.mu.Unlock()
	p.bytes -= size
	p.room.bytes -= size
}

func (p *place) leave() { p.shrink(p.bytes) }
