"""A name out of a file leads nowhere but into its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowboat.machine.inside import inside


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "..",
        "",
        ".",
        "a\0b",
        "C:\\x",
        "\\\\host\\share\\x",
        "..\\x",
        "C:x",
        None,
        7,
        ["x"],
    ],
)
def test_names_that_lead_out_are_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"leads out of its folder|is no file's name"):
        inside(tmp_path, name)


def test_others_are_below_the_folder(tmp_path: Path) -> None:
    assert inside(tmp_path, "model-00001-of-2.safetensors") == tmp_path / "model-00001-of-2.safetensors"
    assert inside(tmp_path, "adapter/a..b") == tmp_path / "adapter" / "a..b"


@given(st.text(alphabet="./\\ab:~ \0", max_size=12))
def test_no_name_gets_out(name: str) -> None:
    folder = Path("/home/somebody/model")
    try:
        found = inside(folder, name)
    except ValueError:
        return
    assert folder in found.parents and ".." not in found.parts
