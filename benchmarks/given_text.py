"""Fits a head for requests that work on the words of a text into a saved gate, and measures the default gate.

    python benchmarks/given_text.py [--save GATE]

"Which department should handle this? Message: When is my refund due?" needs no passages, although the message by
itself does; "Reply to this. Message: When is my refund due?" needs them. The head tells the two apart by the rest of
the request, without its segments that need passages. It learns from the prompts of ``templates/given.txt``, the
frames of `quotations`, and the prompts of programs, paragraphs and tasks among the training text.

Without ``--save``, prints the decisions of the default gate on ``given_text.tsv``: prompts by a writer who saw no
template, each with six questions.
"""

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from base import argument_parser, print_table
from encoder_states import FACT_LAYERS
from heads import CACHE, fact_states
from quotations import read_frames
from templates import FOLDER, add_step, fill, make_requests
from text_rows import LANGUAGES, NEEDY, TRAIN, TextRow, read_language, read_sections
from training_text import make_training_rows

from rgate_integrations import load_gate
from rgate_integrations.gates.folder import read_gate, save_gate
from rgate_integrations.gates.heads_artifact import Kind, KindHead
from rgate_integrations.gates.probability import logit
from rgate_integrations.models.base import PooledLayer
from rgate_integrations.runtime.quotations import PLACE, leave_out
from rgate_integrations.runtime.segments import LAYOUT, segments

RECIPE = "; requests that work on a text: python benchmarks/given_text.py"
NAME = "prompts around a text"
PER_LINE = {"en": 24}
"""Prompts of each line of ``templates/given.txt`` in a language; 12 in the others."""
OWN_LANGUAGE, POLITE, FIRST, ALSO = 0.75, 0.15, 0.5, 0.25
"""Shares of texts in the prompt's language, between pleasantries, and before a task; and of work that needs more."""
TASKS = 5_000
FOLDS, SEEDS = 5, 3
UNITS, EPOCHS, BATCH, RATE, DECAY, DROPOUT = 48, 20, 256, 1e-3, 1e-2, 0.5
WEIGHTS = {"given": 3.0, "paragraphs": 0.5}
"""Weights of the sources; 1 for the others."""
MAX_MISTAKEN = {"wrapped": 0.015, "tasks": 0.015, "answer": 0.02, "quotations": 0.02}
"""Maximum share of held-out requests of each source that need passages and may be taken for work on a text."""
_ENDS = ".:：。?？"
_TWO_ENDS = re.compile(r"([.?!。？！])\.(?= )")
QUESTIONS = (
    "Where is my order 5127?",
    "What does our travel policy say about hotels?",
    "Who signed the lease of the Ghent office?",
    "Are the trains to Porto on time today?",
    "How do I calibrate the Lumen 40 scale?",
    "When is the next fire drill in building C?",
)


@dataclass(frozen=True)
class Prompt:
    """A request around a text.

    Attributes:
        works: Whether it works on the words of the text, so that the text's answer plays no part.
        source: Where it comes from; see `MAX_MISTAKEN`.
        frame: What is held out together.
        rest: The request without the text; see `rgate_integrations.runtime.quotations.leave_out`.
    """

    works: bool
    source: str
    frame: str
    rest: str


class PromptMaker:
    """Makes prompts around questions of the training text that need passages."""

    def __init__(self, rows: list[TextRow]) -> None:
        self._draw = random.Random(0)
        self._texts: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            if row.needs_passages and row.source in ("languages", "howto", "keywords", "facts"):
                self._texts[row.language].append(row.text)
        self._texts["en"] += [each.question for each in make_requests() if each.kind in NEEDY]
        for language, texts in self._texts.items():
            self._texts[language] = [text for text in texts if len(segments(text)) == 1]

    def put_in(self, form: str, language: str) -> str:
        """Return what remains of a form with a question for TEXT (see `leave_out`)."""
        draw = self._draw
        if language not in self._texts or draw.random() > OWN_LANGUAGE:
            language = draw.choice(["en", *self._texts])
        text = draw.choice(self._texts[language])
        wrappers = _read_wrappers(language)
        polite = draw.choice(wrappers) if wrappers and draw.random() < POLITE else "~"
        request = form.replace("TEXT", polite.replace("~", text))
        return leave_out_parts(_TWO_ENDS.sub(r"\1", request), {text})

    def make_given(self) -> Iterator[Prompt]:
        """Yield the prompts of ``templates/given.txt``."""
        draw, sections = self._draw, read_sections(FOLDER / "given.txt")
        also = {name[-2:]: lines for name, lines in sections.items() if name.startswith("also ")}
        for name, lines in sections.items():
            label, _, language = name.partition(" ")
            if label not in ("work", "answer"):
                continue
            forms = sections.get(f"forms {language}", [])
            if language != "en":
                forms = [*forms, *sections["forms"]]
            for number, line in enumerate(lines):
                for _ in range(PER_LINE.get(language, 12)):
                    instruction = fill(line, {}, draw)
                    works = label == "work"
                    if works and draw.random() < ALSO:
                        works = False
                        more = fill(draw.choice(also[language]), {}, draw)
                        instruction = f"{instruction.rstrip(_ENDS)}{'' if more[0] in ',，' else ' '}{more}"
                    form = fill(draw.choice(forms), {}, draw, keep_spaces=True).replace("\\n", "\n")
                    if "INSTRUCTION:" in form:
                        instruction = instruction.rstrip(_ENDS)
                    rest = self.put_in(form.replace("INSTRUCTION", instruction), language)
                    yield Prompt(works, "given" if works else "answer", f"{name}/{number}", rest)
        for number, line in enumerate(sections["references en"]):
            for _ in range(PER_LINE["en"]):
                text = fill(line, {}, draw)
                yield Prompt(
                    False, "answer", f"references/{number}", leave_out(text, [len(segments(text)) - 1])
                )

    def make_quotations(self) -> Iterator[Prompt]:
        """Yield the frames of `quotations` around questions."""
        for number, frame in enumerate(read_frames().itertuples()):
            marked = str(frame.text).replace(PLACE, self._draw.choice(('"TEXT"', "“TEXT”")))
            rest = self.put_in(marked, str(frame.language))
            works = frame.label in ("work", "edit")
            yield Prompt(works, "given" if works else "quotations", f"quotations/{number}", rest)

    def make_tasks(self, rows: list[TextRow]) -> Iterator[Prompt]:
        """Yield tasks that are complete in themselves, beside a question."""
        draw = self._draw
        tasks = [(each.question, "en", str(each.template)) for each in make_requests() if each.kind == "task"]
        sources = ("languages", "work")
        tasks += [
            (row.text, row.language, row.frame)
            for row in rows
            if row.kind == "task" and row.source in sources
        ]
        tasks = [task for task in tasks if len(segments(task[0])) == 1]
        for task, language, frame in draw.sample(tasks, min(len(tasks), TASKS)):
            end = "" if task[-1] in ".?!。？！" else "."
            between = draw.choice((" ", " ", "\n", "\n\n", " Also, ", " And: "))
            first = draw.random() < FIRST
            rest = self.put_in(f"{task}{end}{between}TEXT" if first else f"TEXT. {task}", language)
            yield Prompt(False, "tasks", f"tasks/{frame}", rest)


def _read_wrappers(language: str) -> list[str]:
    path = LANGUAGES / f"{language}.txt"
    return read_language(language).get("polite", []) if path.exists() else []


def leave_out_parts(request: str, texts: set[str]) -> str:
    """Return what `leave_out` does for the segments with one of these texts; "" if there are none."""
    chosen = [i for i, part in enumerate(segments(request)) if any(text in part for text in texts)]
    return leave_out(request, chosen) if chosen else ""


def make_framed(rows: list[TextRow]) -> Iterator[Prompt]:
    """Yield prompts of programs and paragraphs, without what they give or ask."""
    for row in rows:
        if row.source == "helpers" or (row.source in ("wrapped", "paragraphs") and row.needs_passages):
            asked = ("given",) if row.source == "helpers" else NEEDY
            texts = {part for text, kind in row.pieces if kind in asked for part in segments(text)}
            yield Prompt(row.source == "helpers", row.source, row.frame, leave_out_parts(row.text, texts))


def make_prompts() -> list[Prompt]:
    """Return all prompts, each rest once."""
    rows = [row for row in make_training_rows() if row.part == TRAIN and not row.history]
    maker = PromptMaker(rows)
    prompts = [*maker.make_given(), *maker.make_quotations(), *maker.make_tasks(rows), *make_framed(rows)]
    return list({(each.rest, each.works): each for each in prompts if PLACE in each.rest}.values())


def fit_nets(states: np.ndarray, works: np.ndarray, weights: np.ndarray) -> list[list[np.ndarray]]:
    """Return the weights of several networks with one hidden layer: hidden, its bias, output and its bias.

    Args:
        states: Shape (n, features).
        works: What to learn, shape (n,).
        weights: How much each counts, shape (n,).
    """
    torch.set_num_threads(1)
    mean, scale = states.mean(axis=0), states.std(axis=0) + 1e-3
    inputs, answers, weight = (
        torch.from_numpy(column.astype(np.float32)) for column in ((states - mean) / scale, works, weights)
    )
    nets = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        hidden, output = torch.nn.Linear(states.shape[1], UNITS), torch.nn.Linear(UNITS, 1)
        net = torch.nn.Sequential(
            torch.nn.Dropout(DROPOUT / 2), hidden, torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), output
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=DECAY)
        loss_of = partial(torch.nn.functional.binary_cross_entropy_with_logits, reduction="none")
        for _ in range(EPOCHS):
            for chosen in torch.randperm(len(inputs)).split(BATCH):
                losses = loss_of(net(inputs[chosen])[:, 0], answers[chosen])
                optimizer.zero_grad()
                (losses * weight[chosen]).mean().backward()
                optimizer.step()
        rows = hidden.weight.detach().numpy() / scale
        bias = hidden.bias.detach().numpy() - rows @ mean
        nets.append([rows, bias, output.weight.detach().numpy(), output.bias.detach().numpy()])
    return nets


def join_nets(nets: list[list[np.ndarray]]) -> KindHead:
    """Return one head whose second logit is the mean of the networks'."""
    rows, biases, outputs, output_biases = zip(*nets, strict=True)
    output = np.concatenate(outputs, axis=1) / len(nets)
    kinds = (
        Kind("asks", "if_known", "wants what the text asks for"),
        Kind("works", "always", "works on the words of a text", float(np.mean(output_biases))),
    )
    return KindHead(
        tuple(PooledLayer(layer, "question", "mean") for layer in FACT_LAYERS),
        kinds,
        np.pad(np.concatenate(rows), ((0, 0), (0, LAYOUT))).astype(np.float32),
        np.concatenate(biases).astype(np.float32),
        np.pad(output, ((1, 0), (0, 0))).astype(np.float32),
    )


def fit_head(prompts: list[Prompt], threshold: float, cache: Path) -> KindHead:
    """Return the head, and print how well it recognises prompts of frames that it has not learned from.

    At the threshold, P(works) is such that at most `MAX_MISTAKEN` of the others are taken for work on a text.
    """
    encoder_states = fact_states(cache)
    encoder_states.fill((prompt.rest, "") for prompt in prompts)
    states = np.stack([encoder_states.whole(prompt.rest) for prompt in prompts]).astype(np.float32)
    works = np.array([prompt.works for prompt in prompts])
    source = np.array([prompt.source for prompt in prompts])
    weights = np.array([WEIGHTS.get(each, 1.0) for each in source])
    frames, numbers = np.unique([prompt.frame for prompt in prompts], return_inverse=True)
    fold = np.random.default_rng(0).integers(0, FOLDS, len(frames))[numbers]
    flat, logits = states.reshape(len(states), -1), np.zeros(len(states))
    for number in range(FOLDS):
        out = fold == number
        logits[out] = join_nets(fit_nets(flat[~out], works[~out], weights[~out])).whole_logits(states[out])[
            :, 1
        ]
    least = max(
        float(np.quantile(logits[(source == name) & ~works], 1 - share))
        for name, share in MAX_MISTAKEN.items()
    )
    table = [
        [
            name,
            label,
            str((rows := (source == name) & (works == is_work)).sum()),
            f"{(logits > least)[rows].mean():.1%}",
        ]
        for name in np.unique(source)
        for label, is_work in (("work", True), ("others", False))
        if ((source == name) & (works == is_work)).any()
    ]
    print_table(["held out", "", "n", "taken for work"], table)
    head = join_nets(fit_nets(flat, works, weights))
    asks, kind = head.kinds
    return replace(head, kinds=(asks, replace(kind, bias=kind.bias - least + logit(threshold))))


def measure() -> None:
    """Print the share that the default gate retrieves of prompts around questions that need passages."""
    lines = Path(__file__).with_name("given_text.tsv").read_text(encoding="utf-8").splitlines()
    prompts = pd.DataFrame([line.split("\t") for line in lines], columns=["label", "language", "text"])
    prompts = prompts.merge(pd.Series(QUESTIONS, name="question"), how="cross")
    texts = [
        text.replace("\\n", "\n").replace("{q}", question)
        for text, question in zip(prompts.text, prompts.question, strict=True)
    ]
    prompts["retrieve"] = [decision.retrieve for decision in load_gate(on_error="raise").decide_batch(texts)]
    table = []
    english = prompts.language == "en"
    for name, rows in (("English", prompts[english]), ("others", prompts[~english]), ("all", prompts)):
        cells = [name]
        for label in ("answer", "work"):
            of_label = rows[rows.label == label]
            cells += [f"{of_label.retrieve.mean():.1%}", str(len(of_label))]
        table.append(cells)
    print_table(["", "wants the answer: retrieved", "n", "works on the text: retrieved", "n"], table)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of cached states")
    parser.add_argument("--save", type=Path, help="folder of a saved gate")
    arguments = parser.parse_args()
    if arguments.save is None:
        measure()
        return
    gate: Any = read_gate(arguments.save)
    prompts = make_prompts()
    head = fit_head(prompts, gate.threshold, arguments.cache)
    provenance = add_step(gate.provenance, RECIPE, NAME, [prompt.rest for prompt in prompts])
    save_gate(replace(gate, works_on_text=head, provenance=provenance), arguments.save)


if __name__ == "__main__":
    main()
