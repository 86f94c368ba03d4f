"""The samplers, which propose configurations.

The names are separate from the factories, so that --help imports no Optuna.
"""

NAMES = ("evolution", "tpe", "nsga2", "cmaes", "gp", "random")
DEFAULT = "evolution"
SINGLE_OBJECTIVE = frozenset({"cmaes"})
"""samplers that support only one objective"""
PRIOR_GUIDED = frozenset({"evolution"})
"""samplers that a prior guides"""
