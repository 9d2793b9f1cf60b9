"""Model folders that bring code or pickled weights are refused; the identity of an embedder is what it holds."""

import json
import shutil

import numpy as np
import pytest

from rgate_integrations.errors import IndexMismatchError, ModelLoadError
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models.pretrained import load_adapter, load_pretrained
from tests.test_local_proxy import save_lora

pytestmark = pytest.mark.model


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


def load(folder):
    return load_pretrained(str(folder), "cpu")


def embed(folder):
    return SentenceEmbedder(str(folder)).embed(["one", "two"])


# --- code --------------------------------------------------------------------------------------------------


def name_modules(embedder, *types):
    (embedder / "modules.json").write_text(
        json.dumps([{"idx": 0, "path": "", "type": each} for each in types])
    )


def as_router(embedder):
    name_modules(embedder, "sentence_transformers.models.Router")
    types = {"": add_code(embedder)}
    (embedder / "router_config.json").write_text(json.dumps({"types": types, "structure": {}}))


CODE = {
    "a module of the folder": lambda folder: name_modules(folder, add_code(folder)),
    "a module of another package": lambda folder: name_modules(folder, "subprocess.Popen"),
    "a module of a router": as_router,
    "an architecture": lambda folder: change(
        folder / "config.json", model_type="own", auto_map={"AutoConfig": add_code(folder)}
    ),
    "no JSON": lambda folder: (folder / "modules.json").write_text("{"),
}


@pytest.mark.parametrize("way", CODE)
def test_no_way_of_code_into_an_embedder_is_open(embedder, way):
    CODE[way](embedder)
    refused = "references the module class|contains custom code|Expecting property name"
    with pytest.raises(ModelLoadError, match=refused) as caught:
        embed(embedder)
    assert caught.value.hint


def test_an_embedder_without_code_of_its_own_embeds(embedder):
    change(embedder / "config.json", auto_map={"AutoModel": add_code(embedder)})  # transformers has its own
    np.testing.assert_allclose(np.linalg.norm(embed(embedder), axis=1), 1.0, atol=1e-5)


def test_code_beside_a_model_is_not_run(llm):
    change(llm / "config.json", auto_map={"AutoModelForCausalLM": add_code(llm)})
    assert type(load(llm)).__module__.startswith("transformers.")
    # Of an architecture that transformers does not have it would have to be run.
    change(llm / "config.json", model_type="own", auto_map={"AutoConfig": "modeling_own.Config"})
    with pytest.raises(ModelLoadError, match="custom code") as caught:
        load(llm)
    assert "never run" in caught.value.hint
    assert "trust_remote_code" not in str(caught.value)


# --- pickles -----------------------------------------------------------------------------------------------


def index_of_a_pickle(llm):
    pickled(llm, as_name="other.bin")
    parts = {"metadata": {}, "weight_map": {"lm_head.weight": "other.bin"}}
    (llm / "model.safetensors.index.json").write_text(json.dumps(parts))


def configured_pickle(llm, name):
    pickled(llm, as_name=name)
    change(llm / "config.json", transformers_weights=name)


PICKLES = {
    r"not safetensors: pytorch_model\.bin": pickled,
    r"not safetensors: other\.bin in model\.safetensors\.index\.json": index_of_a_pickle,
    r"could not be loaded.*other\.bin": lambda llm: configured_pickle(llm, "other.bin"),
    r"not safetensors: adapter_model\.bin": lambda llm: configured_pickle(llm, "adapter_model.bin"),
}


@pytest.mark.parametrize("said", PICKLES)
def test_a_model_is_not_read_from_a_pickle(llm, said):
    PICKLES[said](llm)
    with pytest.raises(ModelLoadError, match=said) as caught:
        load(llm)
    assert caught.value.hint


def test_a_pickle_beside_safetensors_is_not_read(llm):
    (llm / "pytorch_model.bin").write_bytes(b"not to be read")
    assert load(llm).config.hidden_size == 32


def test_an_embedder_is_not_read_from_a_pickle(embedder, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense

    model = SentenceTransformer(str(embedder), device="cpu")
    model.append(Dense(8, 4))
    deeper = tmp_path / "deeper"
    model.save(str(deeper))
    pickled(deeper / "2_Dense")
    pickled(embedder)
    for folder in (embedder, deeper):
        with pytest.raises(ModelLoadError, match=r"not safetensors: pytorch_model\.bin"):
            embed(folder)


@pytest.mark.parametrize("on_hub", [False, True])
def test_an_adapter_is_not_read_from_a_pickle(llm, tmp_path, monkeypatch, on_hub):
    """Also of a Hub id, whose files are in the Hub's cache, with the network off."""
    commit = "0" * 40
    repository = tmp_path / "hub" / "models--own--adapter"
    folder = repository / "snapshots" / commit
    save_lora(load(llm), folder)
    load_adapter(load(llm), str(folder), "own")
    pickled(folder, "adapter_model.safetensors", "adapter_model.bin")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        load_adapter(load(llm), "own/adapter" if on_hub else str(folder), "own")


# --- the identity of an embedder ---------------------------------------------------------------------------


def flip_last_byte(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def identity(folder):
    return SentenceEmbedder(str(folder)).identity


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "1_Pooling/config.json"])
def test_a_change_of_equal_size_changes_the_identity(embedder, name):
    before = identity(embedder)
    flip_last_byte(embedder / name)
    assert identity(embedder) != before


def test_what_does_not_change_vectors_does_not_change_the_identity(embedder, tmp_path):
    before = identity(embedder)
    (embedder / "README.md").write_text("Another one.")
    (embedder / "model.safetensors").touch()
    assert identity(embedder) == identity(shutil.copytree(embedder, tmp_path / "moved")) == before


def test_an_index_of_changed_weights_is_to_be_built_again(embedder, tmp_path):
    PassageIndex.build([Passage("a", "one")], SentenceEmbedder(str(embedder))).save(tmp_path / "index")
    assert PassageIndex.load(tmp_path / "index").search(["one"])[0][0].passage.id == "a"
    flip_last_byte(embedder / "model.safetensors")
    with pytest.raises(IndexMismatchError, match="was built with the embedder") as caught:
        PassageIndex.load(tmp_path / "index")
    assert "build it again" in caught.value.hint
