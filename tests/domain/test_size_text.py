"""Sizes in words."""

from __future__ import annotations

import pytest

from exaserve_ops.lib.units import size_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (536_870_912, "512 MiB"),
        (58_836_280_934, "54.8 GiB"),
        (85_899_345_920, "80 GiB"),
        (2**50, "1 PiB"),
        (2**63, "8.19e+03 PiB"),
    ],
)
def test_sizes_have_three_digits_and_the_unit_that_fits(size: int, text: str) -> None:
    assert size_text(size) == text
