"""Keys: what each field of a record and of a message means, in one table, so that no field is overlooked.

A field is read; or ignored on purpose (ids, scores, sources); or refused because it cannot be learnt (pictures); or
unknown. Unknown fields are counted and reported. Unknown fields that look like a training flag, a role, a call or a
thought are reported with emphasis, and refused under ``data.strict``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from narrowboat.errors import DataError, cut


class Format(NamedTuple):
    """A format of records: its required fields and its optional fields."""

    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()


TOOLS = ("tools", "functions")
FORMATS: Mapping[str, Format] = {
    "messages": Format(("messages",), ("system", *TOOLS)),
    "sharegpt": Format(("conversations",), ("system", *TOOLS)),
    "alpaca": Format(("instruction", "output"), ("input", "history", "system", *TOOLS)),
    "prompt_completion": Format(("prompt", "completion"), ("system", *TOOLS)),
    "text": Format(("text",)),
}
OTHER_NAMES = {"conversation": "conversations", "query": "instruction", "response": "output"}
"""Other names of required fields."""
BESIDE = {"system_prompt": "system"}
"""Other names of optional fields."""

FLAGS: Mapping[str, bool] = {
    "train": True, "training": True, "trainable": True, "learn": True, "loss": True, "weight": True,
    "loss_weight": True, "masked": False, "mask": False,
}  # fmt: skip
"""Flags of a message or a record, and whether it is learnt if the flag is set."""
JUDGED = ("label", "kto_tag")
"""Flags of a record that say whether its answer is a good one, as in KTO."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts")
MESSAGE = {"role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name", *THOUGHTS, *FLAGS}
"""Fields of a message that are read."""
EXCHANGE = (("system",), ("human", "user", "input", "question"), ("assistant", "gpt", "bot", "output", "answer"))
"""Field names, in turns that hold a whole exchange, of the system prompt, the question and the answer."""

REFUSED = {"image", "images", "video", "videos", "audio", "audios", "refusal", "train_detail"}
"""Fields of a message or record that cannot be learnt."""

PART = {"type", "text", "cache_control", "annotations"}
"""Known fields of a part of a message's content."""

ASIDE = frozenset(
    "id ids idx index uid uuid guid _id pk source sources source_id dataset dataset_name origin url urls link links "  # noqa: SIM905
    "meta metadata score scores rating ratings quality reward rank confidence upvotes likes views category categories "
    "tag tags topic topics domain subject task task_name type lang language locale license licence created created_at "
    "updated_at timestamp date time year model model_name generator engine tokens num_tokens n_tokens token_count "
    "length num_chars word_count turn turns num_turns turn_id split subset hash sha sha1 sha256 md5 checksum file "
    "file_name filename path repo repository commit author label labels class finish_reason stop_reason logprobs "
    "annotations parent_id message_id conversation_id session_id user_id tool_choice parallel_tool_calls".split()
)
"""Fields that are ignored on purpose, because they describe the text and are not part of it."""

_LOOKS_LIKE = (
    ("a training flag", re.compile(r"train|learn|loss|mask|weight|ignore|supervis|label|target|completion_only")),
    ("a call of a tool", re.compile(r"tool|function|call")),
    ("a thought", re.compile(r"think|thought|reason|rationale|reflection|(^|_)cot($|_)|chain_of")),
    ("a role", re.compile(r"role|speaker|sender|(^|_)from($|_)|system|history|persona|instruction")),
)
IN_MESSAGES = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
"""Usual field names that only messages have."""

WANTED = frozenset(key for form in FORMATS.values() for key in (*form.needs, *form.may_have)) | {
    *OTHER_NAMES, *BESIDE, *FLAGS, *JUDGED, *REFUSED
}  # fmt: skip
"""All fields of a record that any format reads."""


def looks_like(key: str) -> str:
    """What an unknown field seems to be, such as ``a training flag``, if it must not be overlooked; else empty."""
    return next((what for what, pattern in _LOOKS_LIKE if pattern.search(key.lower())), "")


def is_aside(key: str) -> bool:
    """Whether a field is ignored on purpose."""
    return key in ASIDE or key.endswith(("_id", "_ids", "_idx"))


def is_empty(value: object) -> bool:
    """Whether a field is empty, so that nothing is lost without it."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


@dataclass
class Told:
    """Counts fields that are not read: ``title``, or ``mood of a message``."""

    is_strict: bool = False
    unread: Counter[str] = field(default_factory=Counter)
    aside: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, of: str = "", num: int = 1) -> None:
        """Count a field that is not read.

        Raises:
            DataError: the field looks important, and ``data.strict`` is set.
        """
        name = cut(f"{key} of a {of}" if of else key)
        if is_aside(key):
            self.aside[name] += num
            return
        if self.is_strict and (what := looks_like(key)):
            raise DataError(f"the field {name} looks like {what} and is unknown; data.columns: id={key} ignores it")
        self.unread[name] += num


def refuse(value: Mapping[str, Any], of: str) -> None:
    """Refuse a field that cannot be learnt.

    Raises:
        DataError: ``value`` holds such a field.
    """
    for key in REFUSED & value.keys():
        if not is_empty(value[key]):
            raise DataError(f"{of} holds {key}, which cannot be learnt")


def is_learnt(value: Mapping[str, Any], of: str) -> bool | None:
    """Whether the flags of a message or record say that it is learnt; None if it has no flag.

    Raises:
        DataError: a flag is neither yes nor no, or two flags contradict each other.
    """
    said: dict[str, bool] = {}
    for key in value.keys() & FLAGS.keys():
        if is_empty(value[key]):
            continue
        if (flag := as_flag(value[key])) is None:
            raise DataError(
                f"{of} has {key}: {value[key]!r}; a message is learnt whole or not at all: write true or false"
            )
        said[key] = flag == FLAGS[key]
    if len({*said.values()}) > 1:
        raise DataError(f"{of} says both that it is learnt and that it is not: {', '.join(sorted(said))}")
    return next(iter(said.values()), None)


def as_flag(value: object) -> bool | None:
    """Parse yes or no, also from a number or a word; None for anything else."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None


_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
