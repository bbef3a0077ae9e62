"""Sources: finds the files to read, from files, folders, archives, patterns and data sets of a hub, in a fixed order.

Where names of files or folders say train, validation and test, those splits are used, and one line says so.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from narrowboat.data.folders import listed, saved
from narrowboat.data.hub import PREFIX, fetched
from narrowboat.data.kinds import Source, shown, source_of
from narrowboat.data.splits import Layout, Listed, Split, layout_of, split_named
from narrowboat.errors import DataError


@dataclass
class Found:
    """The files to read.

    Attributes:
        sources: the files, in a fixed order.
        heldout: files that a folder or data set holds out by their names.
        left_out: how many files (by suffix or reason) and folders (by name) are not read.
        told: a line for each folder or data set in which splits were recognised.
    """

    sources: list[Source] = field(default_factory=list)
    heldout: list[Source] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)


def find(paths: Sequence[str], *, splits: bool = True, heldout: bool = False) -> Found:
    """Files under ``paths``.

    Args:
        paths: files, folders, zip archives, patterns such as ``data/*.jsonl``, or ``hub:`` and a data set's name.
        splits: whether train, validation and test are recognised in a folder or data set; otherwise all files are read.
        heldout: whether the paths are held-out data; of splits, the validation files are then read, or else the test
            files.

    Raises:
        DataError: a path does not exist, cannot be read, or is of an unknown kind.
    """
    found = Found()
    for name in paths:
        try:
            layout = _layout(name, found, splits)
        except OSError as error:
            raise DataError(f"{shown(name)}: it cannot be read: {error.strerror or error}") from None
        except DataError as error:
            raise DataError(f"{error}{_with_comma(paths)}") from None
        found.sources += layout.plain
        if layout.has_splits:
            _take(name, layout, found, heldout)
        elif layout.left_out:
            found.told.append(f"{name}: {_few(layout.left_out)} describe the data and are not read")
    found.sources, num_more = _once(found.sources)
    if num_more:
        found.told.append(f"{num_more:,} files are named more than once; each is read once")
    return found


def _once(sources: Sequence[Source]) -> tuple[list[Source], int]:
    """Each file once, and the number of duplicates."""
    once = {source.identity: source for source in reversed(sources)}
    return [source for source in sources if once[source.identity] is source], len(sources) - len(once)


def _with_comma(names: Sequence[str]) -> str:
    """A hint for a user whose ``names`` are one name with commas in it; else empty."""
    wholes = (mark.join(names) for mark in (",", ", "))
    whole = next((whole for whole in wholes if len(names) > 1 and Path(whole).expanduser().exists()), "")
    return f'; for the file {shown(whole)} write ["{shown(whole)}"], because a comma separates names' if whole else ""


def _layout(name: str, found: Found, splits: bool) -> Layout[Source]:
    """The files of ``name``, by split if it has splits."""
    path = Path(name).expanduser()
    if name.startswith(PREFIX):
        by_split = {split: [source_of(path) for path in paths] for split, paths in fetched(name).items()}
    else:
        by_split = saved(path) if path.is_dir() else {}
    if by_split:
        if not splits or len(by_split) == 1:
            return Layout(plain=[source for sources in by_split.values() for source in sources])
        return _of_splits(name, by_split)
    files = listed(path, found.left_out)
    if files is None:
        matches = sorted(glob.glob(str(path), recursive=True)) if glob.has_magic(name) else []
        if not matches:
            what = "no file matches it" if glob.has_magic(name) else "there is no such file or folder"
            raise DataError(f"{shown(name)}: {what}")
        base = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
        files = [part for match in matches for part in _matching(Path(match), base, found.left_out)]
    if not splits or len(files) == 1:
        return Layout(plain=[source for _, _, source in files])
    return layout_of(files)


def _matching(path: Path, base: Path, left_out: Counter[str]) -> Iterator[Listed[Source]]:
    """The files at ``path``, which matches a pattern that begins with ``base``."""
    above = path.relative_to(base).parts
    for parts, what, source in listed(path, left_out, is_named=False) or ():
        yield (above if path.is_dir() else above[:-1]) + parts, what, source


def _take(name: str, layout: Layout[Source], found: Found, heldout: bool) -> None:
    """Add the files to read of a data set with splits to ``found``, with a line that says so."""
    train, validation, test = (layout.files[split] for split in ("train", "validation", "test"))
    if heldout:
        chosen = validation or test or train
        found.sources += chosen
        what = "validation" if chosen is validation else "test" if chosen is test else "train"
        found.told.append(f"{name}: the split {what} is used for measuring ({len(chosen):,} files)")
        return
    found.sources += train
    found.heldout += validation
    parts = [f"train is learnt ({len(train):,} files)"]
    parts += [f"validation is held out ({len(validation):,})"] if validation else []
    parts += [f"test is not read ({len(test):,})"] if test else []
    parts += [f"{_few(layout.left_out)} are not read"] if layout.left_out else []
    found.told.append(f"{name}: {', '.join(parts)}; data.splits: all reads every file")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _of_splits(name: str, by_split: Mapping[str, list[Source]]) -> Layout[Source]:
    """The layout of a data set with named splits; without a split called train, splits of other names are trained
    on.
    """
    layout: Layout[Source] = Layout()
    named: dict[str, Split | None] = {split: split_named(split) for split in by_split}
    has_train = "train" in named.values()
    for split, sources in by_split.items():
        known = named[split]
        if known:
            layout.files[known] += sources
        elif has_train:
            layout.left_out.append(split)
        else:
            layout.files["train"] += sources
    if not layout.files["train"]:
        raise DataError(f"{name}: its splits are {', '.join(by_split)}, and none of them is for training; name one")
    return layout
