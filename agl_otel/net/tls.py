"""TLS from Settings, for servers and clients; the only place that creates contexts and credentials.

Servers: `Tls.load(settings)`; with `tls_cert` and `tls_key` every port of a stack accepts TLS only. Clients: `Trust`, which the functions
below take from the environment, like the token: an address with https:// is connected to with TLS, one with http:// without, and a bare
host:port with TLS if AGL_TLS_CA (or AGL_TLS_CERT) is set. http_server.py does the listening.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from agl_otel.errors import SettingsError
from agl_otel.settings import Settings

if TYPE_CHECKING:
    import aiohttp

SECURE: Final = frozenset({"https", "grpcs"})
_HANDSHAKE_ROUNDS: Final = 10  # round trips; TLS 1.3 needs two
Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Tls:
    """TLS configuration of a port."""

    certificate: bytes
    key: bytes
    client_authority: bytes | None
    context: ssl.SSLContext
    """For HTTP; with a client authority it requests a certificate, and the application decides whether to require it."""
    anonymous: ssl.SSLContext
    """For HTTP, without requesting a client certificate: most model clients of agents have none."""

    @classmethod
    def load(cls, settings: Settings) -> Tls | None:
        """Load the files of the settings; None without a certificate. Raises SettingsError if a file is missing or invalid."""
        if settings.proxy_client_certificates and not settings.tls_client_ca:
            raise SettingsError("AGL_PROXY_CLIENT_CERTIFICATES needs AGL_TLS_CLIENT_CA, the authority of these certificates")
        if not settings.tls_cert and not settings.tls_key:
            if settings.tls_client_ca:
                raise SettingsError("AGL_TLS_CLIENT_CA needs AGL_TLS_CERT and AGL_TLS_KEY")
            return None
        if not settings.tls_cert or not settings.tls_key:
            raise SettingsError("TLS needs both AGL_TLS_CERT and AGL_TLS_KEY")
        certificate, key = _read(settings.tls_cert, "AGL_TLS_CERT"), _read(settings.tls_key, "AGL_TLS_KEY")
        authority = _read(settings.tls_client_ca, "AGL_TLS_CLIENT_CA") if settings.tls_client_ca else None
        try:
            context, anonymous = (_server_context(settings) for _ in range(2))
            if authority is not None:
                context.load_verify_locations(cadata=authority.decode())
                context.verify_mode = ssl.CERT_OPTIONAL
        except (ssl.SSLError, ValueError) as error:
            files = ", ".join(filter(None, (settings.tls_cert, settings.tls_key, settings.tls_client_ca)))
            raise SettingsError(f"the TLS files {files} cannot be used: {error}") from None
        return cls(certificate, key, authority, context, anonymous)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC port; with a client authority, clients need a certificate."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.client_authority, require_client_auth=self.client_authority is not None
        )

    def check(self, trust: Trust, host: str) -> None:
        """Test in memory whether our own clients could connect to `host`. Raises SettingsError with the reason if not."""
        if self.client_authority is not None and not trust.certificate:
            raise SettingsError(
                "AGL_TLS_CLIENT_CA makes the services ask for client certificates, and they are each other's clients: "
                "set AGL_TLS_CLIENT_CERT and AGL_TLS_CLIENT_KEY"
            )
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trust.context().wrap_bio(to_client, to_server, server_hostname=host)
        server = self.context.wrap_bio(to_server, to_client, server_side=True)
        try:
            for _ in range(_HANDSHAKE_ROUNDS):
                for side in (client, server):
                    try:
                        side.do_handshake()
                    except ssl.SSLWantReadError:
                        continue
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason or str(error)
            raise SettingsError(
                f"clients of this machine could not connect with TLS to {host}: {why}. AGL_TLS_CA names the authority of AGL_TLS_CERT "
                "(for a self-signed one the same file), and the certificate must be made for the host that clients dial (AGL_HOST)"
            ) from None


@dataclass(frozen=True)
class Trust:
    """A client's authority, certificate and key: PEM files; empty: the system's authorities, no certificate."""

    authority: str = ""
    certificate: str = ""
    key: str = ""
    by_default: bool = False
    """Whether an address without a scheme uses TLS."""

    @classmethod
    def of(cls, settings: Settings) -> Trust:
        """Build it from the settings. Raises SettingsError if only one of certificate and key is set."""
        if bool(settings.tls_client_cert) != bool(settings.tls_client_key):
            raise SettingsError("a client certificate needs both AGL_TLS_CLIENT_CERT and AGL_TLS_CLIENT_KEY")
        by_default = bool(settings.tls_ca or settings.tls_cert)
        return cls(settings.tls_ca, settings.tls_client_cert, settings.tls_client_key, by_default)

    def context(self) -> ssl.SSLContext:
        """Context for HTTP. Raises SettingsError if a file is missing or invalid."""
        authority = _read(self.authority, "AGL_TLS_CA") if self.authority else b""
        try:
            context = ssl.create_default_context(cadata=authority.decode() if authority else None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise SettingsError(f"the TLS files {', '.join(filter(None, self._files()))} cannot be used: {error}") from None
        return context

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials for gRPC. Raises SettingsError if a file is missing."""
        authority = _read(self.authority, "AGL_TLS_CA") if self.authority else None
        if not self.certificate:
            return grpc.ssl_channel_credentials(authority)
        certificate, key = _read(self.certificate, "AGL_TLS_CLIENT_CERT"), _read(self.key, "AGL_TLS_CLIENT_KEY")
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def uses_tls(self, address: str) -> bool:
        """Whether connections to `address` (host:port, or with a scheme) use TLS."""
        scheme, separator, _ = address.partition("://")
        return scheme in SECURE if separator else self.by_default

    def _files(self) -> tuple[str, ...]:
        return self.authority, self.certificate, self.key


def ambient() -> Trust:
    """Return the Trust set by this process's environment or agl.toml."""
    return Trust.of(Settings.load())


def target(address: str) -> str:
    """Return host:port of an address with or without a scheme."""
    return address.rpartition("://")[2].rstrip("/")


def aio_channel(address: str, options: Options = (), trust: Trust | None = None) -> grpc.aio.Channel:
    """Return a grpc.aio channel to `address`."""
    trust = trust or ambient()
    if trust.uses_tls(address):
        return grpc.aio.secure_channel(target(address), trust.credentials(), options=options)
    return grpc.aio.insecure_channel(target(address), options=options)


def channel(address: str, options: Options = ()) -> grpc.Channel:
    """Return a channel to `address`, for threads."""
    trust = ambient()
    if trust.uses_tls(address):
        return grpc.secure_channel(target(address), trust.credentials(), options=options)
    return grpc.insecure_channel(target(address), options=options)


def connector(trust: Trust | None = None) -> aiohttp.TCPConnector:
    """Return a connector for an aiohttp.ClientSession that verifies https:// servers by `trust`."""
    import aiohttp

    trust = trust or ambient()
    return aiohttp.TCPConnector(ssl=trust.context() if trust.authority or trust.certificate else True)


def advice(details: str, *, secure: bool) -> str:
    """Return a hint for a connection that failed with `details`, if TLS may be the reason; else an empty string."""
    lower = details.lower()
    if secure and ("verify_failed" in lower or "verify failed" in lower or "certificate" in lower):
        return "its certificate is not trusted, or not for this host, or it wants one of ours: see AGL_TLS_CA and AGL_TLS_CLIENT_CERT"
    if secure and "wrong_version" in lower.replace(" ", "_"):
        return "it speaks no TLS: write http://HOST:PORT, or leave out AGL_TLS_CA"
    if any(word in lower for word in ("socket closed", "reset", "disconnected", "before http2", "speaks tls")):
        if secure:
            return "if it asks for client certificates, set AGL_TLS_CLIENT_CERT and AGL_TLS_CLIENT_KEY; is it running?"
        return "if it speaks TLS, write https://HOST:PORT and set AGL_TLS_CA to its authority; is it running?"
    return ""


def _server_context(settings: Settings) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    return context


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"{setting} names {path}, which cannot be read: {error.strerror or error}") from None
