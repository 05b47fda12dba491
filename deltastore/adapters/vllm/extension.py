"""Where plugins are not loaded the backend is missing: naming a class of this module registers it.

`--worker-extension-cls deltastore.adapters.vllm.extension.WorkerExtension`: every worker imports
this module before its model loads. The engine core imports it too where it shares its process with
the one worker; where it does not, its weight version stays what the caller of
`finish_weight_update` says.
"""

from __future__ import annotations

from deltastore.adapters.vllm.plugin import register

register()


class WorkerExtension:
    """Adds nothing of its own: `register` has given every worker what it needs."""
