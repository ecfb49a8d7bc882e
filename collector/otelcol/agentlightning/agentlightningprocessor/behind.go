package agentlightningprocessor

import (
	"context"
	"errors"

	"go.opentelemetry.io/collector/consumer"
	"go.opentelemetry.io/collector/consumer/consumererror"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// What a sender is answered where a component behind this one fails. The error itself may name addresses, tables or users: it is logged.
var (
	errNotNow   = errors.New("it could not be stored now: send it again later")
	errNotTaken = errors.New("it could not be stored: the collector's log has the reason")
)

// behind hides the errors of what comes next from senders.
type behind struct {
	*core
	signal string
}

func (b behind) traces(next consumer.Traces) (consumer.Traces, error) {
	return consumer.NewTraces(func(ctx context.Context, request ptrace.Traces) error {
		return b.hidden(ctx, next.ConsumeTraces(ctx, request))
	}, consumer.WithCapabilities(next.Capabilities()))
}

func (b behind) logs(next consumer.Logs) (consumer.Logs, error) {
	return consumer.NewLogs(func(ctx context.Context, request plog.Logs) error {
		return b.hidden(ctx, next.ConsumeLogs(ctx, request))
	}, consumer.WithCapabilities(next.Capabilities()))
}

func (b behind) metrics(next consumer.Metrics) (consumer.Metrics, error) {
	return consumer.NewMetrics(func(ctx context.Context, request pmetric.Metrics) error {
		return b.hidden(ctx, next.ConsumeMetrics(ctx, request))
	}, consumer.WithCapabilities(next.Capabilities()))
}

// hidden keeps whether an error is to be tried again, its status and its delay. What another collector refuses as invalid is about the request.
func (b behind) hidden(ctx context.Context, err error) error {
	if err == nil || status.Code(err) == codes.InvalidArgument {
		return err
	}
	if ctx.Err() == nil {
		b.logger.Warn("a request could not be handed on", zap.String("signal", b.signal), zap.Error(err))
	}
	permanent, told := consumererror.IsPermanent(err), errNotNow
	if permanent {
		told = errNotTaken
	}
	if found, is := status.FromError(err); is {
		proto := found.Proto()
		proto.Message = told.Error()
		told = status.FromProto(proto).Err()
	}
	if permanent {
		return consumererror.NewPermanent(told)
	}
	return told
}
