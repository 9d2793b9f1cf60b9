"""Makes a plain Hugging Face folder of a GGUF file. Runs as a script of its own, see `convert_gguf`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def convert_gguf(source: Path, target: Path) -> None:
    """Save a GGUF's weights as safetensors with tokenizer.json, chat template and generation settings.

    Reading a GGUF costs 20 to 135 seconds each time, the saved folder about one, so it is done once. It
    runs in a process of its own: the memory goes back, and nothing of its chatter reaches the caller.

    The weights stay in float32, exactly as dequantised. float16 would halve the folder and hold each
    value within 4.9e-4 relative, but SmolLM2 then loads in 2.9 s instead of 1.0 s on a CPU, where
    the weights are used in float32 and would be converted at every start, and its logits move by 0.02.

    Raises:
        MissingDependencyError: torch, transformers or gguf is not installed.
        DownloadError: The file could not be converted.
    """
    from rgate_integrations.errors import DownloadError, missing_dependency

    # -P: the folder of this script must not come before the installed packages on the child's path.
    command = [sys.executable, "-P", __file__, str(source), str(target)]
    done = subprocess.run(  # noqa: S603  a fixed command
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
        check=False,
    )
    if done.returncode == 0:
        return
    last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
    if last.startswith("ModuleNotFoundError"):
        raise missing_dependency(last.rpartition("named ")[2].strip("'"), "local")
    raise DownloadError(
        f"The GGUF could not be converted: {last}",
        hint="Free memory and disk space, take a smaller model, or bring torch, transformers and gguf up to date: "
        'pip install -U "rgate-integrations[local]"',
    )


def _convert(source: Path, target: Path) -> None:
    import gguf  # noqa: F401  transformers needs it, and its own message names no extra
    import torch
    import transformers

    folder, name = str(source.parent), source.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    # The weights are dequantised by now; with the marks of the GGUF save_pretrained refuses.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    # A GGUF names one end of text; the tokenizer's end of turn is the one that generation must stop at.
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = int(model.config.get_text_config().max_position_embeddings)
    for key in ("local_files_only", "is_local", "gguf_file"):  # how it was loaded here, not what it is
        tokenizer.init_kwargs.pop(key, None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
