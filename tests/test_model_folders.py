"""Model folders that bring code or pickled weights are refused; the identity of an embedder is what it holds."""

import json
import os
import shutil

import numpy as np
import pytest

from rgate_integrations.errors import IndexMismatchError, ModelLoadError
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models.pretrained import load_adapter, load_pretrained

pytestmark = pytest.mark.model

TRANSFORMER = "sentence_transformers.models.Transformer"


def add_code(folder):
    """Write a Python file that ends whoever runs it."""
    (folder / "modeling_own.py").write_text("raise SystemExit('it ran')")
    return "modeling_own.Own"


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def pickled(folder, name="model.safetensors", as_name="pytorch_model.bin"):
    """Turn the weights of a folder into a pickle."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(folder / name), folder / as_name)
    (folder / name).unlink()


@pytest.fixture(scope="module")
def narrow(minilm, tmp_path_factory):
    """A sentence-transformers folder with one narrow layer of random weights."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    from rgate_integrations.models.download import cached_path

    bert = tmp_path_factory.mktemp("bert")
    tokenizer = AutoTokenizer.from_pretrained(cached_path(minilm))
    tokenizer.save_pretrained(bert)
    torch.manual_seed(0)
    size = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(tokenizer), **size)).save_pretrained(bert)
    folder = tmp_path_factory.mktemp("narrow")
    SentenceTransformer(modules=[Transformer(str(bert)), Pooling(8)], device="cpu").save(str(folder))
    return folder


@pytest.fixture
def embedder(narrow, tmp_path):
    """The folder of an embedder of the test's own."""
    return shutil.copytree(narrow, tmp_path / "embedder")


@pytest.fixture
def llm(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "llm")


def name_modules(embedder, *types):
    (embedder / "modules.json").write_text(
        json.dumps([{"idx": 0, "path": "", "type": each} for each in types])
    )


def load(folder):
    return load_pretrained(str(folder), "cpu")


def test_an_embedder_that_needs_no_code_embeds(embedder):
    (embedder / "data_config.json").write_text('[{"name": "pairs", "weight": 1}]')  # MiniLM has one
    vectors = SentenceEmbedder(str(embedder)).embed(["one", "two"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)


def test_an_index_does_not_run_the_code_of_its_embedder(embedder, tmp_path):
    PassageIndex.build([Passage("a", "one")], SentenceEmbedder(str(embedder))).save(tmp_path / "index")
    other = shutil.copytree(embedder, tmp_path / "other")
    name_modules(other, add_code(other))
    named = {"name": str(other), "identity": SentenceEmbedder(str(other)).identity}
    change(tmp_path / "index" / "index.json", embedder=named)
    index = PassageIndex.load(tmp_path / "index")
    with pytest.raises(ModelLoadError, match=r"code of its own: modeling_own\.py") as caught:
        index.search(["one"])
    assert caught.value.hint


def as_router(embedder):
    types = {"a": TRANSFORMER, "b": "os.path"}
    (embedder / "router_config.json").write_text(json.dumps({"types": types}))


CODE = {
    r"1_Pooling.extra\.py": lambda folder: (folder / "1_Pooling" / "extra.py").touch(),
    "the module 'subprocess.Popen' in modules.json": lambda folder: name_modules(folder, "subprocess.Popen"),
    "the module 'sentence_transformers_own.Own' in modules.json": lambda folder: name_modules(
        folder, TRANSFORMER, "sentence_transformers_own.Own"
    ),
    "the module 'os.path' in router_config.json": as_router,
    "auto_map in config.json": lambda folder: change(
        folder / "config.json", auto_map={"AutoModel": "own.Own"}
    ),
    "auto_map in tokenizer_config.json": lambda folder: change(
        folder / "tokenizer_config.json", auto_map={"AutoTokenizer": "own.Own"}
    ),
}


@pytest.mark.parametrize("expected", CODE)
def test_every_way_of_code_into_an_embedder_is_refused_before_loading(embedder, monkeypatch, expected):
    CODE[expected](embedder)
    monkeypatch.setattr("sentence_transformers.SentenceTransformer.__init__", None)  # nothing gets so far
    with pytest.raises(ModelLoadError, match=f"brings code of its own: {expected}"):
        SentenceEmbedder(str(embedder)).embed(["one"])


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\xff"])
def test_a_configuration_that_cannot_be_read_is_named(embedder, text):
    (embedder / "modules.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"modules\.json.*cannot be read"):
        SentenceEmbedder(str(embedder)).embed(["one"])


def test_pickled_weights_of_an_embedder_and_of_a_further_layer_are_refused(embedder, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense

    model = SentenceTransformer(str(embedder), device="cpu")
    model.append(Dense(8, 4))
    deeper = tmp_path / "deeper"
    model.save(str(deeper))
    pickled(deeper / "2_Dense")
    pickled(embedder)
    for folder, found in ((embedder, "pytorch_model"), (deeper, "2_Dense.pytorch_model")):
        with pytest.raises(ModelLoadError, match=rf"not safetensors: {found}\.bin") as caught:
            SentenceEmbedder(str(folder)).embed(["one"])
        assert "save_pretrained" in caught.value.hint


@pytest.mark.parametrize("named_by", ["model.safetensors.index.json", "config.json"])
def test_a_configuration_cannot_name_a_pickle(llm, named_by):
    pickled(llm, as_name="other.bin")
    if named_by == "config.json":
        change(llm / named_by, transformers_weights="other.bin")
    else:
        parts = {"metadata": {}, "weight_map": {"lm_head.weight": "other.bin"}}
        (llm / named_by).write_text(json.dumps(parts))
    with pytest.raises(ModelLoadError, match=rf"not safetensors: other\.bin in {named_by}"):
        load(llm)


def test_a_pickle_is_read_neither_in_place_of_safetensors_nor_beside_them(llm):
    weights = (llm / "model.safetensors").read_bytes()
    pickled(llm)
    with pytest.raises(ModelLoadError, match=r"not safetensors: pytorch_model\.bin"):
        load(llm)
    (llm / "pytorch_model.bin").write_bytes(b"not to be read")
    (llm / "model.safetensors").write_bytes(weights)
    assert load(llm).config.hidden_size == 32


def test_a_proxy_that_needs_code_of_its_own_is_refused_without_the_advice_to_run_it(llm):
    """Of an architecture that transformers does not have: it would have to be run."""
    add_code(llm)
    change(llm / "config.json", model_type="own", auto_map={"AutoConfig": "modeling_own.Config"})
    with pytest.raises(ModelLoadError, match="needs code of its own") as caught:
        load(llm)
    assert "never run" in caught.value.hint
    assert "trust_remote_code" not in str(caught.value)


def test_a_proxy_that_transformers_has_itself_loads_without_the_code_beside_it(llm):
    change(llm / "config.json", auto_map={"AutoModelForCausalLM": add_code(llm)})
    assert type(load(llm)).__module__.startswith("transformers.")


def lora(llm, folder):
    from peft import LoraConfig, get_peft_model

    model = load_pretrained(str(llm), "cpu")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    return folder


def test_pickled_weights_of_an_adapter_are_refused(llm, tmp_path):
    folder = lora(llm, tmp_path / "adapter")
    model = load_pretrained(str(llm), "cpu")
    load_adapter(model, str(folder), "own")

    pickled(folder, "adapter_model.safetensors", "adapter_model.bin")
    model = load_pretrained(str(llm), "cpu")
    with pytest.raises(ModelLoadError, match=r"not safetensors: adapter_model\.bin"):
        load_adapter(model, str(folder), "own")


def test_pickled_weights_of_an_adapter_on_the_hub_are_refused(llm, tmp_path, monkeypatch):
    """A Hub id whose files are in the Hub's cache, with the network off."""
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--own--adapter"
    folder = lora(llm, repository / "snapshots" / commit)
    pickled(folder, "adapter_model.safetensors", "adapter_model.bin")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = load_pretrained(str(llm), "cpu")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        load_adapter(model, "own/adapter", "own")


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    before = path.stat()
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync and archives do


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "1_Pooling/config.json"])
def test_a_change_of_equal_size_changes_the_identity(embedder, name):
    model = SentenceEmbedder(str(embedder))
    before = model.identity
    assert model.identity == before
    flip_last_byte(embedder / name)
    assert model.identity != before


def test_what_does_not_change_vectors_does_not_change_the_identity(embedder, tmp_path):
    before = SentenceEmbedder(str(embedder)).identity
    (embedder / "README.md").write_text("Another one.")
    (embedder / "model.safetensors").touch()
    moved = shutil.copytree(embedder, tmp_path / "moved")
    assert SentenceEmbedder(str(moved)).identity == SentenceEmbedder(str(embedder)).identity == before


def test_weights_are_hashed_once_for_each_state(embedder, monkeypatch):
    import hashlib

    hashed, digest_of = [], hashlib.file_digest

    def counting(file, name):
        hashed.append(file.name)
        return digest_of(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    first = SentenceEmbedder(str(embedder)).identity
    assert str(embedder / "model.safetensors") in hashed
    hashed.clear()
    assert SentenceEmbedder(str(embedder)).identity == first
    assert hashed == []


def test_an_index_of_changed_weights_is_to_be_built_again(embedder, tmp_path):
    PassageIndex.build([Passage("a", "one")], SentenceEmbedder(str(embedder))).save(tmp_path / "index")
    assert PassageIndex.load(tmp_path / "index").search(["one"])[0][0].passage.id == "a"
    flip_last_byte(embedder / "model.safetensors")
    with pytest.raises(IndexMismatchError, match="was built with the embedder") as caught:
        PassageIndex.load(tmp_path / "index")
    assert "build it again" in caught.value.hint
