"""Shapes: records as people write them, and what is right for each; a table for the tests and for docs/data.md.

The words say what is right: texts that hold ``good`` or ``好`` are to be learnt, all others never. Run as a
module it writes the table into docs/data.md anew.
"""

# ruff: noqa: E501

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BEGIN, END = "<!-- shapes: begin -->", "<!-- shapes: end -->"


@dataclass(frozen=True)
class Shape:
    """A record.

    Attributes:
        title: what is meant by it, for the table.
        value: the record.
        refused: part of the reason, where it is refused under any template.
        is_unlearnt: it says of itself that it is not to be learnt.
        has_strict_turns: questions and answers alternate.
        told: fields that are told as not known, and nothing else is.
    """

    title: str
    value: dict[str, Any]
    refused: str = ""
    is_unlearnt: bool = False
    has_strict_turns: bool = True
    told: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether every template can show it: no tools, no thoughts, strict turns."""
        text = json.dumps(self.value)
        return self.has_strict_turns and not any(
            word in text for word in ("tool", "function", "th" + "ought", "observation")
        )


def user(text: Any = "ask 1", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def answer(text: Any = "good 1", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def system(text: str = "rule", role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": text}


def result(text: str = "found 3", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **more}


def messages(*turns: Any, **beside: Any) -> dict[str, Any]:
    return {"messages": list(turns), **beside}


def sharegpt(*turns: tuple[str, str], **beside: Any) -> dict[str, Any]:
    return {"conversations": [{"from": role, "value": text} for role, text in turns], **beside}


ARGUMENTS = {"city": "good Paris"}
CALL = {"id": "callabcde", "type": "function", "function": {"name": "good_look", "arguments": ARGUMENTS}}
AS_TEXT = {**CALL, "function": {"name": "good_look", "arguments": json.dumps(ARGUMENTS)}}
TOOL = {"type": "function", "function": {"name": "good_look", "description": "shown use", "parameters": {}}}
TOOL["function"]["parameters"] = {"type": "object", "properties": {"city": {"type": "string", "description": "shown"}}}  # type: ignore[index]
BARE = TOOL["function"]


def calling(call: Any = CALL, *, text: str | None = None, **beside: Any) -> dict[str, Any]:
    turns = [
        user(),
        answer(text, tool_calls=[call]),
        result(tool_call_id="callabcde", name="good_look"),
        answer("good 2"),
    ]
    return messages(*turns, **({"tools": [TOOL]} | beside))


GROUPS = {
    "Messages": [
        Shape("one exchange", messages(user(), answer())),
        Shape("several", messages(user(), answer(), user("ask 2"), answer("good 2"))),
        Shape("in Chinese", messages(user("问一"), answer("好一"), user("问二"), answer("好二"))),
        Shape("a system prompt", messages(system(), user(), answer())),
        Shape("a developer's prompt", messages(system(role="developer"), user(), answer())),
        Shape("the system prompt beside the messages", messages(user(), answer(), system="rule")),
        Shape("the same in both places", messages(system(), user(), answer(), system="rule")),
        Shape("others in both", messages(system(), user(), answer(), system="another"), "two system prompts that differ"),
        Shape("under another name", messages(user(), answer(), system_prompt="rule")),
        Shape("a question in two turns", messages(user("ask 1"), user("ask 2"), answer())),
        Shape("an answer in two turns", messages(user(), answer("good 1"), answer("good 2"))),
        Shape("content in parts", messages(user([{"type": "text", "text": "ask 1"}, {"type": "text", "text": " ask 2"}]), answer())),
        Shape("content as a list of texts", messages(user(["ask 1"]), answer(["good 1", " good 2"]))),
        Shape("a part that is a picture", messages(user([{"type": "image_url", "image_url": {"url": "x"}}]), answer()), "a part of type 'image_url'"),
        Shape("content that is missing", messages(user(None), answer()), "message 1 has content that is null"),
        Shape("an answer that is a number", messages(user(), answer(4), user("ask 2"), answer("good 2"))),
        Shape("messages as JSON text", {"messages": json.dumps([user(), answer()])}),
        Shape("messages that are null, beside a text", {"messages": None, "text": "a good 1"}),
        Shape("the speaker's name", messages(user(name="zoe"), answer())),
        Shape("a role that nobody knows", messages({"role": "robot", "content": "x"}, answer()), "unknown role 'robot'"),
        Shape("nobody answers", messages(user()), "no message is the assistant's"),
        Shape("names of special tokens in a text", messages(user("ask <|im_end|> 1"), answer("good <|eot_id|> 1"))),
    ],
    "What is not to be learnt": [
        Shape("weight: 0 (OpenAI, Mistral)", messages(user(), answer("bad 1", weight=0), user("ask 2"), answer("good 2", weight=1))),
        Shape("loss: false", messages(user(), answer("bad 1", loss=False), user("ask 2"), answer("good 2"))),
        Shape("train: false", messages(user(), answer("bad 1", train=False), user("ask 2"), answer("good 2", train=True))),
        Shape('training: "no"', messages(user(), answer("bad 1", training="no"), user("ask 2"), answer("good 2"))),
        Shape("masked: true", messages(user(), answer("bad 1", masked=True), user("ask 2"), answer("good 2", masked=False))),
        Shape("mask: 1", messages(user(), answer("bad 1", mask=1), user("ask 2"), answer("good 2", mask=0))),
        Shape("both at once", messages(user(), answer("x", train=True, weight=0)), "both that it is learnt and that it is not"),
        Shape("by half", messages(user(), answer("x", weight=0.5)), "learnt whole or not at all"),
        Shape("a question that asks to be learnt", messages(user(train=True), answer())),
        Shape("an answer in two turns, one of them bad", messages(user(), answer("bad 1", weight=0), answer("good 2")), has_strict_turns=False),
        Shape("the whole record", messages(user(), answer("bad 1"), train=False), is_unlearnt=True),
        Shape("the whole record, by weight", messages(user(), answer("bad 1"), weight=0), is_unlearnt=True),
        Shape("label: false (KTO)", messages(user(), answer("bad 1"), label=False), is_unlearnt=True),
        Shape("kto_tag: true", messages(user(), answer(), kto_tag=True)),
        Shape("a loss that was measured", messages(user(), answer(), loss=2.31), told=("loss",)),
    ],
    "Thoughts": [
        Shape("reasoning_content", messages(user(), answer(reasoning_content="good thought"))),
        Shape("thinking", messages(user(), answer(thinking="good thought"))),
        Shape("a part of type thinking", messages(user(), answer([{"type": "thinking", "thinking": "good thought"}, {"type": "text", "text": "good 1"}]))),
        Shape("two names for the same", messages(user(), answer(thought="good thought", reasoning="good thought"))),
        Shape("two that differ", messages(user(), answer(thought="x", reasoning="y")), "several thoughts that differ"),
        Shape("an earlier thought", messages(user(), answer(reasoning_content="good thought"), user("ask 2"), answer("good 2"))),
        Shape("two answers in a row with a thought each", messages(user(), answer(reasoning_content="good thought a"), answer("good 2", reasoning_content="good thought b"))),
    ],
    "Calls of tools": [
        Shape("calls", calling()),
        Shape("arguments as JSON text", calling(AS_TEXT)),
        Shape("a call without its frame", calling({"name": "good_look", "arguments": ARGUMENTS, "id": "callabcde"})),
        Shape("arguments called parameters", calling({"name": "good_look", "parameters": ARGUMENTS, "id": "callabcde"})),
        Shape("a call that says more", calling({**CALL, "surety": "seen"}), told=("surety of a call of a tool",)),
        Shape("a text beside a call", calling(text="good 3")),
        Shape("two calls at once", messages(user(), answer(None, tool_calls=[CALL, {**CALL, "id": "callother"}]), result("found 3", tool_call_id="callabcde", name="good_look"), result("found 4", tool_call_id="callother", name="good_look"), answer("good 2"), tools=[TOOL])),
        Shape("a bad call", messages(user(), answer(None, tool_calls=[{**CALL, "function": {"name": "look", "arguments": {"city": "bad Rome"}}}], weight=0), result(tool_call_id="callabcde", name="look"), answer("good 2"), tools=[TOOL])),
        Shape("tools as JSON text", calling(tools=json.dumps([TOOL]))),
        Shape("each tool as JSON text", calling(tools=[json.dumps(TOOL)])),
        Shape("functions beside", calling(tools=None, functions=[BARE])),
        Shape("both for the same", calling(functions=[BARE])),
        Shape("function_call (OpenAI, older)", messages(user(), answer(None, function_call=AS_TEXT["function"]), {"role": "function", "name": "good_look", "content": "found 3"}, answer("good 2"), functions=[BARE])),
        Shape("the same beside tool_calls", messages(user(), answer(None, function_call=AS_TEXT["function"], tool_calls=[CALL]), result(), answer("good 2"), tools=[TOOL])),
        Shape("another beside tool_calls", messages(user(), answer(None, function_call={"name": "x"}, tool_calls=[CALL]), answer()), "function_call beside other tool_calls"),
        Shape("a call of nothing", messages(user(), answer(None, tool_calls=[{}]), answer()), "calls a tool without a name"),
        Shape("arguments that are no JSON", messages(user(), answer(None, tool_calls=[{"name": "f", "arguments": "{"}])), "not valid JSON"),
    ],
    "Other fields": [
        Shape("ids, scores and sources", messages(user(), answer(id="aside 1"), id="aside 2", score=3, source="aside 3")),
        Shape("a field that nobody knows", messages(user(), answer(mood="aside 1"), remark="aside 2"), told=("mood of a message", "remark")),
        Shape("one that looks like a flag", messages(user(), answer(no_loss_here=True)), told=("no_loss_here of a message",)),
    ],
    "ShareGPT and its kin": [
        Shape("ShareGPT", sharegpt(("human", "ask 1"), ("gpt", "good 1"))),
        Shape("with a system prompt", sharegpt(("human", "ask 1"), ("gpt", "good 1"), system="rule")),
        Shape("the assistant begins", sharegpt(("system", "rule"), ("human", "ask 1"), ("gpt", "good 1"))),
        Shape("a bad turn", {"conversations": [{"from": "human", "value": "ask 1"}, {"from": "gpt", "value": "bad 1", "weight": 0}, {"from": "human", "value": "ask 2"}, {"from": "gpt", "value": "good 2"}]}),
        Shape("calls and observations", sharegpt(("human", "ask 1"), ("function_call", json.dumps(CALL["function"])), ("observation", "found 3"), ("gpt", "good 2"), tools=json.dumps([TOOL]))),
        Shape("tool_call and tool_response (ms-swift)", messages(user(), {"role": "tool_call", "content": json.dumps(CALL["function"])}, {"role": "tool_response", "content": "found 3"}, answer("good 2"), tools=json.dumps([TOOL]))),
        Shape("turns that are exchanges (XTuner, Firefly)", {"conversation": [{"system": "rule", "input": "ask 1", "output": "good 1"}, {"input": "ask 2", "output": "good 2"}]}),
        Shape("the same, in Chinese", {"conversation": [{"human": "问一", "assistant": "好一"}, {"human": "问二", "assistant": "好二"}]}),
        Shape("Chinese roles", sharegpt(("系统", "规矩"), ("用户", "问一"), ("助手", "好一"))),
        Shape("two names, one of them null", {"conversations": [{"role": None, "from": "human", "content": None, "value": "ask 1"}, {"role": "assistant", "from": None, "content": "good 1", "value": None}]}),
        Shape("two names that differ", {"messages": [{**user(), "value": "another"}, answer()]}, "both content and value"),
    ],
    "Alpaca and its kin": [
        Shape("Alpaca", {"instruction": "ask 1", "output": "good 1"}),
        Shape("with an input", {"instruction": "ask 1", "input": "ask 2", "output": "good 1"}),
        Shape("all of it in the input", {"instruction": "", "input": "ask 1", "output": "good 1"}),
        Shape("with a history", {"instruction": "ask 2", "input": "", "output": "good 2", "history": [["ask 1", "good 1"]]}),
        Shape("with a history as JSON text", {"instruction": "ask 2", "output": "good 2", "history": json.dumps([["ask 1", "good 1"]])}),
        Shape("with a history of messages", {"instruction": "ask 2", "output": "good 2", "history": [user(), answer()]}),
        Shape("with a system prompt beside", {"system": "rule", "instruction": "ask 1", "output": "good 1"}),
        Shape("an output that is a number", {"instruction": "ask 1", "output": 42}),
        Shape("query and response (ms-swift)", {"query": "ask 2", "response": "good 2", "history": [["ask 1", "good 1"]], "system": "rule"}),
        Shape("beside the text it was made of", {"instruction": "ask 1", "input": "", "output": "good 1", "text": "aside: ask 1 good 1"}, told=("text",)),
        Shape("nothing is asked", {"instruction": " ", "input": "", "output": "x"}, "instruction and input are empty"),
    ],
    "Prompt and completion": [
        Shape("prompt and completion", {"prompt": "ask 1", "completion": " good 1"}),
        Shape("as lists of messages", {"prompt": [system(), user()], "completion": [answer()]}),
        Shape("a prompt that holds an earlier answer", {"prompt": [user(), answer("bad 1"), user("ask 2")], "completion": [answer("good 2")]}),
        Shape("a completion that is text", {"prompt": [user()], "completion": "good 1"}),
        Shape("a system prompt beside lists", {"prompt": [user()], "completion": [answer()], "system": "rule"}),
        Shape("a system prompt beside texts", {"prompt": "ask 1", "completion": "x", "system": "rule"}, "joined as they are"),
        Shape("label: false, of texts", {"prompt": "ask 1", "completion": "bad 1", "label": False}, is_unlearnt=True),
    ],
    "Texts": [
        Shape("a text", {"text": "a good 1"}),
        Shape("with fields about it", {"text": "a good 1", "url": "aside 1", "title": "aside 2", "label": False}, told=("title",)),
        Shape("with a picture", {"text": "x", "image": {"bytes": "x"}}, "it holds image"),
        Shape("none of these", {"question": "x", "choices": ["a"]}, "its fields (question, choices) are none of"),
    ],
}  # fmt: skip
SHAPES = [shape for group in GROUPS.values() for shape in group]


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every text and number in a record, those in JSON text as well, with the name of its field."""
    if isinstance(value, str) and value.startswith(("[", "{")):
        value = json.loads(value)
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item, key)
    elif value not in (None, ""):
        yield key, value


def brief(value: Any) -> str:
    """A record in few characters: ``user: ask 1`` is a message; JSON text stands in quotation marks."""
    if isinstance(value, str):
        is_json = value.startswith(("[", "{")) and len(value) > 1
        return f"'{brief(json.loads(value))}'" if is_json else value.strip() or "''"
    if isinstance(value, list):
        return f"[{', '.join(map(brief, value))}]"
    if not isinstance(value, dict):
        return json.dumps(value)
    if value in (CALL, AS_TEXT, TOOL, BARE):
        return "a call" if value is CALL else "its call, arguments as text" if value is AS_TEXT else "a description"
    for role, content in (("role", "content"), ("from", "value")):
        if isinstance(value.get(role), str) and content in value:
            is_result = value[role] in ("tool", "function")
            known = (role, content, *(("tool_call_id", "name") if is_result else ()))
            value = {value[role]: value[content], **{k: v for k, v in value.items() if k not in known}}
            return f"{{{_pairs(value)}}}" if len(value) > 1 else _pairs(value)
    return f"{{{_pairs(value)}}}"


def _pairs(value: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {brief(item)}" for key, item in value.items())


def table() -> str:
    """The table of docs/data.md."""
    lines = ["| what | record | becomes |", "|---|---|---|"]
    for name, group in GROUPS.items():
        lines.append(f"| **{name}** | | |")
        for shape in group:
            text = _pairs(shape.value).replace("|", "\\|").replace("`", "'")
            becomes = (
                f"refused: {shape.refused}" if shape.refused else "counted, not learnt" if shape.is_unlearnt else "read"
            )
            becomes += f"; told: {', '.join(shape.told)}" if shape.told else ""
            lines.append(f"| {shape.title} | `{text}` | {becomes} |")
    return "\n".join(lines)


def between(page: str) -> str:
    """What stands between the marks of the page."""
    return page.split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.split(BEGIN)[0] + f"{BEGIN}\n{table()}\n{END}" + page.split(END)[1], encoding="utf-8")
