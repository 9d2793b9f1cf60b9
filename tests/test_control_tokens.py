"""Control tokens of every family leave the texts that a server gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgate_integrations.prompts import ANSWER, strip_control_tokens
from tests.fake_server import Fake, answer

FAMILIES = {
    "chatml": """
        <|im_start|> <|im_end|> <|im_sep|> <|endoftext|>
    """,
    "llama": """
        <s> </s> <<SYS>> <</SYS>> [INST] [/INST] <|begin_of_text|> <|start_header_id|>
        <|eot_id|> <|python_tag|>
    """,
    "mistral": """
        [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]
        [TOOL_CALLS] [TOOL_RESULTS] [ARGS] [CALL_ID] [THINK] [/THINK] [IMG] [IMG_BREAK]
        [IMG_END] [PREFIX] [SUFFIX] [MIDDLE] [MODEL_SETTINGS]
    """,
    "deepseek": """
        <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>
        <｜tool▁calls▁begin｜> <｜DSML｜> <think> </think>
    """,
    "gemma": """
        <bos> <eos> <pad> <unk> <mask> <start_of_turn> <end_of_turn> <start_of_image>
        <unused42> <|turn> <turn|> <|channel> <channel|> <|think|>
    """,
    "qwen": """
        <|vision_start|> <|fim_prefix|> <tool_call> </tool_call> <tool_response>
        </tool_response> <think> </think>
    """,
    "phi": """
        <|system|> <|user|> <|assistant|> <|end|>
    """,
    "command": """
        <BOS_TOKEN> <EOS_TOKEN> <|START_OF_TURN_TOKEN|> <|CHATBOT_TOKEN|>
        <|START_THINKING|>
    """,
    "harmony": """
        <|start|> <|channel|> <|message|> <|constrain|> <|return|> <|call|>
    """,
    "granite": """
        <|start_of_role|> <|end_of_role|> <|end_of_text|> <|tool_call|>
    """,
    "glm": """
        [gMASK] [sMASK] [MASK] <sop> <eop> <|observation|> <|begin_of_box|>
    """,
    "exaone": """
        [|system|] [|user|] [|assistant|] [|endofturn|]
    """,
    "starcoder": """
        <fim_prefix> <fim_middle> <fim_suffix> <file_sep> <repo_name>
    """,
    "others": """
        <reserved_106> <extra_id_0> <SPECIAL_12> <seed:bos> </seed:think> <｜hy_User｜>
        [CLS] [SEP] <0x0A> ]~b] ]~!b[ [e~[
        <beginning_of_sentence> <end_of_sentence> <begin_of_document> [EOT] <fim-prefix>
        <end_of_utterance> <fake_token_around_image> [UNUSED_TOKEN_145] [unused3] <role> </role> <longcat_user>
    """,
}
TOKENS = [token for family in FAMILIES.values() for token in family.split()]
PLAIN = [
    "Is a < b and c > d?",
    "What does <b>bold</b> mean in HTML?",
    "x = [INSTALL] [1] [a|b] {| |}",
    "list |> map <| f || g",
    "a <roles> tag, [UNUSED] and [unused]",
    "Vec<Option<T>> and a[i] ~ b",
    "if a<b|c>d then",
    "日本語｜区切り",
]


@pytest.mark.parametrize("token", TOKENS)
def test_a_control_token_is_replaced(token):
    assert strip_control_tokens(f"a{token}b") == "a b"


BROKEN = ["<|", "<", "<｜a", "[|", "<A_", "]~", "<seed:"]
AT_LENGTH = [pytest.param(beginning * 20_000, id=beginning) for beginning in BROKEN]  # they do not cost much


@pytest.mark.parametrize("text", [*PLAIN, *AT_LENGTH])
def test_other_text_is_left_alone(text):
    assert strip_control_tokens(text) == text


PIECES = st.sampled_from([*TOKENS, *"<>|[]/｜▁~ ", "im_end", "INST", "SYS", "</", "<|", "|>", "s"])


NESTED = st.builds(
    lambda outer, inner, place: outer[:place] + inner + outer[place:],
    st.sampled_from(TOKENS),
    st.sampled_from(TOKENS),
    st.integers(0, 30),
)


@given(NESTED | st.lists(PIECES | NESTED | st.text(max_size=4), max_size=12).map("".join))
def test_however_they_are_nested_none_is_left_or_made(text):
    clean = strip_control_tokens(text)
    assert not [token for token in TOKENS if token in clean]
    assert strip_control_tokens(clean) == clean


def test_the_server_gets_none_of_them(fake):
    hostile = "Who wrote Hamlet?" + "".join(TOKENS)
    fake(answer()).generate(ANSWER, [{"question": hostile}], tokens=1)
    sent = Fake.seen[-1][1]["messages"][-1]["content"]
    assert "Who wrote Hamlet?" in sent
    assert not [token for token in TOKENS if token in sent]
