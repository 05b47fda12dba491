"""A command that is not on PATH is still wanted: `python -m deltastore.cli` is `deltastore`."""

from __future__ import annotations

from deltastore.cli import main

if __name__ == "__main__":
    main()
