"""A hostile template neither hangs the server, nor fills its memory, nor reaches its insides."""

from __future__ import annotations

import time

import pytest

from pyserve.errors import InvalidRequest
from pyserve.text.chat import ChatTemplate

HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops over text": "{% set t = 'a' * 9999 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "recursion without end": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion like a tree": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "squaring": "{% set n = namespace(x=3) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "repeated text": "{{ 'a' * 10000000000 }}",
    "repeated list": "{{ 10000000000 * [1] }}",
    "power": "{{ 9 ** 999999999 }}",
    "long range": "{{ range(1000000000) | list }}",
    "much output": "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "center": "{{ 'a'.center(9999999999) }}",
    "center filter": "{{ 'a' | center(9999999999) }}",
    "indent filter": "{{ 'a\nb' | indent(9999999999) }}",
    "zfill": "{{ 'a'.zfill(9999999999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent with width as argument": "{{ '%*d' % (999999999, 1) }}",
    "format": "{{ '{:9999999999}'.format(1) }}",
    "format with width as argument": "{{ '{:{}}'.format(1, 999999999) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "tojson indent": "{{ [1] | tojson(indent=9999999999) }}",
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "builtins of a function": "{{ raise_exception.__globals__.keys() }}",
    "class through a filter": "{{ ('' | attr('__class__')).mro() }}",
    "mutation": "{{ messages.append(1) }}",
    "mutation of a message": "{{ messages[0].update(role='system') }}",
    "namespace disguise": "{{ namespace(__class__=1) }}",
    "namespace disguise later": "{% set n = namespace() %}{% set n.__class__ = 1 %}{{ n }}",
    "format string reaching in": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_stopped(source: str) -> None:
    template = ChatTemplate(source, bos=None, eos=None)
    start = time.perf_counter()
    with pytest.raises(InvalidRequest) as error:
        template.render([{"role": "user", "content": "hi"}])
    assert time.perf_counter() - start < 8  # the limit is 5 s; most are refused at once
    assert len(error.value.message) < 300


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": "user", "content": "word " * 2000}] * 1000  # 10 MB
    assert len(ChatTemplate(None, bos=None, eos=None).render(messages)) > 10_000_000


def test_a_budget_is_for_one_rendering() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}done", bos=None, eos=None)
    for _ in range(10):
        assert template.render([{"role": "user", "content": "hi"}]) == "done"


def test_loops_know_their_place_and_length() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% else %}none{% endfor %}"
    )
    template = ChatTemplate(source, bos=None, eos=None)
    assert template.render([{"role": "user", "content": "a"}] * 3) == "1/3,2/3,3/3"
    nothing = ChatTemplate("{% for x in missing %}{{ x }}{% else %}none{% endfor %}", bos=None, eos=None)
    assert nothing.render([{"role": "user", "content": "a"}]) == "none"


def test_ordinary_formatting_works() -> None:
    source = (
        "{{ '%s is %5.2f%%' % ('x', 1.5) }} {{ '{:>6}|{}'.format('a', 2) }} {{ 'a' ~ 1 ~ none }} {{ 'b' | center(5) }}"
    )
    text = ChatTemplate(source, bos=None, eos=None).render([{"role": "user", "content": "a"}])
    assert text == "x is  1.50%      a|2 a1None   b  "
