"""The agent of a call in Google's protocol, as the rest of the proxy sees it: one that calls chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web
from multidict import CIMultiDict

from agl_otel.errors import UsageError
from agl_otel.proxy.agent import RequestAgent
from agl_otel.proxy.answer import error_response
from agl_otel.proxy.google.answer import Stream, count, error, whole
from agl_otel.proxy.google.request import chat_request, tokenize_request
from agl_otel.proxy.reply import Events, data_of, encoded, parse_object, payload_of

WHOLE: Final = "generateContent"
STREAMED: Final = "streamGenerateContent"
COUNTED: Final = "countTokens"
KEY_HEADER: Final = "x-goog-api-key"
KEY_QUERY: Final = "key"
_WITHOUT_TOKENIZE: Final = frozenset({200, 400, 404, 405, 422, 501})
_JSON: Final = "application/json"
_STREAM: Final = "text/event-stream"


class GoogleAgent(RequestAgent):
    """Translates the request, and the answer on its way back.

    Raises UsageError for another method, and a stream that is not one of server-sent events.
    """

    def __init__(self, request: web.Request) -> None:
        super().__init__(request, google_headers(request))
        self._model, method = request.match_info["model"], request.match_info["method"]
        if method not in (WHOLE, STREAMED, COUNTED):
            raise UsageError(f"the proxy has no :{method[:100]} of models: it has :{WHOLE}, :{STREAMED}?alt=sse and :{COUNTED}")
        self.counts = method == COUNTED
        """Whether it asks for the number of tokens alone: then its body is a request to /tokenize."""
        self._streamed = method == STREAMED
        if self._streamed and request.query.get("alt") != "sse":
            raise UsageError(f":{STREAMED} answers with server-sent events: add ?alt=sse to its path")
        self._stream: tuple[Events, Stream] | None = None
        self._answer: tuple[int, Mapping[str, str], bytearray] | None = None

    async def body(self) -> bytes:
        """Return the request as one of chat/completions, or of /tokenize. Raises UsageError."""
        asked = parse_object(await super().body())
        if asked is None:
            raise UsageError(f"the body of {self.path} must be a JSON object")
        if self.counts:
            return encoded(tokenize_request(self._model, asked))
        return encoded(chat_request(self._model, asked, streamed=self._streamed))

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Translate a whole answer; where a stream was requested, to its only event."""
        payload = parse_object(body)
        if status >= 400 or payload is None or "choices" not in payload:
            await super().answer(status, _typed(headers, _JSON), encoded(error(status, body)))
        elif self._streamed:
            stream = Stream()
            chunks = stream.add(payload) + stream.end()
            await super().answer(status, _typed(headers, _STREAM), chunks)
        else:
            await super().answer(status, _typed(headers, _JSON), encoded(whole(payload)))

    async def begin(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        """Begin a stream, or a large answer, which is translated at its end."""
        if length is not None:
            self._answer = status, headers, bytearray()
            return
        self._stream = Events(), Stream()
        await super().begin(status, _typed(headers, _STREAM))

    async def write(self, data: bytes) -> None:
        """Translate the events in `data`."""
        if self._answer is not None:
            self._answer[2].extend(data)
            return
        assert self._stream is not None, "begin() comes first"
        events, stream = self._stream
        shown = b"".join([_translated(event, stream) for event in events.feed(data)])
        if shown:
            await super().write(shown)

    async def end(self) -> None:
        """End the answer."""
        if self._answer is not None:
            status, headers, body = self._answer
            await self.answer(status, headers, bytes(body))
            return
        assert self._stream is not None, "begin() comes first"
        if rest := self._stream[1].end():  # of a server that sends no [DONE]
            await super().write(rest)
        await super().end()


def _translated(event: bytes, stream: Stream) -> bytes:
    payload = payload_of(event)
    if payload is not None:
        return stream.add(payload)
    return stream.end() if data_of(event) == b"[DONE]" else b""


def google_headers(request: web.Request) -> CIMultiDict[str]:
    """Return the headers as those of OpenAI's clients: the key, which Google's send in a header or in the query, is a bearer token."""
    headers = CIMultiDict((name, value) for name, value in request.headers.items() if not name.lower().startswith("x-goog-"))
    key = request.headers.get(KEY_HEADER) or request.query.get(KEY_QUERY)
    if key and "authorization" not in headers:
        headers["authorization"] = f"Bearer {key}"
    return headers


def _typed(headers: Mapping[str, str], kind: str) -> CIMultiDict[str]:
    held = CIMultiDict(headers)
    held["content-type"] = kind
    return held


def counted(tokenized: web.Response) -> web.Response:
    """Return the answer to countTokens by that of /tokenize."""
    assert isinstance(tokenized.body, bytes), "it is a text"
    answered = count(tokenized.body) if tokenized.status == 200 else None
    if answered is not None:
        return web.json_response(answered)
    if tokenized.status not in _WITHOUT_TOKENIZE:
        return as_google(tokenized)
    why = f"the model server has no /tokenize that renders messages (its status: {tokenized.status}), by which tokens are counted"
    return as_google(error_response(501, why, "no_tokenize"))


def as_google(refused: web.Response) -> web.Response:
    """Return the proxy's own answer to a refused call in Google's form."""
    assert isinstance(refused.body, bytes), "it is a text"
    headers = {name: value for name, value in refused.headers.items() if name.lower() == "retry-after"}
    return web.json_response(error(refused.status, refused.body), status=refused.status, headers=headers)
