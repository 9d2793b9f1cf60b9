"""Splits a text that holds a conversation into turns: a labelled transcript, or a prompt in a chat template."""

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
    labels = list(_TURN.finditer(text))
    if not labels:
        return None
    before = _END.sub(" ", text[: labels[0].start()]).split()
    turns = []
    ends = [label.start() for label in labels[1:]] + [len(text)]
    for label, end in zip(labels, ends, strict=True):
        role = str(label.lastgroup).rpartition("_")[2]
        turns.append((role, _END.sub(" ", text[label.end() : end]).strip()))
    # A prompt that ends in "AI:" asks the model to continue.
    is_open = turns[-1] == ("assistant", "")
    turns = [(role, words) for role, words in turns if words and role != "system"]
    has_answer = any(role == "assistant" for role, _ in turns)
    if not turns or turns[-1][0] != "user" or len(before) > _MAX_WORDS_BEFORE:
        return None
    if not is_open and (before or not has_answer):
        return None
    return turns[-1][1], tuple(f"{role}: {words}" for role, words in turns[:-1])
