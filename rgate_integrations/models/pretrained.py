"""Loads a causal language model, its tokenizer and LoRA adapters with transformers. Code and pickles are refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.download import resolve_model
from rgate_integrations.models.model_folder import quiet, refuse_pickles

_ADAPTER_WEIGHTS = "adapter_model.safetensors"


def load_pretrained(name: str, device: str = "auto", dtype: str = "auto") -> Any:
    """Load a model, ready to run.

    Args:
        name: Catalogue name, local folder, or Hub id.
        device: A torch device, or ``"auto"``: CUDA when there is one.
        dtype: ``"float32"`` or ``"bfloat16"``, or ``"auto"``: bfloat16 on CUDA alone.

    Raises:
        ModelLoadError: There is no causal language model that can be loaded, or its weights are not safetensors.
        UnknownNameError: Neither a catalogue name, nor a folder, nor a Hub id.
    """
    where = resolve_model(name)
    refuse_pickles(where)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    with _load_errors(name), quiet(transformers):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            where,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
    return model.to(device).eval()


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer.

    Raises:
        ModelLoadError: There is none, or no fast one.
        UnknownNameError: Neither a catalogue name, nor a folder, nor a Hub id.
    """
    where = resolve_model(name)
    with _load_errors(name), quiet(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise ModelLoadError(f"The tokenizer of {name!r} has no fast version.", hint="Save tokenizer.json.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@contextmanager
def _load_errors(name: str) -> Iterator[None]:
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


def load_adapter(model: Any, adapter: str, name: str) -> None:
    """Put a LoRA adapter into a model, and leave it off.

    Args:
        model: A causal language model of transformers.
        adapter: Folder or Hub id.
        name: What the model is to call it.

    Raises:
        ModelLoadError: It does not fit, is an activated LoRA, or its weights are not safetensors. The model may hold
            a part of it by now: do not use it any more.
    """
    refuse_pickles(adapter)
    try:
        from peft import PeftConfig
        from transformers.utils import cached_file

        config = PeftConfig.from_pretrained(adapter)
        # Without them load_adapter would go on to a pickle, on the Hub too, whatever it is told.
        cached_file(adapter, _ADAPTER_WEIGHTS)
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError("it is an activated LoRA, which acts on a part of the text only")
        # Of a second adapter it is said that the first one's weights were missing; they stay as they are.
        with quiet(transformers), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model.load_adapter(adapter, adapter_name=name, peft_config=config, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelLoadError(
            f"The adapter {adapter!r} does not fit the model: {str(error).splitlines()[0]}",
            hint=f"Give a LoRA adapter of this very model, with its {_ADAPTER_WEIGHTS}: pickles are not read.",
        ) from error
    model.disable_adapters()  # loading switches it on
