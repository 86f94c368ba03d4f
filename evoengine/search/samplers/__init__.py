"""Who proposes the next configuration. The names are here, apart from their makers, so that --help imports no
Optuna."""

NAMES = ("evolution", "tpe", "nsga2", "cmaes", "gp", "random")
DEFAULT = "evolution"
SINGLE = frozenset({"cmaes"})
"""those that aim at one objective only"""
LED = frozenset({"evolution"})
"""those that a prior leads"""
