"""Patterns on foreign text: no text makes one take more than time in proportion to its length."""

import importlib
import re
from pathlib import Path

import pytest

import rgate_integrations
from rgate_integrations.claims.format import parse_claims, without_tags
from rgate_integrations.claims.sentences import split_sentences, subject
from rgate_integrations.models.control_tokens import without_control_tokens
from rgate_integrations.models.credentials import Credentials

parser = importlib.import_module("re._parser")  # there is no public way to a pattern's parts
constants = importlib.import_module("re._constants")
compiler = importlib.import_module("re._compiler")

ROOT = Path(rgate_integrations.__file__).parent
MEGABYTE = 1_000_000
REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT)


def patterns():
    """Every pattern that a module of the package has, with its name."""
    for file in sorted(ROOT.rglob("*.py")):
        if "re.compile(" not in file.read_text(encoding="utf-8"):
            continue
        name = ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
        for attribute, value in vars(importlib.import_module(name)).items():
            for each in value.values() if isinstance(value, dict) else [value]:
                if isinstance(each, re.Pattern):
                    yield f"{name.removeprefix('rgate_integrations.')}.{attribute}", each


def alternatives(parts):
    """The ways in which a pattern may begin, each a list of its parts."""
    kind, value = parts[0] if len(parts) else (None, None)
    if kind is constants.SUBPATTERN:
        return [[*way, *parts[1:]] for way in alternatives(list(value[-1]))]
    if kind is constants.BRANCH:
        return [[*way, *parts[1:]] for branch in value[1] for way in alternatives(list(branch))]
    return [list(parts)]


def begins_with_a_run(pattern):
    """Whether a search begins with an unbounded repeat, or with letters that the repeat behind them takes as well.

    It would be tried, and fail, at each place of a run.
    """
    for way in alternatives(list(parser.parse(pattern.pattern, pattern.flags))):
        before = ""
        while way and letters(way[0]):
            before += letters(way.pop(0))
        if not way or way[0][0] not in REPEATS or way[0][1][1] != constants.MAXREPEAT:
            continue
        can_fail = any(kind not in REPEATS or value[0] > 0 for kind, value in way[1:])
        run = compiler.compile(way[0][1][2], pattern.flags)
        if can_fail and (not before or any(map(run.fullmatch, before))):
            return True
    return False


def letters(part):
    """The letters that a part of a pattern matches one of; none if it is something else."""
    kind, value = part
    if kind is constants.ASSERT:
        return "".join(map(letters, value[1]))
    if kind is constants.LITERAL:
        return chr(value)
    return "".join(map(letters, value)) if kind is constants.IN else ""


@pytest.mark.parametrize(("name", "pattern"), [pytest.param(*each, id=each[0]) for each in patterns()])
def test_no_pattern_begins_with_a_run(name, pattern):
    if name.startswith(("follow_up.", "abilities.names.")):
        pytest.skip("It is given 400 characters at most.")
    assert not begins_with_a_run(pattern)


def test_what_begins_with_a_run_is_seen():
    runs = (r"\s+x", True), (r"(?:\s+of)+$", True), (r"(?<=://)\S*@", True), (r"a.*b", True)
    others = (r"\s+", False), (r"^\W*(yes)", False), (r"<\s*b", False), (r"a.{0,9}b", False)
    for text, expected in (*runs, *others):
        assert begins_with_a_run(re.compile(text)) is expected


WORST = {  # a megabyte each; time of the square of that would be hours
    "logins": "://" * (MEGABYTE // 3),
    "spaces": "A" + " " * MEGABYTE + "b",
    "small words": "A" + " of" * (MEGABYTE // 3) + " b",
    "names": " ".join(f"Aa{number}," for number in range(MEGABYTE // 9)),
    "abbreviations": "Dr. A. " * (MEGABYTE // 7),
    "marks": "<" * (MEGABYTE // 8) + "Query " * (MEGABYTE // 7),
    "open tags": "<Claim(" * (MEGABYTE // 7),
    "brackets": "<|" * (MEGABYTE // 2),
    "quotes": '."' * (MEGABYTE // 2),
    "line feeds": "\n" * MEGABYTE,
}


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in WORST.items()])
def test_a_megabyte_of_the_worst_text_is_read(text):
    """Without an end here the test fails by the suite's time limit; nothing is said about seconds."""
    assert "@" not in Credentials().redact(text)
    assert parse_claims(without_tags(text)) == []
    assert len(without_control_tokens(text)) <= len(text)
    assert "".join(" ".join(split_sentences(text)).split()) == "".join(text.split())
    assert subject(text)[:1] in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://ann:pa/ss@host/v1 it", "at https://***@host/v1 it"),
        ("http://a@b@c http://d x@y", "http://***@c http://d x@y"),
        ("a@b://c", "a@b://c"),
        ("one://two://three@four", "one://***@four"),
    ],
)
def test_the_login_of_a_url_is_hidden(text, shown):
    assert Credentials().redact(text) == shown
