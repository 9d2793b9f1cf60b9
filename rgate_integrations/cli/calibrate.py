"""``rgate calibrate``: a threshold with a guarantee on your own data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rgate_integrations.cli.bars import QuestionBar
from rgate_integrations.cli.gate_options import Data, DraftOf, More, gate_for, numbers
from rgate_integrations.cli.options import DEFAULT_GATE, GateName, ProxyName
from rgate_integrations.cli.output import Terminal
from rgate_integrations.errors import ConfigurationError

if TYPE_CHECKING:
    from rgate_integrations.tuning.policies import Policy


def _policy(budget: float | None, max_loss: float | None, cost: str | None, confidence: float) -> Policy:
    """Return the policy that was asked for, one of the three."""
    from rgate_integrations.tuning import Budget, MaxLoss, MinCost

    asked = [value for value in (budget, max_loss, cost) if value is not None]
    if len(asked) != 1:
        raise ConfigurationError("Give one policy.", hint="--budget, --max-loss or --cost")
    if budget is not None:
        return Budget(budget, confidence)
    if max_loss is not None:
        return MaxLoss(max_loss, confidence)
    return MinCost(**numbers(cost or "", ("retrieval", "draft", "answer", "wrong"), needed=("retrieval",)))


def calibrate(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the calibrated gate.")],
    more: More = None,
    gate: GateName = DEFAULT_GATE,
    draft: DraftOf = "proxy",
    budget: Annotated[
        float | None, typer.Option(help="Retrieve for at most this share of the questions.")
    ] = None,
    max_loss: Annotated[
        float | None, typer.Option(help="Lose at most this much accuracy against always retrieving.")
    ] = None,
    cost: Annotated[
        str | None,
        typer.Option(help="retrieval=…,draft=…,answer=…[,wrong=…]: prices, for the lowest expected cost."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Confidence of the guarantee.")] = 0.95,
    probability: Annotated[str, typer.Option(help="platt, temperature, isotonic or none.")] = "platt",
    proxy: ProxyName = None,
    seed: Annotated[int, typer.Option(help="Seed of the split.")] = 0,
) -> None:
    """Choose a gate's threshold on paired data, with a guarantee, and save the gate."""
    from rgate_integrations.artifacts.folder import save_gate
    from rgate_integrations.gates.probability import Method
    from rgate_integrations.gates.registry import loadable, saved_gate
    from rgate_integrations.tuning import calibrate as calibrate_threshold
    from rgate_integrations.tuning.paired import read_paired

    policy = _policy(budget, max_loss, cost, confidence)
    if probability not in get_args(Method):
        raise ConfigurationError(f"--probability {probability!r} is not known.", hint="platt is the default.")
    files = read_paired([*data, *(more or [])])
    loaded = gate_for(gate, draft, proxy)
    questions = sum(len(f.records) for f in files)
    options: dict[str, Any] = {"draft": draft, "method": probability, "seed": seed}
    with QuestionBar(f"gate {gate}", questions) as report:
        found = calibrate_threshold(loaded, files, policy, report=report, **options)
    save_gate(saved_gate(found.gate.gate, found.provenance), out)
    console = Terminal()
    console.print(found.choice.guarantee, style="bold" if found.choice.guaranteed else "bold yellow")
    facts = found.provenance
    console.print(
        f"threshold {found.choice.threshold:.3f}, retrieval rate {facts['retrieval_rate']:.1%} on {facts['n']} "
        f"questions; calibration error {facts['ece_before']:.3f} -> {facts['ece']:.3f}"
    )
    name = loadable(out)
    console.print(f'Saved. Use it as load_gate("{name}") or --gate {name}.', soft_wrap=True)
