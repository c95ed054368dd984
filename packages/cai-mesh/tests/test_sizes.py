"""Numbers of bytes as people write them."""

import pytest

from cai_mesh.errors import PlanError
from cai_mesh.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (7, 7),
        ("7", 7),
        ("1.5KB", 1500),
        (".5KB", 500),
        ("22GB", 22 * 10**9),
        ("2 GiB", 2**31),
        ("1m", 10**6),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "wrong", ["", "GB", ".", "1.2.3GB", "10XB", "-1", -1, "nan", "1.5", "9" * 400 + "GB", "1e9", "٣GB", True]
)
def test_what_is_no_size(wrong):
    with pytest.raises(PlanError, match="not a size"):
        parse_bytes(wrong)
