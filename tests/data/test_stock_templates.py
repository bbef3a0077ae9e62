"""Labels under the templates of the models people use, which TRL keeps copies of, and for many a second copy in which
generation markers say what the assistant said: there both ways must agree."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import trl

from narrowboat.data.labels import ChatTemplate
from narrowboat.data.tokens import Encoder
from narrowboat.errors import DataError

FOLDER = Path(trl.__file__).parent / "chat_templates"
MARKED = "_training"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith(MARKED))
SPECIAL = r"<[|｜][^<>|｜]{1,40}[|｜]>|</?s>|<(?:start|end)_of_\w+>|<\|?\w+\|?>(?<=\|>)|<\|\w+>"
ENDS = ("<|im_end|>", "<|eot_id|>", "<|return|>", "<end_of_turn>", "<turn|>", "<|end|>", "<｜end▁of▁sentence｜>")
ENDS += ("<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<|endoftext|>", "</s>")
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


def special_names(text: str) -> list[str]:
    """What looks like a special token in a template."""
    return sorted({*re.findall(SPECIAL, text)})


pytestmark = pytest.mark.skipif(not NAMES, reason="this version of TRL keeps no templates")


@pytest.fixture(scope="module")
def speaker(tokenizer):
    """A tokenizer that knows every template's special tokens."""
    speaker = copy.deepcopy(tokenizer)
    texts = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.jinja")]
    speaker.add_tokens(sorted({token for text in texts for token in re.findall(SPECIAL, text)}), special_tokens=True)
    return speaker


def use(speaker, name: str) -> None:
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    speaker.chat_template = text
    speaker.eos_token = next((end for end in ENDS if end in text), "<|endoftext|>")


def answers(speaker, rendered) -> list[str]:
    turns = sorted({*rendered.turn.tolist()} - {-1})
    return [speaker.decode(rendered.input_ids[rendered.turn == turn]) for turn in turns]


CHAT = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei."},
]


@pytest.mark.parametrize("name", NAMES)
def test_r11_stock_templates_without_markers(speaker, name):
    use(speaker, name)
    template = ChatTemplate(speaker, Encoder(speaker))
    rendered = template.render(CHAT)
    first, last = answers(speaker, rendered)
    closed = [text.partition(said)[2] for text, said in ((first, "Eins."), (last, "Zwei."))]
    if name != "glm4moe":  # whose turns end with the next speaker's name
        assert all(speaker(end)["input_ids"][0] in template.end_ids for end in closed)
        assert template.is_closed(np.where(rendered.turn >= 0, rendered.input_ids, -100))
    opened = first.partition("Eins.")[0] + last.partition("Zwei.")[0]
    assert "?" not in opened

    if not (FOLDER / f"{name}{MARKED}.jinja").exists():
        return
    use(speaker, f"{name}{MARKED}")
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in CHAT]
    chat = parts if template.template.takes_parts else CHAT
    marked = speaker.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    if list(marked["input_ids"]) != rendered.input_ids.tolist():
        return  # the marked copy says other words
    ids, mask = np.array(marked["input_ids"]), np.array(marked["assistant_masks"], bool)
    runs = [
        speaker.decode(ids[run])
        for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
        if mask[run[0]]
    ]
    for mine, run in zip((first, last), runs, strict=True):
        opening, _, rest = run.partition(mine)
        assert "?" not in opening
        assert not rest.strip() or rest.strip() == speaker.eos_token  # a line break, or the end of the text


@pytest.mark.parametrize("name", NAMES)
def test_r11_stock_templates_show_calls_of_tools_or_refuse_them(speaker, name):
    use(speaker, name)
    template = ChatTemplate(speaker, Encoder(speaker))
    calling = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "two", "name": "add", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "Zwei."},
    ]
    try:
        rendered = template.render(calling, [TOOL])
    except DataError as error:
        if not re.search("omits tool calls|refuses it", str(error)):
            raise
        return
    call, answer = answers(speaker, rendered)
    assert "add" in call
    assert "two" not in call
    assert "Zwei." in answer
    assert "two" not in answer
