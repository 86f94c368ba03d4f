"""The samplers, which propose configurations.

The names are separate from the factories, so that --help imports no Optuna.
"""

NAMES = ("evolution", "tpe", "nsga2", "cmaes", "gp", "random")
DEFAULT = "evolution"
SINGLE = frozenset({"cmaes"})
"""those that aim at one objective only"""
LED = frozenset({"evolution"})
"""those that a prior leads"""
