"""Where plugins are not loaded the backend is missing: naming a class of this module registers it.

`--worker-extension-cls deltastore.adapters.vllm.extension.WorkerExtension`: every worker imports
this module before its model loads. It serves engines of one rank, whose engine core shares its
process with the worker; engines of several ranks need the plugin in their engine core.
"""

from __future__ import annotations

from deltastore.adapters.vllm.plugin import register

register()


class WorkerExtension:
    """Adds nothing of its own: `register` has given every worker what it needs."""
