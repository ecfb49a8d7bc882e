package agentlightningextension

import (
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
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

// GetGRPCServerOptions implements extensionmiddleware.GRPCServer. The tap checks the token before a body is read; interceptors, and with
// them the receiver's own authentication, run only after it was unpacked and parsed. The limit on messages overrides that of the receiver,
// whose options come first.
func (e *stackExtension) GetGRPCServerOptions(context.Context) ([]grpc.ServerOption, error) {
	codec := &cleaningCodec{CodecV2: encoding.GetCodecV2("proto"), inFlight: e.inFlight, refused: e.refused}
	return []grpc.ServerOption{
		grpc.InTapHandle(e.admit),
		grpc.ForceServerCodecV2(codec),
		grpc.UnaryInterceptor(codec.carry), // before the receiver's
		grpc.ChainUnaryInterceptor(e.intercept),
		grpc.MaxRecvMsgSize(int(min(e.config.MaxBodyBytes, math.MaxInt32))),
		grpc.StatsHandler(refusedByGRPC{e.refused}),
		grpc.UnknownServiceHandler(e.unknown),
	}, nil
}

// admit refuses a call by its headers. The receiver's authentication repeats the check, to pass on what the key is bound to.
func (e *stackExtension) admit(ctx context.Context, call *tap.Info) (context.Context, error) {
	_, err := e.Authenticate(ctx, call.Header)
	return ctx, err
}

// unknown refuses a call of another method than OTLP's, in the words of the Python collector.
func (e *stackExtension) unknown(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	err := status.Errorf(codes.Unimplemented, "this port has no method %s; it has %s", method, strings.Join(slices.Sorted(maps.Keys(methods)), ", "))
	e.refused.addError("grpc", err)
	return err
}

// intercept passes a request to the receiver, unless it is a resend, and makes the response.
func (e *stackExtension) intercept(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	sig := methods[info.FullMethod]
	parsed, is := ctx.Value(decodedKey{}).(*decoded)
	if sig == nil || !is {
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
	if err := checkAck(first(identify.HeaderAck)); err != nil {
		return nil, refusal(err)
	}
	headers := identify.Headers{RolloutID: first(identify.HeaderRolloutID), AttemptID: first(identify.HeaderAttemptID)}
	resendKey := keyOf("grpc", sig.name, parsed.hash[:], headers, client.FromContext(ctx))
	result, err := e.once(ctx, resendKey, func(ctx context.Context) error {
		_, err := handler(ctx, request)
		return err
	})
	if err != nil {
		return nil, err
	}
	return marshalled(result.protobuf()), nil
}

// refusal is the gRPC status of a request that does not reach the receiver.
func refusal(err error) error {
	var full fullError
	var late lateError
	var crowded refusals.CrowdedError
	if errors.As(err, &crowded) {
		return crowded
	}
	if !errors.As(err, &full) && !errors.As(err, &late) {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	failure := status.New(codes.Unavailable, err.Error())
	if detailed, detailErr := failure.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retryDelay)}); detailErr == nil {
		failure = detailed
	}
	return failure.Err()
}

// marshalled is a response in its wire format.
type marshalled []byte

// cleaningCodec removes what makes a request unreadable before it parses it, and sends marshalled responses unchanged. A codec has no
// context, and gRPC reports all its errors as INTERNAL; so it keeps its result for the first interceptor, which gRPC calls right after it.
type cleaningCodec struct {
	encoding.CodecV2
	inFlight *inFlight
	refused  *refused
	done     sync.Map // request → *decoded
}

// decoded is the codec's result for one request.
type decoded struct {
	hold hold
	hash [sha256.Size]byte // of the bytes as received
	err  error
}

type decodedKey struct{}

func (c *cleaningCodec) Marshal(from any) (mem.BufferSlice, error) {
	if raw, is := from.(marshalled); is {
		return mem.BufferSlice{mem.SliceBuffer(raw)}, nil
	}
	return c.CodecV2.Marshal(from)
}

func (c *cleaningCodec) Unmarshal(data mem.BufferSlice, into any) error {
	parsed, is := into.(interface{ UnmarshalProto([]byte) error })
	if !is {
		return c.CodecV2.Unmarshal(data, into)
	}
	found := &decoded{hold: hold{inFlight: c.inFlight}}
	c.done.Store(into, found)
	if found.err = found.hold.grow(int64(data.Len())); found.err != nil {
		return nil
	}
	buffer := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buffer.Free()
	body := buffer.ReadOnlyData()
	found.hash = sha256.Sum256(body)
	if body, found.err = wire.Clean(reflect.TypeOf(into).Elem().Name(), body, found.hold.grow); found.err == nil {
		found.err = parsed.UnmarshalProto(body)
	}
	return nil
}

// carry puts the codec's result into the context of the next interceptors; at the end it releases the request's hold, and counts it if it was
// refused.
func (c *cleaningCodec) carry(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if found, is := c.done.LoadAndDelete(request); is {
		defer found.(*decoded).hold.release()
		ctx = context.WithValue(ctx, decodedKey{}, found)
	}
	answer, err := handler(ctx, request)
	if err != nil {
		c.refused.addError("grpc", err)
	}
	return answer, err
}
