"""Where plugins are not loaded the backend is missing: naming a class of this module registers it.

`--worker-extension-cls deltastore.adapters.vllm.extension.WorkerExtension`: every worker imports
this module before its model loads. It serves engines of one rank only; those of several need the
plugin in their engine core. Where the engine core has a process of its own its weight version stays
what the caller of `finish_weight_update` says, and nothing keeps a poisoned engine from serving but
whoever drives it.
"""

from __future__ import annotations

from deltastore.adapters.vllm.plugin import register

register()


class WorkerExtension:
    """Adds nothing of its own: `register` has given every worker what it needs."""
