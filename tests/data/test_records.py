from __future__ import annotations

import pytest

from narrowboat.data.raw import Record
from narrowboat.data.records import Dialogue, Pair, Records, Text
from narrowboat.errors import DataError


def document(value, name="auto", names=None):
    return Records(name, names).document(Record("a.jsonl, line 1", value, "record"))


def turns(value, **kwargs) -> list[tuple[str, str]]:
    made, _ = document(value, **kwargs)
    return [(message["role"], message["content"]) for message in made.messages]


def test_formats_are_recognised_and_can_be_overridden():
    chat = [("user", "q"), ("assistant", "a")]
    assert turns({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) == chat
    assert turns({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}) == chat
    assert turns({"instruction": "q", "input": "", "output": "a"}) == chat
    assert turns({"instruction": "q", "input": "more", "output": "a"})[0] == ("user", "q\n\nmore")
    assert document({"prompt": "q", "completion": "a"}) == (Pair("a.jsonl, line 1", "q", "a"), "prompt_completion")
    assert document({"text": "t"}) == (Text("a.jsonl, line 1", "t"), "text")
    assert document({"text": "t", "prompt": "q", "completion": "a"}, "text")[1] == "text"
    assert document({"body": "t"}, names={"body": "text"})[0].text == "t"
    assert turns({"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) == chat
    said = {"system": "s", "conversations": [{"from": "gpt", "value": "a"}]}
    assert turns(said) == [("system", "s"), ("assistant", "a")]
    call = {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}]}
    assert document(call)[0].messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    parts = {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]}
    assert turns(parts) == chat


def test_content_parts_tool_calls_and_kept_fields():
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    made, _ = document(
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]},
                {"role": "assistant", "content": None, "tool_calls": [call], "name": None},
                {"role": "tool", "content": "2", "tool_call_id": "x"},
                {"role": "assistant", "content": "a", "reasoning_content": "hm", "train": False},
            ],
            "tools": '[{"type": "function"}]',
        }
    )
    assert isinstance(made, Dialogue)
    assert made.messages[0]["content"] == "qr"
    assert made.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert "name" not in made.messages[1]
    assert made.messages[3] == {"role": "assistant", "content": "a", "reasoning_content": "hm", "train": False}
    assert made.tools == [{"type": "function"}]


def test_r07_turns_of_one_speaker_are_joined():
    value = {
        "messages": [
            {"role": role, "content": role[0] + str(i)} for i, role in enumerate(["user", "user", "assistant"])
        ]
    }
    made, _ = document(value)
    assert [message["content"] for message in made.messages] == ["u0\n\nu1", "a2"]
    assert made.num_joined == 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"messages": None}, "messages is null"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hello"}, "not a list"),
        ({"messages": [None]}, "message 1 is null"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "Did you mean 'assistant'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
        ({"messages": [{"role": "user", "content": None}]}, "content that is null"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "half a character"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls of message 1 is a number, not a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "a tool without a name"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, "not valid JSON"),
        ({"messages": [{"role": "assistant", "content": "x"}], "tools": "{"}, "tools is not valid JSON"),
        ({"conversations": [{"from": "human"}]}, "null"),
        ({"text": None}, "text is null"),
        ({"text": "  "}, "text is empty"),
        ({"text": True}, "text is true or false, not text"),
        ({"prompt": "x", "completion": ""}, "completion is empty"),
        ({"txt": "x"}, "Did you mean 'text'"),
        ({}, "none"),
    ],
)
def test_r07_what_cannot_be_used_says_why(value, reason):
    with pytest.raises(DataError) as caught:
        document(value)
    assert reason in str(caught.value)


def test_a_forced_format_names_what_is_missing():
    with pytest.raises(DataError, match="as sharegpt it lacks conversations; its fields are text"):
        document({"text": "x"}, "sharegpt")
