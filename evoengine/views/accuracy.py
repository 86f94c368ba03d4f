"""The JSON of predicted beside measured times."""

from __future__ import annotations

from collections.abc import Sequence

from evoengine.accuracy.page import Row, class_errors
from evoengine.sass.predict import ClassError
from evoengine.views import SCHEMA, AnswerView


class AccuracyView(AnswerView):
    """Describe what `evoengine accuracy --json` prints."""

    rows: Sequence[Row]
    classes: Sequence[ClassError]


class PredictedAgainView(AnswerView):
    """Describe `evoengine accuracy --repredict --json`: trials, and a sentence for each that was not predicted."""

    predicted_again: Sequence[int]
    missed: Sequence[str]


def accuracy_json(rows: Sequence[Row]) -> AccuracyView:
    return {"schema": SCHEMA, "rows": rows, "classes": list(class_errors(rows).values())}


def again_json(trials: Sequence[int], missed: Sequence[str]) -> PredictedAgainView:
    return {"schema": SCHEMA, "predicted_again": trials, "missed": missed}
