"""Conversations that are handed over as one text: transcripts with labels, and prompts in a model's chat template."""

from __future__ import annotations

import re

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
_MOST_WORDS_BEFORE = 40
"""A text with more words before its first turn is a prompt of its own, not a conversation."""


def split_transcript(text: str) -> list[tuple[str, str]] | None:
    r"""Return the turns of a conversation that ends in an open message of the user; None of any other text.

    What stands before it, or is the system's, is left out, as it is of messages. A transcript in which the user spoke
    last, behind words of its own, is material for these words: they may be a task.

    >>> split_transcript("Human: Hi!\nAI: Hello!\nHuman: When is it due?\nAI:")
    [('user', 'Hi!'), ('assistant', 'Hello!'), ('user', 'When is it due?')]
    >>> split_transcript("Find a title for this chat.\n\nUser: Hi!\nAI: Hello!\nUser: When is it due?")
    """
    found = list(_TURN.finditer(text))
    if not found:
        return None
    before = _END.sub(" ", text[: found[0].start()]).split()
    turns = []
    for turn, following in zip(found, [*found[1:], None], strict=True):
        role = str(turn.lastgroup).rpartition("_")[2]
        said = _END.sub(" ", text[turn.end() : following.start() if following else len(text)]).strip()
        turns.append((role, said))
    is_open = turns[-1] == ("assistant", "")
    turns = [(role, said) for role, said in turns if said and role != "system"]
    has_answer = any(role == "assistant" for role, _ in turns)
    if not turns or turns[-1][0] != "user" or len(before) > _MOST_WORDS_BEFORE:
        return None
    return turns if is_open or (has_answer and not before) else None
