"""Sessions of ONNX Runtime whose graph is shipped, and whose weights lie in a folder of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def open_session(graph: bytes, folder: Path) -> Any:
    """Return a session on the CPU. Any class of error may come from ONNX Runtime.

    Args:
        graph: The graph, which names the files of its weights.
        folder: Where these files are.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # texts are read side by side instead, each by one thread
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
