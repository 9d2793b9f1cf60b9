"""Reads requests in JSON, XML, HTML and code as lines of text, as a person would."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from rgate_integrations.runtime.segments import count_words

_MAX_UNFOLDED = 100_000  # characters; of a longer request, only the beginning and the end are read
_MAX_FAILURES = 20  # each may read the rest of the text
_JSON = json.JSONDecoder(object_pairs_hook=tuple)  # pairs, because a key may occur twice
_BRACKET = re.compile(r"[{\[]")
_LITERAL = re.compile(  # in code, not in prose: f("…"), {'key': "…"}, key="…", or a field of CSV
    r"""(?:(?<=\w\()|(?<=[=,\[{])|(?<=["']:)|(?<=["']: ))"""
    r"""("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')(?=[,)}\]\s;&]|$)"""
)
_ESCAPE = re.compile(r"\\(.)")
_TAG = re.compile(  # in quotes, only words: an attribute of several words may be a text
    r"""<(/?)([A-Za-z][\w:-]*)((?:\s+(?:style="[^"<>]*"|[\w:-]+="[^"<>\s]*"))*+)\s*/?>"""
)
_ATTRIBUTE = re.compile(r'([\w:-]+)="([^"]*)"')
_LOOKS = ("class", "dir", "lang", "style")
_DECLARATION = re.compile(r"<\?xml\s[^<>]*\?>\s*")
_INLINE_TAG = re.compile(r"</?(?:b|br|code|em|i|mark|small|span|strong|sub|sup|u)\s*/?>", re.IGNORECASE)
_CLOSING_TAG = re.compile(r"</[\w:-]+>$")


def unfold(text: str) -> str:
    r"""Return the values of a request in JSON, XML or HTML as lines; any other text as it is.

    The first line has all values of a single word, such as settings, with their keys. The others follow, each on a
    line of its own. Without the syntax between them, the heads judge each text better. Messages in JSON keep their
    roles, as in a transcript. Tags around several lines stay, because they may say what these are: a context, or a
    history. Within other text, objects of JSON become lines, too, but not lists, which are mostly data of a task;
    without JSON, quoted strings of several words in calls, settings and CSV do.

    >>> unfold('Input: {"locale": "en", "top": 3, "q": "When is it due?"}')
    'Input:\nlocale: en, top: 3\nWhen is it due?'
    >>> unfold("search(query='When is it due?')")
    'search(query=\nWhen is it due?\n)'
    """
    if len(text) > _MAX_UNFOLDED:
        return text
    return _to_lines(_markup_values(text)) or _unfold_json(text)


def _unfold_json(text: str) -> str:
    """Return a text with its objects in JSON as lines; without JSON, with its quoted strings as lines."""
    parts, end, stop, failures = [], 0, 0, 0
    for bracket in _BRACKET.finditer(text):
        start = bracket.start()
        if start < stop or failures == _MAX_FAILURES:  # within the last value, or no JSON
            continue
        try:
            value, after = _JSON.raw_decode(text, start)
            lines = _to_lines(_json_values(value))
        except (ValueError, RecursionError):
            lines = ""
        if not lines:
            failures += 1
            continue
        stop = after
        if text[start] == "{" or stop - start == len(text):
            parts += [text[end:start], lines]
            end = stop
    if not stop:
        return _LITERAL.sub(_unquote, text).strip()
    parts.append(text[end:])
    return "\n".join(part.strip() for part in parts if part.strip()) if end else text


def _to_lines(values: Iterable[tuple[str, str]]) -> str:
    """Return a line of all values of a single word, with their names, and a line for each other value."""
    words, texts = [], []
    for name, value in values:
        if count_words(value) > 1:
            texts.append(value)
        elif value:
            words.append(f"{name}: {value}" if name else value)
    return "\n".join([", ".join(words), *texts]).strip()


def _unquote(literal: re.Match[str]) -> str:
    """Return a quoted string of several words on a line of its own, any other as it is."""
    value = _ESCAPE.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], literal[1][1:-1])
    return f"\n{value}\n" if count_words(value) > 1 else literal[0]


def _json_values(decoded: object) -> Iterator[tuple[str, str]]:
    """Yield each value as text, with its key; a key of several words is a text, too."""
    rest: list[tuple[str, Any]] = [("", decoded)]
    while rest:  # not recursive: nested lists would take quadratic time
        key, value = rest.pop()
        if isinstance(value, list):
            rest += [(key, item) for item in reversed(value)]
        elif isinstance(value, tuple):
            fields = dict(value)
            role, said = fields.get("role"), fields.get("content")
            if isinstance(role, str) and isinstance(said, str):
                yield "", f"{role}: {said}"
                value = [(name, item) for name, item in value if name not in ("role", "content")]
            for name, item in reversed(value):
                rest += [(name, item)] if count_words(name) == 1 else [("", item), ("", name)]
        else:
            yield key, value if isinstance(value, str) else json.dumps(value)


def _markup_values(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text before and after each tag, with the name of the element that it begins, or an empty name.

    Attributes come after their tag's name, except those that only say what a text looks like.
    """
    text = _DECLARATION.sub("", text, count=1) if text.startswith("<?xml") else text
    if not _TAG.match(text) or not _CLOSING_TAG.search(text):
        return
    _, *parts = _TAG.split(_INLINE_TAG.sub(" ", text))
    values = [html.unescape(value.strip()) for value in parts[3::4]]
    if any("\n" in value for value in values):
        return
    for is_closing, name, attributes, value in zip(parts[::4], parts[1::4], parts[2::4], values, strict=True):
        for key, setting in _ATTRIBUTE.findall(attributes):
            if key not in _LOOKS:
                yield key, html.unescape(setting)
        yield "" if is_closing else name, value
