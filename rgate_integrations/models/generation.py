"""Jobs that write drafts: alone, with the hidden states of what is written, or with a judgment of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria

from rgate_integrations.decision import Draft
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.models.batch import Batch, LayerStates
from rgate_integrations.models.decoding import Pause, Recorder, Sampling, StopAt
from rgate_integrations.models.encoding import EncodedPrompt
from rgate_integrations.models.hidden import layer_numbers, pooled, spans_of, watching
from rgate_integrations.models.model_runner import BatchJob, ModelRunner
from rgate_integrations.models.reading import TokenValues
from rgate_integrations.models.scoring import SuffixTargets
from rgate_integrations.prompts import PromptTemplate
from rgate_integrations.runtime.arrays import Float32Array


@dataclass(frozen=True)
class DraftRows:
    """What is to be written.

    Attributes:
        prompt: The template that the rows were made of.
        rows: The prompts, one a draft.
        tokens: Maximum number of new tokens, >= 1.
        sampling: Temperature and a seed a row, or None for greedy decoding.
    """

    prompt: PromptTemplate
    rows: Sequence[EncodedPrompt]
    tokens: int
    sampling: Sampling | None = None


class GenerateDrafts(BatchJob[Draft]):
    """Writes a draft a row."""

    def __init__(self, runner: ModelRunner, wanted: DraftRows) -> None:
        self.writer = _Writer(runner, wanted)
        self.lengths = self.writer.lengths

    def run_batch(self, indices: Sequence[int]) -> Sequence[Draft]:
        """Write one batch."""
        return self.writer.write(indices).drafts


class GenerateWithStates(BatchJob[tuple[Draft, Float32Array]]):
    """Writes a draft a row, and pools hidden states over prompt and draft on the way.

    Args:
        runner: Runs the model, in which the layers `can_watch`.
        wanted: What to write.
        layers: Which states, and how each is pooled.
    """

    def __init__(self, runner: ModelRunner, wanted: DraftRows, layers: Sequence[PooledLayer]) -> None:
        self.rows = wanted.rows
        self.layers = layers
        self.writer = _Writer(runner, wanted, complete=True, watch=layer_numbers(layers))
        self.lengths = self.writer.lengths

    def run_batch(self, indices: Sequence[int]) -> list[tuple[Draft, Float32Array]]:
        """Write one batch."""
        written = self.writer.write(indices)
        results = []
        for row, (i, draft) in enumerate(zip(indices, written.drafts, strict=True)):
            prompt, length = len(self.rows[i].ids), len(draft.token_ids)
            states = written.batch.row_states(written.states, row, prompt, length)
            spans = spans_of(self.rows[i].question, prompt, length)
            results.append((draft, pooled(states, spans, self.layers)))
        return results


class GenerateAndScore(BatchJob[tuple[Draft, tuple[float, ...]]]):
    """Writes a draft a row, and scores targets after a suffix on the draft's own keys and values.

    Args:
        runner: Runs the model.
        wanted: What to write.
        judgment: The suffix that asks about the draft, the targets, and the adapter that judges.
    """

    def __init__(self, runner: ModelRunner, wanted: DraftRows, judgment: SuffixTargets) -> None:
        self.runner = runner
        self.judgment = judgment
        self.writer = _Writer(runner, wanted, complete=True)
        self.lengths = self.writer.lengths

    def run_batch(self, indices: Sequence[int]) -> list[tuple[Draft, tuple[float, ...]]]:
        """Write and judge one batch."""
        written = self.writer.write(indices)
        lengths = [len(draft.token_ids) for draft in written.drafts]
        scores = self.judgment.score(self.runner, written.batch, written.cache, lengths)
        return list(zip(written.drafts, scores, strict=True))


@dataclass(frozen=True)
class _Written:
    """What a written batch leaves behind.

    Attributes:
        drafts: What was written, one a row of the batch.
        batch: What was read before.
        states: Watched hidden states of what was read, and of each token written.
        cache: Keys and values of the columns of ``batch`` and of each token written.
    """

    drafts: Sequence[Draft]
    batch: Batch
    states: LayerStates
    cache: Any


class _Writer:
    """Writes batches of drafts.

    Args:
        runner: Runs the model.
        wanted: What to write.
        complete: Compute states, keys and values of a draft's last token too.
        watch: Layers whose hidden states are collected.
    """

    def __init__(
        self,
        runner: ModelRunner,
        wanted: DraftRows,
        *,
        complete: bool = False,
        watch: tuple[int, ...] = (),
    ) -> None:
        self.runner = runner
        self.wanted = wanted
        self.watch = watch
        self.lengths = [len(row.ids) + wanted.tokens for row in wanted.rows]
        self.prefix = runner.shared_prefix(wanted.prompt, [row.ids for row in wanted.rows])
        self.stop_ids = runner.encoder.stop_ids()
        # A token is run through the model when the one after it is asked for. So one more is generated, and dropped,
        # where the states, keys and values of the last one are wanted.
        max_new_tokens = wanted.tokens + 1 if complete else wanted.tokens
        self.config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,  # the recorder chooses
            eos_token_id=self.stop_ids,
            pad_token_id=runner.encoder.pad_token_id,
            use_cache=True,
            return_dict_in_generate=True,
        )

    def write(self, indices: Sequence[int]) -> _Written:
        """Write the drafts of these rows."""
        rows = [self.wanted.rows[i] for i in indices]
        batch = self.runner.batch([row.ids for row in rows], self.prefix, self.watch)
        recorder = Recorder(self._sampling(indices), self.runner.model.device)
        ends = set(self.stop_ids)
        criteria: list[StoppingCriteria] = [Pause(self.runner.pause)]
        if rows[0].template.stop_at_newline:  # all rows are of one template
            newlines = self.runner.newline_mask
            ends.update(newlines.nonzero().flatten().tolist())
            criteria.append(StopAt(newlines))
        with watching(self.runner.model.base_model, self.watch) as seen:
            output = self.runner.model.generate(
                input_ids=batch.ids,
                attention_mask=batch.mask,
                **batch.cache_argument,
                generation_config=self.config,
                logits_processor=[recorder],
                stopping_criteria=criteria,
            )
        start = batch.ids.shape[1]
        written = output.sequences[:, start : start + self.wanted.tokens].tolist()
        logprobs = torch.stack(recorder.logprobs, dim=1).tolist()
        entropies = torch.stack(recorder.entropies, dim=1).tolist()
        margins = torch.stack(recorder.margins, dim=1).tolist()
        drafts = []
        for place, row in enumerate(rows):
            values = TokenValues(logprobs[place], entropies[place], margins[place])
            drafts.append(self._draft(row, written[place], ends, values))
        # The first pass gave the states of the batch's columns, each later one those of one token.
        states = {layer: torch.cat(passes, dim=1) for layer, passes in seen.items()}
        return _Written(drafts, batch, states, output.past_key_values)

    def _sampling(self, indices: Sequence[int]) -> Sampling | None:
        sampling = self.wanted.sampling
        if sampling is None:
            return None
        return Sampling(sampling.temperature, [sampling.seeds[i] for i in indices])

    def _draft(
        self,
        row: EncodedPrompt,
        ids: list[int],
        ends: set[int],
        values: TokenValues,
    ) -> Draft:
        # A row that ended is padded until the last one of its batch has ended.
        length = next((k for k, token in enumerate(ids) if token in ends), len(ids))
        kept = ids[:length]
        texts = self.runner.encoder.token_texts(kept)
        return Draft(
            text="".join(texts).strip(),
            token_ids=tuple(kept),
            tokens=tuple(texts),
            logprobs=tuple(min(v, 0.0) for v in values.logprobs[:length]),
            entropies=tuple(values.entropies[:length]),
            margins=tuple(values.margins[:length]),
            finished=length < len(ids),
            source="proxy",
            model=self.runner.name,
            prompt_tokens=len(row.ids),
        )
