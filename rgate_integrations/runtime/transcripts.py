"""Splits a text that holds a conversation into turns: a labelled transcript, or a prompt in a chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ROLES = {
    "user": r"user|human|customer|client|utilisateur|usuario|utente|nutzer|benutzer|пользователь|用户|ユーザー",
    "assistant": r"assistant|ai|bot|chatbot|agent|model|chatgpt|asistente|assistente|ассистент|助手|アシスタント",
    "system": r"system",
}
_ANY = "|".join(f"(?P<{{0}}_{role}>{names})" for role, names in _ROLES.items())
_TURN = re.compile(
    # <|im_start|>user, <|start_header_id|>user<|end_header_id|>, <start_of_turn>user, <|user|>
    rf"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|)(?:{_ANY.format('token')})(?:<\|end_header_id\|>|\|>|$)"
    r"|(?P<inst_user>\[INST\])|(?P<inst_assistant>\[/INST\])"
    # USER:, **Human:**, ### User:, ||>User:
    rf"|^[^\w\n]{{0,6}}(?:{_ANY.format('label')})[^\w\n:：]{{0,3}}[:：][*_]*",
    re.IGNORECASE | re.MULTILINE,
)
_END = re.compile(r"<\|im_end\|>|<\|eot_id\|>|<end_of_turn>|<\|end\|>|<\|begin_of_text\|>|</?s>|<bos>")
_MAX_WORDS_BEFORE = 40  # with more words before the first turn, the text is a prompt, not a conversation


def split_transcript(text: str) -> tuple[str, tuple[str, ...]] | None:
    r"""Return the user's last, unanswered message of a conversation, and the turns before it, oldest first.

    The turns are lines such as ``user: …`` and ``assistant: …``, as in `rgate_integrations.decision.Request`.

    Any other text gives None. System turns are left out. If the text ends with an empty assistant turn (``AI:``), up
    to 40 words before the first turn are left out, too; more words give None. Without that turn, the result is None
    if there are any such words, because they may be a task about the transcript, or if the assistant never answers.

    >>> split_transcript("Human: Hi!\nAI: Hello!\nHuman: When is it due?\nAI:")
    ('When is it due?', ('user: Hi!', 'assistant: Hello!'))
    >>> split_transcript("Find a title for this chat.\n\nUser: Hi!\nAI: Hello!\nUser: When is it due?")
    """
    before, turns = _split_turns(text)
    # A prompt that ends in "AI:" asks the model to continue.
    is_open = turns[-1:] == [("assistant", "")]
    turns = [(role, words) for role, words in turns if words and role != "system"]
    has_answer = any(role == "assistant" for role, _ in turns)
    if not turns or turns[-1][0] != "user" or len(before.split()) > _MAX_WORDS_BEFORE:
        return None
    if not is_open and (before or not has_answer):
        return None
    return turns[-1][1], tuple(f"{role}: {words}" for role, words in turns[:-1])


def split_history(text: str) -> list[tuple[str, str]]:
    r"""Return the (role, text) turns of an earlier conversation; text before the first label is the assistant's.

    >>> split_history("Human: Hi!\nAI: Hello!"), split_history("They greeted each other.")
    ([('user', 'Hi!'), ('assistant', 'Hello!')], [('assistant', 'They greeted each other.')])
    """
    before, turns = _split_turns(text)
    return [(role, words) for role, words in [("assistant", before), *turns] if words]


def label_turns(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (role, text) turns of a conversation with one turn per line, oldest first; empty ones are left out.

    A line without a label is by the speaker of the line before it. If no line has one, the speakers take turns, and
    the last line is the assistant's.

    >>> label_turns(["Human: Hi!", "AI: Hello!"]) == label_turns(["Hi!", "Hello!"])
    True
    """
    labels = [_TURN.match(line) for line in lines]
    speaker = "assistant"
    turns = []
    for index, (label, line) in enumerate(zip(labels, lines, strict=True)):
        if label is not None:
            speaker = _role(label)
        elif not any(labels):
            speaker = "assistant" if (len(lines) - index) % 2 else "user"
        turns.append((speaker, line[label.end() if label else 0 :].strip()))
    return [(role, words) for role, words in turns if words]


def _split_turns(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text before the first label, and the (role, text) turns."""
    labels = list(_TURN.finditer(text))
    starts = [label.start() for label in labels] + [len(text)]
    turns = []
    for label, end in zip(labels, starts[1:], strict=True):
        turns.append((_role(label), _END.sub(" ", text[label.end() : end]).strip()))
    return _END.sub(" ", text[: starts[0]]).strip(), turns


def _role(label: re.Match[str]) -> str:
    return str(label.lastgroup).rpartition("_")[2]
