"""Model folders that bring code or pickled weights are refused; the identity of an embedder is what it holds."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rgate_integrations.errors import IndexMismatchError, ModelLoadError
from rgate_integrations.index import Passage, PassageIndex
from rgate_integrations.index.embedder import SentenceEmbedder
from rgate_integrations.models.pretrained import load_adapter, load_pretrained
from rgate_integrations.runtime.files import write_atomically
from tests.damaged import with_damage
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
def pooled(tiny, tmp_path_factory):
    """A sentence-transformers folder."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    folder = tmp_path_factory.mktemp("pooled")
    SentenceTransformer(modules=[Transformer(tiny), Pooling(32)], device="cpu").save(str(folder))
    return folder


@pytest.fixture
def embedder(pooled, tmp_path):
    """One of the test's own."""
    return shutil.copytree(pooled, tmp_path / "embedder")


@pytest.fixture
def llm(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "llm")


def load(folder):
    return load_pretrained(str(folder), "cpu")


def embed(folder):
    return SentenceEmbedder(str(folder)).embed(["one", "two"])


# --- code --------------------------------------------------------------------------------------------------


def name_module(embedder, name):
    (embedder / "modules.json").write_text(json.dumps([{"idx": 0, "path": "", "type": name}]))


def as_router(embedder):
    name_module(embedder, "sentence_transformers.models.Router")
    (embedder / "router_config.json").write_text(
        json.dumps({"types": {"": add_code(embedder)}, "structure": {}})
    )


CODE = {
    "a module of the folder": lambda folder: name_module(folder, add_code(folder)),
    "a module of another package": lambda folder: name_module(folder, "subprocess.Popen"),
    "a module of a router": as_router,
    "an architecture": lambda folder: change(
        folder / "config.json", model_type="own", auto_map={"AutoConfig": add_code(folder)}
    ),
    "no JSON": lambda folder: (folder / "modules.json").write_text("{"),
}


@pytest.mark.parametrize("way", CODE)
def test_no_way_of_code_into_an_embedder_is_open(embedder, way):
    CODE[way](embedder)
    says = "references the module class|contains custom code|Expecting property name"
    with pytest.raises(ModelLoadError, match=f"({says}).* Hint: "):
        embed(embedder)


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


# --- what is missing or damaged ----------------------------------------------------------------------------


def rewrite(path, change):
    from safetensors.torch import load_file, save_file

    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def test_a_model_or_adapter_without_some_weights_is_refused(llm, tmp_path):
    """Regression: transformers makes up what is missing at random, so a gate on such a model skipped at random."""
    adapter = save_lora(llm, tmp_path / "adapter")
    rewrite(Path(adapter, "adapter_model.safetensors"), lambda tensors: dict(list(tensors.items())[1:]))
    with pytest.raises(ModelLoadError, match=r"weights are missing \(1 in all\), such as .*lora"):
        load_adapter(load(llm), adapter, "one")
    rewrite(
        llm / "model.safetensors",
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "layers.0" not in name},
    )
    with pytest.raises(ModelLoadError, match=r"weights are missing \(\d+ in all\), such as model\.layers\.0"):
        load(llm)


def test_damaged_weights_are_a_typed_error_with_a_hint(llm, tmp_path):
    """Regression: a SafetensorError, without a hint."""
    adapter = save_lora(llm, tmp_path / "adapter")
    Path(adapter, "adapter_model.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(ModelLoadError, match=r" Hint: "):
        load_adapter(load(llm), adapter, "one")
    (llm / "model.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(ModelLoadError, match=r" Hint: "):
        load(llm)


# --- pickles -----------------------------------------------------------------------------------------------


def index_of_a_pickle(llm):
    pickled(llm, as_name="other.bin")
    (llm / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "other.bin"}})
    )


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
    with pytest.raises(ModelLoadError, match=f"{said}.* Hint: "):
        load(llm)


@pytest.mark.parametrize("weight_map", [["other.bin"], {"lm_head.weight": 1}, None])
def test_a_damaged_index_of_weights_is_named(llm, embedder, weight_map):
    for folder, read in ((llm, load), (embedder, embed)):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelLoadError, match=r"could not be loaded.* Hint: "):
            read(folder)


def test_a_device_that_is_missing_is_named(llm):
    with pytest.raises(ModelLoadError, match=r"device 'no-such-device'.* Hint: .*cpu"):
        load_pretrained(str(llm), "no-such-device")


@pytest.mark.parametrize("config", [[], {"peft_type": 1}, {"peft_type": "LORA", "r": "two"}])
def test_a_damaged_configuration_of_an_adapter_is_named(llm, tmp_path, config):
    folder = save_lora(llm, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="could not be loaded into the model"):
        load_adapter(load(llm), folder, "own")


def test_a_pickle_beside_safetensors_is_not_read(llm):
    (llm / "pytorch_model.bin").write_bytes(b"not to be read")
    assert load(llm).config.hidden_size == 32


def test_an_embedder_is_not_read_from_a_pickle(embedder, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense

    model = SentenceTransformer(str(embedder), device="cpu")
    model.append(Dense(32, 4))
    deeper = tmp_path / "deeper"
    model.save(str(deeper))
    pickled(deeper / "2_Dense")
    pickled(embedder)
    for folder in (embedder, deeper):
        with pytest.raises(ModelLoadError, match=r"not safetensors: pytorch_model\.bin"):
            embed(folder)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that moves a folder into the Hub's cache, as that of ``own/NAME``; nothing else is on the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def move(folder, name):
        repository, commit = tmp_path / "hub" / f"models--own--{name}", "0" * 40
        shutil.copytree(folder, repository / "snapshots" / commit)
        write_atomically(repository / "refs" / "main", commit)
        return f"own/{name}"

    return move


def test_where_downloads_are_forbidden_no_hub_id_is_looked_up(hub, llm, embedder, tmp_path, monkeypatch):
    """Regression: each look-up took 20 seconds in a container without a network, also for what is in the cache."""
    looked_up = []

    def look_up(host, *_, **__):
        looked_up.append(host)
        raise RuntimeError("no network")  # the Hub's client would ask again after a socket's own errors

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    adapter = hub(save_lora(llm, tmp_path / "adapter"), "adapter")
    model = load(hub(llm, "llm"))
    load_adapter(model, adapter, "own")
    assert embed(hub(embedder, "embedder")).shape == (2, 32)
    for missing in (load, embed):
        with pytest.raises(
            ModelLoadError, match=r" Hint: .*in Hugging Face's cache, because RGATE_OFFLINE=1"
        ):
            missing("own/missing")
    with pytest.raises(ModelLoadError):
        load_adapter(model, "own/missing", "missing")
    assert looked_up == []


@pytest.mark.parametrize("on_hub", [False, True])
def test_an_adapter_is_not_read_from_a_pickle(hub, llm, tmp_path, on_hub):
    """Also of a Hub id, whose files are in the Hub's cache."""
    folder = tmp_path / "adapter"
    save_lora(llm, folder)
    load_adapter(load(llm), str(folder), "own")
    pickled(folder, "adapter_model.safetensors", "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        load_adapter(load(llm), hub(folder, "adapter") if on_hub else str(folder), "own")


# --- the identity of an embedder ---------------------------------------------------------------------------


def flipped(content):
    """The same length of bytes, the last of which is another."""
    return content[:-1] + bytes([content[-1] ^ 1])


def identity(folder):
    return SentenceEmbedder(str(folder)).identity


@pytest.mark.parametrize(
    ("name", "is_same"),
    [
        ("model.safetensors", False),
        ("tokenizer.json", False),
        ("1_Pooling/config.json", False),
        ("README.md", True),
    ],
)
def test_a_change_of_equal_size_changes_the_identity(embedder, tmp_path, name, is_same):
    changed = with_damage(embedder, tmp_path / "changed", name, flipped)
    assert (identity(changed) == identity(embedder)) is is_same


def test_an_index_of_changed_weights_is_to_be_built_again(embedder, tmp_path):
    PassageIndex.build([Passage("a", "one")], SentenceEmbedder(str(embedder))).save(tmp_path / "index")
    assert PassageIndex.load(tmp_path / "index").search(["one"])[0][0].passage.id == "a"
    weights = embedder / "model.safetensors"
    weights.write_bytes(flipped(weights.read_bytes()))
    with pytest.raises(
        IndexMismatchError, match=r"was built with the embedder.* Hint: .*build the index again"
    ):
        PassageIndex.load(tmp_path / "index")
