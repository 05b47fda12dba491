"""A baseline that runs ahead of the bucket loses changes for ever: it moves only with commits.

The bits of the last *committed* version, the manifest that names them, and the one manifest whose
put had no answer. It is promoted by applying the committed delta, never by reading the source
again; a damaged one is rebuilt from the bucket, which is the truth. Where the bucket cannot rebuild
it either, it is lost: the next version is a full one.

A commit and the promotion after it are two calls: whoever waits for the version is told first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from deltastore.chain.apply import apply_blocks
from deltastore.errors import (
    FormatError,
    IntegrityError,
    Kind,
    NotFoundError,
    StorageError,
)
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


Content: TypeAlias = "list[Block] | BitState"
"""What turns the baseline into a version: its blocks, or the whole state."""


@dataclass(frozen=True, slots=True, eq=False)
class _Unanswered:
    """A manifest that may or may not exist, and what it stands for."""

    manifest: VersionManifest
    content: Content


class Baseline:
    """The last committed version of a run, with its bits. Used by one thread.

    Args:
        home: the run in the region where versions are committed.
        head: its newest manifest.
        state: the bits of that version, owned by the baseline; None: they could not be rebuilt.
        commit_deadline_s: bodies confirmed longer ago than this are checked again before a commit.
    """

    def __init__(
        self,
        home: Run,
        head: VersionManifest,
        state: BitState | None,
        *,
        commit_deadline_s: float,
        clock: Clock,
    ) -> None:
        self._home = home
        self._commit_deadline_s = commit_deadline_s
        self._clock = clock
        self._unanswered: _Unanswered | None = None
        self._owed: list[Block] = []
        self._doubtful = False
        self.head = head
        self._state = state

    @property
    def state(self) -> BitState:
        """The bits of HEAD; IntegrityError(baseline) when they are lost."""
        self.promote()
        if self._state is None or self._doubtful:
            return self._rebuild()
        return self._state

    def commit(
        self, manifest: VersionManifest, content: Content, *, uploading_since_s: float
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
            self._unanswered = _Unanswered(manifest, content)
            raise
        self._accept(manifest, content)

    def promote(self) -> None:
        """Bring the bits to HEAD. What does not apply is rebuilt from the bucket when next read."""
        blocks, self._owed = self._owed, []
        if not blocks or self._state is None or self._doubtful:
            return
        self._doubtful = True  # until all of them are written, whatever ends this half way
        try:
            apply_blocks(self._state, blocks)
        except IntegrityError:
            return
        self._doubtful = False

    def settle(self) -> VersionManifest | None:
        """Send an unanswered manifest again, byte for byte; return it once it is committed."""
        if self._unanswered is None:
            return None
        manifest, content = self._unanswered.manifest, self._unanswered.content
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
        self._accept(manifest, content)
        self.promote()
        return manifest

    def check(self) -> None:
        """Prove every bit; rebuild from the bucket what does not hold.

        Raises IntegrityError(baseline) when the bucket cannot prove HEAD either.
        """
        if fingerprint_state(self.state) != self.head.core.fingerprint_after:
            self._rebuild()

    def _rebuild(self) -> BitState:
        version = self.head.core.version
        self._state = None
        try:
            rebuilt = replay(self._home, version, clock=self._clock)
        except (IntegrityError, FormatError, NotFoundError) as err:
            if err.kind in {Kind.BUCKET_MISSING, Kind.RUN_MISSING}:
                raise
            raise IntegrityError(
                f"the bits of version {version} can be proved neither here nor from the bucket",
                kind=Kind.BASELINE,
                run=self._home.name,
                version=version,
                hint="the next version is a full one; `deltastore verify --deep` says what is lost",
            ) from err
        self._state, self._doubtful = rebuilt.state, False
        return rebuilt.state

    def _accept(self, manifest: VersionManifest, content: Content) -> None:
        self.promote()
        self.head = manifest
        if isinstance(content, list):
            self._owed = content
        else:
            self._state, self._doubtful = content, False

    def _confirm_bodies(self, manifest: VersionManifest) -> None:
        """A janitor may have taken bodies that waited long: all must be there before a commit."""
        keys = [ref.key for ref in manifest.core.segments]
        keys += [file.key for file in manifest.core.files if file.key is not None]
        for key in keys:
            self._home.store.head(key)
