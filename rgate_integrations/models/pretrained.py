"""Loads a causal language model and its tokenizer with transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.download import resolve_model
from rgate_integrations.models.encoding import PromptEncoder
from rgate_integrations.models.model_folder import refuse_pickles
from rgate_integrations.models.progress import quiet


def load_pretrained(name: str, device: str, dtype: str, *, local_files_only: bool) -> tuple[Any, Any]:
    """Load a model, ready to run, and its tokenizer.

    Args:
        name: Catalogue name, local folder, or Hub id.
        device: A torch device, or ``"auto"``: CUDA when there is one.
        dtype: ``"float32"`` or ``"bfloat16"``, or ``"auto"``: bfloat16 on CUDA alone.
        local_files_only: Never ask the Hub.

    Raises:
        ModelLoadError: There is no causal language model that can be loaded, its weights are not safetensors, or
            its tokenizer is no fast one.
        UnknownNameError: Neither a catalogue name, nor a folder, nor a Hub id.
    """
    where = resolve_model(name)
    refuse_pickles(where)
    target = torch_device(device)
    if dtype == "auto":
        dtype = "bfloat16" if target.type == "cuda" else "float32"
    tokenizer = load_tokenizer(name, local_files_only=local_files_only)
    with _said_plainly(name), quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=local_files_only,
            trust_remote_code=False,
        )
    # Nothing of the model's own settings, such as a repetition penalty, may bend what is recorded as greedy.
    model.generation_config = transformers.GenerationConfig()
    return model.to(target).eval(), tokenizer


def load_tokenizer(name: str, *, local_files_only: bool) -> Any:
    """Load a model's tokenizer alone; see `load_pretrained`."""
    where = resolve_model(name)
    with _said_plainly(name), quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            where, local_files_only=local_files_only, trust_remote_code=False, **_plain_config(where)
        )
    if not tokenizer.is_fast:
        raise ModelLoadError(f"The tokenizer of {name!r} has no fast version.", hint="Save tokenizer.json.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _plain_config(folder: str) -> dict[str, Any]:
    """Return the argument that spares `AutoTokenizer` a model's own configuration class, where it can be spared.

    It only looks for the model's type there. Importing the class takes 1.3 s and 90 MB, because torch's compiler
    comes along.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        told = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not told.get("tokenizer_class") or "auto_map" in {*told, *config}:
        return {}
    return {"config": transformers.PreTrainedConfig.from_dict(config)}


@contextmanager
def _said_plainly(name: str) -> Iterator[None]:
    """Turn what transformers raises into an error that says what to do."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if "trust_remote_code" in str(error):  # transformers' advice is to run the code
            raise ModelLoadError(
                f"The model {name!r} needs code of its own, and transformers has none for it.",
                hint="Code of model folders is never run: give a model that transformers can load without.",
            ) from None
        raise ModelLoadError(
            f"The model {name!r} could not be loaded: {str(error).splitlines()[0]}",
            hint="Give a folder or Hub id of a causal language model, or a name from `rgate download`.",
        ) from error


def make_encoder(model: Any, tokenizer: Any, max_prompt_tokens: int) -> PromptEncoder:
    """Return what makes a model's prompts, at most so long that an answer still fits into its context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 2_048
    room_for_prompt = max(context - 256, context // 2)
    return PromptEncoder(tokenizer, min(max_prompt_tokens, room_for_prompt))


def torch_device(name: str) -> torch.device:
    """Return the device of this name; ``"auto"`` is CUDA when there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
