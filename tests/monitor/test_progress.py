from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from rich.console import Console
from tests.monitor.runs import ended, step_done, strange_run, whole_run

from narrowboat.events import Event, Notice
from narrowboat.monitor.progress import Progress


class Terminal(io.StringIO):
    """A text file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(events: list[Event], console: Console) -> str:
    progress = Progress(console)
    for event in events:
        progress.record(event)
    progress.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def terminal(width: int = 100) -> Console:
    return Console(file=Terminal(), force_terminal=True, width=width, height=30, legacy_windows=False)


def test_a_log_file_gets_plain_lines(tmp_path: Path) -> None:
    text = shown(whole_run(tmp_path), Console(file=io.StringIO(), width=60))
    lines = text.splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.startswith("step ")] == [
        "step 1/6, loss 2.9000, 64.0 tokens/s, memory 5.00 GiB of 8.00 GiB, 2 min 40 s left",
        "step 6/6, loss 2.4000, 64.0 tokens/s, memory 5.00 GiB of 8.00 GiB",
    ]
    assert lines[1:12] == [
        "data        documents                         48",
        "            tokens in                  1,234,567",
        "              learnt                     308,641    25 %",
        "              questions, seen only       925,926    75 %",
        "            records skipped as broken          2",
        "              train.jsonl, line 17: not JSON",
        "              train.jsonl, line 40: empty",
        "model       smollm2-135m, 139,400,064 parameters in bfloat16 on cpu; 4,884,480 trainable (3.5 %): "
        "q_proj x 30, v_proj x 30",
        "plan        stream layers in tiles of 512; forecast 5.50 GiB of 8.00 GiB for 4,096 tokens",
        "notice      2 records were dropped: lines 17 and 40 of train.jsonl.",
        "held out    loss 2.5000 after step 0, on 900 tokens, 4.0 s",
    ]


def test_the_closing_summary_says_what_one_wants_to_know(tmp_path: Path) -> None:
    text = shown(whole_run(tmp_path), Console(file=io.StringIO(), width=20))
    assert text.splitlines()[-6:] == [
        "done        after step 6, 4 min 10 s",
        "held out    loss 2.5000 -> 2.0000 (20.0 % lower)",
        "peak        6.00 GiB of 8.00 GiB (75 % of the budget)",
        "pace        64.0 tokens/s, 12,288 tokens in 3 min 12 s of steps",
        f"adapter     {tmp_path / 'adapter'}",
        f"report      {tmp_path / 'report.html'}",
    ]


def test_a_failure_is_told_with_its_error() -> None:
    console = Console(file=io.StringIO())
    text = shown([ended(Path("run"), 3, "failed", error="The disk is full.", report_path=None)], console)
    assert text.startswith("failed      after step 3, 4 min 10 s: The disk is full.\n")


def test_a_terminal_shows_a_bar_with_lines_above_it_and_is_left_as_it_was(tmp_path: Path) -> None:
    text = shown(whole_run(tmp_path), terminal())
    assert "step 2/6 done   2 min 8 s left" in text
    assert "64 tokens/s   peak 5.00 GiB of 8.00 GiB" in text
    assert "2 records were dropped" in text
    assert "20.0 % lower" in text
    hidden, shown_again = text.rfind("\x1b[?25l"), text.rfind("\x1b[?25h")
    assert 0 <= hidden < shown_again


@pytest.mark.parametrize("width", [20, 40, 79, 200])
def test_the_foot_fits_every_width(width: int) -> None:
    console = terminal(width)
    progress = Progress(console)
    for last in (None, step_done(3, 123_456), step_done(123_456, 123_456, budget_bytes=0)):
        if last is not None:
            progress._foot.pace.take(last)
        lines = console.render_lines(progress._foot, pad=False)
        assert len(lines) in (1, 2)
        assert all(sum(segment.cell_length for segment in line) <= width for line in lines)


@pytest.mark.parametrize("interactive", [True, False])
def test_the_strangest_run_is_shown_without_a_word_of_its_control_codes(tmp_path: Path, interactive: bool) -> None:
    console = terminal() if interactive else Console(file=io.StringIO(), width=60)
    text = shown(strange_run(tmp_path), console)
    assert "\x1b[31m<script>" not in text
    assert "<script>alert(1)</script> 模型" in text
    assert "failed" in text
    assert "out of memory" in text


def test_a_closed_pipe_does_not_end_the_run(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    kept = os.dup(1)  # rich points the standard output elsewhere when a pipe breaks
    try:
        with open(writing, "w", encoding="utf-8", buffering=1) as pipe:
            progress = Progress(Console(file=pipe))
            for event in whole_run(tmp_path):
                progress.record(event)
            progress.close()
    except BrokenPipeError:
        pass  # closing what was never delivered; the program's own pipe is left to the interpreter
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def test_a_terminal_that_cannot_spell_gets_question_marks() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    progress = Progress(console)
    progress.record(Notice("模型 naïve"))
    progress.record(Notice("next"))
    assert raw.getvalue().split(b"\n")[:2] == [b"notice      ?? na?ve", b"notice      next"]
