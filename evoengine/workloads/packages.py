"""Kernels of packages that need not be installed, beside which candidates are timed where they are.

It needs no tensor library. A package is imported only by the process that times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from evoengine.workloads.base import Inputs, Outputs

P = TypeVar("P")
DISTRIBUTIONS = {"flash_attn": "flash-attn", "flash_attn_interface": "flash-attn-3", "flashinfer": "flashinfer-python"}
"""package → the distribution that installs it, whose version figures state"""
PACKAGES = "packages"
"""the key of a reason that holds for the kernels of all packages"""
LONGEST_REASON = 300


@dataclass(frozen=True, slots=True)
class PackageBaseline(Generic[P]):
    """One kernel of a package."""

    package: str
    """the name by which it is imported"""
    kernel: str
    covers: Callable[[P], bool]
    """whether the package supports the problem, by its documentation"""
    prepare: Callable[[ModuleType, P, Inputs], Callable[[], Outputs]]
    """gets the package and whole inputs, on whatever device they are, and does what is not timed"""

    @property
    def name(self) -> str:
        """Return package, version and kernel."""
        return f"{self.package} {installed_version(self.package)} {self.kernel}"

    def call(self, problem: P, inputs: Inputs) -> Callable[[], Outputs]:
        """Import the package and return a call of the kernel. Whatever the package raises becomes a RuntimeError."""
        prepared = _said(lambda: self.prepare(import_module(self.package), problem, inputs))
        return lambda: _said(prepared)


_Found = TypeVar("_Found")


def _said(run: Callable[[], _Found]) -> _Found:
    try:
        return run()
    except RuntimeError:
        raise
    except Exception as error:
        line = next(iter(str(error).splitlines()), "")
        raise RuntimeError(f"{type(error).__name__}: {line:.{LONGEST_REASON}}") from error


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder without code of its own, as others share, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def any_installed() -> bool:
    """Return whether one of these packages can be imported."""
    return any(map(is_installed, DISTRIBUTIONS))


def installed_version(package: str) -> str:
    """Return the version of a package that can be imported."""
    try:
        return version(DISTRIBUTIONS[package])
    except PackageNotFoundError:
        return "(unknown version)"
