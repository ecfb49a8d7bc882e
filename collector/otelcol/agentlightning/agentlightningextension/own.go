package agentlightningextension

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
)

// ownPages refuses what a page of another site makes a browser send, as only_own_pages of agl_otel/listen.py does: anybody may write a
// page that posts to 127.0.0.1, or point a name of his own at it.
type ownPages struct{ names map[string]bool } // nil: any name

// newOwnPages: names are checked where only this machine reaches the collector and it asks for no token.
func newOwnPages(ctx context.Context, config *Config) ownPages {
	names := map[string]bool{strings.ToLower(config.Host): true}
	for _, name := range strings.Split(config.AllowedHosts, ",") {
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			names[name] = true
		}
	}
	if config.Token != "" || names["*"] || !onlyThisMachine(ctx, config.Host) {
		return ownPages{}
	}
	if announced, err := url.Parse(config.CollectorHTTP); err == nil {
		names[strings.ToLower(announced.Hostname())] = true
	}
	return ownPages{names}
}

// onlyThisMachine says whether who listens on `host` may be reached from this machine only: where it, or an address of its name, is of the
// loopback. A name without an address is taken for one.
func onlyThisMachine(ctx context.Context, host string) bool {
	if host == "" {
		return false
	}
	if address, err := netip.ParseAddr(host); err == nil {
		return address.Unmap().IsLoopback()
	}
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	return err != nil || slices.ContainsFunc(found, func(address netip.Addr) bool { return address.Unmap().IsLoopback() })
}

// refusal says why a request is refused; empty where it is not.
func (o ownPages) refusal(r *http.Request) string {
	if asked := hostName(r.Host); o.names != nil && !o.names[asked] && !isAddress(asked) {
		return fmt.Sprintf("this service is not called %.100q: use its address, or name it in AGL_ALLOWED_HOSTS", asked)
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return ""
	}
	origin := r.Header.Get("Origin")
	if origin == "" || r.Header.Get("Sec-Fetch-Site") == "same-origin" {
		return ""
	}
	if page, err := url.Parse(origin); err == nil && page.Host != "" && page.Host == r.Host {
		return ""
	}
	return fmt.Sprintf("pages of %.100q may not call this service", origin)
}

// hostName is the name in lower case that a request asks for, without a port; what is none as it stands.
func hostName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.ToLower(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"))
}

func isAddress(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil || host == "" || host == "localhost"
}
