"""Where a chat template runs: it comes from a stranger's file and may neither reach the process nor keep it busy.

Jinja's immutable sandbox keeps the template away from Python's insides and from the caller's objects. What it lacks is
a measure, so every rendering gets a Budget, and the template's syntax tree is rewritten where work multiplies:

* every `for` draws its items through a filter that counts them, and calls count too: no endless loop by nesting;
* `~`, `+`, `*`, `**`, `%` and the widths given to string methods are checked before they allocate;
* the text that comes out is counted as it comes.

The filters' names and the budget's key have characters that no template can write, so a template cannot replace them.
Not handled: a method such as `replace` can make one large allocation out of two texts of permitted size.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_center, do_format, do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 250_000  # items of loops, calls and joins of one rendering
MAX_CHARS = 1 << 24  # of a text
MAX_ITEMS = 1 << 20  # of a list
MAX_WIDTH = 100_000  # characters that a text is padded or indented to
MAX_BITS = 4096  # of a whole number
MAX_SECONDS = 5.0

_BUDGET = "budget!"
_LOOP = "loop!"
_JOIN = "join!"
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*(\d*\.)?(\*|\d{6})")  # a width of six digits, or from an argument
_WIDE_BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{6}|\{)")


class TemplateRefusal(Exception):
    """The template called `raise_exception`: the messages are not what it takes."""


class BudgetExceeded(TemplateError):
    """The template does more than a chat template has reason to."""


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._deadline_s = time.monotonic() + MAX_SECONDS
        self._chars = MAX_CHARS

    def take_step(self) -> None:
        self._steps -= 1
        if self._steps < 0 or time.monotonic() > self._deadline_s:
            raise BudgetExceeded("it takes too many steps")

    def take_chars(self, count: int) -> None:
        self._chars -= count
        if self._chars < 0:
            raise BudgetExceeded("it writes too much text")


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with the checks of this module."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as in Jinja: plain names could collide with the template's keyword arguments.
        _budget(__context).take_step()
        if isinstance(getattr(__obj, "__self__", None), str):
            _check_widths(args)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        template = getattr(value, "__self__", None)
        if isinstance(template, str) and value.__name__ in ("format", "format_map") and _WIDE_BRACES.search(template):
            raise BudgetExceeded("it pads a text too far")
        return super().wrap_str_format(value)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]


class _Counting(NodeTransformer):
    """Sends the items of loops and the operands of `~` through the filters that count."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _LOOP, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, _JOIN, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012, Jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """`namespace()` without names that Python gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # no named argument: a template may call one `self`
        self, *values = args
        Namespace.__init__(self, *values, **kwargs)
        for name in dict(*values, **kwargs):
            _Namespace._check(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if not isinstance(name, str) or name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")


def compile_template(source: str) -> Template:
    """Raises jinja2.TemplateSyntaxError; other exceptions too for sources that are no template at all."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation], cache_size=0
    )
    environment.filters.update(
        {_LOOP: _count_items, _JOIN: _join, "tojson": _to_json, "center": _center, "indent": _indent, "format": _format}
    )
    environment.globals.update(
        {"raise_exception": _refuse, "strftime_now": _now, "namespace": _Namespace, "dict": _new_dict}
    )
    environment.globals.pop("lipsum")
    return Template(environment, source)


class Template:
    """A compiled template. Safe to render from several threads at once."""

    def __init__(self, environment: _Environment, source: str) -> None:
        self._template = environment.from_string(source)

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises TemplateRefusal for `raise_exception`, and whatever else the template does wrong."""
        budget = Budget()
        chunks = []
        for chunk in self._template.generate({**variables, _BUDGET: budget}):
            budget.take_chars(len(chunk))
            chunks.append(chunk)
        return "".join(chunks)


def _budget(context: Context) -> Budget:
    budget = context.parent[_BUDGET]
    assert isinstance(budget, Budget)
    return budget


@pass_context
def _count_items(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget(context)
    for item in items:
        budget.take_step()
        yield item


@pass_context
def _join(context: Context, items: list[Any]) -> str:
    _budget(context).take_step()
    texts = [str(item) for item in items]
    _check_len("", sum(map(len, texts)))
    return "".join(texts)


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuses operations whose result would be out of proportion."""
    if operator == "*" and not (isinstance(left, int) and isinstance(right, int)):
        for text, count in ((left, right), (right, left)):
            if isinstance(text, str | list | tuple) and isinstance(count, int):
                _check_len(text, len(text) * count)
    elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
        _check_len(left, len(left) + len(right))
    elif operator == "**" and (abs(right) > 64 or abs(left) > 1 << 32):
        raise BudgetExceeded("it raises to too high a power")
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
    elif isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise BudgetExceeded("it computes with too large a number")


def _check_len(kind: str | list[Any] | tuple[Any, ...], count: int) -> None:
    if count > (MAX_CHARS if isinstance(kind, str) else MAX_ITEMS):
        raise BudgetExceeded("it makes too large a value")


def _check_widths(widths: Iterable[Any]) -> None:
    if any(isinstance(width, int) and width > MAX_WIDTH for width in widths):
        raise BudgetExceeded("it pads a text too far")


def _check_format(template: str) -> None:
    if _WIDE_PERCENT.search(template):
        raise BudgetExceeded("it pads a text too far")


def _center(value: str, width: int = 80) -> str:
    _check_widths([width])
    return do_center(value, width)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_widths([width if isinstance(width, int) else len(width)])
    return do_indent(value, width, first, blank)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _check_format(value)
    return do_format(value, *args, **kwargs)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the models were trained on: not escaped for HTML, not even to ASCII."""
    _check_widths([indent])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _now(pattern: str) -> str:
    _check_len(pattern, len(pattern) * 64)
    return datetime.now().strftime(pattern)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)
