"""Converts a GGUF file to a plain Hugging Face folder, in a separate process; see `convert_gguf`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path


def check_converter(kind: str) -> None:
    """Check that a download of this kind can be converted, because otherwise it would be useless.

    Raises:
        MissingDependencyError: It is a GGUF, and torch, transformers or gguf is not installed.
    """
    from rgate_integrations.errors import missing_dependency

    for module in ("gguf", "torch", "transformers") if kind == "gguf" else ():
        if find_spec(module) is None:
            raise missing_dependency(module, "local")


def convert_gguf(source: Path, target: Path) -> None:
    """Save a GGUF file as a Hugging Face folder: weights (safetensors), tokenizer, chat template, settings.

    transformers loads a GGUF in 20 to 135 seconds, and the saved folder in about one. The conversion runs in a
    separate process, which frees its memory and hides its output.

    The weights stay in float32, exactly as dequantised. In float16 the folder would be half as large, but on a CPU,
    which computes in float32, SmolLM2 would load in 2.9 s instead of 1.0 s, and its logits would change by 0.02.

    Raises:
        DownloadError: The file could not be converted.
        KeyboardInterrupt: The conversion was stopped with Ctrl-C.
    """
    from rgate_integrations.errors import DownloadError

    result = subprocess.run(  # noqa: S603  a fixed command
        # -P keeps this script's folder from shadowing installed packages in the child.
        [sys.executable, "-P", __file__, str(source), str(target)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        check=False,
    )
    if result.returncode == 0:
        return
    last = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[-1]
    if last == "KeyboardInterrupt":  # Ctrl-C reaches the converter even if a worker thread waits for it
        raise KeyboardInterrupt
    raise DownloadError(
        f"The GGUF file {str(source)!r} could not be converted: {last}",
        hint="Free memory and disk space, use a smaller model, or update torch, transformers and gguf "
        "with pip install -U.",
    )


def _convert(source: Path, target: Path) -> None:
    import torch
    import transformers

    folder, name = str(source.parent), source.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are dequantised, but save_pretrained refuses a model that is still marked as quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    # Generation must stop at the tokenizer's end-of-turn token; a GGUF may name another one.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = int(model.config.get_text_config().max_position_embeddings)
    for key in ("local_files_only", "is_local", "gguf_file"):  # options of this load, not of the tokenizer
        tokenizer.init_kwargs.pop(key, None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
