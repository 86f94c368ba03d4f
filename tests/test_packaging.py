"""A wheel carries all that an installed evoengine reads, and an sdist all that its own tests do."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
IN_WHEEL = {
    "evoengine": "evoengine",
    "templates": "evoengine/_assets/templates",
    "search_spaces": "evoengine/_assets/search_spaces",
}
"""folder of a checkout → where a wheel has it"""
IN_SDIST = (*IN_WHEEL, "tests", "benchmarks", "docs", "deploy", ".ci")
BESIDE = {"pyproject.toml", "constraints.txt", "Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def build_wheel(folder: Path, config: dict) -> Path:
    return Path(next(WheelBuilder(str(ROOT), config=config).build(directory=str(folder), versions=["standard"])))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), project())


def files_in(folder: str) -> Iterator[str]:
    """Of a checkout, relative to the folder; bytecode left out."""
    for path in (ROOT / folder).rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(ROOT / folder))


def missing_from(wheel: Path) -> set[str]:
    wanted = {f"{place}/{name}" for folder, place in IN_WHEEL.items() for name in files_in(folder)}
    return wanted - set(zipfile.ZipFile(wheel).namelist())


def test_a_wheel_has_every_file_of_the_package_and_of_its_assets(wheel):
    assert missing_from(wheel) == set()


def test_a_folder_that_a_wheel_does_not_take_along_is_noticed(tmp_path):
    config = project()
    del config["tool"]["hatch"]["build"]["targets"]["wheel"]["sources"]["templates"]
    missing = missing_from(build_wheel(tmp_path, config))
    assert missing and all(name.startswith("evoengine/_assets/templates/") for name in missing)


def test_a_wheel_has_nothing_outside_of_the_package(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top.split("-")[0] for top in tops} == {"evoengine"} and len(tops) == 2


def test_an_installed_evoengine_reads_its_own_templates_and_spaces(wheel, tmp_path):
    installed = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(installed)
    script = (
        "from evoengine.paths import asset, default_database\n"
        "from evoengine.ledger.store import open_ledger\n"
        "open_ledger('new.db', create=True).close()\n"
        "for name in ('templates', 'search_spaces'):\n"
        "    print(asset(name), any(asset(name).rglob('*.*')))\n"
        "print(default_database())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    places = [f"{installed}/{place} True" for folder, place in IN_WHEEL.items() if folder != "evoengine"]
    assert done.stdout.splitlines() == [*places, f"sqlite:///{tmp_path}/db/evoengine.db"]
    assert (tmp_path / "new.db").is_file()


def test_an_sdist_has_every_file_that_its_tests_need(tmp_path):
    sdist = next(SdistBuilder(str(ROOT), config=project()).build(directory=str(tmp_path), versions=["standard"]))
    with tarfile.open(sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames()}
    wanted = {f"{folder}/{name}" for folder in IN_SDIST for name in files_in(folder)}
    assert (wanted | BESIDE) - held == set()
