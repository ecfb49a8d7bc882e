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

// Bounds of a compressed body, those of collector/compress.py. What it unfolds to is bounded by its reader.
const (
	maxMembers    = 1024 // of gzip; frames of zstd. Blockwise compressors make one for each 64 KiB
	unpackSeconds = 5 * time.Second
	maxWindow     = 8 << 20 // bytes of a zstd window: what encoders may ask of every decoder (RFC 8878)
)

var (
	errMembers  = fmt.Errorf("the body has more than %d members: compress a request as one", maxMembers)
	errTooSlow  = fmt.Errorf("the body takes more than %s to unpack: send smaller batches", unpackSeconds)
	errEncoding = errors.New("this Content-Encoding is not taken here: send gzip, deflate, zstd, or none")
)

// unpacked gives what is inside a body; `encoding` is the value of Content-Encoding.
func unpacked(encoding string, body io.Reader) (io.Reader, error) {
	switch encoding {
	case "", "identity":
		return body, nil
	case "gzip", "x-gzip":
		return newMembers(body)
	case "deflate":
		return zlib.NewReader(body)
	case "zstd":
		return newFrames(body)
	default:
		return nil, errEncoding
	}
}

// members reads a gzip body member by member.
type members struct {
	source *bufio.Reader // gzip reads no further than a member's end where it can read single bytes
	reader *gzip.Reader
	count  int
}

func newMembers(body io.Reader) (*members, error) {
	source := bufio.NewReader(body)
	reader, err := gzip.NewReader(source)
	if err != nil {
		return nil, err
	}
	reader.Multistream(false)
	return &members{source, reader, 1}, nil
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
		if m.count++; m.count > maxMembers {
			if _, err := m.source.Peek(1); err == nil {
				return 0, errMembers
			}
		}
		if err := m.reader.Reset(m.source); err != nil {
			return 0, err // io.EOF where no other member follows
		}
		m.reader.Multistream(false)
	}
}

// newFrames reads a zstd body frame by frame: the decoder takes empty ones without end, so they are counted by their magic numbers, of
// which no more are in the bytes than there are frames and chance hits (one in four thousand million).
func newFrames(body io.Reader) (io.Reader, error) {
	decoder, err := zstd.NewReader(&frames{source: body}, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return nil, err
	}
	return decoder.IOReadCloser(), nil
}

// frames counts the magic numbers that pass: 28 B5 2F FD, and ?? 2A 4D 18 of frames to be skipped.
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

// readBody reads all of a body and what is in it, at most `limit` bytes, as long as its client waits and unpacking it takes no longer than
// it may. Waiting for the client does not count.
func readBody(ctx context.Context, encoding string, body io.Reader, limit int64) ([]byte, error) {
	waiting := &stopwatch{source: body}
	inside, err := unpacked(encoding, waiting)
	if err != nil {
		return nil, err
	}
	if closer, is := inside.(io.Closer); is && inside != io.Reader(waiting) {
		defer func() { _ = closer.Close() }()
	}
	began := time.Now()
	var all []byte
	piece := make([]byte, 256<<10)
	for {
		n, err := inside.Read(piece)
		all = append(all, piece[:n]...)
		switch {
		case int64(len(all)) > limit:
			return nil, &http.MaxBytesError{Limit: limit}
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case time.Since(began)-waiting.waited > unpackSeconds:
			return nil, errTooSlow
		}
	}
}

// stopwatch measures how long a source lets its reader wait.
type stopwatch struct {
	source io.Reader
	waited time.Duration
}

func (s *stopwatch) Read(into []byte) (int, error) {
	began := time.Now()
	n, err := s.source.Read(into)
	s.waited += time.Since(began)
	return n, err
}

// boundedGzip is gRPC's gzip with a bound on members; the size is bounded by the server's largest message.
type boundedGzip struct{ encoding.Compressor }

func (boundedGzip) Decompress(r io.Reader) (io.Reader, error) { return newMembers(r) }

// boundedZstd is the collector's zstd of gRPC with bounds on frames and on the window, which every decoder sets memory aside for.
type boundedZstd struct{ encoding.Compressor }

func (boundedZstd) Decompress(r io.Reader) (io.Reader, error) { return newFrames(r) }

func init() {
	encoding.RegisterCompressor(boundedGzip{encoding.GetCompressor(grpcgzip.Name)})
	encoding.RegisterCompressor(boundedZstd{encoding.GetCompressor("zstd")}) // registered by configgrpc
}
