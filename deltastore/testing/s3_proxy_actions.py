"""What a line or a server does to a request, as data for S3Proxy: a test reads like its story."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class DropRequest:
    """The connection breaks before the server has seen the request."""


@dataclass(frozen=True, slots=True)
class DropResponse:
    """The server carries the request out, the connection breaks before it has answered."""


@dataclass(frozen=True, slots=True)
class CutBody:
    """The answer promises its whole body and breaks off after `keep_bytes`.

    With `reset` by a reset, which also throws away what the client had not read, else by an end.
    """

    keep_bytes: int
    reset: bool = False


@dataclass(frozen=True, slots=True)
class CutRequest:
    """The connection is reset when `keep_bytes` of the request's body have come."""

    keep_bytes: int


@dataclass(frozen=True, slots=True)
class ReadSlowly:
    """The request's body is taken at `bytes_per_s`, as a slow link would."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """The answer stops after `keep_bytes` of its body; the connection stays open."""

    keep_bytes: int


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit of byte `at_byte` changes on the way: of the request's body, or of the answer's."""

    at_byte: int
    of_request: bool = False


@dataclass(frozen=True, slots=True)
class Twice:
    """The request reaches the server twice; the client hears the second answer."""


@dataclass(frozen=True, slots=True)
class Strip:
    """The server does not see this header (in lower case), as one that ignores it."""

    header: str


@dataclass(frozen=True, slots=True)
class DateLater:
    """The answer's date is `seconds` later than the server said."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Reply:
    """The client gets this answer; the server sees the request only if `forwarded`."""

    status: int
    code: str = ""
    message: str = ""
    forwarded: bool = False
    more: str = ""
    """Further elements of the error, as XML."""
    document: str = ""
    """The whole body, where it is no error."""

    def body(self) -> bytes:
        """The answer as S3 writes errors."""
        if not self.code:
            return self.document.encode()
        return (
            f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{self.code}</Code>'
            f"<Message>{self.message}</Message>{self.more}</Error>"
        ).encode()


@dataclass(frozen=True, slots=True)
class Before:
    """Something happens before the request goes through: a rival writes, a server dies."""

    action: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Choose:
    """What happens is decided when the request comes, by its target; None lets it through."""

    choose: Callable[[str], Reply | None]


ProxyAction: TypeAlias = (
    Choose
    | DropRequest
    | DropResponse
    | CutBody
    | CutRequest
    | ReadSlowly
    | Stall
    | FlipBit
    | Twice
    | Strip
    | DateLater
    | Reply
    | Before
)


@dataclass(frozen=True, slots=True)
class ProxyRule:
    """From the `nth` request (from 1) with this method and text in its target, `times` of them.

    With `signed`, only requests whose Authorization header contains that text.
    """

    method: str
    contains: str
    action: ProxyAction
    nth: int = 1
    times: int = 1
    signed: str = ""

    def is_about(self, method: str, target: str, authorization: str) -> bool:
        """Whether this request is one of those that are counted."""
        return method == self.method and self.contains in target and self.signed in authorization
