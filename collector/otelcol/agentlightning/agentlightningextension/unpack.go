package agentlightningextension

import (
	"bufio"
	"compress/gzip"
	"compress/zlib"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/klauspost/compress/zstd"
	"google.golang.org/grpc/encoding"
	grpcgzip "google.golang.org/grpc/encoding/gzip"
)

// Bounds of a compressed body, as in agl_otel/net/compress.py. Its reader bounds the unpacked size.
const (
	maxMembers    = 1024 // of gzip and deflate; frames of zstd. Blockwise compressors make one for each 64 KiB
	unpackSeconds = 5 * time.Second
	maxWindow     = 8 << 20 // bytes of a zstd window: what every decoder should support (RFC 8878)
)

var (
	errMembers  = fmt.Errorf("the body has more than %d members: compress a request as one", maxMembers)
	errTooSlow  = fmt.Errorf("the body takes more than %s to unpack: send smaller batches", unpackSeconds)
	errEncoding = errors.New("this Content-Encoding is not taken here: send gzip, deflate, zstd, or none")
)

// unpacked returns a reader of the unpacked body; `encoding` is the value of Content-Encoding.
func unpacked(encoding string, body io.Reader) (io.Reader, error) {
	switch encoding {
	case "", "identity":
		return body, nil
	case "gzip", "x-gzip":
		return newGzip(body)
	case "deflate":
		return newZlib(body)
	case "zstd":
		return newFrames(body)
	default:
		return nil, errEncoding
	}
}

// members reads a body of one or more gzip or zlib streams.
type members struct {
	source *bufio.Reader // a ByteReader, so that decompressors read no further than the end of a stream
	reader io.Reader     // of the current stream
	next   func() error  // begins the next stream
	count  int
}

func newGzip(body io.Reader) (*members, error) {
	reader := new(gzip.Reader)
	m := &members{source: bufio.NewReader(body), reader: reader}
	m.next = func() error {
		if err := reader.Reset(m.source); err != nil {
			return err
		}
		reader.Multistream(false)
		return nil
	}
	return m.begin()
}

func newZlib(body io.Reader) (*members, error) {
	m := &members{source: bufio.NewReader(body)}
	m.next = func() error {
		if again, is := m.reader.(zlib.Resetter); is {
			return again.Reset(m.source, nil)
		}
		reader, err := zlib.NewReader(m.source)
		m.reader = reader
		return err
	}
	return m.begin()
}

func (m *members) begin() (*members, error) {
	m.count = 1
	return m, m.next()
}

func (m *members) Read(into []byte) (int, error) {
	for {
		n, err := m.reader.Read(into)
		if n > 0 || !errors.Is(err, io.EOF) {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return n, err
		}
		if _, err := m.source.Peek(1); err != nil {
			return 0, err // io.EOF if there is no further stream
		}
		if m.count++; m.count > maxMembers {
			return 0, errMembers
		}
		if err := m.next(); err != nil {
			return 0, err
		}
	}
}

// newFrames reads a zstd body. The decoder accepts any number of empty frames, so they are counted by their magic numbers; data matches
// one by chance once in four thousand million positions.
func newFrames(body io.Reader) (io.Reader, error) {
	decoder, err := zstd.NewReader(&frames{source: body}, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return nil, err
	}
	return decoder.IOReadCloser(), nil
}

// frames counts magic numbers: 28 B5 2F FD, and ?? 2A 4D 18 of skippable frames.
type frames struct {
	source io.Reader
	last   uint32 // four bytes, the newest in the highest
	count  int
}

func (f *frames) Read(into []byte) (int, error) {
	n, err := f.source.Read(into)
	for _, b := range into[:n] {
		f.last = f.last>>8 | uint32(b)<<24
		if f.last == 0xFD2FB528 || f.last&0xFFFFFFF0 == 0x184D2A50 {
			f.count++
		}
	}
	if f.count > maxMembers {
		return 0, errMembers
	}
	return n, err
}

// readBody unpacks a body. It ends with an error beyond `limit` unpacked bytes, if the client disconnects, after unpackSeconds, or if `grow`
// refuses the memory.
func readBody(ctx context.Context, encoding string, body io.Reader, limit int64, grow func(int64) error) ([]byte, error) {
	return readWatched(watch(ctx, body, time.Now), encoding, limit, grow)
}

func readWatched(body *watched, encoding string, limit int64, grow func(int64) error) ([]byte, error) {
	inside, err := unpacked(encoding, body)
	if err != nil {
		return nil, err
	}
	if closer, is := inside.(io.Closer); is {
		defer func() { _ = closer.Close() }()
	}
	var all []byte
	piece := make([]byte, 256<<10)
	for {
		n, err := inside.Read(piece)
		if int64(len(all)+n) > limit {
			return nil, &http.MaxBytesError{Limit: limit}
		}
		if full := grow(int64(n)); full != nil {
			return nil, full
		}
		all = append(all, piece[:n]...)
		switch {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
	}
}

// watched is the source of a decompressor. It returns an error once the client has disconnected or unpacking has taken unpackSeconds, without
// the time spent waiting for the client. Decompressors read their source every few kilobytes, even while they produce nothing.
type watched struct {
	ctx    context.Context //nolint:containedctx // of the request whose body this is
	source io.Reader
	now    func() time.Time
	began  time.Time
	waited time.Duration
}

func watch(ctx context.Context, source io.Reader, now func() time.Time) *watched {
	return &watched{ctx: ctx, source: source, now: now, began: now()}
}

func (w *watched) Read(into []byte) (int, error) {
	if err := w.ctx.Err(); err != nil {
		return 0, err
	}
	asked := w.now()
	if asked.Sub(w.began)-w.waited > unpackSeconds {
		return 0, errTooSlow
	}
	n, err := w.source.Read(into)
	w.waited += w.now().Sub(asked)
	return n, err
}

// boundedGzip is gRPC's gzip with bounds on members and time; the server's limit on messages bounds the size. gRPC's decompressors have no
// context, so they do not notice that a client disconnects.
type boundedGzip struct {
	encoding.Compressor
	now func() time.Time
}

func (b boundedGzip) Decompress(r io.Reader) (io.Reader, error) {
	source := watch(context.Background(), r, b.now)
	inside, err := newGzip(source)
	return inTurn(inside, source), err
}

// boundedZstd is the collector's zstd for gRPC with bounds on frames, time, and the window, for which a decoder allocates memory in advance.
type boundedZstd struct {
	encoding.Compressor
	now func() time.Time
}

func (b boundedZstd) Decompress(r io.Reader) (io.Reader, error) {
	source := watch(context.Background(), r, b.now)
	inside, err := newFrames(source)
	return inTurn(inside, source), err
}

// gRPC messages are unpacked before the codec can count them as in flight: so at most maxTurns that exceed littleBytes are unpacked at a
// time.
const (
	littleBytes = 1 << 20
	maxTurns    = 4
)

var turns = make(chan struct{}, maxTurns)

// turn reads an unpacked message, from littleBytes on only while it has one of the turns; gRPC closes it.
type turn struct {
	inside io.Reader
	source *watched
	read   int
	mine   bool
}

func inTurn(inside io.Reader, source *watched) io.Reader {
	return &turn{inside: inside, source: source}
}

func (t *turn) Read(into []byte) (int, error) {
	if t.read > littleBytes && !t.mine {
		asked := t.source.now()
		turns <- struct{}{}
		t.mine = true
		t.source.waited += t.source.now().Sub(asked)
	}
	n, err := t.inside.Read(into)
	t.read += n
	return n, err
}

func (t *turn) Close() error {
	if t.mine {
		<-turns
		t.mine = false
	}
	if closer, is := t.inside.(io.Closer); is {
		return closer.Close()
	}
	return nil
}

func init() {
	encoding.RegisterCompressor(boundedGzip{encoding.GetCompressor(grpcgzip.Name), time.Now})
	encoding.RegisterCompressor(boundedZstd{encoding.GetCompressor("zstd"), time.Now}) // registered by configgrpc
}
