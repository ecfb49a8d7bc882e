"""Certificates made by the openssl command: an authority, a server's certificate and a client's."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc


@dataclass
class Authority:
    """A certificate authority in a folder."""

    folder: Path
    names: str = "DNS:localhost,IP:127.0.0.1"

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                      "-subj", "/CN=test authority", "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
        for name in ("server", "client"):
            self._openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
                          "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
            (self.folder / "names").write_text(f"subjectAltName={self.names}\n")
            self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
                          "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip

    def self_signed(self, name: str) -> None:
        """A certificate NAME.pem that nobody but its own key has signed."""
        self._openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                      "-subj", f"/CN={name}", "-addext", f"subjectAltName={self.names}",
                      "-keyout", f"{name}.key", "-out", f"{name}.pem")  # fmt: skip

    def _openssl(self, *args: str) -> None:
        subprocess.run(["openssl", *args], cwd=self.folder, check=True, capture_output=True, timeout=300)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def context(self, *, client: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.path("ca.pem"))
        if client:
            context.load_cert_chain(self.path("client.pem"), self.path("client.key"))
        return context

    def credentials(self, *, client: bool = False) -> grpc.ChannelCredentials:
        if client:
            return grpc.ssl_channel_credentials(self.read("ca.pem"), self.read("client.key"), self.read("client.pem"))
        return grpc.ssl_channel_credentials(self.read("ca.pem"))

    def serving(self, *, mutual: bool = False) -> dict[str, str]:
        """The AGL_* variables of a stack with these certificates."""
        own = {"AGL_TLS_CERT": self.path("server.pem"), "AGL_TLS_KEY": self.path("server.key")}
        return {**own, **self.dialling(mutual=mutual), **({"AGL_TLS_CLIENT_CA": self.path("ca.pem")} if mutual else {})}

    def dialling(self, *, mutual: bool = False) -> dict[str, str]:
        """The AGL_* variables of its clients."""
        shown = {"AGL_TLS_CLIENT_CERT": self.path("client.pem"), "AGL_TLS_CLIENT_KEY": self.path("client.key")}
        return {"AGL_TLS_CA": self.path("ca.pem"), **(shown if mutual else {})}
