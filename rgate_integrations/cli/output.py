"""How the commands print what they have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, TaskID

if TYPE_CHECKING:
    from rgate_integrations.errors import RGateError
    from rgate_integrations.index.retriever import Hit


def print_error(error: RGateError) -> None:
    """Print an error and its hint to standard error."""
    console = Console(stderr=True, highlight=False)
    console.print("error:", style="bold red", end=" ")
    console.print(error.message, markup=False)
    if error.hint:
        console.print("hint:", style="bold", end="  ")
        console.print(error.hint, markup=False)


def advance(progress: Progress, task: TaskID, done: int) -> None:
    """Show how much of a task is done; ``partial(advance, progress, task)`` is a ``report=`` argument."""
    progress.update(task, completed=done)


def hit_as_json(hit: Hit) -> dict[str, Any]:
    """Return a passage that was found as JSON values."""
    passage = hit.passage
    return {"id": passage.id, "title": passage.title, "text": passage.text, "score": round(hit.score, 4)}
