"""Whoever reaches a server's development endpoints owns the engine: they are reached locally only.

An EngineControl for servers that cannot load the endpoint plugin: it speaks to the endpoints that
vLLM has with VLLM_SERVER_DEV_MODE=1. They ask for no password, so a server on another machine is
refused (its endpoints must not be reachable from here), and every use is warned about. The workers
must have deltastore's methods, from the plugin or by
`--worker-extension-cls deltastore.adapters.vllm.extension.WorkerExtension`.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from deltastore.adapters.vllm.verbs import OutsideVerbs, engine_timeout
from deltastore.errors import ApplyError, InvalidInputError, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.pipeline.engine_control import ControlBounds, PauseMode

_LOG = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 16 << 20
MARGIN_S = 5.0
"""A call that the server bounds itself may take this much longer on the wire."""
ENDPOINTS = {
    "init_weight_transfer_engine": "/init_weight_transfer_engine",
    "start_weight_update": "/start_weight_update",
    "update_weights": "/update_weights",
    "finish_weight_update": "/finish_weight_update",
}
"""Methods with an endpoint of their own, which keeps vLLM's own metrics; it returns no answers."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server on this machine listens: a loopback address and port, or a socket's path."""

    host: str
    port: int
    unix_path: str = ""

    def __str__(self) -> str:
        """As people write it."""
        if self.unix_path:
            return f"unix://{self.unix_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def local_server(url: str) -> ServerAddress:
    """The address in `http://127.0.0.1:8000`, `http://localhost:8000` or `unix:///run/vllm.sock`.

    Raises InvalidInputError(url) for anything else, addresses of other machines above all.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or 80
    except ValueError as err:
        raise _not_local(url) from err
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return ServerAddress("localhost", 0, parts.path)
    plain = not (parts.username or parts.password or parts.query or parts.fragment)
    if parts.scheme != "http" or not parts.hostname or not plain or parts.path not in ("", "/"):
        raise _not_local(url)
    if not _is_loopback(parts.hostname):
        raise _not_local(url)
    return ServerAddress(parts.hostname, port)


class HttpControl(OutsideVerbs):
    """An EngineControl over the development endpoints of a server on this machine.

    Args:
        url: see `local_server`.
        init_info: the settings of the workers (`run` and so on), since no plugin gives them any.
    """

    def __init__(
        self,
        url: str,
        *,
        init_info: Mapping[str, Any] | None = None,
        bounds: ControlBounds | None = None,
    ) -> None:
        super().__init__(init_info, bounds)
        self.address = local_server(url)
        self._ranks: int | None = None
        _LOG.warning(
            "the development endpoints of %s ask for no password: whoever reaches them controls"
            " the engine; keep them on this machine, behind a firewall",
            self.address,
        )

    def call_ranks(self, method: str, within_s: float, **arguments: Any) -> list[Any]:
        """Call a worker method on every rank; the answers, where the endpoint passes them on."""
        path = ENDPOINTS.get(method)
        if path is not None:
            self._post(path, within_s, arguments)
            return []
        body = {"method": method, "kwargs": arguments, "timeout": within_s}
        answer = self._post("/collective_rpc", within_s + MARGIN_S, body)
        results = answer.get("results")
        if not isinstance(results, list):
            raise self._unexpected("/collective_rpc", answer)
        self._require_all(len(results))
        return results

    def name_version(self, text: str) -> None:
        """Have the engine say `text` as the weight version of what it generates from now on."""
        self._post("/update_weight_version", self.bounds.status_s, {"new_version": text})

    def is_paused(self) -> bool:
        """Whether forward passes are kept out."""
        answer = self._ask("GET", "/is_paused", self.bounds.status_s, None)
        if not isinstance(answer.get("is_paused"), bool):
            raise self._unexpected("/is_paused", answer)
        return bool(answer["is_paused"])

    def reset_caches(self) -> bool:
        """Drop the prefix cache and the external connector's."""
        query = {"reset_running_requests": "false", "reset_external": "true"}
        answer = self._post(f"/reset_prefix_cache?{urlencode(query)}", self.bounds.reset_s)
        if not isinstance(answer.get("success"), bool):
            raise self._unexpected("/reset_prefix_cache", answer)
        return bool(answer["success"])

    def resume(self) -> None:
        """Let forward passes in again."""
        self._post("/resume", self.bounds.resume_s)

    def _pause(self, mode: PauseMode, within_s: float) -> None:
        query = urlencode({"mode": mode.value, "clear_cache": "true"})
        self._post(f"/pause?{query}", within_s)

    def _require_all(self, answers: int) -> None:
        """A server with several engine cores passes on one core's answers: half a truth is none."""
        if self._ranks is None:
            query = urlencode({"include_dp": "true"})
            answer = self._ask("GET", f"/get_world_size?{query}", self.bounds.status_s, None)
            self._ranks = int(answer.get("world_size", 0))
        if answers != self._ranks:
            raise ApplyError(
                f"{self.address} passes on the answers of {answers} ranks of {self._ranks}",
                kind=Kind.ENGINE,
                hint="data-parallel servers are followed by the plugin: VLLM_PLUGINS=deltastore",
            )

    def _post(
        self, path: str, within_s: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        return self._ask("POST", path, within_s, body or {})

    def _ask(
        self, verb: str, path: str, within_s: float, body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """One request on a connection of its own; redirects are not followed."""
        what = f"{verb} {path.partition('?')[0]}"
        connection = _Connection(self.address, within_s)
        sent = None if body is None else json.dumps(body, allow_nan=False).encode()
        try:
            connection.request(verb, path, sent, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                status, text = response.status, response.read(MAX_ANSWER_BYTES + 1)
        except TimeoutError as err:
            raise engine_timeout(what, within_s) from err
        except (OSError, http.client.HTTPException) as err:
            raise ApplyError(
                f"{self.address} cannot be asked: {what}: {err!s}",
                kind=Kind.ENGINE,
                hint="check that the server runs",
            ) from err
        finally:
            connection.close()
        return self._read(what, status, text)

    def _read(self, what: str, status: int, text: bytes) -> dict[str, Any]:
        if status == http.client.NOT_FOUND:
            raise ApplyError(
                f"{self.address} has no endpoint {what}",
                kind=Kind.ENGINE,
                hint="start the server with VLLM_SERVER_DEV_MODE=1",
            )
        shown = " ".join(text[:1000].decode("utf-8", "replace").split())
        if status != http.client.OK:
            raise ApplyError(
                f"{self.address} answered {status} to {what}: {shown}",
                kind=Kind.ENGINE,
                hint="see the server's log",
            )
        try:
            answer = json.loads(text) if text else {}
        except ValueError as err:
            raise self._unexpected(what, shown) from err
        if len(text) > MAX_ANSWER_BYTES or not isinstance(answer, dict):
            raise self._unexpected(what, shown)
        return answer

    def _unexpected(self, what: str, answer: object) -> ApplyError:
        return ApplyError(
            f"{self.address} answered {what} with {str(answer)[:300]}",
            kind=Kind.ENGINE,
            hint="is it a vLLM server of a supported version?",
        )


class _Connection(http.client.HTTPConnection):
    """A connection to a server on this machine, over TCP or a socket in the file system."""

    def __init__(self, address: ServerAddress, within_s: float) -> None:
        super().__init__(address.host, address.port or 80, timeout=within_s)
        self._unix_path = address.unix_path

    def connect(self) -> None:
        if not self._unix_path:
            super().connect()
            peer = self.sock.getpeername()[0]
            if not _is_loopback(peer):  # a name service of its own ideas
                raise OSError(f"{self.host} is {peer}, which is not this machine")
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._unix_path)


def _is_loopback(host: str) -> bool:
    """Whether a name or address means this machine and no other, whatever resolves names here."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _not_local(url: str) -> InvalidInputError:
    shown = "//".join(part.rpartition("@")[2] for part in url.split("//"))  # without a password
    return InvalidInputError(
        f"{shown!r} is not a server on this machine",
        kind=Kind.URL,
        hint="http://127.0.0.1:8000 or unix:///path/of/socket: development endpoints are"
        " unauthenticated, so other machines are refused",
    )
