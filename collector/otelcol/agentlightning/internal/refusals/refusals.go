// Package refusals carries what the processor refuses of a request back to where it is answered: senders are told by `partial_success`.
package refusals

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// List is what was refused of one request.
type List struct {
	mu      sync.Mutex
	reasons []string // in the order in which they were found
	counts  map[string]int64
	crowded bool
}

// CrowdedError is why a whole request is refused that has too many parts, or whose rows would be too large.
type CrowdedError struct{ Err error }

func (c CrowdedError) Error() string { return c.Err.Error() }

// Unwrap gives what it is made of.
func (c CrowdedError) Unwrap() error { return c.Err }

// GRPCStatus is that of its error, or INVALID_ARGUMENT.
func (c CrowdedError) GRPCStatus() *status.Status {
	if found, is := status.FromError(c.Err); is {
		return found
	}
	return status.New(codes.InvalidArgument, c.Error())
}

type listKey struct{}

// Within gives a context whose refusals come into the list.
func Within(ctx context.Context) (context.Context, *List) {
	list := &List{counts: map[string]int64{}}
	return context.WithValue(ctx, listKey{}, list), list
}

// Add notes items that were refused; nowhere where no list is asked for.
func Add(ctx context.Context, reason string, items int64) {
	list, is := ctx.Value(listKey{}).(*List)
	if !is || items == 0 {
		return
	}
	list.mu.Lock()
	defer list.mu.Unlock()
	if list.counts[reason] == 0 {
		list.reasons = append(list.reasons, reason)
	}
	list.counts[reason] += items
}

// Crowded notes that the whole request is refused as a CrowdedError, and returns why.
func Crowded(ctx context.Context, why error) error {
	if list, is := ctx.Value(listKey{}).(*List); is {
		list.mu.Lock()
		defer list.mu.Unlock()
		list.crowded = true
	}
	return why
}

// Error gives the error of the whole request: a CrowdedError, where that was noted.
func (l *List) Error(err error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.crowded {
		return CrowdedError{err}
	}
	return err
}

// Summary gives how many items were refused, and why.
func (l *List) Summary() (int64, string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all int64
	texts := make([]string, 0, len(l.reasons))
	for _, reason := range l.reasons {
		all += l.counts[reason]
		texts = append(texts, fmt.Sprintf("%d × %s", l.counts[reason], reason))
	}
	return all, strings.Join(texts, "; ")
}
