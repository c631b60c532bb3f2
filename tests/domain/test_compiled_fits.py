"""Compiled files go to nodes with the hardware that they were compiled for, and names are checked."""

from __future__ import annotations

import pytest

from exaserve_ops.lib.errors import InvalidInputError
from exaserve_ops.serving.domain.compiled import check_target, fits

H200 = [("cuda", "NVIDIA H200"), ("cuda", "NVIDIA H200")]


@pytest.mark.parametrize(
    ("hardware", "accelerators", "fit"),
    [
        ("", [], True),
        ("", H200, True),
        ("NVIDIA H200", H200, True),
        ("nvidia h200", H200, True),
        ("cuda", H200, True),
        ("NVIDIA H100", H200, False),
        ("H200", H200, False),
        ("cpu", H200, False),
        ("cpu", [], True),
        ("cpu", [("cpu", "cpu")], True),
        ("cuda", [], False),
    ],
)
def test_what_was_compiled_fits_its_own_hardware_alone(
    hardware: str, accelerators: list[tuple[str, str]], *, fit: bool
) -> None:
    assert fits(hardware, accelerators) is fit


@pytest.mark.parametrize("engine", ["", "..", "a/b", "/", "VLLM", "v" * 33, "-v", "v\0", "é"])
def test_an_engine_whose_name_is_no_name_of_a_folder_is_refused(engine: str) -> None:
    with pytest.raises(InvalidInputError):
        check_target(engine, "")


@pytest.mark.parametrize("hardware", ["x" * 121, "a\nb", "a\0"])
def test_hardware_that_nobody_could_read_is_refused(hardware: str) -> None:
    with pytest.raises(InvalidInputError):
        check_target("vllm", hardware)
