"""A baseline that runs ahead of the bucket loses changes for ever: it moves only with commits.

The bits of the last *committed* version, the manifest that names them, and the one manifest whose
put had no answer. It is promoted by applying the committed delta, never by reading the source
again; a damaged one is rebuilt from the bucket, which is the truth.

A commit and the promotion after it are two calls: whoever waits for the version is told first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deltastore.chain.apply import apply_blocks
from deltastore.errors import IntegrityError, Kind, NotFoundError, StorageError
from deltastore.format.mixing import fingerprint_state
from deltastore.pipeline.replay import replay
from deltastore.repository.commit import commit_version
from deltastore.repository.resolve import version_exists

if TYPE_CHECKING:
    from deltastore.clock import Clock
    from deltastore.format.block import Block
    from deltastore.format.layout import BitState
    from deltastore.format.manifest import VersionManifest
    from deltastore.repository.run import Run


@dataclass(frozen=True, slots=True, eq=False)
class _Unanswered:
    """A manifest that may or may not exist, and the blocks it stands for."""

    manifest: VersionManifest
    blocks: list[Block]


class Baseline:
    """The last committed version of a run, with its bits. Used by one thread.

    Args:
        home: the run in the region where versions are committed.
        head: its newest manifest.
        state: the bits of that version; owned by the baseline.
        commit_deadline_s: bodies confirmed longer ago than this are checked again before a commit.
    """

    def __init__(
        self,
        home: Run,
        head: VersionManifest,
        state: BitState,
        *,
        commit_deadline_s: float,
        clock: Clock,
    ) -> None:
        self._home = home
        self._commit_deadline_s = commit_deadline_s
        self._clock = clock
        self._unanswered: _Unanswered | None = None
        self._owed: list[Block] = []
        self._doubt: IntegrityError | None = None
        self.head = head
        self._state = state

    @property
    def state(self) -> BitState:
        """The bits of HEAD."""
        self.promote()
        if self._doubt is not None:
            self._rebuild()
        return self._state

    def commit(
        self, manifest: VersionManifest, blocks: list[Block], *, uploading_since_s: float
    ) -> None:
        """Commit a version: it is HEAD from now on. `promote` moves the bits after it.

        Raises LeaseError (another writer has the number) and StorageError; after the latter the
        version may exist: `settle` finds out before anything else is published.
        """
        if self._clock.monotonic_s() - uploading_since_s > self._commit_deadline_s:
            self._confirm_bodies(manifest)
        try:
            commit_version(self._home, manifest)
        except StorageError:
            self._unanswered = _Unanswered(manifest, blocks)
            raise
        self._accept(manifest, blocks)

    def promote(self) -> None:
        """Bring the bits to HEAD. What does not apply is rebuilt from the bucket when next read."""
        blocks, self._owed = self._owed, []
        if not blocks or self._doubt is not None:
            return
        try:
            apply_blocks(self._state, blocks)
        except IntegrityError as err:
            self._doubt = err

    def settle(self) -> VersionManifest | None:
        """Send an unanswered manifest again, byte for byte; return it once it is committed."""
        if self._unanswered is None:
            return None
        manifest, blocks = self._unanswered.manifest, self._unanswered.blocks
        if not version_exists(self._home, manifest.core.version):
            try:
                self._confirm_bodies(manifest)
            except NotFoundError as err:
                if err.kind is not Kind.OBJECT_MISSING:
                    raise
                self._unanswered = None  # a janitor took its bodies: it can never be committed
                return None
        commit_version(self._home, manifest)
        self._unanswered = None
        self._accept(manifest, blocks)
        self.promote()
        return manifest

    def check(self) -> None:
        """Prove every bit; rebuild from the bucket what does not hold.

        Raises IntegrityError(baseline) when the bucket cannot prove HEAD either.
        """
        self.promote()
        if self._doubt is not None or self._fingerprint_differs():
            self._rebuild()

    def _fingerprint_differs(self) -> bool:
        return fingerprint_state(self._state) != self.head.core.fingerprint_after

    def _rebuild(self) -> None:
        rebuilt = replay(self._home, self.head.core.version, clock=self._clock)
        self._state = rebuilt.state
        if self._fingerprint_differs():
            raise IntegrityError(
                "the baseline differs from HEAD and cannot be rebuilt",
                kind=Kind.BASELINE,
                run=self._home.name,
                version=self.head.core.version,
                hint="run `deltastore verify --deep`",
            ) from self._doubt
        self._doubt = None

    def _accept(self, manifest: VersionManifest, blocks: list[Block]) -> None:
        self.promote()
        self.head = manifest
        self._owed = blocks

    def _confirm_bodies(self, manifest: VersionManifest) -> None:
        """A janitor may have taken bodies that waited long: all must be there before a commit."""
        for ref in manifest.core.segments:
            self._home.store.head(ref.key)
