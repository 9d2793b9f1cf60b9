"""What other ways of running the proxy on a CPU give, beside float32 on all threads, and whether decisions stay.

    python benchmarks/cpu.py [--only TEXT ...] [--rounds N] [--onnx FOLDER] [--gguf FILE]

Each way takes turns with float32, in pairs; its time is the median ratio of the pairs. Decisions are those of the
default gate, every question drafted. ONNX Runtime and llama.cpp give no hidden states, so they only draft, and are
left out where file or package is missing. FOLDER is made by optimum-onnx in an environment of its own:

    optimum-cli export onnx --task text-generation-with-past --model MODEL_FOLDER FOLDER

FILE is the GGUF that the proxy was converted from; the tests keep it in the cache. The columns: times; equal
decisions; by how much p_known differs at most; equal drafts; size of the weights; seconds of the first drafts,
compilation included. The table goes to benchmarks/out/cpu.json too.
"""

import argparse
import copy
import json
import signal
import statistics
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from speed import milliseconds, questions

from rgate_integrations import load_gate
from rgate_integrations.prompts import ANSWER
from rgate_integrations.proxy.batch import pad_left, positions
from rgate_integrations.proxy.download import cache_dir
from rgate_integrations.proxy.local import LocalProxy, shared_proxy
from rgate_integrations.proxy.model_runner import ModelRunner

OUT = Path(__file__).parent / "out" / "cpu.json"
GATE = load_gate("default", early_exit=False, on_error="raise")
PROXY = shared_proxy()
TOKENS, SECONDS = 32, 900
COLUMNS = {
    "time of 1": ("1 question", "{:.2f}"),
    "time of 16": ("16 questions", "{:.2f}"),
    "decisions": ("decisions", "{:.1%}"),
    "p_known": ("p_known", "{:.4f}"),
    "drafts": ("drafts", "{:.0%}"),
    "megabytes": ("MB", "{:.0f}"),
    "first": ("first, s", "{:.1f}"),
}
Drafts = Callable[[Sequence[str]], list[list[int]]]


class Way(NamedTuple):
    """A way to run the proxy: drafts of questions as token ids, and decisions if hidden states are to be had."""

    draft: Drafts
    megabytes: float
    decide: Callable[[Sequence[str]], Sequence[Any]] | None = None


class OtherModel(LocalProxy):
    """The proxy with another model in place of its own, such as a quantised copy of it."""

    def __init__(self, model: Any) -> None:
        super().__init__(PROXY.name)
        encoder = PROXY.runner.encoder
        self._other = ModelRunner(model, encoder, PROXY.name, PROXY.max_batch_size, PROXY.max_batch_tokens)

    @property
    def runner(self) -> ModelRunner:
        """What runs the other model."""
        return self._other

    @property
    def fingerprint(self) -> str:
        """That of the proxy's own model, so that the gate, which was trained on it, judges the other one too."""
        return PROXY.fingerprint


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def of_model(model: Any, threads: int) -> Way:
    """Run another model, or the same one on other threads, in place of the proxy's own."""
    proxy = OtherModel(model)
    gate = GATE.with_options(proxy=proxy)

    def draft(asked: Sequence[str]) -> list[list[int]]:
        with on_threads(threads):
            drafts = proxy.generate(ANSWER, [{"question": q} for q in asked], tokens=TOKENS)
        return [list(d.token_ids) for d in drafts]

    def decide(asked: Sequence[str]) -> Sequence[Any]:
        with on_threads(threads):
            return gate.decide_batch(asked)

    packed = [m.weight() for m in model.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)]
    size = sum(w.numel() * w.element_size() for w in [*model.parameters(), *packed]) / 2**20
    return Way(draft, size, decide)


def quantised(head: bool, channels: bool) -> Any:
    model, how = copy.deepcopy(PROXY.runner.model), torch.ao.quantization.default_dynamic_qconfig
    if channels:  # a scale for each row of a weight, not one for all of it
        how = torch.ao.quantization.per_channel_dynamic_qconfig
    part = model if head else model.base_model
    torch.ao.quantization.quantize_dynamic(part, {torch.nn.Linear: how}, inplace=True)
    return model


def compiled(whole: bool) -> Any:
    model = copy.deepcopy(PROXY.runner.model)
    for part in [model] if whole else [layer.mlp for layer in model.base_model.layers]:
        part.forward = torch.compile(part.forward, dynamic=True)
    return model


def from_ids(draft: Callable[[list[list[int]]], list[list[int]]], file: Path) -> Way:
    """A way that takes up to sixteen prompts as token ids, and may write on after the end of an answer."""

    def whole(asked: Sequence[str]) -> list[list[int]]:
        encoder = PROXY.runner.encoder
        rows = [list(encoder.encode(ANSWER, {"question": q}).ids) for q in asked]
        ends = set(encoder.stop_ids())
        drafts = []
        for i in range(0, len(rows), 16):
            for ids in draft(rows[i : i + 16]):
                length = next((k for k, token in enumerate(ids) if token in ends), len(ids))
                drafts.append(ids[:length])
        return drafts

    return Way(whole, file.stat().st_size / 2**20)


def of_onnx(file: Path, threads: int) -> Way:
    """Decode greedily with a cache."""
    from onnxruntime import InferenceSession, OrtValue, SessionOptions

    options = SessionOptions()
    options.intra_op_num_threads = threads
    session = InferenceSession(file, options, providers=["CPUExecutionProvider"])
    caches = [i for i in session.get_inputs() if i.name.startswith("past")]
    outputs = [o.name for o in session.get_outputs()]

    def draft(rows: list[list[int]]) -> list[list[int]]:
        ids, mask = pad_left(rows, PROXY.pad_token_id, torch.device("cpu"))
        inputs: dict[str, Any] = {
            "input_ids": ids.numpy(),
            "attention_mask": mask.numpy(),
            "position_ids": positions(mask).numpy(),
        }
        empty = np.zeros((len(rows), caches[0].shape[1], 0, caches[0].shape[3]), np.float32)
        past, new = [OrtValue.ortvalue_from_numpy(empty) for _ in caches], []
        for _ in range(TOKENS):
            feed = {name: OrtValue.ortvalue_from_numpy(value) for name, value in inputs.items()}
            feed |= {c.name: value for c, value in zip(caches, past, strict=True)}
            logits, *past = session.run_with_ort_values(outputs, feed)
            new.append(logits.numpy()[:, -1].argmax(-1)[:, None])
            if np.isin(np.hstack(new), PROXY.runner.encoder.stop_ids()).any(1).all():
                break
            mask = np.pad(inputs["attention_mask"], ((0, 0), (0, 1)), constant_values=1)
            place = inputs["position_ids"][:, -1:] + 1
            inputs = {"input_ids": new[-1], "attention_mask": mask, "position_ids": place}
        return np.hstack(new).tolist()

    return from_ids(draft, file)


def of_llama_cpp(file: Path, threads: int) -> Way:
    """Ask llama.cpp's server in this process; sixteen questions are decoded together."""
    import xllamacpp

    if not file.exists():
        raise FileNotFoundError(f"there is no {file}")
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.verbosity = str(file), 4_096, 16, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    fixed = {"n_predict": TOKENS, "temperature": 0, "cache_prompt": False, "return_tokens": True}

    def draft(rows: list[list[int]]) -> list[list[int]]:
        body = json.dumps({**fixed, "prompt": rows}).encode()
        with urllib.request.urlopen(f"{server.listening_address}/completion", body) as answer:  # noqa: S310
            found = json.load(answer)
        found = found if isinstance(found, list) else [found]
        return [each["tokens"] for each in sorted(found, key=lambda each: each["index"])]

    return from_ids(draft, file)


def ways(onnx: Path | None, gguf: Path) -> dict[str, Callable[[], Way]]:
    threads, model = torch.get_num_threads(), PROXY.runner.model
    found: dict[str, Callable[[], Way]] = {
        f"float32, {threads} threads, again": lambda: of_model(model, threads),
        "float32, 1 thread": lambda: of_model(model, 1),
        "bfloat16": lambda: of_model(copy.deepcopy(model).to(torch.bfloat16), threads),
        "int8 layers": lambda: of_model(quantised(False, False), threads),
        "int8 layers, scales by channel": lambda: of_model(quantised(False, True), threads),
        "int8 layers and lm_head, by channel": lambda: of_model(quantised(True, True), threads),
        "torch.compile, feed-forward blocks": lambda: of_model(compiled(False), threads),
        "torch.compile, whole model": lambda: of_model(compiled(True), threads),
    }
    for file in sorted(onnx.glob("*.onnx")) if onnx else ():
        found[f"ONNX Runtime, {file.name}"] = lambda file=file: of_onnx(file, threads)
    return {**found, "llama.cpp, Q4_1": lambda: of_llama_cpp(gguf, threads)}


def measured(
    way: Way, base: Way, drafts: Any, decisions: Any, asked: list[str], rounds: int
) -> dict[str, Any]:
    """Time a way in turns with ``base``, and compare with the drafts and decisions of that."""
    signal.alarm(SECONDS)
    row: dict[str, Any] = {"first": milliseconds(lambda: [way.draft(asked[:n]) for n in (1, 16)]) / 1e3}
    signal.alarm(0)
    for n in (1, 16):
        pairs = []
        for k in range(rounds):
            sides = {"way": way, "base": base} if k % 2 else {"base": base, "way": way}
            spent = {name: milliseconds(lambda s=s, n=n: s.draft(asked[:n])) for name, s in sides.items()}
            pairs.append((spent["way"], spent["base"]))
        row |= {
            f"pairs of {n}": pairs,
            f"time of {n}": statistics.median(own / other for own, other in pairs),
        }
    row["megabytes"] = way.megabytes
    row["drafts"] = statistics.mean(a == b for a, b in zip(way.draft(asked), drafts, strict=True))
    if way.decide:
        signal.alarm(SECONDS)
        own = way.decide(asked)
        signal.alarm(0)
        if errors := [d.error for d in own if d.error]:
            row["failed"] = f"decisions: {errors[0].message}"
            return row
        row["decisions"] = statistics.mean(
            a.retrieve == b.retrieve for a, b in zip(own, decisions, strict=True)
        )
        row["p_known"] = max(abs(a.p_known - b.p_known) for a, b in zip(own, decisions, strict=True))
    return row


def late(number: int, frame: object) -> NoReturn:
    raise TimeoutError(f"not done after {SECONDS} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="ways whose name holds one of these texts")
    parser.add_argument("--questions", type=int, default=64, help="whose decisions are compared")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--onnx", type=Path, help="folder of exported models")
    parser.add_argument("--gguf", type=Path, default=cache_dir() / "tests" / "smollm2.gguf")
    arguments = parser.parse_args()
    asked, threads = questions(arguments.questions), torch.get_num_threads()
    base = of_model(PROXY.runner.model, threads)
    signal.signal(signal.SIGALRM, late)
    drafts, decisions = base.draft(asked), base.decide(asked)
    rows: dict[str, dict[str, Any]] = {}
    for name, make in ways(arguments.onnx, arguments.gguf).items():
        if any(text in name for text in arguments.only):
            try:
                rows[name] = measured(make(), base, drafts, decisions, asked, arguments.rounds)
            except Exception as error:
                rows[name] = {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
            row = {key: value for key, value in rows[name].items() if "pairs" not in key}
            print(name, json.dumps(row), file=sys.stderr, flush=True)

    each = {n: [pair[1] for row in rows.values() for pair in row.get(f"pairs of {n}", ())] for n in (1, 16)}
    title = (
        f"Times are multiples of float32 on {threads} threads "
        f"({' and '.join(f'{statistics.median(ms):.0f} ms for {n}' for n, ms in each.items() if ms)}); "
        f"{torch.backends.cpu.get_cpu_capability()}; "
        f"float32 retrieves for {sum(d.retrieve for d in decisions)} of {len(asked)}"
    )
    table = Table(box=None)
    table.add_column("way", no_wrap=True)
    for heading, _ in COLUMNS.values():
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(form.format(row[k]) if k in row else "–" for k, (_, form) in COLUMNS.items()))
    console = Console(width=118)
    console.print(title, table)
    for name, row in rows.items():
        if "failed" in row:
            console.print(f"{name}: {row['failed']}")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"title": title, "ways": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
