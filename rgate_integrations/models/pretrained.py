"""Loads models, tokenizers and LoRA adapters with transformers. Never runs their code or reads pickles.

The options used here make transformers refuse code and most pickles. `refuse_pickles`, and for adapters
`load_adapter`, reject the pickles that would still be read.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rgate_integrations.errors import ModelLoadError, RGateError, first_line
from rgate_integrations.models.download import find_download_obstacle, resolve_model
from rgate_integrations.runtime.files import parse_json, read_file

_ADAPTER_WEIGHTS = "adapter_model.safetensors"


def load_pretrained(name: str, device: str = "auto", dtype: str = "auto") -> Any:
    """Load a causal language model, ready to run.

    Args:
        name: Catalogue name, local folder, or Hub id.
        device: A torch device, or ``"auto"`` for CUDA if available.
        dtype: ``"float32"``, ``"bfloat16"``, or ``"auto"`` for bfloat16 on CUDA and float32 elsewhere.

    Raises:
        ModelLoadError: It is not a causal language model, lacks weights, cannot be loaded or moved to the device, is
            missing while downloads are forbidden, or its weights are not safetensors.
        DownloadError: The model is missing and could not be downloaded.
        UnknownNameError: The name is neither a catalogue name, nor a folder, nor a Hub id.
        ImportError: The extra ``local`` is not installed.
        ConfigurationError: The user has no home folder; see `rgate_integrations.models.download.cache_dir`.
    """
    import torch
    import transformers

    where, options = resolve_model(name), offline()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    with load_errors(f"The model {name!r}"), quiet():
        refuse_pickles(where)  # before transformers opens a file
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            where,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            adapter_kwargs=options,  # an adapter beside the model is looked up with these alone
            output_loading_info=True,
            **options,
        )
        # transformers fills them with random numbers, which it only logs.
        check_weights(loading["missing_keys"])
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # torch raises the latter if it was built without CUDA
        raise ModelLoadError(
            f"The model {name!r} could not be moved to the device {device!r}: {first_line(error)}",
            hint="Use another device, such as device='cpu', or a smaller model.",
        ) from error


def load_tokenizer(name: str) -> Any:
    """Load a model's tokenizer.

    Raises:
        ModelLoadError: The model has no tokenizer that can be loaded, or is missing while downloads are forbidden.
        DownloadError: The model is missing and could not be downloaded.
        UnknownNameError: The name is neither a catalogue name, nor a folder, nor a Hub id.
        ImportError: The extra ``local`` is not installed.
        ConfigurationError: The user has no home folder; see `rgate_integrations.models.download.cache_dir`.
    """
    import transformers

    where = resolve_model(name)
    with load_errors(f"The model {name!r}"), quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, trust_remote_code=False, **offline())
    if tokenizer.pad_token_id is None:  # any token will do, because padding is masked out
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def offline() -> dict[str, bool]:
    """Return the option that keeps Hugging Face's libraries from looking up a Hub id where downloads are forbidden.

    Each look-up without a network takes 20 seconds, and a gate whose model is missing repeats it at every decision.
    """
    return {"local_files_only": bool(find_download_obstacle())}


def check_weights(missing: Collection[str]) -> None:
    """Raise a `ValueError` if weights are missing, given their names."""
    if missing:
        raise ValueError(f"weights are missing ({len(missing)} in all), such as {min(missing)}")


@contextmanager
def load_errors(
    what: str,
    hint: str = "Check the name (if it is a folder, its path), the network and the free memory. Use a name from "
    "`rgate download`, or a folder or Hub id of a causal language model that needs no code of its own: such code is "
    "never run.",
) -> Iterator[None]:
    """Convert errors of transformers inside the ``with`` block to a `ModelLoadError` about ``what``."""
    try:
        yield
    except RGateError:
        raise
    except (
        Exception
    ) as error:  # a damaged folder makes the libraries raise anything, such as a SafetensorError
        if (obstacle := find_download_obstacle()) and isinstance(error, OSError):
            hint = f"If it is a Hub id, it must be in Hugging Face's cache, because {obstacle}. {hint}"
        raise ModelLoadError(f"{what} could not be loaded: {first_line(error)}", hint=hint) from error


def load_adapter(model: Any, adapter: str, name: str) -> None:
    """Add a LoRA adapter to a model, and switch it on.

    Args:
        model: A causal language model on transformers.
        adapter: Folder or Hub id.
        name: The adapter's name in the model.

    Raises:
        ModelLoadError: The adapter cannot be read, does not fit the model, is an activated LoRA, or has
            weights that are not safetensors; or peft is not installed. Do not use the model after this error,
            because a part of the adapter may be in it.
    """
    try:
        from peft import PeftConfig
        from transformers.utils import cached_file

        config = PeftConfig.from_pretrained(adapter, **offline())
        # Raises if the safetensors file is missing: despite its options, the model would then unpickle another file.
        weights = cached_file(adapter, _ADAPTER_WEIGHTS, **offline())
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError("it is an activated LoRA, which is not supported")
        # For a second adapter, peft warns that the first one's weights are missing, which is wrong.
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            # From the folder of the file: transformers would look up a Hub id once more.
            folder = str(Path(str(weights)).parent)
            loading = model.load_adapter(folder, adapter_name=name, peft_config=config, use_safetensors=True)
        # Those of other adapters count as missing, too.
        missing = getattr(loading, "missing_keys", ())  # transformers 5.0 returns nothing
        check_weights([key for key in missing if f".{name}." in key])
    except Exception as error:  # a damaged file makes the libraries raise anything, as in `load_errors`
        raise ModelLoadError(
            f"The adapter {adapter!r} could not be loaded into the model: {first_line(error)}",
            hint='Run: pip install "rgate-integrations[local]"'
            if isinstance(error, ImportError)
            else f"Use an ordinary LoRA adapter for this model, with {_ADAPTER_WEIGHTS}; pickles are not read.",
        ) from error


def refuse_pickles(where: str) -> None:
    """Raise an error if loading a model from a folder could read pickled weights.

    That is so if the folder has pickled weights without a safetensors file beside them, or if an index of safetensors
    names a file of another type. A Hub id passes, because the loaders take only safetensors from there.

    Raises:
        ModelLoadError: Pickled weights could be read.
        OSError: An index cannot be read.
        ValueError: An index is not JSON.
        KeyError: An index has no ``weight_map``.
        TypeError, AttributeError: An index has parts of the wrong type.
    """
    folder = Path(where)
    pickles = []
    for path in [*folder.rglob("pytorch_model*.bin"), *folder.rglob("adapter_model.bin")]:
        taken_instead = path.stem.partition("-")[0].removeprefix("pytorch_") + "*.safetensors"
        if not list(path.parent.glob(taken_instead)):
            pickles.append(path.name)
    for path in folder.rglob("*.safetensors.index.json"):
        for part in parse_json(read_file(path))["weight_map"].values():
            if not part.endswith(".safetensors"):  # the suffix of the part decides how it is read
                pickles.append(f"{part} in {path.name}")
    if pickles:
        raise ModelLoadError(
            f"The model folder {where!r} has weights that are not safetensors: {min(pickles)}.",
            hint="Pickles are never read. Save the model again with save_pretrained(folder).",
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice inside the ``with`` block."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
