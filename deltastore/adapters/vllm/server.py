"""A server that must be told of every version is told too late: with this plugin it follows a run.

What `deltastore.vllm_server`, the entry point of `vllm.endpoint_plugins`, gives to a server whose
VLLM_PLUGINS names it:

    VLLM_PLUGINS=deltastore vllm serve MODEL --weight-transfer-config '{"backend": "deltastore"}' \
        --additional-config '{"deltastore": {"run": "s3://bucket/prefix/run", "policy": "keep"}}'

No development mode. The follower starts with the server, in the background; requests wait until it
has found its version, and if it cannot follow, the server serves what it loaded. `/health` (and
`/ping`) answer 503 while the engine is out of rotation or dead, else as before; `GET
/deltastore/status` says where the engine is; responses say which version they came from
(`version_headers.py`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import Request  # noqa: TC002 - the framework evaluates annotations at run time
from fastapi.responses import JSONResponse, Response

from deltastore.adapters.vllm.control import AsyncControl
from deltastore.adapters.vllm.plugin import uses_backend
from deltastore.adapters.vllm.server_following import ServerFollowing
from deltastore.adapters.vllm.server_settings import parse_server
from deltastore.adapters.vllm.settings import section_of
from deltastore.adapters.vllm.version_headers import VersionHeaders, VersionWatch
from deltastore.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractContextManager

    from deltastore.adapters.vllm.server_settings import ServerSettings
    from deltastore.events import EventSink
    from deltastore.pipeline.engine_control import ServedVersion
    from deltastore.storage.store_use import StoreUse

    Used = Callable[[StoreUse], None]

_LOG = logging.getLogger(__name__)
STATUS_PATH = "/deltastore/status"
HEALTH_PATHS = ("/health", "/ping")


class DeltastoreEndpoints:
    """vLLM's `EndpointPlugin`: routes, headers, and the follower of one API server.

    Args:
        observe: what takes the follower's events, and what takes the use of its store, from the
            follower's start to the server's end.
    """

    name = "deltastore"
    required_tasks = None

    def __init__(
        self, observe: Callable[[ServerSettings], AbstractContextManager[tuple[EventSink, Used]]]
    ) -> None:
        self._observe = observe
        self._around = ExitStack()
        self._watch = VersionWatch()
        self._following: ServerFollowing | None = None

    def attach_router(self, app: Any) -> None:
        """Add the routes and the headers; called before the engine is known."""
        app.add_api_route(STATUS_PATH, self.status, methods=["GET"])
        there = {
            (getattr(route, "path", ""), method)
            for route in app.routes
            for method in getattr(route, "methods", None) or ()
        }
        for path in HEALTH_PATHS:
            methods = [method for method in ("GET", "POST") if (path, method) in there]
            if methods:
                app.add_api_route(path, self.health, methods=methods, response_class=Response)
        app.add_middleware(VersionHeaders, served=self._served, held=self._held)
        before = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(running: Any) -> AsyncIterator[Any]:
            async with before(running) as state:
                try:
                    yield state
                finally:
                    await self._stop()

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Begin to follow; a setting that is wrong ends the server's start."""
        if engine_client is None or not uses_backend(engine_client.vllm_config):
            _LOG.warning(
                "VLLM_PLUGINS names deltastore, but this server's weights come from elsewhere:"
                ' start it with --weight-transfer-config \'{"backend": "deltastore"}\''
            )
            return
        _log_where_the_engine_does()
        self._watch.attach(engine_client)
        section = section_of(engine_client.vllm_config.additional_config)
        if "run" not in section:
            _LOG.warning("no run is set: this server waits for somebody else to drive it")
            return
        settings = parse_server(section)
        control = AsyncControl(engine_client, asyncio.get_running_loop(), bounds=settings.bounds)
        server = f"{os.getppid()} {args.host} {args.port} {getattr(args, 'uds', None)}"
        sink, used = self._around.enter_context(self._observe(settings))
        self._following = ServerFollowing(
            control, settings, SystemClock(), server=server, sink=sink, used=used
        )
        self._following.start()

    async def health(self, request: Request) -> Response:
        """200; 503 with a reason while the engine is dead or out of rotation."""
        from vllm.v1.engine.exceptions import EngineDeadError

        client = request.app.state.engine_client
        if client is not None:
            try:
                await client.check_health()
            except EngineDeadError:
                return Response(status_code=503)
        held = self._held()
        if held:
            return JSONResponse({"status": "out of rotation", "reason": held}, status_code=503)
        return Response(status_code=200)

    async def status(self) -> JSONResponse:
        """Where the engine is: versions, stages, ranks."""
        if self._following is None:
            return JSONResponse({"run": None, "served": None, "held": ""})
        return JSONResponse(self._following.document())

    async def _stop(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            await asyncio.to_thread(following.stop)
        self._around.close()

    def _served(self) -> ServedVersion | None:
        served = None if self._following is None else self._following.served
        return served or self._watch.latest

    def _held(self) -> str:
        return "" if self._following is None else self._following.held


def _log_where_the_engine_does() -> None:
    """Say what happens in the server's own log; vLLM sets up its own logger only."""
    ours, theirs = logging.getLogger("deltastore"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(theirs.level)
