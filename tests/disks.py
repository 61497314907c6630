"""Disks that are small or full, files that may not be read, and what lies in a folder."""

import contextlib
import os
import pathlib
import resource
import subprocess
from collections.abc import Generator

import pytest


@contextlib.contextmanager
def files_up_to(size: int) -> Generator[None]:
    """No file can have more than `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def mounted(folder: pathlib.Path, size: str) -> Generator[pathlib.Path]:
    """A new folder that is a file system of this size, such as 8m."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def as_nobody() -> Generator[None]:
    """Files of this user, such as those of tests, may not be read."""
    if os.getuid():
        pytest.skip("root alone can be another user for a while")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def snapshot(folder: pathlib.Path) -> dict[str, bytes]:
    """The content of each file, by its path in the folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
