"""Stored as two tensors, a tied embedding and head drift apart: here they are found to be one.

A safetensors file cannot say that two names share their bytes, so a checkpoint says it in its
configuration. Equal bytes alone prove nothing: untied tensors may start equal and must stay two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

HEAD_NAME = "lm_head.weight"
_EMBEDDING_ENDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
_WITH_HEAD = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


@dataclass(frozen=True, slots=True)
class TiedPair:
    """An embedding and the head that is the same storage, by their checkpoint names."""

    embedding: str
    head: str


def find_tied_pair(config: Mapping[str, Any], names: Collection[str]) -> TiedPair | None:
    """The tied embedding and head of a checkpoint that stores `names`, or None.

    They are tied when the configuration says `tie_word_embeddings` (of a model with several parts:
    its text part), or when it says nothing, the model is one that has a head, and none is stored.
    A checkpoint may store both names, or the embedding, or the head only.
    """
    heads = [n for n in names if n == HEAD_NAME or n.endswith("." + HEAD_NAME)]
    embeddings = [n for n in names if _is_embedding(n)]
    if len(heads) > 1 or len(embeddings) > 1 or not (heads or embeddings):
        return None  # several candidates: nothing says which belong together
    stated = _says_tied(config)
    if stated is False or (stated is None and (heads or not _has_head(config))):
        return None
    head = heads[0] if heads else HEAD_NAME
    embedding = embeddings[0] if embeddings else "model.embed_tokens.weight"
    return TiedPair(embedding, head)


def _is_embedding(name: str) -> bool:
    return any(name == end or name.endswith("." + end) for end in _EMBEDDING_ENDINGS)


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    text_part = config.get("text_config")
    parts = (config, text_part) if isinstance(text_part, dict) else (config,)
    stated = [part.get("tie_word_embeddings") for part in parts]
    flags = [flag for flag in stated if isinstance(flag, bool)]
    return any(flags) if flags else None


def _has_head(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(
        isinstance(name, str) and name.endswith(_WITH_HEAD) for name in architectures
    )
