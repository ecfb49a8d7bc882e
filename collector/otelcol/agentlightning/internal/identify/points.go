package identify

import (
	"strings"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/pmetric"
)

// BindPoints takes out of a request what an agent's key may not send, and gives {reason: how many data points}. With a key that is bound to
// an attempt, metrics whose resource names another are refused, and those of no rollout are the attempt's; metrics of training are refused
// from every agent's key (`bound` is nil where it is bound to none). The ids of metrics are those of their resource.
func BindPoints(request pmetric.Metrics, bound *IDs) map[string]int64 {
	refused := map[string]int64{}
	request.ResourceMetrics().RemoveIf(func(group pmetric.ResourceMetrics) bool {
		whose := ""
		if bound != nil {
			whose = claim(group.Resource().Attributes(), *bound)
		}
		group.ScopeMetrics().RemoveIf(func(scope pmetric.ScopeMetrics) bool {
			scope.Metrics().RemoveIf(func(metric pmetric.Metric) bool {
				reason := whose
				if strings.HasPrefix(metric.Name(), TrainingFigures) {
					reason = ReasonTraining
				}
				if reason != "" {
					refused[reason] += points(metric)
				}
				return reason != ""
			})
			return scope.Metrics().Len() == 0
		})
		return group.ScopeMetrics().Len() == 0
	})
	return refused
}

// claim makes the attributes of a resource name the attempt, once; else it gives the reason why they cannot.
func claim(attributes pcommon.Map, bound IDs) string {
	found := levelOf(attributes)
	switch {
	case found.reason != "":
		return found.reason
	case !bound.admits(IDs{found.rollout, found.attempt}):
		return ReasonKey
	}
	attributes.RemoveIf(func(key string, _ pcommon.Value) bool { return key == AttrRolloutID || key == AttrAttemptID })
	attributes.PutStr(AttrRolloutID, bound.Rollout)
	attributes.PutStr(AttrAttemptID, bound.Attempt)
	return ""
}

// points counts the data points of a metric; one without data counts as one.
func points(metric pmetric.Metric) int64 {
	switch metric.Type() {
	case pmetric.MetricTypeGauge:
		return int64(metric.Gauge().DataPoints().Len())
	case pmetric.MetricTypeSum:
		return int64(metric.Sum().DataPoints().Len())
	case pmetric.MetricTypeHistogram:
		return int64(metric.Histogram().DataPoints().Len())
	case pmetric.MetricTypeExponentialHistogram:
		return int64(metric.ExponentialHistogram().DataPoints().Len())
	case pmetric.MetricTypeSummary:
		return int64(metric.Summary().DataPoints().Len())
	default:
		return 1
	}
}
