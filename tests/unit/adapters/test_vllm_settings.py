"""What an engine is told, and which engines are followed with: decided without vLLM."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import pytest

from deltastore.adapters.vllm.settings import (
    SERVER_KEYS,
    EngineSettings,
    parse_settings,
    section_of,
)
from deltastore.adapters.vllm.versions import (
    USED,
    EngineFacts,
    find_facts,
    refusal,
    refused_engine,
    require_supported,
)
from deltastore.errors import FormatError, InvalidInputError, Kind
from deltastore.format.key_files import trusted_line
from deltastore.format.signing import MaySign, SigningKey

if TYPE_CHECKING:
    from pathlib import Path

RUN = "file:///data/runs/r1"


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.33.0rc1", "0.33.2+cpu", "0.33"])
def test_supported_engines_are_followed_with(version: str) -> None:
    """CASE R25: every build of a supported version that has what is used is taken."""
    assert refusal(EngineFacts(version)) is None
    require_supported(EngineFacts(version))


@pytest.mark.parametrize("version", ["", "0.31.4", "0.34.0", "0.320.0", "1.32.0", "0.3", "dev"])
def test_other_engines_are_refused(version: str) -> None:
    """CASE R25: another version is refused by a message that names it and the supported ones."""
    with pytest.raises(InvalidInputError, match=r"0\.32 and 0\.33") as caught:
        require_supported(EngineFacts(version))
    assert caught.value.kind is Kind.ENGINE_VERSION
    assert caught.value.hint
    assert version in caught.value.message


def test_an_engine_that_lacks_what_is_used_is_refused() -> None:
    """CASE R25: a build of the right number without an attribute that is used is named so."""
    missing = USED[3]
    with pytest.raises(InvalidInputError, match="another build") as caught:
        require_supported(EngineFacts("0.32.0", [missing]))
    assert missing in caught.value.message


def test_the_refusal_stands_in_for_the_backend() -> None:
    """CASE R25: what is registered where no supported vLLM is raises the refusal when used."""
    here = refusal(find_facts())
    said = "refused when its plugins were loaded" if here is None else "supported are versions"
    with pytest.raises(InvalidInputError, match=said) as caught:
        refused_engine("config", "vllm_config", "device", "model")
    assert caught.value.kind is Kind.ENGINE_VERSION


def test_settings_have_defaults_and_init_info_wins() -> None:
    """Only the run must be given; what is given at initialisation wins."""
    plain = parse_settings({"run": RUN}, {})
    assert plain == EngineSettings(run=RUN)
    assert plain.trusted is None
    later = parse_settings(
        {"run": RUN, "allow_dense": True, "unused": ["mtp.*"]}, {"run": RUN + "b", "region": None}
    )
    assert (later.run, later.allow_dense, later.unused) == (RUN + "b", True, ("mtp.*",))
    timed = parse_settings({"run": RUN, "vote_timeout_s": 3}, {})
    assert type(timed.vote_timeout_s) is float


def test_the_servers_settings_are_not_the_workers() -> None:
    """The API server's settings share the section and are left to it."""
    section = {"run": RUN, **dict.fromkeys(SERVER_KEYS, "x")}
    assert parse_settings(section, {}) == EngineSettings(run=RUN)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({}, "no run"),
        ({"run": RUN, "runn": RUN}, "runn"),
        ({"run": 7}, "run"),
        ({"run": ""}, "run"),
        ({"run": "r1"}, "r1"),
        ({"run": RUN, "allow_dense": 1}, "allow_dense"),
        ({"run": RUN, "scratch_max_bytes": True}, "scratch_max_bytes"),
        ({"run": RUN, "scratch_max_bytes": -1}, "scratch_max_bytes"),
        ({"run": RUN, "shadow_max_bytes": -1}, "shadow_max_bytes"),
        ({"run": RUN, "full_check_every_versions": 0}, "full_check_every_versions"),
        ({"run": RUN, "unused": "mtp.*"}, "unused"),
        ({"run": RUN, "unfilled": [1]}, "unfilled"),
        ({"run": RUN, "vote_timeout_s": 0}, "vote_timeout_s"),
        ({"run": RUN, "vote_timeout_s": float("nan")}, "vote_timeout_s"),
        ({"run": RUN, "stage_wait_s": "soon"}, "stage_wait_s"),
        ({"run": RUN, "poll_min_s": 0}, "poll_min_s"),
        ({"run": RUN, "stager": "mine"}, "stager"),
        ({"run": RUN, "engine": "a/b"}, "a/b"),
    ],
)
def test_bad_settings_are_named(section: dict[str, object], named: str) -> None:
    """What is missing, unknown, mistyped or out of range is refused by name."""
    with pytest.raises(InvalidInputError, match=named) as caught:
        parse_settings(section, {})
    assert caught.value.hint


def test_trusted_keys_are_lines_of_their_file() -> None:
    """Trusted keys are given as the file has them; a line that is no key is refused."""
    line = trusted_line(SigningKey.generate().public, [MaySign.VERSIONS])
    trusted = parse_settings({"run": RUN, "trusted_keys": [line]}, {}).trusted
    assert trusted is not None
    with pytest.raises((InvalidInputError, FormatError)):
        parse_settings({"run": RUN, "trusted_keys": ["versions nonsense"]}, {})


def test_the_section_is_found_or_refused() -> None:
    """No configuration is an empty section; a section that is no object is refused."""
    assert section_of(None) == section_of({}) == {}
    assert section_of({"deltastore": {"run": RUN}, "other": 1}) == {"run": RUN}
    with pytest.raises(InvalidInputError, match="not an object"):
        section_of({"deltastore": RUN})


def test_the_default_spool_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default folder is the same for all engines of a run, another for another run, and is
    refused where somebody else could write."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one, other = EngineSettings(run=RUN), EngineSettings(run=RUN + "b")
    folder = one.spool_folder()
    assert folder == EngineSettings(run=RUN, engine="e").spool_folder()
    assert folder != other.spool_folder()
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    assert EngineSettings(run=RUN, folder=str(tmp_path / "x")).spool_folder() == tmp_path / "x"
    folder.parent.chmod(0o777)
    with pytest.raises(InvalidInputError, match="this user alone"):
        one.spool_folder()
    folder.parent.rmdir()
    folder.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidInputError, match="this user alone"):
        one.spool_folder()


def test_engines_have_names_of_their_own() -> None:
    """Without a name an engine is called by its host and process, as a rank's name may be."""
    name = EngineSettings(run=RUN).engine_name
    assert EngineSettings(run=RUN, engine=name).engine_name == name
