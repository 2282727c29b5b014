"""Files are written whole or not at all."""

import os
import shutil
import signal
import time
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


@pytest.fixture
def others(tmp_path: Path) -> list[Path]:
    """Paths of anything but a regular file, some of which would make a plain read wait or never end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    return [
        tmp_path,
        *(tmp_path / name for name in ("pipe", "zero", "circle", "missing", "a\0b", "a\ud800b", "a" * 256)),
    ]


def test_only_a_regular_file_is_read_and_nothing_is_waited_for(tmp_path: Path, others: list[Path]) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"12345")
    (tmp_path / "link").symlink_to(plain)
    assert fileio.read_regular(plain) == fileio.read_regular(tmp_path / "link") == b"12345"
    for other in others:
        with pytest.raises(OSError):
            fileio.read_regular(other)
    with pytest.raises(OSError):
        fileio.open_descriptor(tmp_path / "link", follow=False)
    with pytest.raises(OSError, match="larger than 4 bytes"):
        fileio.read_regular(plain, 4)


def test_a_folder_is_copied_with_its_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"12345")
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=fileio.copy_regular)
    assert (tmp_path / "b" / "file").read_bytes() == b"12345"
    (tmp_path / "a" / "zero").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        shutil.copytree(tmp_path / "a", tmp_path / "c", copy_function=fileio.copy_regular)


DEEP = 100_000


@pytest.mark.parametrize(
    "text",
    [
        "[" * DEEP,
        '{"a":' * 900 + "1" + "}" * 900,
        "[" * 65 + "]" * 65,
        "1" * 5000,
        "1" * 30,
        "[1,",
        "\ud800",
        b"\xff",
    ],
    ids=["brackets", "braces", "just too deep", "digits", "65 bits", "incomplete", "surrogate", "not UTF-8"],
)
def test_invalid_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        fileio.parse_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "a=" + "[" * DEEP,
        "a=" + "{b=" * DEEP,
        ".".join(["a"] * DEEP) + "=1",
        "[" + " . ".join(["'a'", '"b"'] * DEEP) + "]",
        "a=" + "1" * 5000,
        "a=0x" + "f" * 5000,
        "a",
    ],
    ids=["brackets", "braces", "key", "section", "digits", "hexadecimal", "incomplete"],
)
def test_invalid_toml_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):
        fileio.parse_toml(text)


def test_valid_json_and_toml_are_read() -> None:
    nested = "[" * 64 + "]" * 64
    assert fileio.parse_json(f'{{"a": 1, "b": {nested[1:-1]}}}')["a"] == 1
    words = ", ".join(f'"a.b.{number}"' for number in range(1000))
    values = fileio.parse_toml(f'a.b = [{words}]\nprompt = "{"." * 100}"\nx = [{"1.5, " * 1000}]\n[ a . c ]')
    assert len(values["a"]["b"]) == 1000


def test_only_a_path_that_a_file_can_have_is_accepted() -> None:
    for name in ("a/b", "\udc80", "a" * 255):
        assert fileio.check_path(Path(name)) == Path(name)
    for name in ("a\0b", "\ud800", "a" * 256, "a/" * 2100):
        with pytest.raises(ValueError, match="a path"):
            fileio.check_path(Path(name))


def _holder(final: Path) -> tuple[int, Path]:
    """Fork a process that has a temporary folder for `final`; its id and the folder."""
    before = {*final.parent.iterdir()}
    process = os.fork()
    if not process:
        with fileio.temporary_folder(final):
            time.sleep(60)
        os._exit(0)
    limit_s = time.monotonic() + 10
    while not (made := {*final.parent.iterdir()} - before) and time.monotonic() < limit_s:
        time.sleep(0.01)
    time.sleep(0.1)  # for its lock
    return process, made.pop()


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path: Path) -> None:
    final = tmp_path / "out"
    killed, living = [_holder(final) for _ in range(3)], _holder(final)
    try:
        for process, _ in killed:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        (other_host := tmp_path / f"out.tmp-{'0' * 16}").mkdir()
        (other_name := tmp_path / killed[1][1].name.replace("out", "output")).mkdir()
        for path in (killed[0][1], killed[1][1], living[1], other_host, other_name):
            os.utime(path, (0, 0))
        with fileio.temporary_folder(final) as folder:
            (folder / "file").write_text("new")
            left = {path.name for path in tmp_path.iterdir()} - {folder.name}
            folder.rename(final)
        new, kept = killed[2][1], (living[1], other_host, other_name)
        assert left == {path.name for path in (new, *kept)}, "a new one may be about to be locked"
        assert (final / "file").read_text() == "new"
        with pytest.raises(ZeroDivisionError), fileio.temporary_folder(tmp_path / "failed") as folder:
            raise ZeroDivisionError
        assert not folder.exists()
    finally:
        os.kill(living[0], signal.SIGKILL)
        os.waitpid(living[0], 0)
