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

// ownPages refuses what a page of another site makes a browser send, as Visitors of agl_otel/net/auth.py does: anybody may write a
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
	if !ofAnotherPage(r) {
		return ""
	}
	whose := "other sites"
	if origin := r.Header.Get("Origin"); origin != "" {
		whose = fmt.Sprintf("%.100q", origin)
	}
	return "pages of " + whose + " may not call this service"
}

// ofAnotherPage says whether a page of another origin made a browser send it, by what the browser says of itself. A read counts as well: its
// answer is kept from that page, the time that it takes is not.
func ofAnotherPage(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "cross-site", "same-site":
		return true
	case "same-origin":
		return false
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return false
	}
	origin := r.Header.Get("Origin")
	page, err := url.Parse(origin)
	return origin != "" && (err != nil || page.Host == "" || page.Host != r.Host)
}

// hostName is the name in lower case that a request asks for, without a port; what is none as it stands.
func hostName(host string) string {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	return strings.ToLower(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"))
}

// isAddress says whether it is an address of a machine: of requests to 0.0.0.0, which reach this machine, browsers do not say whose page
// sent them.
func isAddress(host string) bool {
	address, err := netip.ParseAddr(host)
	return err == nil && !address.IsUnspecified() || host == "" || host == "localhost"
}
