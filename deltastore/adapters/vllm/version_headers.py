"""An answer that does not name its policy cannot be learned from: responses carry versions.

`x-deltastore-version` is the version ("7:policy-hash") that the first token of the response came
from, `x-deltastore-end-version` the one of its last, where the body is sent in one piece: a stream
has sent its headers long before it ends. Both come from what the engine says with its outputs, not
from what a clock beside it says. A response without generation carries what was served when it was
asked for. While nothing may be served, requests for generation get 503.

Pure ASGI, no vLLM and no web framework: `scope`, `receive` and `send` are plain dictionaries and
callables. A stream's headers are held back until its first piece of body.
"""

from __future__ import annotations

import json
import re
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from deltastore.pipeline.engine_control import ServedVersion

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Message: TypeAlias = dict[str, Any]
BEGIN_HEADER = b"x-deltastore-version"
END_HEADER = b"x-deltastore-end-version"
GENERATES = (
    "/v1/",
    "/v2/",
    "/inference/",
    "/cohere/",
    "/invocations",
    "/generative_scoring",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
)
"""Beginnings of paths whose POST asks for a forward pass."""
RETRY_AFTER_S = 5
_LABEL = re.compile(r"([0-9]{1,10}):([0-9a-f]{64})")


@dataclass(slots=True)
class Seen:
    """Which versions answered one HTTP request; several generations may belong to it."""

    first: ServedVersion | None = None
    last: ServedVersion | None = None

    def note(self, version: ServedVersion) -> None:
        """One of its tokens came from that version."""
        if self.first is None or version.version < self.first.version:
            self.first = version
        if self.last is None or version.version > self.last.version:
            self.last = version


_REQUEST: ContextVar[Seen | None] = ContextVar("deltastore_request", default=None)


def read_label(text: object) -> ServedVersion | None:
    """The version in an engine's weight version; None when it says none of ours."""
    found = _LABEL.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else ServedVersion(int(found[1]), found[2])


class VersionWatch:
    """Notes which version each of an engine's outputs came from.

    `attach` replaces two methods of the engine object: what takes outputs from the core, and
    `generate`. They do what they did.
    """

    def __init__(self) -> None:
        self.latest: ServedVersion | None = None
        """What the newest output of the engine came from."""

    def attach(self, engine: Any) -> None:
        """Watch an `AsyncLLM`."""
        processor = engine.output_processor
        process, generate = processor.process_outputs, engine.generate

        def process_outputs(*arguments: Any, **named: Any) -> Any:
            version = read_label(named.get("weight_version"))
            if version is not None:
                self.latest = version
            return process(*arguments, **named)

        def watched(*arguments: Any, **named: Any) -> AsyncIterator[Any]:
            outputs = generate(*arguments, **named)
            seen = _REQUEST.get()
            return outputs if seen is None else self._noting(outputs, seen)

        processor.process_outputs, engine.generate = process_outputs, watched

    async def _noting(self, outputs: Any, seen: Seen) -> AsyncIterator[Any]:
        async with aclosing(outputs):  # a client that goes away ends the request at once
            async for output in outputs:
                spans = [
                    read_label(span.version)
                    for sample in output.outputs
                    for span in sample.weight_versions or ()
                ]
                for version in spans or [self.latest]:
                    if version is not None:
                        seen.note(version)
                yield output


class VersionHeaders:
    """ASGI middleware that adds the headers, and turns requests away from a held engine.

    Args:
        app: what answers.
        served: the version that is served now, or None.
        held: why nothing may be served; empty when something may.
    """

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        *,
        served: Callable[[], ServedVersion | None],
        held: Callable[[], str],
    ) -> None:
        self._app = app
        self._served = served
        self._held = held

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held = self._held()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if held and scope.get("method") == "POST" and path.startswith(GENERATES):
            await _turn_away(held, send)
            return
        seen = Seen()
        reply = _Reply(send, seen, self._served(), self._served)
        token = _REQUEST.set(seen)
        try:
            await self._app(scope, receive, reply.send)
        finally:
            _REQUEST.reset(token)


class _Reply:
    """Holds a response's start back until it is known what the headers must say."""

    def __init__(
        self,
        send: Callable[[Message], Awaitable[None]],
        seen: Seen,
        asked_at: ServedVersion | None,
        served: Callable[[], ServedVersion | None],
    ) -> None:
        self._send = send
        self._seen = seen
        self._asked_at = asked_at
        self._served = served
        self._start: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        start, more = self._start, message.get("more_body", False)
        if start is not None:
            if more and not message.get("body"):
                return  # an empty first piece says nothing yet
            self._start = None
            await self._send(self._named(start, whole=not more))
        await self._send(message)

    def _named(self, start: Message, *, whole: bool) -> Message:
        begin = self._seen.first or self._asked_at
        end = self._seen.last or self._served()
        headers = list(start.get("headers", ()))
        if begin is not None:
            headers.append((BEGIN_HEADER, str(begin).encode()))
        if whole and end is not None:
            headers.append((END_HEADER, str(end).encode()))
        return {**start, "headers": headers}


async def _turn_away(reason: str, send: Callable[[Message], Awaitable[None]]) -> None:
    error = {"message": f"out of rotation: {reason}", "type": "ServiceUnavailable", "code": 503}
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
