"""A policy that is spelt wrong must not become another policy: the server's settings are checked.

The API server's part of `additional_config["deltastore"]`; the workers' part is in `settings.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltastore.adapters.vllm.settings import parse_settings
from deltastore.config import require
from deltastore.pipeline.engine_control import ControlBounds, PauseMode
from deltastore.pipeline.safe_point import SafePointSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltastore.adapters.vllm.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How an API server follows.

    Args:
        engine: the workers' settings, for the run's name and the folder that ranks meet in.
        safe_points: when it pauses.
        bounds: how long calls of its engine may take.
        events: event log to append to; None: events are in the metrics and the server's log only.
    """

    engine: EngineSettings
    safe_points: SafePointSettings
    bounds: ControlBounds
    events: Path | None


def parse_server(section: Mapping[str, Any]) -> ServerSettings:
    """The server's settings from deltastore's part of the additional configuration.

    Keys: `policy` (keep, wait, abort), `min_interval_s`, `jitter_s`, `poll_s` (between looks at
    what is staged), `drain_max_s` (with wait), `pause_timeout_s`, `hold_max_s`, `events`. Raises
    InvalidInputError(setting) naming the one that is wrong.
    """
    engine = parse_settings(section, {})
    policy = section.get("policy", PauseMode.KEEP.value)
    modes = [mode.value for mode in PauseMode]
    require(policy in modes, "policy", policy, f"one of {', '.join(modes)}")
    events = section.get("events")
    require(events is None or isinstance(events, str), "events", events, "a path")
    safe_points, bounds = SafePointSettings(), ControlBounds()
    return ServerSettings(
        engine=engine,
        safe_points=SafePointSettings(
            mode=PauseMode(policy),
            min_interval_s=_seconds(section, "min_interval_s", safe_points.min_interval_s),
            jitter_s=_seconds(section, "jitter_s", safe_points.jitter_s),
            look_s=_seconds(section, "poll_s", safe_points.look_s),
            hold_max_s=_seconds(section, "hold_max_s", safe_points.hold_max_s),
        ),
        bounds=ControlBounds(
            pause_s=_seconds(section, "pause_timeout_s", bounds.pause_s),
            drain_max_s=_seconds(section, "drain_max_s", bounds.drain_max_s),
        ),
        events=None if events is None else Path(events),
    )


def _seconds(section: Mapping[str, Any], name: str, default: float) -> float:
    value = section.get(name, default)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number and value >= 0, name, value, "seconds, not negative")
    return float(value)
