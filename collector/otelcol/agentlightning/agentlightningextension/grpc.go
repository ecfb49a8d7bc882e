package agentlightningextension

import (
	"context"
	"crypto/sha256"
	"errors"
	"math"
	"reflect"
	"sync"
	"time"

	"go.opentelemetry.io/collector/client"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"
	"google.golang.org/protobuf/types/known/durationpb"

	"agl-otel.internal/agentlightning/internal/identify"
	"agl-otel.internal/agentlightning/internal/refusals"
	"agl-otel.internal/agentlightning/internal/wire"
)

const retryDelay = time.Second

// GetGRPCServerOptions implements extensionmiddleware.GRPCServer. The token is asked for before a body is read: interceptors, and with them
// the receiver's own authentication, come after it is unpacked and parsed. The largest message is the one of this extension, whose options
// come after those of the receiver's own settings.
func (p *presence) GetGRPCServerOptions(context.Context) ([]grpc.ServerOption, error) {
	codec := &cleaning{CodecV2: encoding.GetCodecV2("proto"), room: p.room}
	return []grpc.ServerOption{
		grpc.InTapHandle(p.admit),
		grpc.ForceServerCodecV2(codec),
		grpc.UnaryInterceptor(codec.carry), // before the receiver's
		grpc.ChainUnaryInterceptor(p.intercept),
		grpc.MaxRecvMsgSize(int(min(p.config.MaxBodyBytes, math.MaxInt32))),
	}, nil
}

// admit refuses a call by its headers. What its key is bound to, the receiver's authentication says again to those behind it.
func (p *presence) admit(ctx context.Context, call *tap.Info) (context.Context, error) {
	_, err := p.Authenticate(ctx, call.Header)
	return ctx, err
}

// intercept gives the receiver a request that has not come before, and answers for it.
func (p *presence) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	of := methods[info.FullMethod]
	parsed, is := ctx.Value(decodedKey{}).(*decoded)
	if of == nil || !is {
		return handler(ctx, request)
	}
	if parsed.err != nil {
		return nil, refusal(parsed.err)
	}
	first := func(name string) string {
		if values := metadata.ValueFromIncomingContext(ctx, name); len(values) > 0 {
			return values[0]
		}
		return ""
	}
	headers := identify.Headers{RolloutID: first(identify.HeaderRolloutID), AttemptID: first(identify.HeaderAttemptID)}
	this := keyOf("grpc", of.name, parsed.hash[:], headers, client.FromContext(ctx))
	found, err := p.resends.once(ctx, this, func(ctx context.Context) (outcome, error) {
		ctx, refused := refusals.Within(ctx)
		if _, err := handler(ctx, request); err != nil {
			return outcome{}, err
		}
		rejected, message := refused.Summary()
		return outcome{rejected, message}, nil
	})
	if err != nil {
		return nil, err
	}
	return marshalled(found.protobuf()), nil
}

// refusal is the status of a request that was not given to the receiver.
func refusal(err error) error {
	var full noRoom
	var late errLate
	if !errors.As(err, &full) && !errors.As(err, &late) {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	failure := status.New(codes.Unavailable, err.Error())
	if detailed, detailErr := failure.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)}); detailErr == nil {
		failure = detailed
	}
	return failure.Err()
}

// marshalled is an answer as it goes over the wire.
type marshalled []byte

// cleaning is a codec that makes requests parse before it parses them, and sends what is marshalled as it is. A codec has no context, and
// all its errors are INTERNAL to a sender: what it finds out of a request waits for the first interceptor, which gRPC calls right after it.
type cleaning struct {
	encoding.CodecV2
	room *room
	done sync.Map // of decoded, by the request
}

// decoded is what became of a request's bytes.
type decoded struct {
	place place
	hash  [sha256.Size]byte // of the bytes as they came
	err   error
}

type decodedKey struct{}

func (c *cleaning) Marshal(from any) (mem.BufferSlice, error) {
	if raw, is := from.(marshalled); is {
		return mem.BufferSlice{mem.SliceBuffer(raw)}, nil
	}
	return c.CodecV2.Marshal(from)
}

func (c *cleaning) Unmarshal(data mem.BufferSlice, into any) error {
	parsed, is := into.(interface{ UnmarshalProto([]byte) error })
	if !is {
		return c.CodecV2.Unmarshal(data, into)
	}
	found := &decoded{place: place{room: c.room}}
	c.done.Store(into, found)
	if found.err = found.place.grow(int64(data.Len())); found.err != nil {
		return nil
	}
	buffer := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buffer.Free()
	body := buffer.ReadOnlyData()
	found.hash = sha256.Sum256(body)
	if body, found.err = wire.Clean(reflect.TypeOf(into).Elem().Name(), body, found.place.grow); found.err == nil {
		found.err = parsed.UnmarshalProto(body)
	}
	return nil
}

// carry gives those behind it what was found out of the request, and its room back at the end.
func (c *cleaning) carry(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if found, is := c.done.LoadAndDelete(request); is {
		defer found.(*decoded).place.leave()
		ctx = context.WithValue(ctx, decodedKey{}, found)
	}
	return handler(ctx, request)
}
