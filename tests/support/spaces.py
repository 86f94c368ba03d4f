"""Parts of space files that tests write."""

from __future__ import annotations


def launches(*families: str) -> str:
    """The part of a space file that gives these families a launch, where it is no matter which."""
    return "".join(f"[launch.{family}]\nthreads = 32\ngrid = [1, 1, 1]\nshared = 0\n" for family in families)
