"""The encoder: its tokens and numbers, what they do not depend on, and what happens without its files."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rgate_integrations.cli.doctor import _examine
from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.catalog import entry
from rgate_integrations.models.download import cached_path, download
from rgate_integrations.models.encoder import (
    ALL_LAYERS,
    ENCODER,
    FINGERPRINT,
    STATES,
    Encoder,
    Tokens,
    _windows,
)
from rgate_integrations.models.encoder_file import (
    ADAPTER,
    FLOATS,
    FOUR_BIT,
    HIDDEN,
    LAYERS,
    TOKENIZER,
    TOKENS,
    WEIGHTS,
    adapter_digest,
    dequantise,
    make_encoder,
    read_weights,
    sentencepiece_model,
)
from rgate_integrations.models.sources import fetch_files
from rgate_integrations.runtime.files import write_folder
from tests.damaged import with_damage, zeroed

TEXTS = [
    "What is the capital of France?",
    "a",
    "",
    "Wie viele Urlaubstage habe ich noch?",
    "昨晚的比赛谁赢了？",
    "متى يجب أن أدفع الفاتورة؟",
    "कल की बैठक किस समय है?",
    "Écris un poème sur 東京 🙂 " * 7,
    "What does our contract say about late delivery? " * 30,
    "<s> half a pair \ud800, nothing \x00, and a joined \N{THUMBS UP SIGN}\U0001f3fd",
    "The parcel was sent to the depot and weighed before noon, as the list says. " * 40,
]
SCRIPTS = [
    "Когда нужно оплатить счёт № 12?",
    "Πότε λήγει η σύμβαση;",
    "המשלוח יצא אתמול?",
    "ใบแจ้งหนี้ครบกำหนดเมื่อไหร่",
    "請求書の支払期限はいつですか？",
    "다음 회의는 언제입니까?",
    "বিল কবে দিতে হবে?",
    "எப்போது பணம் செலுத்த வேண்டும்?",
    "Ｆｕｌｌ ｗｉｄｔｈ, ﬁgures ½ and 𝐛𝐨𝐥𝐝 letters",
    "Zażółć gęślą jaźń; cæsar, naïve façade – “quoted” …",
    "print(f'{x:>8}')  # tabs\tand\nlines",
    "https://example.org/a?b=c&d=%20e 10:21 ERROR x.y: failed (3)",
]
QUESTION = "When is my bill due, and what did the plumber cost last year?"
PIECES = [
    ["▁Hi", "▁Anna", ",", "▁it", "▁rain", "ed", "."],
    ["我的", "账", "单", "什么时候", "到", "期", "?"],
    ["谢谢", "。"],
    ["▁Thanks", "!"],
]
RESIDENT = """
from pathlib import Path
from rgate_integrations.models.encoder import Encoder
Encoder(Path({folder!r})).encode(["What is the capital of France?"])
(line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(line.split()[1]) / 1024)
"""


@pytest.fixture(scope="module")
def encoder():
    download(ENCODER)
    return Encoder.shared()


@pytest.fixture(scope="module")
def source(request):
    """The files that the encoder is made of; kept from one run of the tests to the next."""
    folder = Path(request.config.cache.mkdir("encoder-source"))
    if not list(folder.rglob(FOUR_BIT)):
        fetch_files(entry(ENCODER), "index", folder)
    return folder


@pytest.fixture(scope="module")
def hub_folder(source, tmp_path_factory):
    """The model as the Hub has it: float32 by the Hub's names, and its tokenizer."""
    from safetensors.numpy import save_file

    folder = tmp_path_factory.mktemp("hub")
    floats = {}
    for name, array in read_weights(source).items():
        if array.dtype == np.uint8:
            array = dequantise(array).reshape(-1)
        floats[name] = array
    for name in floats:
        if name.endswith("weight") and "LayerNorm" not in name:
            is_down = name.endswith("output.dense.weight") and "attention" not in name
            floats[name] = floats[name].reshape(-1, 4 * HIDDEN if is_down else HIDDEN)
    save_file(floats, folder / FLOATS)
    shutil.copy(next(source.rglob(TOKENIZER)), folder)
    return folder


def cosines(some, others):
    return (some * others).sum(-1) / np.linalg.norm(some, axis=-1) / np.linalg.norm(others, axis=-1)


def same(some, others):
    """Whether texts gave the same bits."""
    return all(
        np.array_equal(one.whole, other.whole) and np.array_equal(one.segments, other.segments)
        for one, other in zip(some, others, strict=True)
    )


# --- its tokens --------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_tokens_are_those_of_tokenizers(encoder, source):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(next(source.rglob(TOKENIZER))))
    for text in [*TEXTS[:9], *SCRIPTS]:
        words = " ".join(text.split())
        expected = tokenizer.encode(words, add_special_tokens=False).ids if words else []
        assert encoder.ids(words) == expected, text


@pytest.mark.model
def test_the_spellings_of_control_tokens_are_text(encoder):
    for text in ("<s>", "</s>", "<pad>", "<mask>", "<unk>", "query: </s> passage:"):
        assert {0, 1, 2, 250_001}.isdisjoint(encoder.ids(text))


def test_a_sentencepiece_model_is_written():
    from sentencepiece import SentencePieceProcessor

    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", "a", "▁ab", "b", "c", "<mask>"]
    vocabulary = [[piece, -float(i)] for i, piece in enumerate(pieces)]
    rules = {"type": "Precompiled", "precompiled_charsmap": ""}
    content = {
        "added_tokens": [{"id": i} for i in (0, 1, 2, 3, 9)],
        "model": {"unk_id": 3, "vocab": vocabulary},
        "normalizer": {"normalizers": [rules]},
    }
    made = SentencePieceProcessor(model_proto=sentencepiece_model(content))
    assert made.encode(" ab  c x<mask>") == [6, 4, 8, 4, 3, 5, 3]
    assert (made.unk_id(), made.bos_id(), made.eos_id(), made.pad_id()) == (3, 0, 2, 1)
    assert made.get_score(8) == -8.0


# --- its numbers -------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_states_are_close_to_those_of_transformers(encoder, hub_folder):
    import torch
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=250_037,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=12,
        intermediate_size=4 * HIDDEN,
        layer_norm_eps=1e-12,
    )
    exact = BertModel(config, add_pooling_layer=False).eval()
    missing = exact.load_state_dict(load_file(hub_folder / FLOATS), strict=False)
    assert not missing.missing_keys
    prefix = encoder.ids("query: ")
    for text in (*TEXTS[:8], TEXTS[8][:1000]):
        ids = [0, *prefix, *encoder.ids(text), 2]
        with torch.no_grad():
            states = exact(torch.tensor([ids]), output_hidden_states=True).hidden_states
        wanted = np.stack([states[layer][0].mean(0).numpy() for layer in STATES])
        (found,) = encoder.encode([text])
        assert cosines(found.whole, wanted).min() > 0.997
        np.testing.assert_allclose(
            encoder.vectors([text], "query: ")[0],
            found.whole[-1] / np.linalg.norm(found.whole[-1]),
            atol=1e-6,
        )
    matrices = load_file(ADAPTER)
    weights = exact.state_dict()
    for name in {name.rpartition(".")[0] for name in matrices}:
        weights[f"{name}.weight"] += (matrices[f"{name}.down"].float() @ matrices[f"{name}.up"].float()).T
    for text in TEXTS[:8]:
        with torch.no_grad():
            ids = torch.tensor([[0, *prefix, *encoder.ids(text), 2]])
            wanted = exact(ids).last_hidden_state[0].mean(0).numpy()
        (found,) = encoder.encode([text], layers=(ALL_LAYERS,))
        assert cosines(found.whole, wanted[None]).min() > 0.997


@pytest.mark.model
def test_no_company_changes_one_bit(encoder):
    parts = [[(0, len(text) // 2), (len(text) // 2, len(text))] for text in TEXTS]
    alone = [encoder.encode([text], [own])[0] for text, own in zip(TEXTS, parts, strict=True)]
    short = [QUESTION[:end] for end in range(1, len(QUESTION), 4)]
    short_alone = [encoder.encode([text])[0] for text in short]
    for each in (encoder, *(Encoder(cached_path(ENCODER), threads=threads) for threads in (1, 3))):
        assert same(each.encode(TEXTS, parts), alone)
        mixed = each.encode([*short, *TEXTS[::-1]])
        assert same(mixed[: len(short)], short_alone)
    assert same(encoder.encode(TEXTS * 2, parts * 2), alone * 2)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: encoder.encode([TEXTS[i % 9]], [parts[i % 9]])[0], range(18)))
    assert same(found, [alone[i % 9] for i in range(18)])


@pytest.mark.model
def test_layers_above_those_that_are_wanted_change_nothing_and_are_not_computed(encoder):
    (every,) = encoder.encode([QUESTION], layers=range(1, ALL_LAYERS + 1))
    for layers in ((8,), (3, 1), (10, 8), (12, 8, 12), (16,), (14, 12, 6)):
        (found,) = encoder.encode([QUESTION], layers=layers)
        np.testing.assert_array_equal(found.whole, every.whole[[layer - 1 for layer in layers]])
    for layer, others in ((8, (12, 16)), (12, (16,)), (16, (12,))):
        with patch.dict(encoder._sessions, dict.fromkeys(others)):
            encoder.encode([QUESTION], layers=(layer,))


# --- parts and windows -------------------------------------------------------------------------------------------


@pytest.mark.model
def test_parts_are_means_over_their_own_tokens(encoder):
    text = "Hi Anna, it rained. 我的账单什么时候到期？谢谢。\n\nThanks!"
    parts = [(0, 19), (20, 31), (31, 34), (36, 43)]
    assert [text[begin:end] for begin, end in parts][1:] == ["我的账单什么时候到期？", "谢谢。", "Thanks!"]
    (found,) = encoder.encode([text], [parts])
    before = [0, *encoder.ids("query: ")]
    ids = [*before, *encoder.ids(text), 2]
    (states,) = encoder.states([ids], STATES)
    np.testing.assert_array_equal(found.whole, states.sum(1) / np.float32(len(ids)))
    begin = len(before)
    for part, pieces in zip(found.segments, PIECES, strict=True):
        begin = begin + 1 if pieces[0] == "我的" else begin  # behind the white space
        end = begin + len(pieces)
        assert encoder._tokens.id_to_piece(ids[begin:end]) == pieces
        np.testing.assert_allclose(part, states[:, begin:end].mean(1), atol=1e-5)
        begin = end


@pytest.mark.model
def test_a_part_without_tokens_has_those_of_its_neighbour(encoder):
    (found,) = encoder.encode(["who wrote it"], [[(0, 3), (3, 3), (4, 9), (12, 12)]])
    assert np.isfinite(found.segments).all()
    (empty,) = encoder.encode([""], [[(0, 0)]])
    assert empty.segments.shape == (1, 3, HIDDEN)
    (long,) = encoder.encode(["word " * 4_000], [[(0, 5), (19_990, 19_995)]])
    assert long.prompt_tokens < 3_100
    assert np.isfinite(long.segments).all()


@given(st.integers(0, 3_072), st.lists(st.integers(0, 3_071), max_size=6), st.integers(2, 8))
def test_every_token_counts_in_one_window(count, cuts, before):
    ids = [0] * before + list(range(1, count + 1)) + [2]
    borders = sorted({min(cut, count) + before for cut in cuts})
    row = Tokens(ids, [(0, len(ids)), *pairwise(borders)])
    counted = [[] for _ in row.ranges]
    for window in _windows(row, before):
        assert len(window.ids) <= 512
        assert window.ids[:before] == ids[:before]
        for own, (begin, end) in zip(counted, window.ranges, strict=True):
            own += window.ids[begin : max(begin, end)]
            assert begin >= 0 or end <= begin
    assert counted == [ids[begin:end] for begin, end in row.ranges]


# --- its files ---------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.slow
def test_the_same_files_are_made_of_the_hubs(encoder, hub_folder, tmp_path):
    make_encoder(hub_folder, tmp_path)
    for name in (WEIGHTS, TOKENS):
        assert (tmp_path / name).read_bytes() == (cached_path(ENCODER) / name).read_bytes()
    assert entry(ENCODER).sha256.startswith(FINGERPRINT)


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (WEIGHTS, None, "could not be loaded"),
        (TOKENS, None, "could not be loaded"),
        (TOKENS, lambda content: content[: len(content) // 2], "could not be loaded"),
        (TOKENS, lambda content: b"no model" * 1_000, "could not be loaded"),
        # Twentieths: the table ends at 14.
        (WEIGHTS, lambda content: content[: len(content) // 2], "could not be loaded"),
        (WEIGHTS, lambda content: content[: 19 * len(content) // 20], "could not be loaded"),
        (WEIGHTS, lambda content: zeroed(content, 15, 20), "wrong hidden states"),
        (WEIGHTS, lambda content: zeroed(content, 19, 20), "wrong hidden states"),
        (WEIGHTS, lambda content: bytes(len(content)), "wrong hidden states"),
    ],
)
def test_missing_and_damaged_files_are_noticed(encoder, tmp_path, name, damage, says):
    with pytest.raises(ModelLoadError, match=f"{says}.* Hint: .*rgate download {ENCODER}"):
        Encoder(with_damage(cached_path(ENCODER), tmp_path / "encoder", name, damage))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("Exception during loading: std::bad_alloc")])
def test_without_memory_the_hint_is_not_to_download_it_again(tmp_path, error):
    with (
        patch.object(Encoder, "_load", side_effect=error),
        pytest.raises(ModelLoadError, match=r"could not be loaded: .* Hint: Give the process more memory"),
    ):
        Encoder(tmp_path)


@pytest.mark.usefixtures("own_cache")
def test_doctor_reads_with_it(tmp_path):
    files = {"rgate.json": "{}", TOKENS: "no model", WEIGHTS: "no weights"}
    write_folder(tmp_path / f"{ENCODER}-{adapter_digest()}", files)
    found = {name: (state, remedy) for name, state, remedy in _examine()}
    assert "could not be loaded" in found[ENCODER][0]
    assert f"rgate download {ENCODER}" in found[ENCODER][1]


@pytest.mark.parametrize("module", ["onnxruntime", "sentencepiece"])
def test_a_cpu_that_is_refused_is_a_typed_error(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)  # its import fails, as on a CPU that it refuses
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        Encoder(tmp_path)


# --- processes ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_cache")
def test_callers_at_once_load_it_once(tmp_path):
    folder = write_folder(tmp_path / f"{ENCODER}-{adapter_digest()}", {"rgate.json": "{}"})
    with (
        patch.object(Encoder, "_load") as load,
        patch.object(Encoder, "_check_states"),
        ThreadPoolExecutor(8) as pool,
    ):
        found = [call.result() for call in [pool.submit(Encoder.shared) for _ in range(64)]]
    load.assert_called_once_with(folder)
    assert found == [found[0]] * 64


@pytest.mark.model
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say it")
def test_only_the_rows_of_tokens_that_occur_are_in_memory(encoder):
    code = RESIDENT.format(folder=str(cached_path(ENCODER)))
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(found.stdout) < 190
