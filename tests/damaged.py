"""Copies of model folders with one file damaged, and files that may not be read."""

import errno
import shutil


def forbidden(path, *_, **__):
    """Stands for a function that reads a file, which this user may not read."""
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def with_damage(folder, copy, name, damage):
    """Copy a folder with a file that is changed, or missing where ``damage`` is None."""
    file = shutil.copytree(folder, copy) / name
    content = file.read_bytes()
    file.unlink()  # it may be a link
    if damage is not None:
        file.write_bytes(damage(content))
    return copy


def zeroed(content, at, parts):
    """Bytes of which one of several equal parts is zeros."""
    size = len(content) // parts
    return content[: at * size] + bytes(size) + content[(at + 1) * size :]
