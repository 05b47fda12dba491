"""Responses name the versions their tokens came from, and a held engine turns requests away."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from deltastore.adapters.vllm.version_headers import VersionHeaders, VersionWatch, read_label
from tests.unit.pipeline.scripted_engine import served

BODY = "http.response.body"


@dataclass
class Span:
    """As vLLM's: a version and what it covers."""

    version: str


@dataclass
class Sample:
    """One completion; spans come with the last output."""

    weight_versions: list[Span] | None = None


@dataclass
class Output:
    """One output of a request."""

    outputs: list[Sample]


class Processor:
    """Takes outputs from the core."""

    def process_outputs(self, outputs: Any, weight_version: str | None = None) -> str:
        """What was there is called with what it was called with."""
        return f"{outputs} at {weight_version}"


@dataclass
class Engine:
    """Generates one token per version in `script`, then ends."""

    script: list[int]
    output_processor: Processor = field(default_factory=Processor)
    closed: int = 0

    async def generate(self, prompt: str) -> Any:
        """Outputs as `AsyncLLM.generate` yields them."""
        try:
            for number, version in enumerate(self.script):
                label = str(served(version))
                self.output_processor.process_outputs([], weight_version=label)
                last = number == len(self.script) - 1
                spans = [Span(str(served(one))) for one in dict.fromkeys(self.script)]
                yield Output([Sample(spans if last else None)])
        finally:
            self.closed += 1


class Page:
    """An application over an engine: answers whole or as a stream, behind the middleware."""

    def __init__(self, engine: Engine, *, stream: bool = False, first_body: bytes = b"x") -> None:
        self.engine = engine
        self.stream = stream
        self.first_body = first_body
        self.now = served(5)
        self.held = ""
        self.watch = VersionWatch()
        self.watch.attach(engine)
        self.sent: list[dict[str, Any]] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer from two generations, as a request with two prompts does."""
        start = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
        if self.stream:
            await send(start)
            await send({"type": BODY, "body": b"", "more_body": True})
            async for _ in self.engine.generate("p"):
                await send({"type": BODY, "body": self.first_body, "more_body": True})
            await send({"type": BODY, "body": b""})
            return
        for _ in range(2):
            await asyncio.create_task(self._generate())
        await send(start)
        await send({"type": BODY, "body": b"{}"})

    async def _generate(self) -> None:
        async for _ in self.engine.generate("p"):
            pass

    def ask(self, path: str = "/v1/completions", method: str = "POST") -> dict[bytes, bytes]:
        """One request; the headers of its response."""
        around = VersionHeaders(self.app, served=lambda: self.now, held=lambda: self.held)
        scope = {"type": "http", "method": method, "path": path, "headers": []}

        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)

        asyncio.run(around(scope, None, send))
        return dict(self.sent[0]["headers"])


def test_a_whole_response_says_its_first_and_last_version() -> None:
    """Tokens from 7, 7 and 8: begin 7, end 8, whatever is served when it is sent (CASE R20)."""
    headers = Page(Engine([7, 7, 8])).ask()
    assert headers[b"x-deltastore-version"] == str(served(7)).encode()
    assert headers[b"x-deltastore-end-version"] == str(served(8)).encode()
    assert headers[b"a"] == b"b"


def test_a_stream_says_the_version_of_its_first_token() -> None:
    """Headers wait for the first piece of body, and say nothing of an end they cannot know."""
    page = Page(Engine([7, 8]), stream=True)
    headers = page.ask()
    assert headers[b"x-deltastore-version"] == str(served(7)).encode()
    assert b"x-deltastore-end-version" not in headers
    assert [message.get("body") for message in page.sent[1:]] == [b"x", b"x", b""]


def test_a_response_without_generation_says_what_is_served() -> None:
    """No token, no span: the version that was served when it was asked for, and at its end."""
    page = Page(Engine([]))
    headers = page.ask("/v1/models", "GET")
    assert headers[b"x-deltastore-version"] == str(served(5)).encode()
    assert headers[b"x-deltastore-end-version"] == str(served(5)).encode()


def test_before_a_version_is_known_nothing_is_claimed() -> None:
    """A server that has not found its version sends no header."""
    page = Page(Engine([]))
    page.now = None
    assert page.ask() == {b"a": b"b"}


def test_a_held_engine_turns_generation_away() -> None:
    """503 with the reason and when to come back; what does not generate is answered (CASE R20)."""
    page = Page(Engine([7]))
    page.held = "rank 1: the rollback failed"
    headers = page.ask()
    assert page.sent[0]["status"] == 503
    assert b"the rollback failed" in page.sent[1]["body"]
    assert headers[b"retry-after"] == b"5"
    assert page.engine.closed == 0
    page.sent.clear()
    page.ask("/resume")
    assert page.sent[0]["status"] == 200


def test_a_client_that_goes_away_ends_its_request() -> None:
    """The engine's own generator is closed when a stream's reader is cancelled."""
    engine = Engine([7] * 100)
    page = Page(engine, stream=True)

    async def gone(message: dict[str, Any]) -> None:
        raise ConnectionResetError

    around = VersionHeaders(page.app, served=lambda: None, held=lambda: "")
    with pytest.raises(ConnectionResetError):
        asyncio.run(around({"type": "http", "path": "/v1/x", "method": "POST"}, None, gone))
    assert engine.closed == 1


def test_other_scopes_and_other_calls_pass_as_they_are() -> None:
    """Sockets and lifespans are not touched, nor is what the watched methods return."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    scope = {"type": "lifespan"}
    asyncio.run(VersionHeaders(app, served=lambda: None, held=lambda: "x")(scope, 1, 2))
    assert seen == [(scope, 1, 2)]
    page = Page(Engine([]))
    assert page.engine.output_processor.process_outputs([], weight_version="v1") == "[] at v1"
    assert page.watch.latest is None


@pytest.mark.parametrize(
    "text", ["default", "poisoned", "", None, 7, "7:", "7:abc", f"-1:{'a' * 64}", f"7:{'A' * 64}"]
)
def test_a_label_that_is_not_ours_is_no_version(text: object) -> None:
    """What another backend, or a poisoned engine, says of its weights is passed over."""
    assert read_label(text) is None
