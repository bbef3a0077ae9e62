"""Real long text that every machine has, for a first run: Python's own library, as questions and answers and as it is.

    python examples/demo_data.py --tokens 2048 build/demo/data

Writes ``train/modules.jsonl``: dialogues, a module's source and then the question what it is for; the docstring, which
answers it, is taken out of the source. ``train/*.txt`` and ``train/*.py`` are plain documents. ``heldout.jsonl`` holds
shorter dialogues over modules that are not in ``train``, with some 1,000 tokens of answers; ``asked.jsonl`` is a few of
them, to be answered. Training dialogues nearly fill ``--tokens``; plain documents are longer and go in segments, so
that nothing is dropped. The same Python gives the same files.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

TRAIN = """
argparse base64 calendar configparser contextlib difflib dis fractions ftplib functools gzip heapq ipaddress mailbox
mimetypes optparse pickle plistlib random shutil socketserver tokenize wave weakref
"""
HELDOUT = """
bdb bisect bz2 cmd colorsys copy csv filecmp fnmatch getpass glob hmac html linecache lzma netrc numbers pdb pprint
py_compile pyclbr queue quopri reprlib rlcompleter sched secrets shelve smtplib stringprep symtable tabnanny
fileinput opcode timeit traceback uuid warnings webbrowser zipfile
"""
ASKED = "bz2 colorsys csv getpass sched secrets"
PLAIN_MODULES = "statistics"
PLAIN_TOPICS = "compound"

ANSWER_TOKENS = 200  # what template, question and answer take beside the source
LONGER = 2.5  # plain documents are this many times as long
HELDOUT_TOKENS = 640
USUAL_TOKENS = 2048
PIECE = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]+|\n")


def main() -> None:
    """Write the data set into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--tokens", type=int, default=USUAL_TOKENS, help="about how long a dialogue is (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.tokens < 512:
        parser.error(f"--tokens {arguments.tokens}: a module's source with question and answer needs 512 at least")
    for path, text in files(arguments.tokens):
        target = arguments.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        print(f"{target}: {text.count(chr(10)):,} lines, about {estimate_tokens(text):,} tokens")


def files(num_tokens: int) -> Iterator[tuple[str, str]]:
    """``(path, content)`` of every file of the data set."""
    longer = int(LONGER * num_tokens)
    heldout_tokens = min(num_tokens, HELDOUT_TOKENS)
    yield "train/modules.jsonl", jsonl(dialogue(name, num_tokens) for name in TRAIN.split())
    yield "heldout.jsonl", jsonl(dialogue(name, heldout_tokens) for name in some_of(HELDOUT, num_tokens))
    yield "asked.jsonl", jsonl(dialogue(name, heldout_tokens) for name in some_of(ASKED, num_tokens))
    for name in PLAIN_MODULES.split():
        yield f"train/{name}.py", shorten(source_of(name), longer)
    for topic in PLAIN_TOPICS.split():
        yield f"train/{topic}.txt", topic_text(topic, longer)


def some_of(names: str, num_tokens: int) -> list[str]:
    """All ``names``, or fewer for a demo that is shorter than usual."""
    known = names.split()
    return known[: max(2, len(known) * num_tokens // USUAL_TOKENS)]


def dialogue(name: str, num_tokens: int) -> dict[str, object]:
    """One JSONL record: the source of the module ``name``, what it is for, and what it defines."""
    source = source_of(name)
    purpose = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    shown = shorten(without_docstring(source), num_tokens - ANSWER_TOKENS)
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = [node.name for node in ast.parse(shown).body if isinstance(node, kinds) and not node.name.startswith("_")]
    question = (
        f"```python\n{shown}```\n\nWhich module of Python's library is this, what is it for, and what does it define?"
    )
    answer = f"Module: {name}\nPurpose: {purpose}\nDefines: {', '.join(defined[:8])}"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def source_of(name: str) -> str:
    """The source of a module of Python's library."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        sys.exit(f"This Python ({sys.executable}) has no source file of its module {name!r}; use one that has.")
    return Path(spec.origin).read_text(encoding="utf-8")


def without_docstring(source: str) -> str:
    """``source`` without the string that says what the module is for."""
    first = ast.parse(source).body[0]
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return source
    lines = source.splitlines(keepends=True)
    return "".join(lines[first.end_lineno :]).lstrip("\n")


def shorten(source: str, num_tokens: int) -> str:
    """``source`` up to the last whole definition, of the module or of a class in it, within about ``num_tokens``."""
    lines = source.splitlines(keepends=True)
    lengths = list(accumulate(estimate_tokens(line) for line in lines))
    ends = []
    for node in ast.parse(source).body:
        ends += [part.end_lineno or 0 for part in (*(node.body if isinstance(node, ast.ClassDef) else ()), node)]
    fitting = [end for end in ends if lengths[end - 1] <= num_tokens]
    return "".join(lines[: max(fitting, default=ends[0])])


def topic_text(topic: str, num_tokens: int) -> str:
    """A chapter of Python's language reference, as ``help()`` prints it, up to a whole paragraph."""
    from pydoc_data.topics import topics

    text = ""
    for paragraph in topics[topic].split("\n\n"):
        if text and estimate_tokens(text + paragraph) > num_tokens:
            break
        text += paragraph.rstrip() + "\n\n"
    return text


def estimate_tokens(text: str) -> int:
    """About what a tokenizer makes of source and English: words, digits and marks, and a fifth more."""
    return round(1.2 * len(PIECE.findall(text)))


def jsonl(records: Iterator[dict[str, object]]) -> str:
    """One record a line."""
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


if __name__ == "__main__":
    main()
