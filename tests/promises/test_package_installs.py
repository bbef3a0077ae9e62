"""Promise: a wheel and an sdist hold all that Narrowboat needs, and work outside of the clone."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

TOP = Path(__file__).parents[2]
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run(*words: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=TOP)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    return folder


def test_the_wheel_holds_every_file_of_the_source(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    files = {path for path in (TOP / "src" / "narrowboat").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        metadata = archive.read(next(name for name in held if name.endswith("METADATA"))).decode()
    assert {f"narrowboat/{path.relative_to(TOP / 'src' / 'narrowboat').as_posix()}" for path in files} <= held
    assert "narrowboat/py.typed" in held
    assert any(name.endswith("licenses/LICENSE") for name in held)
    assert set(PROJECT["optional-dependencies"]) <= {
        line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Provides-Extra: ")
    }


def test_it_works_where_there_is_no_clone(built: Path, tmp_path: Path) -> None:
    """In an environment of its own, which has this one's libraries; pip and a network would bring the same."""
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (packages,) = (tmp_path / "env").glob("lib/*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    where = run(python, "-c", "import narrowboat; print(narrowboat.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    assert run(python.with_name("narrowboat"), "--version", cwd=tmp_path) == f"narrowboat {PROJECT['version']}\n"
    assert "Train an adapter." in run(python, "-m", "narrowboat", "--help", cwd=tmp_path)
    words = ("plan", "--model", "smollm2-135m", "--tokens", "8192", "--card", "rtx-3060")
    assert "8,192 tokens: fits" in run(python, "-m", "narrowboat", *words, cwd=tmp_path)


def test_every_extra_is_in_all() -> None:
    extras = dict(PROJECT["optional-dependencies"])
    (everything,) = extras.pop("all")
    assert set(everything.removeprefix("narrowboat[").removesuffix("]").split(",")) == set(extras)


def test_what_is_used_inside_has_an_upper_bound() -> None:
    for name in ("torch", "transformers", "peft", "accelerate", "datasets", "pydantic", "typer"):
        (bound,) = [line for line in PROJECT["dependencies"] if line.startswith((f"{name}>", f"{name} "))]
        assert ",<" in bound, bound


def test_what_is_pinned_is_within_the_bounds() -> None:
    pins = dict(
        line.split("==") for line in (TOP / "constraints.txt").read_text(encoding="utf-8").split() if "==" in line
    )
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    extras = [line for name, lines in PROJECT["optional-dependencies"].items() if name != "all" for line in lines]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), str(requirement)


def test_the_lowest_bounds_are_those_that_were_tried() -> None:
    lines = (TOP / "constraints-lowest.txt").read_text(encoding="utf-8").split("\n")
    tried = {canonicalize_name(name): version for name, version in (li.split("==") for li in lines if "==" in li)}
    extras = [line for name, lines in PROJECT["optional-dependencies"].items() if name != "all" for line in lines]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        (lowest,) = [Version(spec.version) for spec in requirement.specifier if spec.operator == ">="]
        version = Version(tried.pop(canonicalize_name(requirement.name)))
        assert version.release[: len(lowest.release)] == lowest.release, str(requirement)
    assert not tried, "nothing asks for these"
