"""The contents of the wheel, and the places that must list every op."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dtensor_vocab as dv
from bench.measure.ops import OPS as MEASURED
from tests import oracle
from tests.mutants import FAULTS
from tests.ops import OPS, PUBLIC_OPS

ROOT = Path(__file__).parents[1]


@pytest.mark.ranks(1)
def test_wheel_contains_the_package_and_nothing_else(tmp_path: Path) -> None:
    """The wheel holds every module, the type marker and the license, and nothing else."""
    command = [sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "-w", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob(f"dtensor_vocab-{dv.__version__}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"dtensor_vocab-{dv.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
    package = ROOT / "dtensor_vocab"
    modules = {str(path.relative_to(ROOT)) for path in package.rglob("*.py")}
    contents = {name for name in names if not name.startswith(info)}
    assert contents == modules | {"dtensor_vocab/py.typed"}
    assert f"{info}/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in metadata
    assert re.search(r"^Requires-Dist: torch(<2\.15)?,?(>=2\.11)?", metadata, re.M)


def test_every_op_is_listed_everywhere() -> None:
    """The README, the oracles, the tests' table and the bench's table list every op."""
    rows = re.findall(r"^\| \[`([a-z_]+)\(", (ROOT / "README.md").read_text(), re.M)
    assert set(rows) == set(PUBLIC_OPS)
    assert {op.name for op in OPS} == set(PUBLIC_OPS)
    assert all(callable(getattr(oracle, name, None)) for name in PUBLIC_OPS)
    assert {op.family for op in MEASURED.values()} >= set(PUBLIC_OPS)


@pytest.mark.parametrize("name", PUBLIC_OPS)
def test_docstring_says_what_a_caller_must_know(name: str) -> None:
    text = getattr(dv, name).__doc__
    for heading in ("Args:", "Returns:", "Communication:", "Rows"):
        assert heading in text, heading


def test_planted_faults_are_of_the_package_and_of_the_tests() -> None:
    """Each fault replaces text that occurs once in its module, and names a test that exists."""
    for fault in FAULTS:
        file, _, test = fault.test.partition("::")
        assert (ROOT / "dtensor_vocab" / fault.module).read_text().count(fault.sound) == 1, fault
        assert f"def {test}(" in (Path(__file__).parent / file).read_text(), fault
