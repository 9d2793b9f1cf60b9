"""Trains the gates that are LoRA adapters: from labelled questions to pairs, folds and a saved gate."""

from __future__ import annotations

import json
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from rgate_integrations.claims.format import parse_claims, print_claims
from rgate_integrations.claims.rewriter import REWRITE
from rgate_integrations.decision import Draft
from rgate_integrations.errors import ConfigurationError, DataFormatError
from rgate_integrations.files import read_jsonl
from rgate_integrations.gates import Gate, gate_class
from rgate_integrations.gates.adapt import CONTEXT_PROMPT, PARAMETRIC_PROMPT, RET
from rgate_integrations.gates.boundary import BOUNDARY_QUESTION
from rgate_integrations.gates.ik import IK_DRAFT, IK_FOLLOW_UP, IK_QUESTION
from rgate_integrations.gates.slimplm import JUDGMENT, TARGETS
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.proxy.local import shared_proxy
from rgate_integrations.saved import AdapterArtifact, save_adapter
from rgate_integrations.training.drafts import DraftKind, Report, drafts_for
from rgate_integrations.training.examples import DataFile, Example, check_labels
from rgate_integrations.training.probe import auc_by_set, question_folds
from rgate_integrations.training.trainer import RECIPES, Pair, Recipe, fine_tune

ADAPTER_GATES = ("ik", "slimplm", "adapt", "boundary")


def verdict_prompt(gate: str, drafted: bool, activated: bool = False) -> PromptTemplate:
    """Return the prompt under which a trained gate gives its verdict."""
    if activated:
        return IK_FOLLOW_UP
    prompts = {"ik": IK_DRAFT if drafted else IK_QUESTION, "slimplm": JUDGMENT}
    return {**prompts, "adapt": PARAMETRIC_PROMPT, "boundary": BOUNDARY_QUESTION}[gate]


def pairs_for(
    gate: str, examples: Sequence[Example], drafts: Sequence[Draft] | None, activated: bool = False
) -> list[Pair]:
    """Turn labelled questions into what a gate learns to write.

    A soft label becomes two weighted pairs. ADAPT-LLM's two-prompt set (section 3.1, algorithm 1): the gold
    answer where the LLM was right; ``<RET>``, and the gold answer given the context, where it was wrong.

    Args:
        gate: One of `ADAPTER_GATES`.
        examples: The questions.
        drafts: One a question for gates that read drafts, or None.
        activated: Whether the gate asks in a turn after the draft.

    Raises:
        DataFormatError: ADAPT-LLM needs gold answers, and some questions have none.
    """
    prompt = verdict_prompt(gate, drafts is not None, activated)
    verdicts = {"slimplm": TARGETS, "boundary": ("known", "unknown")}.get(gate, ("Yes", "No"))
    pairs = []
    for i, example in enumerate(examples):
        values = {"question": example.question} | ({"draft": drafts[i].text} if drafts else {})
        if gate == "adapt":
            pairs += _two_prompts(example)
            continue
        for verdict, weight in zip(verdicts, (example.target, 1 - example.target), strict=True):
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
        for number, record in read_jsonl(path):
            where, hint = (
                f"{path}, line {number}",
                'Each line needs "question", "closed_book_text", "claims".',
            )
            if not isinstance(record, dict) or not isinstance(record.get("question"), str):
                raise DataFormatError(f"{where}: no question.", hint=hint)
            tagged = record.get("rewritten") or _tagged(record.get("claims"), where, hint)
            if tagged:
                values = {"question": record["question"], "draft": str(record.get("closed_book_text") or "")}
                pairs.append(Pair(REWRITE, values, tagged))
    return pairs


def _tagged(claims: Any, where: str, hint: str) -> str:
    from rgate_integrations.claims.format import Claim

    if not isinstance(claims, list):
        raise DataFormatError(f"{where}: no claims.", hint=hint)
    found = [
        Claim(
            text=" ".join(str(c["claim"]).split()),
            query=" ".join(str(c.get("query") or c["claim"]).split()),
            needs_search=c.get("needs_search"),
        )
        for c in claims
        if isinstance(c, dict) and str(c.get("claim") or "").strip()
    ]
    printed = print_claims(found)
    return printed if len(parse_claims(printed)) == len(found) else ""


def train_adapter(
    gate: str,
    files: Sequence[DataFile],
    model: str,
    out: Path,
    *,
    draft: DraftKind = "proxy",
    tokens: int = 32,
    folds: int = 0,
    seed: int = 0,
    recipe: Recipe | None = None,
    resume: bool = False,
    activated: bool = False,
    label: str = "closed_book_correct",
    llm: str = "the LLM of the training data",
    licence: str = "that of the training data",
    report: Report | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Fine-tune a gate on labelled questions, cross-validate it if asked, and save it.

    Args:
        gate: One of `ADAPTER_GATES`.
        files: The labelled questions.
        model: Base model: catalogue name, folder or Hub id.
        out: Folder for the trained gate; `load_gate` takes it.
        draft: Whose drafts the gate reads (`ik` and `slimplm` only).
        tokens: Draft tokens to read.
        folds: Folds of a cross-validation before the final fit, or 0 for none.
        seed: Seed of everything.
        recipe: How to fine-tune; the paper's settings when None.
        resume: Continue a run that was killed.
        activated: Train an activated LoRA, which acts after the draft alone (`ik` only): the proxy then judges on
            the keys and values with which it wrote the draft.
        label: Name of the label, for the model card.
        llm: Name of the LLM whose answers were labelled.
        licence: Licence of the weights.
        report: Told what is being done, how far it is, and how far it goes.
        show: Told the result of each fold.

    Returns:
        The metrics of the cross-validation; empty without one.
    """
    if gate not in ADAPTER_GATES:
        raise ConfigurationError(f"{gate!r} is not trained by fine-tuning.", hint=", ".join(ADAPTER_GATES))
    examples = [e for f in files for e in f.examples]
    known = check_labels(examples, folds)
    say: Report = report or (lambda what, done, total: None)
    reads = gate in ("ik", "slimplm")
    if gate == "slimplm" and draft == "none":
        raise ConfigurationError("The slimplm gate judges a draft.", hint="--draft proxy or recorded")
    if activated and (gate != "ik" or draft == "none"):
        raise ConfigurationError(
            "An activated adapter acts after a draft.", hint="--gate ik --draft proxy or recorded"
        )
    drafts = drafts_for(shared_proxy(model), examples, draft, tokens, say) if reads else None
    parameters: dict[str, Any] = {}
    if reads:
        parameters["tokens"] = tokens if drafts is not None else 0
        parameters["source"] = "recorded" if draft == "recorded" else "proxy"
    if activated:
        parameters["follow_up"] = True
    invocation = shared_proxy(model).ids_after_draft(IK_FOLLOW_UP) if activated else None
    how = recipe or RECIPES[gate]
    metrics: dict[str, Any] = {}
    if folds:
        p = np.zeros(len(examples))
        for n, (train, test) in enumerate(question_folds(len(examples), folds, seed), start=1):
            folder = Path(tempfile.mkdtemp(prefix="rgate-fold-"))
            try:
                some = [drafts[i] for i in train] if drafts is not None else None
                pairs = pairs_for(gate, [examples[i] for i in train], some, activated)
                fine_tune(pairs, model, folder / "gate", how, invocation=invocation, seed=seed, report=say)
                judge = _gate(gate, str(folder / "gate"), model, parameters)
                asked = [drafts[i] for i in test] if drafts is not None else None
                found = judge.decide_batch([examples[i].question for i in test], drafts=asked)
                p[test] = [d.p_known for d in found]
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            auc = auc_by_set(p[test], known[test], ["all"] * len(test)).get("all", float("nan"))
            show(f"fold {n} of {folds}: AUC {auc:.3f} on {len(test)} questions")
        each = auc_by_set(p, known, [e.dataset for e in examples])
        pooled = auc_by_set(p, known, ["all"] * len(examples))["all"]
        metrics = {"auc": each, "auc_mean": float(np.mean(list(each.values()))), "auc_pooled": pooled}
    pairs = pairs_for(gate, examples, drafts, activated)
    fine_tune(pairs, model, out, how, invocation=invocation, seed=seed, resume=resume, report=say)
    artifact = AdapterArtifact(
        method=gate,
        prompt=verdict_prompt(gate, drafts is not None, activated),
        parameters=parameters,
        base_model=model,
        fingerprint=shared_proxy(model).fingerprint,
        llm=llm,
        provenance={
            "label": label,
            "seed": seed,
            "folds": folds,
            "recipe": json.dumps(how.__dict__),
            "data": [f.as_provenance() for f in files],
            "metrics": metrics,
            "versions": {name: version(name) for name in ("torch", "transformers", "peft")}
            | {"python": platform.python_version()},
            "licence": licence,
        },
    )
    save_adapter(artifact, out)
    return metrics


def _gate(name: str, adapter: str, model: str, parameters: dict[str, Any]) -> Gate:
    return gate_class(name).model_validate({"adapter": adapter, "proxy": model, **parameters})
