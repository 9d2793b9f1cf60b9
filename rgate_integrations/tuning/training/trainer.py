"""LoRA fine-tuning on transformers' ``Trainer``: what a gate learns to write, checkpoints, resuming, several GPUs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rgate_integrations.answering.claims import REWRITE, Claim, parse_claims, print_claims
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError, missing_dependency
from rgate_integrations.gates.artifacts.folder import ADAPTER
from rgate_integrations.gates.papers.adapt import CONTEXT_PROMPT, PARAMETRIC_PROMPT, RET
from rgate_integrations.gates.papers.boundary import BOUNDARY_QUESTION
from rgate_integrations.gates.papers.ik import IK_DRAFT, IK_QUESTION
from rgate_integrations.gates.papers.slimplm import JUDGMENT, TARGETS
from rgate_integrations.models.download import resolve_model
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.files import check_replaceable, rename_folder
from rgate_integrations.runtime.records import Record, read_records
from rgate_integrations.tuning.collection import Progress, silent
from rgate_integrations.tuning.training.examples import Example
from rgate_integrations.tuning.training.target_trainer import prepare

if TYPE_CHECKING:
    from rgate_integrations.tuning.training.target_trainer import Row


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
    seed: int = 0,
    resume: bool = False,
    progress: Progress = silent,
) -> Path:
    """Train a LoRA adapter and save it; only the logits of the targets are computed.

    Checkpoints lie beside ``out`` until it is finished. The same seed gives the same weights on a CPU, also when
    the run was killed and resumed.

    Args:
        pairs: What to learn.
        model: Base model: catalogue name, folder or Hub id.
        out: Folder for the adapter.
        recipe: How.
        seed: Seed of the adapter's weights, the order and the dropout.
        resume: Continue from the last checkpoint of this very run, if there is one.
        progress: Told what is being done, how far it is, and how far it goes.

    Returns:
        ``out``.
    """
    _check_dependencies()
    from rgate_integrations.models.local import LocalProxy
    from rgate_integrations.tuning.training.target_trainer import Row, train_on_targets

    if not pairs:
        raise ConfigurationError("There is nothing to train on.")
    check_replaceable(out, (ADAPTER,))
    proxy = LocalProxy(model)
    rows = []
    for pair in pairs:
        prompt, target = proxy.load().encoder.training_pair(
            pair.prompt, pair.values, pair.target, ends=pair.ends
        )
        rows.append(Row(tuple(prompt), tuple(target), pair.weight))
    run = Run(model, proxy.fingerprint, recipe, seed)
    tuned = run.model_to_tune()
    checkpoints = out.parent / f".{out.name}-checkpoints"
    resumed = prepare(checkpoints, run.identity(rows), resume)
    trainer = train_on_targets(
        tuned, run.arguments(rows, checkpoints), rows, proxy.encoder.tokenizer.pad_token_id, progress
    )
    trainer.train(resume_from_checkpoint=True if resumed else None)
    made = out.parent / f".{out.name}-made"
    shutil.rmtree(made, ignore_errors=True)
    tuned.save_pretrained(str(made))
    (made / "README.md").unlink(missing_ok=True)  # peft's empty card
    rename_folder(made, out)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return out


def _check_dependencies() -> None:
    for module, extra in (
        ("torch", "local"),
        ("transformers", "local"),
        ("peft", "local"),
        ("accelerate", "train"),
    ):
        if importlib.util.find_spec(module) is None:
            raise missing_dependency(module, extra)


@dataclass(frozen=True)
class Run:
    """What decides the weights that come out.

    Attributes:
        model: Base model: catalogue name, folder or Hub id.
        fingerprint: `rgate_integrations.models.base.Proxy.fingerprint` of it.
        recipe: How.
        seed: Seed of the adapter's weights, the order and the dropout.
    """

    model: str
    fingerprint: str
    recipe: Recipe
    seed: int

    def identity(self, rows: Sequence[Row]) -> str:
        """Return what tells this run from others; the rows by their checksum, for other labels are another run."""
        settings = [asdict(self.recipe), self.seed, self.model, self.fingerprint]
        return json.dumps([*settings, hashlib.sha256(repr(rows).encode()).hexdigest()])

    def model_to_tune(self) -> Any:
        """Load the base model, and put a fresh adapter into it."""
        import torch
        import transformers
        from peft import LoraConfig, get_peft_model

        from rgate_integrations.models.model_folder import quiet

        transformers.set_seed(self.seed)
        with quiet(transformers):
            base = transformers.AutoModelForCausalLM.from_pretrained(
                resolve_model(self.model),
                dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
                attn_implementation="sdpa",
                use_safetensors=True,
                trust_remote_code=False,
            )
        lora = LoraConfig(
            r=self.recipe.rank,
            lora_alpha=self.recipe.alpha,
            lora_dropout=self.recipe.dropout,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            # peft asks transformers by a name that is going away
            warnings.simplefilter("ignore", FutureWarning)
            return get_peft_model(base, lora)

    def arguments(self, rows: Sequence[Row], checkpoints: Path) -> Any:
        """Return the arguments of transformers' trainer."""
        import torch
        import transformers

        recipe, cuda = self.recipe, torch.cuda.is_available()
        per_pass = min(recipe.per_device, recipe.batch_size, len(rows))
        passes = max(1, min(recipe.batch_size, len(rows)) // per_pass)
        steps = max(1, round(len(rows) * recipe.epochs / (per_pass * passes)))
        return transformers.TrainingArguments(
            output_dir=str(checkpoints),
            num_train_epochs=recipe.epochs,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type=recipe.schedule,
            warmup_steps=round(recipe.warmup * steps),
            per_device_train_batch_size=per_pass,
            gradient_accumulation_steps=passes,
            bf16=cuda,
            auto_find_batch_size=cuda,  # halves the batch when memory runs out
            save_strategy="steps",
            save_steps=max(1, steps // 10),
            save_total_limit=2,
            logging_steps=max(1, steps // 20),
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=self.seed,
            data_seed=self.seed,
            dataloader_pin_memory=False,
        )


_VERDICTS = {
    "ik": ("Yes", "No"),
    "slimplm": TARGETS,
    "boundary": ("known", "unknown"),
}
"""What a gate writes for a known question, and for an unknown one."""

_CLAIMS = 'Each line needs "question", "closed_book_text", "claims".'


def verdict_prompt(gate: str, drafted: bool) -> PromptTemplate:
    """Return the prompt under which a trained gate gives its verdict."""
    if gate == "ik":
        return IK_DRAFT if drafted else IK_QUESTION
    return {"slimplm": JUDGMENT, "adapt": PARAMETRIC_PROMPT, "boundary": BOUNDARY_QUESTION}[gate]


def pairs_for(gate: str, examples: Sequence[Example], drafts: Sequence[Draft] | None) -> list[Pair]:
    """Turn labelled questions into what a gate learns to write.

    A soft label becomes two weighted pairs. ADAPT-LLM's two-prompt set (section 3.1, algorithm 1): the gold
    answer where the LLM was right; ``<RET>``, and the gold answer given the context, where it was wrong.

    Args:
        gate: ``"ik"``, ``"slimplm"``, ``"adapt"`` or ``"boundary"``.
        examples: The questions.
        drafts: One a question for gates that read drafts, or None.

    Raises:
        DataFormatError: ADAPT-LLM needs gold answers, and some questions have none.
    """
    if gate == "adapt":
        return [pair for example in examples for pair in _two_prompts(example)]
    prompt = verdict_prompt(gate, drafts is not None)
    known, unknown = _VERDICTS[gate]
    pairs = []
    for i, example in enumerate(examples):
        values = {"question": example.question}
        if drafts is not None:
            values["draft"] = drafts[i].text
        for verdict, weight in ((known, example.target), (unknown, 1 - example.target)):
            if weight > 0:
                pairs.append(Pair(prompt, values, verdict, weight, ends=gate == "slimplm"))
    return pairs


def _two_prompts(example: Example) -> list[Pair]:
    if not example.gold:
        raise DataFormatError(
            f"{example.question[:60]!r} has no gold_answers.", hint="ADAPT-LLM learns to answer: give them."
        )
    values = {"question": example.question}
    if example.known:
        return [Pair(PARAMETRIC_PROMPT, values, example.gold[0])]
    asks = Pair(PARAMETRIC_PROMPT, values, RET)
    if not example.context:
        return [asks]
    return [asks, Pair(CONTEXT_PROMPT, {**values, "context": example.context}, example.gold[0])]


def rewriter_pairs(paths: Sequence[Path]) -> list[Pair]:
    """Read annotated claims (SlimPLM, section 3.3) as pairs for the claim rewriter.

    Each line needs ``question``, ``closed_book_text`` (the heuristic answer) and ``claims``: a list of objects
    with ``claim``, ``query`` and ``needs_search``; or ``rewritten``: the tagged text itself.
    """
    pairs = []
    for path in paths:
        for record in read_records(path, hint=_CLAIMS):
            values = {"question": record.text("question"), "draft": record.optional_text("closed_book_text")}
            tagged = record.optional_text("rewritten") or _tagged(record)
            if tagged:
                pairs.append(Pair(REWRITE, values, tagged))
    return pairs


def _tagged(record: Record) -> str:
    """Return claims as the rewriter should write them; empty where that text could not be read back."""
    annotated = record.fields.get("claims")
    if not isinstance(annotated, list):
        raise record.wrong("no claims")
    claims = []
    for fields in annotated:
        each = Record(record.where, record.number, fields if isinstance(fields, dict) else {}, record.hint)
        text, needs_search = each.optional_text("claim"), each.fields.get("needs_search")
        if not text:
            continue
        if needs_search is not None and not isinstance(needs_search, bool):
            raise each.wrong("needs_search is neither true nor false")
        query = each.optional_text("query") or text
        claims.append(
            Claim(text=" ".join(text.split()), query=" ".join(query.split()), needs_search=needs_search)
        )
    printed = print_claims(claims)
    return printed if len(parse_claims(printed)) == len(claims) else ""
