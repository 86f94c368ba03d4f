"""What goes into a ledger comes out again, and `best` ranks honestly."""

from __future__ import annotations

import math
import random
import sqlite3
import string

import pytest
from sqlalchemy import event

from evoengine.errors import NothingFound, UsageError
from evoengine.ledger.runs import KILLED, RUNNING, Device
from evoengine.ledger.store import Ledger
from evoengine.records import Baseline, Binary, CaseResult, Kind, Launch, Measurement, Outcome, Source, Verdict

from .conftest import CONFIG, GPU, PROBLEM, SPACE, a_binary, a_figure, a_source, a_verdict, add_ranked, start_run
