"""`plait export` refuses options that do not belong together, before it writes anything."""

from pathlib import Path

from support.cli_runs import finish, start
from support.compressed_models import MODELS, saved


def test_options_that_a_folder_does_not_have_are_errors(tmp_path: Path) -> None:
    saved(tmp_path / "in", MODELS["llama"])
    for words, message in (
        (("--adapter",), "--adapter is of runs"),
        (("--base", tmp_path), "--base is of runs"),
        (("--sparsity", "4:2"), "not a sparsity"),
        (("--weights", "int2"), "int2"),
    ):
        _, err = finish(start("export", tmp_path / "in", tmp_path / "out", *words), 2)
        assert message in err, err
    _, err = finish(start("export", tmp_path / "none", tmp_path / "out"), 2)
    assert "the run does not exist" in err
    assert not (tmp_path / "out").exists()
    finish(start("export", tmp_path / "in", tmp_path / "out", "--weights", "int8"))
    assert (tmp_path / "out" / "model.safetensors").is_file()
