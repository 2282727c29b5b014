"""`tf32` and `deterministic`: settings of the process, applied only by plans that ask for them."""

import os

import pytest
import torch
from torch import nn

import plait
from plait.engine.numerics import set_numerics, set_product_precision
from plait.engine.spec import Arguments, validate
from plait.errors import PlanError
from plait.plan import Plan

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")
pytestmark = pytest.mark.usefixtures("restored_numerics")


def _settings() -> tuple[str, bool, list[str | None]]:
    enabled = torch.are_deterministic_algorithms_enabled()
    return torch.get_float32_matmul_precision(), enabled, [os.environ.get(name) for name in _VARIABLES]


def test_a_plan_without_them_leaves_the_programs_settings() -> None:
    torch.set_float32_matmul_precision("medium")
    set_numerics(Plan())
    set_product_precision(Plan())
    assert _settings() == ("medium", False, [None, None])


def test_tf32_is_used_only_if_the_plan_says_so() -> None:
    set_product_precision(Plan(tf32=True))
    assert _settings() == ("high", False, [None, None])


def test_deterministic_sets_kernels_and_what_libraries_read_when_they_start() -> None:
    set_numerics(Plan(deterministic=True))
    assert _settings() == ("highest", True, [":4096:8", "^NVLS,NVLSTree"])


def test_variables_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    set_numerics(Plan(deterministic=True))
    assert _settings()[2] == [":4096:8", "Ring"]


def test_tf32_without_a_gpu_is_an_error() -> None:
    with pytest.raises(PlanError, match="tf32 needs GPUs"):
        validate(Arguments(nn.Linear(2, 2), Plan(tf32=True)), 1, torch.device("cpu"))


def test_a_deterministic_step_has_the_bits_of_the_default_one() -> None:
    def weight(plan: str) -> torch.Tensor:
        torch.manual_seed(0)
        engine = plait.parallelize(nn.Linear(4, 4), plan, loss=lambda out, _: (out.square().sum(), len(out)))
        engine.step({"input": torch.ones(2, 4)})
        return engine.full_parameters()["weight"]

    expected = weight("dp=1")
    assert torch.equal(weight("deterministic=true"), expected)
    assert _settings()[1]
