"""Is it the same run? What its result follows from is kept with every checkpoint and compared when it goes on.

That is: the rows' token ids, labels and order; the base's weights; tokenizer and template; and all options but those
that only say when, where and how thriftily. Whatever is not listed here as harmless is refused, so an option that is
new is safe. A change is accepted where ``--resume-anyway`` names it, and told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowboat.errors import OptionError, did_you_mean
from narrowboat.events import Notice, Tell

FREE = (
    "memory.", "evaluate.", "data.cache", "data.workers", "train.folder", "train.save_every", "train.keep_checkpoints",
    "train.keep_best", "train.max_minutes", "train.evaluate_every", "train.patience", "optimizer.max_skipped",
    "model.trust_remote_code", "train.monitor", "parallel.",
)  # fmt: skip
"""Options, or beginnings of them, that change nothing of the result."""

TOLD = (
    "optimizer.lr", "optimizer.schedule", "optimizer.warmup_steps", "train.steps", "train.epochs", "model.device",
    "heldout",
)  # fmt: skip
"""Options that may change when a run is resumed."""

BY_CONTENT = {
    "data": ("data.", "segments.", "dialogues.", "packing."),
    "heldout": (),
    "weights": ("model.name", "model.revision"),
    "tokenizer": (),
}
"""What is judged by its content, and the options that act through it alone."""

WHAT = {
    "data": "the rows hold other tokens or labels, or come in another order",
    "heldout": "the held-out rows are others, so that losses before and after do not compare",
    "weights": "the base has other weights",
    "tokenizer": "the tokenizer or its chat template is another",
}


@dataclass(frozen=True)
class Identity:
    """What a run's result follows from: digests of contents by their names in ``BY_CONTENT``, and options by key."""

    contents: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def refuse_other_run(saved: Identity, now: Identity, accepted: Iterable[str], where: str, tell: Tell) -> None:
    """Compare what a checkpoint was made with, ``saved``, with what it is to go on with, ``now``.

    Args:
        saved: the checkpoint's.
        now: of these options, files and model.
        accepted: names of differences that are wanted.
        where: the checkpoint, for people.
        tell: hears of what differs and is gone on with.

    Raises:
        OptionError: something else differs, each with its name; or an accepted name is none.
    """
    accepted = set(accepted)
    known = {*now.options, *BY_CONTENT}
    if unknown := sorted(accepted - known):
        raise OptionError(f"--resume-anyway: {unknown[0]!r} is no option{did_you_mean(unknown[0], known)}")
    differing = dict(_differences(saved, now))
    refused = {name: words for name, words in differing.items() if name not in accepted and name not in TOLD}
    if refused:
        raise OptionError(
            f"{where} belongs to another run: {'; '.join(refused.values())}. Go on with what it began with, accept it "
            f"by --resume-anyway {','.join(refused)}, or name another train.folder."
        )
    for name, words in differing.items():
        tell(Notice(f"Resumed with a change{'' if name in TOLD else ' that makes it another run'}: {words}."))


def _differences(saved: Identity, now: Identity) -> Iterable[tuple[str, str]]:
    changed = {
        key: f"{key} was {_words(saved.options[key])}, is {_words(value)}"
        for key, value in now.options.items()
        if key in saved.options and not _is_same(key, saved.options[key], value)
    }
    acting = {key: name for name, keys in BY_CONTENT.items() for key in changed if key.startswith(keys)}
    for name in BY_CONTENT:
        if saved.contents.get(name) != now.contents.get(name):
            causes = [words for key, words in changed.items() if acting.get(key) == name]
            yield name, WHAT[name] + (f" ({', '.join(causes)})" if causes else "")
    for key, words in changed.items():
        if key not in acting and not key.startswith(FREE):
            yield key, words


def _is_same(key: str, one: Any, other: Any) -> bool:
    if key == "optimizer.states":  # all but rebuilt ones are the same numbers at another place
        return (one == "rebuilt") == (other == "rebuilt")
    return bool(one == other)


def _words(value: Any) -> str:
    if value is None or value in ([], ""):
        return "not given"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
