"""transformers' ``Trainer`` with a loss on the targets alone, and its checkpoints.

Imports torch: import it where it is needed.

A checkpoint is sealed with the checksums of its files when it is complete. What a kill left half written has no seal,
and what was damaged later does not match it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rgate_integrations.errors import ConfigurationError
from rgate_integrations.models.decoding import pad_left
from rgate_integrations.runtime.files import json_text, parse_json, write_atomically
from rgate_integrations.tuning.collection import Progress

_NO_LABEL = -100


@dataclass(frozen=True)
class Row:
    """A pair in tokens.

    Attributes:
        prompt: Token ids of the prompt.
        target: Token ids that should continue it.
        weight: Weight in the loss.
    """

    prompt: tuple[int, ...]
    target: tuple[int, ...]
    weight: float


def train_on_targets(
    model: Any, arguments: Any, rows: Sequence[Row], pad: int, progress: Progress
) -> transformers.Trainer:
    """Return the trainer, ready to run.

    Args:
        model: The model, with an adapter in it.
        arguments: ``TrainingArguments``.
        rows: What to learn.
        pad: Token id of the padding.
        progress: Told what is being done, how far it is, and how far it goes.
    """
    trainer = TargetTrainer(
        model=model,
        args=arguments,
        train_dataset=list(rows),
        data_collator=Collator(pad),
        callbacks=[ReportProgress(progress), SealCheckpoints()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


class TargetTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types here
    """Minimises the mean negative log-probability of the target tokens, each with its row's weight."""

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        """Return the loss, and the logits if they are asked for."""
        labels, weights = inputs.pop("labels"), inputs.pop("weights")
        # All targets end at the end of their row (see `Collator`), so the last logits are enough; the logit that
        # predicts a token stands one before it.
        logits = model(**inputs, logits_to_keep=labels.shape[1] + 1, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        is_target = labels >= 0
        target_logprobs = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        token_weights = is_target * weights[:, None]
        loss = -(target_logprobs * token_weights).sum() / token_weights.sum().clamp(min=1e-6)
        return (loss, {"logits": logits}) if return_outputs else loss


class ReportProgress(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Tells the last loss and the number of steps that are done.

    Args:
        progress: Is told.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.loss = ""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the loss."""
        if logs and "loss" in logs:
            self.loss = f", loss {float(logs['loss']):.3f}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell."""
        self.progress(f"training{self.loss}", state.global_step, state.max_steps)


class SealCheckpoints(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """Seals each checkpoint once all of its files are written."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seal the checkpoint that was just written."""
        if state.is_world_process_zero:
            seal(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows, padded on the left, so that all targets end in the last position.

    Attributes:
        pad: Token id of the padding.
    """

    pad: int

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return the batch; positions count from the first token that is no padding."""
        ids, mask = pad_left([(*row.prompt, *row.target) for row in rows], self.pad, torch.device("cpu"))
        widest = max(len(row.target) for row in rows)
        labels = [[_NO_LABEL] * (widest - len(row.target)) + list(row.target) for row in rows]
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "labels": torch.tensor(labels),
            "weights": torch.tensor([row.weight for row in rows]),
        }


_SEAL = "checksums.json"
_RUN = "run.json"


def prepare(checkpoints: Path, identity: str, resume: bool) -> bool:
    """Return whether there are checkpoints of this very run to go on from; else make an empty folder for them.

    Raises:
        ConfigurationError: The checkpoints are of a run with other data, options or weights.
    """
    marker = checkpoints / _RUN
    if resume and _keep_whole(checkpoints):
        if marker.is_file() and marker.read_text(encoding="utf-8") == identity:
            return True
        raise ConfigurationError(
            "The run that was stopped had other data, options or another base model.",
            hint="Leave out --resume to begin anew, or train into another folder.",
        )
    shutil.rmtree(checkpoints, ignore_errors=True)
    write_atomically(marker, identity)
    return False


def seal(checkpoint: Path) -> None:
    """Write the checksums of a complete checkpoint's files into it.

    Raises:
        WriteError: They could not be written, such as on a full disk.
    """
    write_atomically(checkpoint / _SEAL, json_text(_checksums(checkpoint)))


def _keep_whole(checkpoints: Path) -> bool:
    """Remove the checkpoints that are not as they were sealed; returns whether one is left."""
    left = False
    for folder in checkpoints.glob("checkpoint-*"):
        if _is_whole(folder):
            left = True
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return left


def _is_whole(checkpoint: Path) -> bool:
    try:
        sealed = parse_json((checkpoint / _SEAL).read_bytes())
        found = _checksums(checkpoint)
    except (OSError, ValueError):
        return False
    # Other processes of the run may add files of their own after the seal.
    return isinstance(sealed, dict) and bool(sealed) and sealed.items() <= found.items()


def _checksums(checkpoint: Path) -> dict[str, str]:
    found = {}
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and path.name != _SEAL:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
