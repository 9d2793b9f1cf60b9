"""Saved gates on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from rgate_integrations.artifacts.folder import read_gate


def push_to_hub(folder: str | Path, repo_id: str, *, private: bool = False, token: str | None = None) -> str:
    """Upload a saved gate's folder to the Hugging Face Hub; ``load_gate(repo_id)`` takes it from there.

    Args:
        folder: A folder that `load_gate` takes; it is checked first.
        repo_id: Such as ``"you/my-gate"``; made if it does not exist.
        private: Whether a new repository is private.
        token: Access token; by default the one of ``hf auth login``.

    Returns:
        The address of the commit.

    Raises:
        ModelLoadError: The folder holds no saved gate, or a damaged one.
    """
    read_gate(folder)
    from huggingface_hub import HfApi  # slow to import

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    commit = api.upload_folder(repo_id=repo_id, folder_path=str(folder))
    return str(commit.commit_url)
