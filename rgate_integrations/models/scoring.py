"""Scores fixed continuations, such as "Yes" and "No", after prompts, or on keys and values that are there already.

Targets that share all but their last token, such as "Yes" and "No", share a forward pass: their last tokens are read
off the same distribution.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rgate_integrations.models.batch import Batch
from rgate_integrations.models.encoding import EncodedPrompt
from rgate_integrations.models.model_runner import BatchJob, ModelRunner
from rgate_integrations.prompts import PromptTemplate


def score_targets(
    runner: ModelRunner,
    prompt: PromptTemplate,
    rows: Sequence[EncodedPrompt],
    targets: Sequence[Sequence[Sequence[int]]],
) -> list[tuple[float, ...]]:
    """Score targets after prompts.

    Args:
        runner: Runs the model.
        prompt: The template of the prompts.
        rows: The prompts.
        targets: For each prompt the token ids of each target.

    Returns:
        For each prompt the log-probability of each target's whole sequence.
    """
    job = _ScoreTargets(runner, prompt, rows, targets)
    scores = [[0.0] * len(own) for own in targets]
    for (i, _), found in zip(job.reads, runner.run(job), strict=True):
        for number, score in found.items():
            scores[i][number] = score
    return [tuple(own) for own in scores]


class _ScoreTargets(BatchJob[dict[int, float]]):
    """Reads each prompt with each beginning of its targets; a result has the score by the target's number."""

    def __init__(
        self,
        runner: ModelRunner,
        prompt: PromptTemplate,
        rows: Sequence[EncodedPrompt],
        targets: Sequence[Sequence[Sequence[int]]],
    ) -> None:
        self.runner = runner
        self.targets = targets
        self.reads = [(i, start) for i, own in enumerate(targets) for start in _starts(own)]
        self.sequences = [(*rows[i].ids, *start) for i, start in self.reads]
        self.lengths = [len(sequence) for sequence in self.sequences]
        # The first token of a target is read at the prompt's last one, so that must not come from a cache.
        self.prefix = runner.shared_prefix(
            prompt, self.sequences, [len(start) + 1 for _, start in self.reads]
        )

    def run_batch(self, indices: Sequence[int]) -> list[dict[int, float]]:
        """Read one batch."""
        batch = self.runner.batch([self.sequences[k] for k in indices], self.prefix)
        width = max(len(self.reads[k][1]) + 1 for k in indices)
        logprobs = self.runner.tail_logprobs(batch, width)
        results = []
        for row, k in enumerate(indices):
            i, start = self.reads[k]
            tail = logprobs[row, width - len(start) - 1 :]
            scores = {}
            for number, target in enumerate(self.targets[i]):
                if tuple(target[:-1]) == start:
                    scores[number] = min(float(tail[range(len(target)), target].sum()), 0.0)
            results.append(scores)
        return results


@dataclass(frozen=True)
class SuffixTargets:
    """Targets after the same suffix in every row, on the keys and values of what stands before it.

    Attributes:
        suffix: Token ids that follow what was read.
        targets: Token ids of each target.
        adapter: Name of a loaded adapter that is on from the suffix on, or None.
    """

    suffix: Sequence[int]
    targets: Sequence[Sequence[int]]
    adapter: str | None

    def score(
        self, runner: ModelRunner, batch: Batch, cache: Any, written: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Score the targets in each row of a batch.

        Args:
            runner: Runs the model.
            batch: What was read.
            cache: Keys and values of its columns and of those written since; of no use to anybody afterwards.
            written: How many of the columns written since count in each row: one that ended early was padded.

        Returns:
            For each row the log-probability of each target's whole sequence.
        """
        device = runner.model.device
        rows = len(written)
        # Rows that ended early have padding between draft and suffix: masked out, and not counted by positions.
        columns = torch.arange(cache.get_seq_length() - batch.ids.shape[1], device=device)
        is_draft = columns[None] < torch.tensor(written, device=device)[:, None]
        mask = torch.cat([batch.mask, is_draft.long()], dim=1)
        next_position = mask.sum(dim=1, keepdim=True)
        scores = torch.zeros(rows, len(self.targets), device=device)
        starts = _starts(self.targets)
        with runner.adapted(self.adapter):
            for start in starts:
                ids = torch.tensor([[*self.suffix, *start]] * rows, device=device)
                # A forward pass appends to the cache, so all but the last work on a copy.
                own_cache = cache if start == starts[-1] else copy.deepcopy(cache)
                logits = runner.model(
                    input_ids=ids,
                    attention_mask=torch.cat([mask, torch.ones_like(ids)], dim=1),
                    position_ids=next_position + torch.arange(ids.shape[1], device=device),
                    past_key_values=own_cache,
                    use_cache=True,
                    logits_to_keep=len(start) + 1,
                ).logits
                logprobs = torch.log_softmax(logits.float(), dim=-1)
                for number, target in enumerate(self.targets):
                    if tuple(target[:-1]) == start:
                        scores[:, number] = logprobs[:, range(len(target)), list(target)].sum(dim=-1)
        return [tuple(min(score, 0.0) for score in own) for own in scores.tolist()]


class ReadAndScore(BatchJob[tuple[float, ...]]):
    """Reads rows with the base model, and scores targets after a suffix with an activated adapter.

    Args:
        runner: Runs the model.
        prompt: The template of the rows.
        rows: Token ids of what stands before the suffix.
        judgment: Suffix, targets and adapter.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prompt: PromptTemplate,
        rows: Sequence[Sequence[int]],
        judgment: SuffixTargets,
    ) -> None:
        self.runner = runner
        self.rows = rows
        self.judgment = judgment
        self.lengths = [len(row) + len(judgment.suffix) for row in rows]
        self.prefix = runner.shared_prefix(prompt, rows)

    def run_batch(self, indices: Sequence[int]) -> list[tuple[float, ...]]:
        """Read and score one batch."""
        batch = self.runner.batch([self.rows[i] for i in indices], self.prefix)
        output = self.runner.model.base_model(**{**batch.inputs, "use_cache": True})
        written = [0] * len(indices)
        return self.judgment.score(self.runner, batch, output.past_key_values, written)


def _starts(targets: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return all but the last token of each target, each such beginning once, in order."""
    return sorted({tuple(target[:-1]) for target in targets})
