"""Completes a message of a conversation with the turns that it refers to, before a gate reads it.

A question that is a pasted transcript, and ends with an unanswered user message, is read as a conversation; JSON
and markup are read as lines.
Consecutive user turns are one request. A reply is read together with the question or offer that it answers, a
retry with the question that it repeats. A remark about the answer, such as thanks, is read alone, unless it
replies to a specific question or offer; "ok" may also accept an offer that is no question. If the gate uses the
encoder, retries, remarks and offers are recognised in any language, by their similarity to a few examples.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice

from rgate_integrations.decision import Request
from rgate_integrations.gates.base import Gate
from rgate_integrations.gates.evidence.base import Context, Sources
from rgate_integrations.gates.evidence.model_outputs import encoder_passes
from rgate_integrations.gates.rules import read_text_states, to_directions
from rgate_integrations.gates.turn_examples import ACCEPT, EXAMPLES, OFFER, OPEN, OTHER, REMARK, RETRY
from rgate_integrations.models.encoder import ENCODER
from rgate_integrations.models.proxies import require_states
from rgate_integrations.runtime.closings import closing_sentences, question_before
from rgate_integrations.runtime.segments import (
    ASSISTANT,
    USER,
    count_words,
    drop_label,
    is_question,
    split_transcript,
    user_turns,
)
from rgate_integrations.runtime.unfolding import unfold

# Minimum cosine of a message that is similar to an example; chosen by benchmarks/conversations.py.
_MIN_COSINE = 0.53
_MIN_OFFER_COSINE = 0.45  # the same for `OFFER`, whose examples cannot name all that may be searched
_MAX_WORDS = 12  # maximum words of a message to compare; longer messages say what they want
_MAX_TURNS = 8  # number of user turns to search for the question that a retry repeats
_SHORT = 5  # maximum words of a question that may be a reply, such as "Why not?", and of a reply such as "order 4411"
_WORDS = re.compile(r"\w.*\w\W?")  # the words of a sentence, and the mark after them


def resolve_turns(gate: Gate, requests: Sequence[Request], sources: Sources) -> list[Request | Exception]:
    """Return each request with the earlier turns that it refers to moved from its history to its question.

    If the encoder fails, its error is returned in place of each request whose history has a turn by someone other
    than the user.

    Args:
        gate: A gate that reads turns. Retries ("Try again"), remarks ("Thanks") and general offers of help are only
            detected if this gate uses the encoder.
        requests: The requests.
        sources: The sources of evidence, which include the encoder.
    """
    joined = [join_user_turns(_read_transcript(request)) for request in requests]
    messages = list(chain.from_iterable(map(_messages, joined))) if encoder_passes(gate.specs) else []
    try:
        kinds = _classify(messages, sources)
    except Exception as error:  # the encoder or its loading may fail
        return [error if request.history else request for request in joined]
    return [_resolve(request, kinds) for request in joined]


def _read_transcript(request: Request) -> Request:
    """Return a request with a pasted transcript split into its last message and, as history, the turns before it.

    JSON and markup are unfolded first, and a label such as ``User:`` before a single line is left out. Without a
    transcript, or with a history of its own, nothing else changes.
    """
    unfolded = unfold(request.question)
    turns = None if request.history else split_transcript(unfolded)
    if turns is None:
        question = drop_label(unfolded)
        return request if question == request.question else replace(request, question=question)
    question, history = turns
    return replace(request, question=question, history=history)


def join_user_turns(request: Request) -> Request:
    r"""Return a request joined with the user's turns right before it, or unchanged if there are none.

    >>> join_user_turns(Request("Thanks!", ["assistant: Hi!", "user: When is it due?"])).question
    'When is it due?\nThanks!'
    """
    if not request.history or not request.history[-1].startswith(USER):
        return request
    turns, before = next(user_turns(request.history))
    return replace(request, question=f"{turns}\n{request.question}", history=before)


def _resolve(request: Request, kinds: Mapping[str, str]) -> Request:
    """Return a request joined with the earlier question that it refers to.

    A mere remark loses its history, and a reply to a general offer loses the offer. Any other request is returned
    unchanged.
    """
    kind = kinds.get(request.question, OTHER)
    # A retry repeats the latest question that is not itself a retry or remark, however far back it is.
    if kind == RETRY:
        for turns, before in user_turns(request.history):
            if kinds.get(turns, OTHER) in (OFFER, OTHER):
                return replace(request, question=f"{turns}\n{request.question}", history=before)
    question = question_before(request.history)
    if not question and any(map(str.isdigit, request.question)) and count_words(request.question) <= _SHORT:
        question = question_before(request.history, before_any=True)
        if kinds.get(_bare(question)) == OPEN:
            return request
    is_open = kinds.get(_bare(question)) == OPEN
    waits = is_question(question)
    if kind == ACCEPT:
        offers = (each for each in closing_sentences(request.history) if kinds.get(_bare(each)) == OFFER)
        question = question or next(offers, "")
        waits = bool(question)
    # Thanks and edits are complete by themselves, unless they answer a question ("Shall I translate it?").
    if kind in (REMARK, ACCEPT) and (is_open or not waits):
        return replace(request, history=())
    if not question or (is_question(request.question) and count_words(request.question) > _SHORT):
        return request
    # Move the question from the end of the assistant's turn to the front of the user's reply; drop a general
    # offer.
    *before, last = request.history
    rest = last.replace(question, "").strip()
    if rest != ASSISTANT.strip():
        before.append(rest)
    text = request.question if is_open else f"{_bare(question)}\n{request.question}"
    return replace(request, question=text, history=before)


def _bare(sentence: str) -> str:
    """Return a sentence without the markup, quotes and emoji around it."""
    words = _WORDS.search(sentence)
    return words.group() if words else sentence


def _messages(request: Request) -> Iterable[str]:
    """Yield the texts for `_classify`: the last question and sentences of the assistant's turn, and short messages.

    Without earlier turns, there are none.
    """
    if question := question_before(request.history, before_any=True):
        yield _bare(question)
    if count_words(request.question) <= _SHORT:
        yield from map(_bare, closing_sentences(request.history))
    messages = [request.question] if request.history else []
    messages += [turns for turns, _ in islice(user_turns(request.history), _MAX_TURNS - 1)]
    for message in messages:
        if message and count_words(message) <= _MAX_WORDS:
            yield message


def _classify(messages: Iterable[str], sources: Sources) -> dict[str, str]:
    """Map each message that is similar to one of the `EXAMPLES` to its kind; other messages are left out."""
    distinct = sorted(set(messages))
    if not distinct:
        return {}
    encoder = require_states(sources.proxy(ENCODER))
    kinds = [kind for kind, examples in EXAMPLES.items() for _ in examples]
    texts = [example for examples in EXAMPLES.values() for example in examples]
    # The examples are read once per engine.
    known = Context([], sources).memory(
        resolve_turns, lambda: to_directions(read_text_states(texts, encoder))
    )
    likeness = to_directions(read_text_states(distinct, encoder)) @ known.T
    nearest = zip(
        distinct, [kinds[best] for best in likeness.argmax(axis=1)], likeness.max(axis=1), strict=True
    )
    return {
        text: kind
        for text, kind, cosine in nearest
        if cosine >= (_MIN_OFFER_COSINE if kind == OFFER else _MIN_COSINE)
    }
