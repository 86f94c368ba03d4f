"""In the keeper that a scenario starts: the fault that its environment names."""

from tests.faults.hook import install_from_environment

install_from_environment()
