"""Rendering: runs a chat template within limits of loop iterations, time and output.

A template comes with a model from an unknown source. It runs in jinja's sandbox, with the functions that transformers
gives to templates. Loop iterations are counted, texts and lists are measured, and each error becomes one sentence. A
template that asks for the date gets a fixed one, so that a run resumed tomorrow has the same data. Price: a tenth of a
microsecond for each iteration and each operation.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from narrowboat.data.containers import said
from narrowboat.data.limits import (
    MESSAGE_SECONDS,
    MESSAGE_STEPS,
    TEMPLATE_CHARS,
    TEMPLATE_ITEMS,
    TEMPLATE_SECONDS,
    TEMPLATE_STEPS,
)
from narrowboat.errors import DataError

TODAY = datetime(2025, 1, 1)
"""The date that templates get."""

CLOCK_STEPS = 64  # iterations between two looks at the clock
MOST_POWER = 64


class Overrun(DataError):
    """Raised for a template that runs too long or writes too much."""


class Renderer:
    """A tokenizer's chat templates.

    Args:
        template: the template's text, or several by name: ``tool_use`` for dialogues with tools, else ``default``.
        special: the tokenizer's special tokens by name, which templates may write.

    Raises:
        DataError: a template cannot be parsed.
    """

    def __init__(self, template: str | Mapping[str, str], special: Mapping[str, Any]) -> None:
        self._limits = _Limits()
        environment = _Environment(self._limits)
        texts = {"default": template} if isinstance(template, str) else dict(template)
        try:
            self._templates = {name: environment.from_string(text) for name, text in texts.items()}
        except Exception as error:  # a template may raise any error
            raise DataError(f"cannot be parsed: {said(error)}") from None
        self._special = dict(special)

    @property
    def asks_for_the_date(self) -> bool:
        """Whether a rendered template asked for the date."""
        return self._limits.asked_for_date

    def begin(self, num_messages: int) -> None:
        """Start new limits, for ``num`` messages together, until the next ``begin``."""
        self._limits.begin(num_messages)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, generate: bool = False) -> str:
        """The dialogue as the template writes it, with the generation prompt if ``generate``.

        Raises:
            Overrun: the template takes too long.
            DataError: the template refuses the dialogue, or fails.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise DataError(f"none of the templates is called default: {', '.join(sorted(self._templates))}")
        given = [_as_given(message) for message in messages]
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._templates[name].generate(
                messages=given, tools=tools, documents=None, add_generation_prompt=generate, **self._special
            ):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > TEMPLATE_CHARS:
                    raise Overrun(f"it writes more than {TEMPLATE_CHARS:,} characters")
        except DataError:
            raise
        except Exception as error:  # a template may raise any error
            raise DataError(said(error)) from None
        return "".join(pieces)


def _as_given(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the form that transformers gives to templates: without nulls, with thoughts under both usual
    names.
    """
    given = {key: value for key, value in message.items() if value is not None}
    if "reasoning_content" in given:
        given["thinking"] = given["reasoning_content"]
    return given


class _Limits:
    """Counts loop iterations, checks the time, and measures texts and lists."""

    def __init__(self) -> None:
        self.asked_for_date = False
        self.begin(0)

    def begin(self, num_messages: int) -> None:
        """Reset all counts."""
        self._num_steps, self._began = 0, time.thread_time()
        self._most_steps = TEMPLATE_STEPS + num_messages * MESSAGE_STEPS
        self._most_seconds = TEMPLATE_SECONDS + num_messages * MESSAGE_SECONDS

    def step(self) -> bool:
        """Count one loop iteration."""
        self._num_steps += 1
        if self._num_steps > self._most_steps:
            raise Overrun(f"its loops take more than {self._most_steps:,} turns")
        if not self._num_steps % CLOCK_STEPS and time.thread_time() - self._began > self._most_seconds:
            raise Overrun(f"it takes more than {self._most_seconds:.0f} seconds")
        return True

    def date(self, form: str) -> str:
        """The fixed date, as the template function ``strftime_now``."""
        self.asked_for_date = True
        return TODAY.strftime(form)


def _measured(value: Any) -> Any:
    """Return ``value`` if it is not too large."""
    if (kind := value.__class__) is str and len(value) > TEMPLATE_CHARS:
        raise Overrun(_TOO_LARGE)
    if kind is list and len(value) > TEMPLATE_ITEMS:
        raise Overrun(_TOO_LARGE)
    return value


_TOO_LARGE = f"it makes a text of more than {TEMPLATE_CHARS:,} characters, or a list or number of that kind"


def _narrow(widen: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pads a text, with a limit on the width."""

    @wraps(widen)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if (
            any(_factor(value) > TEMPLATE_CHARS for value in (*args, *kwargs.values()))
            or _widest(args[0]) > TEMPLATE_CHARS
        ):
            raise Overrun(_TOO_LARGE)
        return widen(*args, **kwargs)

    return apply


class _Generation(Extension):
    """The tag ``{% generation %}``, with which some templates mark learnt text; renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """Jinja's namespace, without names that give access to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        given = dict(*args[1:], **kwargs)
        for name in given:
            _refuse_private(name)
        Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace keeps no {name}")


class _Code(CodeGenerator):
    """Compiles a template so that its operators, joins and filters are measured."""

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self._wrapped(super().visit_Add, node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._wrapped(super().visit_Concat, node, frame)

    def visit_Filter(self, node: nodes.Filter, frame: Frame) -> None:
        self._wrapped(super().visit_Filter, node, frame)

    def _wrapped(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.measured(")
        visit(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with the functions of transformers, in which loops are counted and values are limited."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"*", "**", "%"})
    measured = staticmethod(_measured)

    def __init__(self, limits: _Limits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self._limits = limits
        self.filters |= {name: _narrow(self.filters[name]) for name in ("center", "indent", "format", "round")}
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _refuse, "strftime_now": limits.date, "dict": _dict, "namespace": _Names,
        }  # fmt: skip
        del self.globals["lipsum"]  # writes as much as it is told to

    @property
    def step(self) -> bool:
        """Count one loop iteration. It is an attribute, because the sandbox's check of a call takes ten times as
        long.
        """
        return self._limits.step()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree, with a count at the start of each loop's body."""
        tree = super()._parse(source, name, filename)
        for loop in [*tree.find_all(nodes.For)]:
            step = nodes.EnvironmentAttribute("step", lineno=loop.lineno)
            if loop.test is not None:
                loop.test = nodes.And(step, loop.test, lineno=loop.lineno)
            else:
                loop.body.insert(0, nodes.ExprStmt(step, lineno=loop.lineno))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator, with a limit on the size of its result."""
        if operator == "*":
            large = max(_size(left) * _factor(right), _size(right) * _factor(left))
        elif operator == "**":
            large = 0 if isinstance(right, (int, float)) and abs(right) <= MOST_POWER else TEMPLATE_CHARS + 1
        else:
            large = _widest(left)
        if large > TEMPLATE_CHARS:
            raise Overrun(_TOO_LARGE)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, with a limit on the size of its result."""
        large = max((_factor(value) for value in args), default=0)
        text = getattr(called, "__self__", None)
        if isinstance(text, str) and called.__name__ == "replace" and len(args) > 1:
            large = text.count(str(args[0])) * len(str(args[1]))
        if large > TEMPLATE_CHARS:
            raise Overrun(_TOO_LARGE)
        return _measured(super().call(context, called, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Call ``str.format``, with a limit on widths."""
        if isinstance(text := getattr(value, "__self__", None), str) and _widest(text) > TEMPLATE_CHARS:
            raise Overrun(_TOO_LARGE)
        return super().wrap_str_format(value)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _factor(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _widest(form: Any) -> int:
    """The largest width in a format string."""
    return max((int(digits[:12]) for digits in re.findall(r"\d+", form)), default=0) if isinstance(form, str) else 0


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
