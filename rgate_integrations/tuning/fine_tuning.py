"""Trains LoRA adapters for gates and the claim rewriter with transformers; the prompt does not count in the loss.

This module imports torch, so import it only when you use it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, needs_extra
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.folder import ADAPTER, save_adapter
from rgate_integrations.models.local import TransformersProxy, shared_proxy
from rgate_integrations.models.pretrained import load_pretrained
from rgate_integrations.runtime.files import check_output, expand, rename_folder, write_atomically
from rgate_integrations.tuning.collection import Progress, no_progress
from rgate_integrations.tuning.questions import DataFile, all_examples, check_labels
from rgate_integrations.tuning.training import (
    PROMPTS,
    RECIPES,
    Pair,
    Recipe,
    SampledLabel,
    TrainingOptions,
    drafts_for,
    pairs_for,
    rewriter_pairs,
    verdict_prompt,
)

with needs_extra("local"):
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from rgate_integrations.models.model_runner import pad_left

_RUN = "run.json"


def train_adapter(
    gate: str,
    files: Sequence[DataFile],
    model: str,
    out: Path,
    options: TrainingOptions,
    *,
    progress: Progress = no_progress,
) -> None:
    """Fine-tune a gate on labelled questions, and save it.

    Args:
        gate: ``"ik"``, ``"slimplm"``, ``"adapt"`` or ``"boundary"``.
        files: The labelled questions.
        model: Base model: catalogue name, folder or Hub id.
        out: Folder for the trained gate; `load_gate` takes it.
        options: Options; only ``"ik"`` and ``"slimplm"`` use drafts.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``gate`` is none of these, or it is ``"slimplm"`` and ``options.draft`` is ``"none"``; or
            `fine_tune` raises it.
        DataFormatError: All labels are the same, or a recorded draft or gold answer that the gate needs is
            missing.
        RGateError: The model could not write a draft; see `rgate_integrations.tuning.training.drafts_for`.
    """
    if gate not in PROMPTS:
        raise ConfigurationError(
            f"The gate {gate!r} is not trained by fine-tuning.", hint=f"Choose one of {', '.join(PROMPTS)}."
        )
    if gate == "slimplm" and options.draft == "none":
        raise ConfigurationError(
            'The slimplm gate cannot use draft="none".', hint='Use draft="proxy" or "recorded" (--draft).'
        )
    examples = all_examples(files)
    check_labels(examples, folds=0)
    drafts: Sequence[Draft | None] = [None] * len(examples)
    parameters: dict[str, Any] = {}
    if gate in ("ik", "slimplm"):
        questions = [example.question for example in examples]
        drafts = drafts_for(shared_proxy(model), questions, options, progress) or drafts
        parameters = options.reads
    if gate == "boundary" and options.label in get_args(SampledLabel):
        parameters["label"] = options.label
    pairs: list[Pair] = []
    for example, draft in zip(examples, drafts, strict=True):
        pairs += pairs_for(gate, example, draft)
    recipe = options.recipe or RECIPES[gate]
    fine_tune(pairs, model, out, recipe, seed=options.seed, resume=options.resume, progress=progress)
    prompt = verdict_prompt(gate, drafts[0] is not None)
    saved = SavedGate(
        method=gate,
        prompts={prompt.name: prompt.hash},
        parameters=parameters,
        base_model=model,
        fingerprint=shared_proxy(model).fingerprint,
        llm=options.llm,
        provenance=options.provenance(files, json.dumps(asdict(recipe)), {}),
    )
    save_adapter(saved, out)


def train_rewriter(
    paths: Sequence[Path],
    model: str,
    out: Path,
    options: TrainingOptions,
    *,
    progress: Progress = no_progress,
) -> None:
    """Fine-tune the claim rewriter on annotated claims, and save its adapter.

    Args:
        paths: Files for `rgate_integrations.tuning.training.rewriter_pairs`.
        model: Base model: catalogue name, folder or Hub id.
        out: Folder for the adapter.
        options: Options, of which ``recipe``, ``seed`` and ``resume`` are used.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: As in `fine_tune`.
        DataFormatError: As in `rgate_integrations.tuning.training.rewriter_pairs`.
    """
    fine_tune(
        rewriter_pairs(paths),
        model,
        out,
        options.recipe or RECIPES["rewriter"],
        seed=options.seed,
        resume=options.resume,
        progress=progress,
    )


def fine_tune(
    pairs: Sequence[Pair],
    model: str,
    out: Path,
    recipe: Recipe,
    *,
    seed: int = 0,
    resume: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Train a LoRA adapter to continue prompts with their targets, and save it.

    Checkpoints are kept next to ``out`` until the adapter is saved. On a CPU, the same seed gives the same weights,
    even if the run was interrupted and resumed.

    Args:
        pairs: Training pairs.
        model: Base model: catalogue name, folder or Hub id.
        out: Folder for the adapter.
        recipe: Hyperparameters.
        seed: Seed of the adapter's initial weights, the order of the pairs, and dropout.
        resume: Whether to continue from the last checkpoint, if there is one. If false, old checkpoints are deleted.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``pairs`` is empty, ``out`` holds something other than an adapter, or the checkpoints
            with which to resume are from other data, options or weights.
    """
    if not pairs:
        raise ConfigurationError(
            "There is nothing to train on: no line has claims that can be used.",
            hint='A line needs "question" and "claims": [{"claim": "…"}]. Remove tags such as <Query> from claims.',
        )
    check_output(out := expand(out), files=(ADAPTER,))
    proxy = TransformersProxy(model)
    rows = _as_rows(pairs, proxy)
    # The identity includes the rows, because other labels for the same questions make it another run.
    contents = hashlib.sha256(repr(rows).encode()).hexdigest()
    identity = json.dumps([asdict(recipe), seed, model, proxy.fingerprint, contents])
    checkpoints = out.parent / f".{out.name}-checkpoints"
    last = last_checkpoint(checkpoints, identity) if resume else None
    if last is None:
        shutil.rmtree(checkpoints, ignore_errors=True)
        write_atomically(checkpoints / _RUN, identity)
    tuned = _model_to_tune(model, recipe, seed)
    trainer = TargetTrainer(
        model=tuned,
        args=_arguments(recipe, len(rows), seed, checkpoints),
        train_dataset=rows,
        data_collator=partial(collate, pad=proxy.encoder.tokenizer.pad_token_id),
        callbacks=[ReportProgress(progress)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=last)
    staging = out.parent / f".{out.name}-made"
    shutil.rmtree(staging, ignore_errors=True)
    tuned.save_pretrained(str(staging))
    (staging / "README.md").unlink(missing_ok=True)  # peft's empty model card
    rename_folder(staging, out)
    shutil.rmtree(checkpoints, ignore_errors=True)


def _as_rows(pairs: Sequence[Pair], proxy: TransformersProxy) -> list[dict[str, Any]]:
    """Return the token ids and the weight of each pair, as `collate` takes them."""
    rows = []
    for pair in pairs:
        prompt, target = proxy.encoder.training_pair(pair.prompt, pair.values, pair.target, ends=pair.ends)
        rows.append({"prompt": prompt, "target": target, "weight": pair.weight})
    return rows


def last_checkpoint(checkpoints: Path, identity: str) -> str | None:
    """Return the folder of a run's last complete checkpoint, or None without one.

    Args:
        checkpoints: Folder of the checkpoints.
        identity: Text that identifies the run: its data, options and weights.

    Raises:
        ConfigurationError: The checkpoints belong to a run with other data, options or weights.
    """
    # The trainer writes its state last, so a checkpoint without it is incomplete.
    complete = [file.parent for file in checkpoints.glob("checkpoint-*/trainer_state.json")]
    if not complete:
        return None
    if (checkpoints / _RUN).read_text(encoding="utf-8") != identity:
        raise ConfigurationError(
            f"The interrupted run in {str(checkpoints)!r} cannot be continued: its data, options or base model are "
            "not those of this run.",
            hint="Omit resume (--resume) to start over, or choose another output folder.",
        )
    return str(max(complete, key=lambda folder: int(folder.name.removeprefix("checkpoint-"))))


def _model_to_tune(model: str, recipe: Recipe, seed: int) -> Any:
    """Return the base model with a new adapter."""
    transformers.set_seed(seed)
    # The trainer moves it to the device.
    base = load_pretrained(model, "cpu", "bfloat16" if torch.cuda.is_available() else "float32")
    lora = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        return get_peft_model(base, lora)  # which uses a deprecated part of transformers


def _arguments(recipe: Recipe, rows: int, seed: int, checkpoints: Path) -> transformers.TrainingArguments:
    """Return the arguments of transformers' trainer."""
    cuda = torch.cuda.is_available()
    per_pass = min(recipe.per_device, recipe.batch_size, rows)
    passes = max(1, min(recipe.batch_size, rows) // per_pass)
    steps = max(1, round(rows * recipe.epochs / (per_pass * passes)))
    return transformers.TrainingArguments(
        output_dir=str(checkpoints),
        num_train_epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=round(recipe.warmup * steps),
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=passes,
        bf16=cuda,
        auto_find_batch_size=cuda,  # halves the batch if memory runs out
        save_strategy="steps",
        save_steps=max(1, steps // 10),
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=seed,
        data_seed=seed,
        dataloader_pin_memory=False,
    )


class TargetTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types here
    """A trainer that minimises the mean negative log-probability of the target tokens, weighted by row."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], **kwargs: Any) -> Any:
        """Return the loss of a batch from `collate`."""
        labels, weights = inputs.pop("labels"), inputs.pop("weights")
        # Every target ends at the end of its row (see `collate`), so the last logits suffice. The logit that predicts
        # a token is one position before it.
        logits = model(**inputs, logits_to_keep=labels.shape[1] + 1, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        target_logprobs = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        token_weights = (labels >= 0) * weights[:, None]  # 0 for padding
        return -(target_logprobs * token_weights).sum() / token_weights.sum().clamp(min=1e-6)


@dataclass
class ReportProgress(transformers.TrainerCallback):  # type: ignore[misc]  # transformers has no types here
    """A callback of the trainer that reports finished steps to a progress callback."""

    progress: Progress

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the number of finished steps."""
        self.progress("training", state.global_step, state.max_steps)


def collate(rows: Sequence[dict[str, Any]], pad: int) -> dict[str, torch.Tensor]:
    """Return a batch of rows, padded on the left so that every target ends in the last position.

    Args:
        rows: Token ids of a ``prompt`` and of its ``target``, and the ``weight`` of the row in the loss.
        pad: Token id of the padding.

    Returns:
        The inputs of the model and of the loss; positions count from the first token after the padding.
    """
    ids, mask = pad_left([row["prompt"] + row["target"] for row in rows], pad, torch.device("cpu"))
    labels, _ = pad_left([row["target"] for row in rows], -100, torch.device("cpu"))
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "labels": labels,
        "weights": torch.tensor([row["weight"] for row in rows]),
    }
