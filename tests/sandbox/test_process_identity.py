"""A process of this machine is told apart from every other that had its number."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from evoengine.sandbox.machine import is_gone, this_process
from tests.support.waiting import wait_for

TELL = "from evoengine.sandbox.machine import this_process; print(this_process(), flush=True); input()"

if this_process() is None:
    pytest.skip("this system does not say which boot and namespace a process is of", allow_module_level=True)


@pytest.fixture
def other():
    """A process that lives, and what it says it is."""
    with subprocess.Popen(
        [sys.executable, "-c", TELL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        yield process, process.stdout.readline().strip()
        process.kill()


def test_a_process_that_lives_is_not_gone(other):
    assert not is_gone(other[1]) and not is_gone(this_process())


def test_one_that_was_killed_is_whether_its_parent_has_asked_about_it_or_not(other):
    process, said = other
    process.kill()
    wait_for(lambda: is_gone(said))
    process.wait()
    assert is_gone(said)


def test_one_whose_number_another_has_by_now_is_gone():
    *mine, start = this_process().split()
    assert is_gone(" ".join([*mine, str(int(start) - 1)]))


def test_nothing_is_known_of_another_machine_or_container_or_of_a_row_that_does_not_say():
    boot, namespace, pid, start = this_process().split()
    assert not is_gone(f"{boot[::-1]} {namespace} 999999999 {start}")
    assert not is_gone(f"{boot} pid:[1] 999999999 {start}")
    assert not is_gone(None)
    assert is_gone(f"{boot} {namespace} 999999999 {start}")
