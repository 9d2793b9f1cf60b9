"""Spellings of control tokens, by families of models, for servers whose tokenizer cannot be asked."""

from __future__ import annotations

import re

__all__ = ["without_control_tokens"]

# No pattern matches white space. So no token can come into being where another one gave way to a space.
_BAR = "[|\uff5c]"  # DeepSeek and Hunyuan write the full-width bar
_PATTERNS = (
    # <|im_end|>, <|eot_id|>, <｜begin▁of▁sentence｜>, <|turn>, <turn|>
    rf"<{_BAR}[^\s<>|\uff5c]+{_BAR}?>",
    rf"<[^\s<>|\uff5c]+{_BAR}>",
    # EXAONE: [|assistant|]
    r"\[\|[^\s\[\]|]*\|\]",
    # Llama 2: <<SYS>>
    r"<</?SYS>>",
    # Sentencepiece models, Gemma, T5, Baichuan, Nemotron; <s>, </s>, <bos>, <0x0A>
    r"</?s>|<(?:bos|eos|pad|unk|mask|sep|cls|BOS|EOS|PAD|UNK|image)>",
    r"<(?:start|end)_of_(?:turn|image|audio)>|<(?:image|audio)_soft_token>",
    r"<(?:unused|reserved_|extra_id_|SPECIAL_)\d+>|<0x[0-9A-Fa-f]{2}>",
    # Command: <BOS_TOKEN>, <EOS_TOKEN>, <EOP_TOKEN>
    r"<[A-Z_]+_TOKEN>",
    # Turns of thought and tools: Qwen, DeepSeek, Hermes, Seed
    r"</?(?:think|thinking|tool_calls?|tool_responses?|tools|function_calls?)>",
    r"</?seed:[\w:]+>",
    # Code models: StarCoder, CodeGemma; Code Llama's are <PRE>, <SUF>, <MID>, <EOT>
    r"<(?:fim_(?:prefix|middle|suffix|pad)|file_sep|repo_name|endoftext|PRE|SUF|MID|EOT)>",
    # Mistral: [INST], [SYSTEM_PROMPT], [TOOL_CALLS]; GLM: [gMASK]; BERT: [SEP]
    r"\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|TOOL_CONTENT|MODEL_SETTINGS|THINK)\]",
    r"\[(?:ARGS|CALL_ID|PREFIX|MIDDLE|SUFFIX|IMG|IMG_BREAK|IMG_END|AUDIO|BEGIN_AUDIO|TRANSCRIBE)\]",
    r"\[(?:[gs]?MASK|CLS|SEP|PAD|UNK|BOS|EOS)\]|<[se]op>",
    # MiniMax: ]~b] and [e~[, between further brackets
    r"\]~!?b[\[\]]|\[e~\[|\]!p~\[",
)
_CONTROL = re.compile("|".join(_PATTERNS))


def without_control_tokens(text: str) -> str:
    """Return ``text`` with a space in place of each control token, so that it cannot end its own turn.

    Servers read the spellings of control tokens as control tokens. Which ones a server has is not known here, so
    those of all families above go, whichever the model. A text about such tokens, or HTML's ``<s>``, loses them.
    """
    return _CONTROL.sub(" ", text)
