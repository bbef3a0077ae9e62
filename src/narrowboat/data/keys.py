"""Keys: what each field of a record and of a message means; one table, so that none goes by unnoticed.

A field is read; or set aside on purpose (ids, scores, sources); or refused, since what it holds cannot be learnt
(pictures); or unknown. Unknown ones are counted and told. Those that look like a training flag, a role, a call or a
thought are told loudly, and refused under ``data.strict``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from narrowboat.errors import DataError, cut


class Format(NamedTuple):
    """A format of records: the fields that it must have, and those that it may have."""

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
"""Of fields that make a format, where the usual one is not there."""
BESIDE = {"system_prompt": "system"}
"""The same, of fields that stand beside those."""

FLAGS: Mapping[str, bool] = {
    "train": True, "training": True, "trainable": True, "learn": True, "loss": True, "weight": True,
    "loss_weight": True, "masked": False, "mask": False,
}  # fmt: skip
"""Of a message or a record: whether it is learnt if the flag is set."""
JUDGED = ("label", "kto_tag")
"""Of a record of questions and answers, as KTO has it: whether the answer is a good one."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts")
MESSAGE = {"role", "from", "content", "value", "tool_calls", "function_call", "tool_call_id", "name", *THOUGHTS, *FLAGS}
"""What is read of a message."""
EXCHANGE = (("system",), ("human", "user", "input", "question"), ("assistant", "gpt", "bot", "output", "answer"))
"""Of turns that are a whole exchange: names of the system prompt, the question and the answer."""

REFUSED = {"image", "images", "video", "videos", "audio", "audios", "refusal", "train_detail"}
"""What a message or record may hold that cannot be learnt, or not as it says."""

PART = {"type", "text", "cache_control", "annotations"}
"""What is known of a part of a message's content."""

ASIDE = frozenset(
    "id ids idx index uid uuid guid _id pk source sources source_id dataset dataset_name origin url urls link links "  # noqa: SIM905
    "meta metadata score scores rating ratings quality reward rank confidence upvotes likes views category categories "
    "tag tags topic topics domain subject task task_name type lang language locale license licence created created_at "
    "updated_at timestamp date time year model model_name generator engine tokens num_tokens n_tokens token_count "
    "length num_chars word_count turn turns num_turns turn_id split subset hash sha sha1 sha256 md5 checksum file "
    "file_name filename path repo repository commit author label labels class finish_reason stop_reason logprobs "
    "annotations parent_id message_id conversation_id session_id user_id tool_choice parallel_tool_calls".split()
)
"""What is set aside on purpose: about the text, not of it."""

_LOOKS_LIKE = (
    ("a training flag", re.compile(r"train|learn|loss|mask|weight|ignore|supervis|label|target|completion_only")),
    ("a call of a tool", re.compile(r"tool|function|call")),
    ("a thought", re.compile(r"think|thought|reason|rationale|reflection|(^|_)cot($|_)|chain_of")),
    ("a role", re.compile(r"role|speaker|sender|(^|_)from($|_)|system|history|persona|instruction")),
)
IN_MESSAGES = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
"""Usual names that only a message has."""

WANTED = frozenset(key for form in FORMATS.values() for key in (*form.needs, *form.may_have)) | {
    *OTHER_NAMES, *BESIDE, *FLAGS, *JUDGED, *REFUSED
}  # fmt: skip
"""What somebody reads of a record."""


def looks_like(key: str) -> str:
    """What an unknown field seems to be that must not be overlooked, such as ``a training flag``; or nothing."""
    return next((what for what, pattern in _LOOKS_LIKE if pattern.search(key.lower())), "")


def is_aside(key: str) -> bool:
    """Whether a field is set aside on purpose."""
    return key in ASIDE or key.endswith(("_id", "_ids", "_idx"))


def is_empty(value: object) -> bool:
    """Whether a field holds nothing, so that nothing is lost without it."""
    return value is None or (isinstance(value, (str, list, dict)) and not value)


@dataclass
class Told:
    """Fields that are not read, counted: ``title``, or ``mood of a message``."""

    is_strict: bool = False
    unread: Counter[str] = field(default_factory=Counter)
    aside: Counter[str] = field(default_factory=Counter)

    def add(self, key: str, of: str = "", num: int = 1) -> None:
        """A field that nobody reads.

        Raises:
            DataError: it looks like more than a remark, and the data is read strictly.
        """
        name = cut(f"{key} of a {of}" if of else key)
        if is_aside(key):
            self.aside[name] += num
            return
        if self.is_strict and (what := looks_like(key)):
            raise DataError(
                f"the field {name} looks like {what} and is not known; data.columns: id={key} sets it aside"
            )
        self.unread[name] += num


def refuse(value: Mapping[str, Any], of: str) -> None:
    """Refuse what cannot be learnt.

    Raises:
        DataError: ``value`` holds such a field.
    """
    for key in REFUSED & value.keys():
        if not is_empty(value[key]):
            raise DataError(f"{of} holds {key}, which cannot be learnt")


def is_learnt(value: Mapping[str, Any], of: str) -> bool | None:
    """What the flags of a message or record say; None if it has none.

    Raises:
        DataError: a flag says something else than yes or no, or two flags contradict each other.
    """
    said: dict[str, bool] = {}
    for key in value.keys() & FLAGS.keys():
        if is_empty(value[key]):
            continue
        if (flag := as_flag(value[key])) is None:
            raise DataError(f"{of} has {key}: {value[key]!r}; it is learnt whole or not at all: write true or false")
        said[key] = flag == FLAGS[key]
    if len({*said.values()}) > 1:
        raise DataError(f"{of} says both that it is learnt and that it is not: {', '.join(sorted(said))}")
    return next(iter(said.values()), None)


def as_flag(value: object) -> bool | None:
    """Yes or no, also as a number or a word; None for anything else."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None


_WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
