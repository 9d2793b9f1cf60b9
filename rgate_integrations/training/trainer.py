"""LoRA fine-tuning on prompt and target pairs, on transformers' ``Trainer``: checkpoints, resuming, several GPUs."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rgate_integrations.errors import ConfigurationError, missing_dependency
from rgate_integrations.files import rename_folder, write_atomically
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.proxy.download import resolve_model

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Pair:
    """A prompt and the text that should continue it.

    Attributes:
        prompt: The template.
        values: Its fields.
        target: What the model should write.
        weight: Weight of the pair in the loss; a soft label is two pairs.
        ends: Whether the end of the turn follows the target; verdicts are only ever scored.
    """

    prompt: PromptTemplate
    values: Mapping[str, str]
    target: str
    weight: float = 1.0
    ends: bool = True


@dataclass(frozen=True)
class Recipe:
    """How to fine-tune.

    Attributes:
        epochs: Passes over the pairs.
        learning_rate: Peak learning rate.
        batch_size: Pairs an optimizer step.
        rank: LoRA rank.
        alpha: LoRA scaling.
        dropout: LoRA dropout.
        schedule: Learning rate schedule of transformers.
        warmup: Share of the steps that warm up.
        per_device: Pairs a forward pass; several passes make a step.
    """

    epochs: float
    learning_rate: float
    batch_size: int = 16
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    schedule: str = "linear"
    warmup: float = 0.0
    per_device: int = 8

    def with_options(self, **options: Any) -> Self:
        """Return a copy with the options that are not None."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})


RECIPES: dict[str, Recipe] = {
    "slimplm": Recipe(epochs=2, learning_rate=1e-4),
    "ik": Recipe(epochs=1, learning_rate=1e-4),
    "adapt": Recipe(epochs=3, learning_rate=3e-4, batch_size=128),
    "boundary": Recipe(epochs=3, learning_rate=1e-5, batch_size=4, schedule="cosine", warmup=0.02),
    "rewriter": Recipe(epochs=2, learning_rate=1e-4),
}
"""The papers' settings: SlimPLM section 4.4, IK section 3.1, ADAPT-LLM section 4.3, KBM appendix; where a paper
fine-tunes all weights or names no batch size, LoRA of rank 8 and 16 pairs a step."""


def fine_tune(
    pairs: Sequence[Pair],
    model: str,
    out: Path,
    recipe: Recipe,
    *,
    invocation: Sequence[int] | None = None,
    seed: int = 0,
    resume: bool = False,
    report: Callable[[str, int, int], None] | None = None,
) -> Path:
    """Train a LoRA adapter and save it; only the logits of the targets are computed.

    Checkpoints lie beside ``out`` until it is finished. The same seed gives the same weights on a CPU, also when
    the run was killed and resumed.

    Args:
        pairs: What to learn.
        model: Base model: catalogue name, folder or Hub id.
        out: Folder for the adapter.
        recipe: How.
        invocation: Token ids from whose last occurrence on the adapter acts (activated LoRA); everywhere when None.
        seed: Seed of the adapter's weights, the order and the dropout.
        resume: Continue from the last checkpoint of this very run, if there is one.
        report: Told what is being done, how far it is, and how far it goes.

    Returns:
        ``out``.
    """
    try:
        import torch
        import transformers
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise missing_dependency(error.name or "peft", "local") from error
    if importlib.util.find_spec("accelerate") is None:
        raise missing_dependency("accelerate", "train")
    from rgate_integrations.proxy.local import LocalProxy
    from rgate_integrations.proxy.progress import quiet

    if not pairs:
        raise ConfigurationError("There is nothing to train on.")
    proxy = LocalProxy(model)
    rows = [_row(proxy, pair) for pair in pairs]
    where = resolve_model(model)
    transformers.set_seed(seed)
    cuda = torch.cuda.is_available()
    with quiet(transformers):
        base = transformers.AutoModelForCausalLM.from_pretrained(
            where, dtype=torch.bfloat16 if cuda else torch.float32, attn_implementation="sdpa"
        )
    lora = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        alora_invocation_tokens=list(invocation) if invocation else None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that is going away
        tuned = get_peft_model(base, lora)
    checkpoints = out.parent / f".{out.name}-checkpoints"
    run = json.dumps([asdict(recipe), seed, model, len(rows), list(invocation or [])])
    marker = checkpoints / "run.json"
    resumable = resume and marker.is_file() and marker.read_text() == run and any(checkpoints.glob("check*"))
    if not resumable:
        shutil.rmtree(checkpoints, ignore_errors=True)
        checkpoints.mkdir(parents=True)
        write_atomically(marker, run)
    each = min(recipe.per_device, recipe.batch_size, len(rows))
    gathered = max(1, min(recipe.batch_size, len(rows)) // each)
    steps = max(1, round(len(rows) * recipe.epochs / (each * gathered)))
    arguments = transformers.TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=round(recipe.warmup * steps),
        per_device_train_batch_size=each,
        gradient_accumulation_steps=gathered,
        bf16=cuda,
        auto_find_batch_size=cuda,  # halves the batch when memory runs out
        save_strategy="steps",
        save_steps=max(1, steps // 10),
        save_total_limit=2,
        logging_steps=max(1, steps // 20),
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=seed,
        data_seed=seed,
        dataloader_pin_memory=False,
    )
    trainer = _trainer(transformers, tuned, arguments, rows, proxy.pad_token_id, report)
    trainer.train(resume_from_checkpoint=True if resumable else None)
    made = out.parent / f".{out.name}-made"
    shutil.rmtree(made, ignore_errors=True)
    tuned.save_pretrained(str(made))
    (made / "README.md").unlink(missing_ok=True)  # peft's empty card
    rename_folder(made, out)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return out


@dataclass(frozen=True)
class _Row:
    prompt: tuple[int, ...]
    target: tuple[int, ...]
    weight: float


def _row(proxy: Any, pair: Pair) -> _Row:
    prompt, target = proxy.pair_ids(pair.prompt, pair.values, pair.target, pair.ends)
    return _Row(tuple(prompt), tuple(target), pair.weight)


def _trainer(
    transformers: Any,
    model: Any,
    arguments: Any,
    rows: Sequence[_Row],
    pad: int,
    report: Callable[[str, int, int], None] | None,
) -> Any:
    import torch

    class Progress(transformers.TrainerCallback):  # type: ignore[misc]
        loss = ""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "loss" in logs:
                self.loss = f", loss {float(logs['loss']):.3f}"

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if report is not None:
                report(f"training{self.loss}", state.global_step, state.max_steps)

    class TargetTrainer(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            labels, weights = inputs.pop("labels"), inputs.pop("weights")
            logits = model(**inputs, logits_to_keep=labels.shape[1] + 1, use_cache=False).logits
            logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
            kept = labels >= 0
            chosen = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
            loss = -(chosen * kept * weights[:, None]).sum() / (kept * weights[:, None]).sum().clamp(min=1e-6)
            return (loss, {"logits": logits}) if return_outputs else loss

    def collate(batch: Sequence[_Row]) -> dict[str, torch.Tensor]:
        return _collate(batch, pad)

    trainer = TargetTrainer(
        model=model, args=arguments, train_dataset=list(rows), data_collator=collate, callbacks=[Progress()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def _collate(batch: Sequence[_Row], pad: int) -> dict[str, torch.Tensor]:
    """Pad on the left, so that all targets end at the end; the target of a row is in the last positions."""
    import torch

    from rgate_integrations.proxy.batch import pad_left

    ids, mask = pad_left([(*r.prompt, *r.target) for r in batch], pad, torch.device("cpu"))
    widest = max(len(r.target) for r in batch)
    labels = [[-100] * (widest - len(r.target)) + list(r.target) for r in batch]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "labels": torch.tensor(labels),
        "weights": torch.tensor([r.weight for r in batch]),
    }
