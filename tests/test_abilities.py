"""From a name to an ability: spellings seen in the wild, guesses by family and size, and measured folders."""

import json
import math
import re
from pathlib import Path

import pytest

from rgate_integrations import load_gate
from rgate_integrations.errors import ConfigurationError, ModelLoadError
from rgate_integrations.gates import ability as abilities
from rgate_integrations.gates.ability import (
    Ability,
    least_capable,
    resolve_ability,
    save_measured,
)
from rgate_integrations.gates.llm_names import parse_name
from rgate_integrations.runtime.files import SHIPPED
from tests.commands import rgate

SPELLINGS = {
    "gpt-4o": [
        "gpt4o",
        "openai/gpt-4o",
        "openai:gpt-4o",
        "azure/gpt-4o",
        "gpt-4o-2024-08-06",
        "chatgpt-4o-latest",
        "GPT-4o",
    ],
    "gpt-4o-mini": ["gpt-4o-mini-2024-07-18", "ft:gpt-4o-mini-2024-07-18:acme::9aBc", "gpt4o-mini"],
    "gpt-3.5-turbo": ["gpt-35-turbo", "gpt-35-turbo-16k", "gpt-3.5-turbo-0125"],
    "gpt-oss-20b": ["gpt-oss:20b", "openai/gpt-oss-20b", "gpt-oss-20b-mxfp4.gguf"],
    "phi-4": ["phi4", "phi4:14b", "phi4:latest", "microsoft/phi-4", "phi-4-Q4_K_M.gguf"],
    "phi-4-mini": ["phi4-mini:3.8b", "microsoft/Phi-4-mini-instruct"],
    "claude-sonnet-4": [
        "claude-sonnet-4-0",
        "claude-sonnet-4-20250514",
        "claude-4-sonnet",
        "claude-sonnet-4@20250514",
    ],
    "claude-sonnet-4.5": ["claude-sonnet-4-5-20250929", "us.anthropic.claude-sonnet-4-5-20250929-v1:0"],
    "claude-3.5-sonnet": [
        "anthropic.claude-3-5-sonnet-20241022-v2:0",
        "bedrock/anthropic.claude-3-5-sonnet-20240620-v1:0",
        "arn:aws:bedrock:eu-west-1:123456789012:inference-profile/eu.anthropic.claude-3-5-sonnet-20240620-v1:0",
        "claude-3-5-sonnet@20240620",
        "claude-3-5-sonnet-v2@20241022",
        "claude-3-5-sonnet-latest",
        "anthropic/claude-3.5-sonnet:beta",
    ],
    "claude-2.1": ["anthropic.claude-v2:1", "claude-2.1"],
    "llama-3.1-8b": [
        "llama3.1:8b",
        "llama3.1:8b-instruct-q4_K_M",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B-Instruct-Turbo",
        "meta-llama/llama-3.1-8b-instruct:free",
        "meta.llama3-1-8b-instruct-v1:0",
        "meta/llama-3.1-8b-instruct-maas",
        "accounts/fireworks/models/llama-v3p1-8b-instruct",
        "llama-3.1-8b-instant",
        "@cf/meta/llama-3.1-8b-instruct",
        "/models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf",
        "Meta-Llama-3.1-8B-Instruct.i1-Q4_K_M.gguf",
        "neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w4a16",
        "Llama-3.1-8B-Instruct-q4f16_1-MLC",
        "models--meta-llama--Llama-3.1-8B-Instruct/snapshots/0e9e39f249a16976918f6564b8830bc894c89659",
    ],
    "llama-3.1-70b": [
        "Meta-Llama-3.1-70B-Instruct-Q4_K_M-00001-of-00002.gguf",
        "hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4",
        "databricks-meta-llama-3-1-70b-instruct",
    ],
    "llama-3-70b": ["llama3-70b-8192", "meta/meta-llama-3-70b-instruct"],
    "llama-3.2-1b": [
        "Llama-3.2-1B",
        "llama3.2:1b",
        "us.meta.llama3-2-1b-instruct-v1:0",
        "unsloth/Llama-3.2-1B-Instruct-bnb-4bit",
    ],
    "llama-3.2-3b": [
        "hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
        "mlx-community/Llama-3.2-3B-Instruct-4bit",
    ],
    "llama-3.2-11b": ["llama3.2-vision:11b", "meta-llama/Llama-3.2-11B-Vision-Instruct"],
    "llama-3.3-70b": ["llama-3.3-70b-versatile", "meta-llama/Llama-3.3-70B-Instruct-Turbo-Free"],
    "llama-4-scout": ["meta-llama/Llama-4-Scout-17B-16E-Instruct"],
    "qwen2.5-72b": [
        "Qwen/Qwen2.5-72B-Instruct",
        "Qwen/Qwen2.5-72B-Instruct-Turbo",
        "qwen-2.5-72b-instruct",
        "accounts/fireworks/models/qwen2p5-72b-instruct",
        "qwen2.5:72b",
    ],
    "qwen2.5-0.5b": ["qwen2.5-0.5b-instruct-q8_0.gguf", "qwen2.5:0.5b"],
    "qwen2.5-coder-32b": ["qwen2.5-coder:32b-instruct-q4_K_M"],
    "qwen3-30b": ["qwen3:30b-a3b", "Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M"],
    "gemma-2-9b": ["gemma2:9b-instruct-q5_K_M", "gemma2-9b-it", "google/gemma-2-9b-it"],
    "gemma-2-2b": [r"C:\models\gemma-2-2b-it-IQ4_XS.gguf"],
    "gemma-3-4b": ["gemma3:4b-it-qat", "google/gemma-3-4b-it", "gemma-3-4b-it-UD-Q4_K_XL.gguf"],
    "gemma-3n-e4b": ["gemma3n:e4b", "google/gemma-3n-e4b-it"],
    "gemini-1.5-pro": ["publishers/google/models/gemini-1.5-pro-002", "google_genai:gemini-1.5-pro"],
    "gemini-2.0-flash": ["models/gemini-2.0-flash-001", "gemini-2.0-flash-exp"],
    "gemini-2.5-flash": ["gemini-2.5-flash-preview-04-17"],
    "mistral-7b": [
        "mistral",
        "mistral-7b-instruct-v0.2.Q4_K_M.gguf",
        "mistralai/Mistral-7B-Instruct-v0.3",
        "mistral.mistral-7b-instruct-v0:2",
        "open-mistral-7b",
    ],
    "mixtral-8x7b": ["mistral.mixtral-8x7b-instruct-v0:1", "mixtral:8x7b", "mixtral-8x7b-32768"],
    "mistral-nemo": ["mistral-nemo:12b", "open-mistral-nemo-2407", "mistralai/Mistral-Nemo-Instruct-2407"],
    "mistral-large-2": ["mistral-large-latest", "mistral-large-2407", "mistral-large2"],
    "deepseek-v3": ["deepseek-chat", "deepseek-ai/DeepSeek-V3-0324", "deepseek-v3:671b"],
    "deepseek-r1": ["deepseek-reasoner", "deepseek.r1-v1:0", "deepseek-r1:671b"],
    "command-r-plus": ["cohere.command-r-plus-v1:0", "command-r-plus-08-2024"],
    "nova-lite": ["bedrock/us.amazon.nova-lite-v1:0", "amazon.nova-lite-v1:0"],
    "phi-3-mini": ["Phi-3-mini-4k-instruct-q4.gguf", "microsoft/Phi-3-mini-128k-instruct"],
    "kimi-k2": ["moonshotai/kimi-k2-instruct-0905", "kimi-k2:1t-cloud"],
    "glm-4.5-air": ["zai-org/GLM-4.5-Air-FP8"],
    "kimi-k2.5": ["accounts/fireworks/models/kimi-k2p5", "kimi-k2-5", "unsloth/Kimi-K2.5-GGUF:UD-Q2_K_XL"],
    "grok-4.20": ["x-ai/grok-4-20"],
    "muse-spark": ["muse_spark"],
    "command-r-7b": ["command-r7b-12-2024", "cohere/command-r7b"],
}

TABLE = {
    "Llama-3.1-8B-Instruct": 0.0,
    "llama-3.1-70b-instruct": 1.0,
    "llama-3.2-1b-instruct": -2.0,
    "llama-3.2-3b-instruct": -1.0,
    "qwen2.5-7b-instruct": -0.2,
    "qwen2.5-14b-instruct": 0.2,
    "qwen2.5-coder-7b": -0.6,
    "gpt-4o-2024-05-13": 1.8,
    "gpt-4o-2024-08-06": 1.9,
    "gpt-4o-mini": 0.5,
    "gpt-4.1": 2.0,
    "claude-3-haiku-20240307": 0.4,
    "claude-sonnet-4-20250514": 1.2,
    "deepseek-r1": 1.6,
    "phi-4": -0.2,
}


@pytest.fixture
def table(monkeypatch):
    """A table whose lines count with the abilities of `TABLE`: a deviation below the written ones."""
    text = json.dumps(
        {name: {"theta": theta + 0.3, "sd": 0.3, "source": "test"} for name, theta in TABLE.items()}
    )
    whole = abilities.build_table(text)
    monkeypatch.setattr(abilities, "ability_table", lambda: whole)


def theta(name):
    return resolve_ability(name)[0].theta


@pytest.mark.parametrize(
    ("usual", "seen"), [(usual, seen) for usual, spellings in SPELLINGS.items() for seen in spellings]
)
def test_a_spelling_that_is_seen_in_the_wild_is_read(usual, seen):
    assert parse_name(seen).words == parse_name(usual).words


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3.1-8b-distilled-from-405b", 8),
        ("Qwen3-0.6B-distill-235B", 0.6),
        ("Llama-3.3-70B-DRAFT-1B", 1),
    ],
)
def test_of_two_sizes_the_smaller_one_counts(name, size):
    """Regression: a distilled LLM was as able as its teacher."""
    assert parse_name(name).size == size


def test_no_two_of_these_llms_are_taken_for_one_and_the_shipped_table_knows_them():
    assert len({parse_name(usual).words for usual in SPELLINGS}) == len(SPELLINGS)
    known = {parse_name(name).words for name in facts_of_the_table()}
    unknown = [usual for usual in SPELLINGS if parse_name(usual).words not in known]
    assert len(unknown) < len(SPELLINGS) / 5  # no published figures
    assert [
        each for each in SPELLINGS if resolve_ability(each)[1]
    ] == []  # those are judged by their families


@pytest.mark.parametrize(
    ("weaker", "stronger"),
    [
        # What was taken for another LLM when names were compared by likeness.
        ("phi-4", "gpt-4o"),
        ("gpt-4o-mini", "gpt-4o"),
        ("Llama-3.1-8B", "claude-sonnet-4"),
        ("Llama-3.1-8B", "qwen2.5-72b"),
        ("Llama-3.2-1B", "Llama-3.1-8B"),
    ],
)
def test_llms_with_names_alike_have_abilities_of_their_own(weaker, stronger):
    assert theta(weaker) < theta(stronger)
    assert resolve_ability(weaker)[1] == resolve_ability(stronger)[1] == ""


def test_the_shipped_table_is_one():
    facts = facts_of_the_table()
    assert len(facts) >= 60
    assert all(set(each) == {"theta", "sd", "source"} for each in facts.values())
    assert all(abs(each["theta"]) < 6 and 0 < each["sd"] < 3 and each["source"] for each in facts.values())
    reference = facts["llama-3.1-8b-instruct"]
    assert reference["theta"] == pytest.approx(0.0, abs=0.05)
    assert theta("Llama-3.1-8B-Instruct") == reference["theta"] - reference["sd"], "its lower end"
    assert [name for name in facts if not parse_name(name).families] == []


def test_the_documentation_has_every_line_of_the_table():
    page = (Path(__file__).parents[1] / "docs" / "reference" / "abilities.md").read_text(encoding="utf-8")
    listed = re.findall(r"`([^`]+)` ([+-][\d.]+)", page.partition("|---|---|\n")[2])
    assert dict(listed) == {
        name: f"{facts['theta'] - facts['sd']:+.1f}" for name, facts in facts_of_the_table().items()
    }


@pytest.mark.parametrize(
    ("name", "expected", "sd"),
    [
        # Of several dates the one that is named counts, or else the weakest.
        ("gpt-4o-2024-08-06", 1.9, 0.3),
        ("azure/gpt-4o-0806", 1.9, 0.3),
        ("gpt-4o", 1.8, 0.3),
        ("gpt-4o-2025-01-01", 1.8, 0.3),
        # A name without a size is judged as the weakest of its family.
        ("llama3.2", -2.0, 1.0),  # the smallest of that version
        ("llama3.1:latest", 0.0, 1.0),
        ("llama-5", -2.0, 1.5),  # no such version: the smallest of all
        ("prod-gpt-4o-eu", 0.5, 1.0),
        ("gpt-6", 2.0, math.hypot(0.3, 0.8)),  # a successor of gpt-4.1
        ("gpt-40", 0.5, 1.5),  # a number, but not a version
        ("claude-opus-6", 0.4, 1.5),
        ("qwen-max", -0.6, 1.5),
        # A small LLM of which no other is known may be weaker than all.
        ("gpt-4.1-nano", 0.0, 1.5),
        ("deepseek-coder-lite", 0.0, 1.5),
        # A size that is named counts.
        # Between 7b and 14b on a line, by the logarithm of the size.
        ("qwen2.5:10b", -0.2 + 0.4 * 0.5146, 0.8),
        ("qwen2.5:32b", 0.2, 0.8),  # above the largest: as that one
        ("qwen2.5:3.5b", -0.2 - 0.6, 0.8),  # half the size of the smallest
        ("qwen2.5-coder:14b", -0.6, 0.8),  # coders among themselves
        ("qwen3:14b", 0.2, 1.5),  # another version: by the family
        ("deepseek-r1:7b", 1.6 - 0.6 * 6.583, 0.8),  # Ollama's distilled one
        ("dolphin-2.9-llama3.1-8b", 0.0, 1.0),
        # Of two families in a name the weaker counts.
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 1.6 - 0.6 * 6.583, 1.0),
        ("DeepSeek-R1-Distill-Llama-1B", 1.6 - 0.6 * 9.39, 1.0),
    ],
)
def test_a_name_is_judged_by_its_date_its_family_and_its_size(table, name, expected, sd):
    ability, warning = resolve_ability(name)
    assert (ability.theta, ability.sd, warning) == (pytest.approx(expected, abs=0.01), sd, "")
    assert ability.llm == name or sd == 0.3, "what is guessed goes by the name that was given"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # A size alone may only lower ability.
        ("tinymodel-1b", -1.8),
        ("hugemodel-700b", 0.0),
        # A name that says nothing is judged as the default.
        *((name, 0.0) for name in ("my-assistant", "unknown", "ggml-model-q4_0.gguf", "m", "gpt2", "-", "é")),
    ],
)
def test_a_name_of_no_known_family_is_judged_with_a_warning(table, name, expected):
    ability, warning = resolve_ability(name)
    assert ability.theta == pytest.approx(expected)
    assert name in warning
    assert "rgate ability" in warning


def test_a_wrong_guess_never_raises_ability_above_the_smallest_of_a_family():
    words = ["", "pro", "max", "ultra", "9", "next", "large", "xl", "2030-01-01", "prod-eu"]
    for family in ("llama", "qwen", "gpt", "claude", "gemini", "gemma", "phi", "mistral", "deepseek"):
        names = [name for name in facts_of_the_table() if family in parse_name(name).families]
        smallest = min(theta(name) for name in names)
        for word in words:
            name = f"{family}-zzz-{word}"
            assert theta(name) <= smallest, name


SUCCESSORS = {  # names without published figures, and their predecessors
    "claude-opus-6": "claude-opus-5",
    "claude-sonnet-5-1": "claude-sonnet-5",
    "claude-haiku-5": "claude-haiku-4-5",
    "claude-fable-6": "claude-fable-5-1",
    "gpt-5.3": "gpt-5.2",
    "gpt-7": "gpt-5.5",
    "openai/gpt-7-high": "gpt-5.5",
    "gpt-5.5-mini": "gpt-5.4-mini",
    "gpt-7-nano": "gpt-5.4-nano",
    "gpt-5.5-pro": "gpt-5.4-pro",
    "gpt-6-luna": "gpt-5.6-luna",
    "google/gemini-4-pro-preview": "gemini-3.1-pro-preview",
    "gemini-4-flash": "gemini-3.7-flash",
    "gemini-3.5-flash-lite": "gemini-2.5-flash-lite",
    "o5-mini": "o4-mini",
    "grok-5": "grok-4.6",
    "grok-4-mini": "grok-3-mini",
    "kimi-k4": "kimi-k3",
    "glm-5": "glm-4.7",
    "qwen4-max": "qwen3.8-max",
    "qwen3.7-plus": "qwen3.6-plus",
    "qwen4-flash": "qwen3.6-flash",
    "deepseek-v5-pro": "deepseek-v4-pro",
    "deepseek-r2": "deepseek-r1-0528",
    "muse-spark-2_max": "muse-spark-1.2",
}


@pytest.mark.parametrize(("name", "predecessor"), SUCCESSORS.items())
def test_a_successor_counts_as_its_latest_known_predecessor_with_a_wide_deviation(name, predecessor):
    ability, known = resolve_ability(name)[0], resolve_ability(predecessor)[0]
    assert ability.source == f"its latest known predecessor, {known.llm}"
    assert ability.theta == known.theta
    assert ability.sd >= known.sd + 0.2


@pytest.mark.parametrize(
    ("name", "weakest"),
    [
        ("gpt-5.6", "gpt-5.6-luna"),
        ("gpt-5.6-zzz", "gpt-5.6-luna"),
        ("claude-zzz-4-5", "claude-haiku-4-5"),
        ("gemini-3", "gemini-3-flash"),
        ("gpt-5.1-codex-mini", "gpt-5-nano"),  # of 5.1 one tier is known, which need not be the weakest
        ("my-gpt-5", "gpt-5-nano"),
        ("o3-pro", "o3-mini"),
    ],
)
def test_an_unknown_tier_counts_as_the_weakest_of_its_version(name, weakest):
    assert theta(name) == theta(weakest)


@pytest.mark.parametrize(
    "weaker_first",
    [
        "claude-3-haiku claude-3-5-haiku claude-haiku-4-5",
        "claude-sonnet-4 claude-sonnet-4-5 claude-sonnet-4-6 claude-sonnet-5",
        "claude-3-opus claude-opus-4 claude-opus-4-1 claude-opus-4-5 claude-opus-4-6 claude-opus-4-7 claude-opus-4-8 "
        "claude-opus-5",
        "gpt-4 gpt-4o gpt-5.2 gpt-5.4 gpt-5.1 gpt-5 gpt-5.5",  # in the order of their figures
        "gpt-4.1-nano gpt-4.1-mini gpt-4.1",
        "gpt-5-nano gpt-5-mini gpt-5",
        "gpt-5.4-nano gpt-5.4-mini gpt-5.4",
        "gemini-1.5-flash gemini-2.5-flash gemini-3-flash gemini-3.7-flash",
        "gemini-1.5-pro gemini-2.5-pro gemini-3-pro gemini-3.1-pro",
        "qwen3.6-flash qwen3.5-flash qwen3.5-plus qwen3.6-plus qwen3.8-max qwen3-max qwen3.6-max qwen3.7-max",
        "o3-mini o4-mini o1 o3",
        "grok-4.20 grok-4.3 grok-4 grok-4.5 grok-4.6",
        "glm-4.5 glm-4.7 glm-5.1 glm-5.2 glm-5.3",
        "kimi-k2 kimi-k2.5 kimi-k2.6 kimi-k3",
        "deepseek-v4-flash deepseek-v4-pro",
    ],
)
def test_llms_of_a_family_are_in_the_order_of_their_figures(weaker_first):
    thetas = [theta(name) for name in weaker_first.split()]
    assert thetas == sorted(thetas)


@pytest.mark.parametrize(
    ("name", "highest"),
    [
        # Made of answers of the LLM that they name, or not an LLM that answers.
        ("Claude-Opus-4.5-Distill-GGUF", 0.0),
        ("Qwen3-8B-Claude-Opus-4.5-Distill-Q4_K_M.gguf", 0.0),
        (r"C:\models\gemini-3-pro-distill-7b.Q4_K_M.gguf", 0.2),
        ("alpaca-gpt4", 0.0),
        ("marco-o1", 0.0),
        ("o", 0.0),
        ("o-my-model-3", 0.0),
        ("gpt4all-j", 0.0),
        ("gemini-embedding-001", 0.0),
        ("Qwen3-Embedding-8B", 0.0),
        ("e5-mistral-7b-instruct", 0.0),
        ("gpt-image-1", 0.0),
        ("llama-guard-4-12b", 0.0),
        ("deepseek-ocr", 0.0),
        # The name of a family alone says little.
        ("claude-zzz", 0.0),
        ("muse", 0.0),
        ("inkling-assistant", 0.0),
        ("kimi-vl-a3b", 0.0),
        ("glm-4-flash", 0.0),  # older than all that are known
        ("muse-spark-1.1-zzz", 0.0),
        ("gemini-assistant-3", 1.0),
        ("grok-4-fast-reasoning", 1.5),
        ("gpt-6-zzz", 1.0),
        # Typing errors.
        ("gtp-5.5", 0.0),
        ("gpt-40", 1.0),
        ("claude-opus-45", 1.0),
        ("claude-opuss-4-5", 1.6),
        ("gemini-25-pro", 1.0),
        ("gpt-5.5-nanoo", 1.5),
        ("gpt-5.4-mini-2026-03-17-5", 2.5),  # a number after a date does not belong to a version
        ("claude-haiku-4-20250514-8", 1.6),
    ],
)
def test_an_odd_name_does_not_count_as_more_than_what_it_may_be(name, highest):
    assert theta(name) <= highest


def facts_of_the_table():
    return json.loads((SHIPPED / "abilities.json").read_text())


def test_the_weakest_of_several_counts(table):
    assert least_capable(["gpt-4o", "llama3.2:1b", "phi-4"]) == "llama3.2:1b"
    assert least_capable(["gpt-4o", "my-assistant"]) == "my-assistant"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":",
        "::",
        "/",
        "a:b:c",
        "x" * 100_000,
        "-".join("1" * 500),
        "ft:",
        "\0",
        "9" * 350 + "x7b",
        "9" * 350 + "t",
    ],
)
def test_any_text_is_a_name(name):
    ability, warning = resolve_ability(name)
    assert ability.theta == 0.0
    assert bool(warning) == bool(name), "no name is the default without a warning"


def test_a_measured_ability_is_saved_and_goes_before_the_name_of_its_folder(tmp_path):
    measured = Ability("m", 1.234, 0.25, "100 anchors")
    folder = save_measured(measured, tmp_path / "gpt-4o")
    assert resolve_ability(str(folder)) == (measured, "")


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format": 2}', '{"format": 1, "llm": "m", "theta": NaN, "sd": 1, "source": ""}', "\xff"],
)
def test_a_damaged_measurement_is_refused(tmp_path, content):
    (tmp_path / "ability.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        resolve_ability(str(tmp_path))


@pytest.mark.parametrize("name", ["./nope", "../nope", "~/nope", "./ability-llama-3.1-8b", "./\0"])
def test_a_path_to_nothing_is_no_name_where_the_user_gives_it(name):
    """Regression: a mistyped folder was judged as an LLM of that name, here as Llama-3.1-8B."""
    with pytest.raises(ConfigurationError, match=r"does not exist.* Hint: .*rgate ability"):
        load_gate(llm_name=name)
    assert isinstance(rgate("gates", "--llm", name).exception, ConfigurationError)
    assert load_gate().gate.for_llm(name, "the chain").llm_name == name  # a server's own path


def test_a_folder_that_exists_and_a_path_of_a_server_are_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "phi-4").mkdir()
    (tmp_path / "profile").mkdir()
    with pytest.raises(ConfigurationError, match="no measured ability"):
        load_gate(llm_name="./profile")
    for name in ("./phi-4", "/models/phi-4"):
        assert load_gate(llm_name=name).gate.ability.theta == theta("phi-4")
