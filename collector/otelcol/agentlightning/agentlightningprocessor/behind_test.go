package agentlightningprocessor

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumererror"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/processor/processortest"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestWhatAnExporterSaysOfItsServerIsLoggedAndNotAnswered(t *testing.T) {
	why := errors.New("handshake: failed to read packet from 10.0.0.9:9000")
	for _, failed := range []struct {
		err       error
		code      codes.Code
		permanent bool
		says      string
	}{
		{why, codes.Unknown, false, errNotNow.Error()},
		{consumererror.NewPermanent(why), codes.Unknown, true, errNotTaken.Error()},
		{fmt.Errorf("no more retries left: %w", status.Error(codes.Unavailable, why.Error())), codes.Unavailable, false, errNotNow.Error()},
		{consumererror.NewPermanent(status.Error(codes.Unauthenticated, why.Error())), codes.Unauthenticated, true, errNotTaken.Error()},
		{consumererror.NewPermanent(status.Error(codes.InvalidArgument, "too deep")), codes.InvalidArgument, true, "too deep"},
	} {
		core, logged := observer.New(zapcore.WarnLevel)
		settings := processortest.NewNopSettings(Type)
		settings.Logger = zap.New(core)
		factory, config := NewFactory(), createDefaultConfig()
		config.(*Config).Queue.Endpoint = nowhere
		next := consumertest.NewErr(failed.err)
		traces, err := factory.CreateTraces(t.Context(), settings, config, next)
		require.NoError(t, err)
		logs, err := factory.CreateLogs(t.Context(), settings, config, next)
		require.NoError(t, err)
		metrics, err := factory.CreateMetrics(t.Context(), settings, config, next)
		require.NoError(t, err)
		lines := plog.NewLogs()
		lines.ResourceLogs().AppendEmpty()
		points := pmetric.NewMetrics()
		points.ResourceMetrics().AppendEmpty()
		require.NoError(t, traces.Start(t.Context(), componenttest.NewNopHost()))
		for _, answered := range []error{
			traces.ConsumeTraces(t.Context(), newRequest(nil, nil)), logs.ConsumeLogs(t.Context(), lines), metrics.ConsumeMetrics(t.Context(), points),
		} {
			require.ErrorContains(t, answered, failed.says)
			require.NotContains(t, answered.Error(), "10.0.0.9")
			require.Equal(t, failed.code, status.Code(answered))
			require.Equal(t, failed.permanent, consumererror.IsPermanent(answered))
		}
		if failed.code != codes.InvalidArgument {
			require.Equal(t, 3, logged.FilterFieldKey("error").Len())
			require.Contains(t, fmt.Sprint(logged.All()[0].ContextMap()), "10.0.0.9:9000")
		}
		require.NoError(t, traces.Shutdown(t.Context()))
	}
}
