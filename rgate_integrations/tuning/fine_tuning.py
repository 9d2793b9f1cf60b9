"""Trains LoRA adapters for gates and the claim rewriter: the training pairs, and fine-tuning with transformers.

This module imports torch, so import it only when you use it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from rgate_integrations.answering.claims import REWRITE, Claim, format_claims, parse_claims
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError, needs_extra
from rgate_integrations.gates.artifacts import SavedGate
from rgate_integrations.gates.folder import ADAPTER, save_adapter
from rgate_integrations.gates.papers.verdicts import (
    BOUNDARY_QUESTION,
    CONTEXT_PROMPT,
    IK_DRAFT,
    IK_QUESTION,
    JUDGMENT,
    PARAMETRIC_PROMPT,
    RET,
    TARGETS,
)
from rgate_integrations.models.local import TransformersProxy, shared_proxy
from rgate_integrations.models.pretrained import load_pretrained
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.files import check_output, follow, rename_folder
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.tuning.collection import Progress, no_progress
from rgate_integrations.tuning.questions import DataFile, Example, all_examples, check_labels
from rgate_integrations.tuning.training import RECIPES, Recipe, SampledLabel, TrainingOptions, drafts_for

with needs_extra("local"):
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from rgate_integrations.models.model_runner import pad_left


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
    fine_tune(pairs, model, out, recipe, seed=options.seed, progress=progress)
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
        options: Options, of which ``recipe`` and ``seed`` are used.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: As in `fine_tune`.
        DataFormatError: As in `rgate_integrations.tuning.training.rewriter_pairs`.
    """
    recipe = options.recipe or RECIPES["rewriter"]
    fine_tune(rewriter_pairs(paths), model, out, recipe, seed=options.seed, progress=progress)


def fine_tune(
    pairs: Sequence[Pair],
    model: str,
    out: Path,
    recipe: Recipe,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
) -> None:
    """Train a LoRA adapter to continue prompts with their targets, and save it.

    On a CPU, the same seed gives the same weights.

    Args:
        pairs: Training pairs.
        model: Base model: catalogue name, folder or Hub id.
        out: Folder for the adapter.
        recipe: Hyperparameters.
        seed: Seed of the adapter's initial weights, the order of the pairs, and dropout.
        progress: Progress callback: ``(label, done, total)``.

    Raises:
        ConfigurationError: ``pairs`` is empty, or ``out`` holds something other than an adapter.
    """
    if not pairs:
        raise ConfigurationError(
            "There is nothing to train on: no line has claims that can be used.",
            hint='A line needs "question" and "claims": [{"claim": "…"}]. Remove tags such as <Query> from claims.',
        )
    check_output(out := follow(out), files=(ADAPTER,))
    proxy = TransformersProxy(model)
    rows = []
    for pair in pairs:
        prompt, target = proxy.encoder.training_pair(pair.prompt, pair.values, pair.target, ends=pair.ends)
        rows.append({"prompt": prompt, "target": target, "weight": pair.weight})
    staging = out.parent / f".{out.name}-made"
    shutil.rmtree(staging, ignore_errors=True)
    tuned = _model_to_tune(model, recipe, seed)
    trainer = TargetTrainer(
        model=tuned,
        args=_arguments(recipe, len(rows), seed, staging),
        train_dataset=rows,
        data_collator=partial(collate, pad=proxy.encoder.tokenizer.pad_token_id),
        callbacks=[ReportProgress(progress)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    tuned.save_pretrained(str(staging))
    (staging / "README.md").unlink(missing_ok=True)  # peft's empty model card
    rename_folder(staging, out)


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


def _arguments(recipe: Recipe, rows: int, seed: int, folder: Path) -> transformers.TrainingArguments:
    """Return the arguments of transformers' trainer."""
    cuda = torch.cuda.is_available()
    per_pass = min(recipe.per_device, recipe.batch_size, rows)
    passes = max(1, min(recipe.batch_size, rows) // per_pass)
    steps = max(1, round(rows * recipe.epochs / (per_pass * passes)))
    return transformers.TrainingArguments(
        output_dir=str(folder),  # which the trainer makes, although it saves nothing
        num_train_epochs=recipe.epochs,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=round(recipe.warmup * steps),
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=passes,
        bf16=cuda,
        auto_find_batch_size=cuda,  # halves the batch if memory runs out
        save_strategy="no",
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


# --- training pairs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A prompt and the text that should continue it.

    Attributes:
        prompt: The template.
        values: Values of its fields.
        target: The text that the model should write.
        weight: Weight of the pair in the loss; a soft label becomes two pairs.
        ends: Whether the model also learns to end its answer after the target: with a line feed if the template
            stops at one, otherwise with the stop token. False for verdicts that are scored and never written.
    """

    prompt: PromptTemplate
    values: Mapping[str, str]
    target: str
    weight: float = 1.0
    ends: bool = True


_VERDICTS = {
    "ik": ("Yes", "No"),
    "slimplm": TARGETS,
    "boundary": ("known", "unknown"),
}
"""The verdicts that each gate learns to write for known and unknown questions."""

PROMPTS = {
    "ik": IK_QUESTION,
    "slimplm": JUDGMENT,
    "adapt": PARAMETRIC_PROMPT,
    "boundary": BOUNDARY_QUESTION,
}
"""The prompt of each gate that is trained by fine-tuning; ``ik`` has another one with a draft."""


def verdict_prompt(gate: str, drafted: bool) -> PromptTemplate:
    """Return the prompt with which a fine-tuned gate, such as ``"ik"``, gives its verdict.

    ``drafted`` says whether the gate reads drafts.
    """
    return IK_DRAFT if gate == "ik" and drafted else PROMPTS[gate]


def pairs_for(gate: str, example: Example, draft: Draft | None) -> list[Pair]:
    """Return the training pairs of a labelled question.

    The target is a verdict, and a soft label becomes two weighted pairs. ADAPT-LLM (section 3.1, algorithm 1) is
    different: if the LLM was right, the target is the first gold answer. If it was wrong, the target is ``<RET>``,
    and a question with a context gives a second pair, which has the context in the prompt and the first gold
    answer as the target.

    Args:
        gate: ``"ik"``, ``"slimplm"``, ``"adapt"`` or ``"boundary"``.
        example: The question.
        draft: Its draft, for gates that read drafts, or None.

    Raises:
        DataFormatError: ADAPT-LLM needs gold answers, and the question has none.
    """
    question = example.question
    values = {"question": question.text}
    if gate != "adapt":
        prompt = verdict_prompt(gate, draft is not None)
        if draft is not None:
            values["draft"] = draft.text
        # A hard label gives only one pair, because the other's weight is 0.
        verdicts = zip(_VERDICTS[gate], (example.target, 1 - example.target), strict=True)
        return [
            Pair(prompt, values, text, weight, gate == "slimplm") for text, weight in verdicts if weight > 0
        ]
    if not question.gold:
        raise DataFormatError(
            f"The question {question.text[:60]!r} has no gold_answers.",
            hint='Add "gold_answers": ["…"], because the adapt gate also learns to answer.',
        )
    if example.known:
        return [Pair(PARAMETRIC_PROMPT, values, question.gold[0])]
    pairs = [Pair(PARAMETRIC_PROMPT, values, RET)]
    if question.context:
        pairs.append(Pair(CONTEXT_PROMPT, {**values, "context": question.context}, question.gold[0]))
    return pairs


def rewriter_pairs(paths: Sequence[Path]) -> list[Pair]:
    """Read annotated claims (SlimPLM, section 3.3), and return the pairs that train the claim rewriter.

    Each line needs ``question`` and ``claims``, a list of objects with the text ``claim`` and, optionally, ``query``
    and ``needs_search``. ``closed_book_text``, the draft of the answer, is optional. Items without a claim are
    ignored. A line is left out if it has no claims, or if `parse_claims` could not read them back from the text that
    the rewriter should write.

    Raises:
        DataFormatError: A file cannot be read, a line lacks ``question`` or ``claims``, or a value has the
            wrong type; the message names the file and, for a line, its number.
    """
    pairs = []
    for path in paths:
        for record in read_records(path, hint='Each line needs "question" and "claims": [{"claim": "…"}].'):
            values = {"question": record.text("question"), "draft": record.optional_text("closed_book_text")}
            tagged = _print_claims(record)
            if tagged:
                pairs.append(Pair(REWRITE, values, tagged))
    return pairs


def _print_claims(record: Record) -> str:
    """Return the text that the rewriter should write: a record's claims, with their tags.

    The text is empty if ``claims`` holds no claim with text, or if `parse_claims` would not find all claims in it.

    Raises:
        DataFormatError: ``claims`` is missing or not a list of objects, or a value of a claim has the wrong type.
    """
    annotated = record.fields.get("claims")
    if not isinstance(annotated, list) or not all(isinstance(fields, dict) for fields in annotated):
        raise record.error("claims is missing or not a list of objects")
    claims = []
    for fields in annotated:
        annotation = Record(record.where, fields, record.hint)
        text, needs_search = annotation.optional_text("claim"), annotation.fields.get("needs_search")
        if text and not isinstance(needs_search, bool | None):
            raise record.error(
                f"needs_search of a claim must be true, false or null, not {needs_search!r:.60}"
            )
        query = annotation.optional_text("query") or text
        if text:
            claims.append(
                Claim(text=" ".join(text.split()), query=" ".join(query.split()), needs_search=needs_search)
            )
    printed = format_claims(claims)
    # A rewriter must not learn output that our own parser cannot read.
    return printed if len(parse_claims(printed)) == len(claims) else ""
