"""Files are written whole or not at all."""

import os
from pathlib import Path

import pytest

from plait import fileio


def test_a_file_is_on_disk_before_its_name_and_its_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "facts.json"
    happened: list[str] = []
    sync, replace = os.fsync, Path.replace

    def watched_sync(descriptor: int) -> None:
        happened.append("folder" if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path else "file")
        sync(descriptor)

    def watched_replace(fresh: Path, target: Path) -> Path:
        happened.append("renamed")
        return replace(fresh, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    fileio.write_json(path, {"a": 1})
    assert happened == ["file", "renamed", "folder"]
    assert path.read_text() == '{\n "a": 1\n}'


def test_a_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "facts.json"
    fileio.write_json(path, {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        fileio.write_json(path, {"a": 2})
    assert path.read_text() == '{\n "a": 1\n}'
    assert list(tmp_path.iterdir()) == [path]


def test_only_a_plain_file_has_a_size(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(plain)
    assert fileio.regular_file_bytes(plain) == 5
    assert fileio.regular_file_bytes(tmp_path / "link") is None
    assert fileio.regular_file_bytes(tmp_path) is None
    with pytest.raises(FileNotFoundError):
        fileio.regular_file_bytes(tmp_path / "missing")
