"""Sessions of ONNX Runtime: on the CPU, one thread each, with weights in files of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rgate_integrations.runtime.threads import reset_after_fork


class OnnxSession:
    """A graph and its weights, ready to run. Safe for threads and forks.

    A forked child opens a session of its own when it first runs one: in the parent another thread may have been
    inside, and the locks that it held are never released in the child.

    Args:
        graph: The graph, which names the files of its weights.
        folder: Where these files are.

    Raises:
        Exception: ONNX Runtime raises classes of its own, or plain Exception.
    """

    def __init__(self, graph: bytes, folder: Path) -> None:
        self._graph = graph
        self._folder = folder
        self._session: Any = self._open()
        self._inherited: list[Any] = []
        reset_after_fork(self)

    def after_fork(self) -> None:
        """Use no session of the parent."""
        self._inherited.append(self._session)  # kept: to end it would take its locks, too
        self._session = None

    def run(self, outputs: Sequence[str] | None, inputs: Mapping[str, Any]) -> list[Any]:
        """Return the named outputs for some inputs; all outputs with None."""
        if self._session is None:
            self._session = self._open()
        results: list[Any] = self._session.run(outputs, inputs)
        return results

    def _open(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # texts are read side by side instead, each by one thread
        options.log_severity_level = 3
        folder = str(self._folder)
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        return onnxruntime.InferenceSession(self._graph, options, providers=["CPUExecutionProvider"])
