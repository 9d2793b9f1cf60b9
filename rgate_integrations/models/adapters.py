"""LoRA adapters of a local model: put into it once, and off until they are asked for."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from rgate_integrations.errors import ModelLoadError
from rgate_integrations.models.model_folder import refuse_pickles
from rgate_integrations.models.progress import quiet

_WEIGHTS = "adapter_model.safetensors"


class LoadedAdapter(NamedTuple):
    """An adapter in a model.

    Attributes:
        name: What the model calls it.
        activated: Whether it is an activated LoRA, which acts only on what follows its invocation tokens. Keys and
            values of all that stands before are the base model's, and may be shared with it.
    """

    name: str
    activated: bool


class Adapters:
    """The adapters of one model, by folder or Hub id.

    Args:
        model: A causal language model of transformers.
        model_name: What it is called, for errors.
    """

    def __init__(self, model: Any, model_name: str) -> None:
        self.model = model
        self.model_name = model_name
        self._loaded: dict[str, LoadedAdapter] = {}

    def load(self, adapter: str) -> LoadedAdapter:
        """Put an adapter into the model, unless it is there already, and leave it off.

        Raises:
            ModelLoadError: It does not fit, or its weights are not safetensors. The model may hold a part of it by
                now: do not use it any more.
        """
        if adapter not in self._loaded:
            refuse_pickles(adapter)
            name = f"rgate_{len(self._loaded)}"
            try:
                activated = self._load(adapter, name)
            except (OSError, ValueError, RuntimeError, ImportError) as error:
                raise ModelLoadError(
                    f"The adapter {adapter!r} does not fit {self.model_name!r}: {str(error).splitlines()[0]}",
                    hint="Give the folder of a LoRA adapter that was trained on this very model.",
                ) from error
            self._loaded[adapter] = LoadedAdapter(name, activated)
        return self._loaded[adapter]

    def _load(self, adapter: str, name: str) -> bool:
        import transformers
        from peft import PeftConfig

        config = PeftConfig.from_pretrained(adapter)
        _require_safetensors(adapter)
        activated = bool(getattr(config, "alora_invocation_tokens", None))
        if activated:
            # It is switched on for what follows the invocation tokens alone, so here it is an ordinary LoRA.
            config.alora_invocation_tokens = None
        # Of a second adapter it is said that the first one's weights were missing; they stay as they are.
        with quiet(transformers), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.model.load_adapter(adapter, adapter_name=name, peft_config=config, use_safetensors=True)
        self.model.disable_adapters()  # loading switches it on
        return activated


def _require_safetensors(adapter: str) -> None:
    """Refuse an adapter, on the Hub too, for which load_adapter would go on to a pickle, whatever it is told."""
    from transformers.utils import cached_file

    try:
        cached_file(adapter, _WEIGHTS)
    except OSError as error:
        raise ModelLoadError(
            f"The adapter {adapter!r} has no {_WEIGHTS}, or it cannot be reached: {str(error).splitlines()[0]}",
            hint="A pickle is never read: save the adapter again with save_pretrained(folder).",
        ) from error
