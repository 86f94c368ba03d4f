"""Damaged ledgers: every command answers as from the sound one, or names the damage in one sentence, exit code 3."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from evoengine.cli.main import evoengine
from evoengine.errors import EvoengineError, MachineError
from evoengine.ledger.database import back_up
from evoengine.ledger.integrity import checked_columns
from evoengine.ledger.store import Ledger, open_ledger
from evoengine.ledger.tables import Base, Checked
from evoengine.records import Baseline, Candidate, Kind, Outcome, Profile
from evoengine.text import spans
from tests.support.exhaustive import each_nth
from tests.support.ledger_examples import CONFIG, GPU, POLICY, PROBLEM, a_figure, add_ranked, add_step, start_run
from tests.support.recorded import cache

COMMANDS = (("best", "--json"), ("history", "--json"), ("show", "3"), ("show", "3", "--json"), ("report",))
CHECKED: list[type[Base]] = sorted(
    (m.class_ for m in Base.registry.mappers if issubclass(m.class_, Checked)), key=lambda row: row.__tablename__
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A ledger that has a row in every table: estimated and measured trials, a rejected one, a baseline, a profile."""
    path = tmp_path_factory.mktemp("sound") / "ledger.db"
    with open_ledger(str(path), create=True) as ledger:
        run = start_run(ledger)
        first, _ = add_step(ledger, run, 1.0, 2.0)
        timed = add_ranked(ledger, run, a_figure(5.0, Kind.MEASURED), CONFIG | {"tile_m": 32}, "timed", (first,))
        rejected = ledger.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
        ledger.finish(rejected, Outcome.SCREENED, "too large", None, None)
        ledger.record_baseline(run, Baseline("MATH", "NVIDIA H200", 900.0, 305.0, (900.0,), POLICY))
        ledger.record_profile(timed, Profile("Nsight Compute", "NVIDIA H200", {"issue slots %": 61.5}, ("stalls",)))
        ledger.finish_run(run, "all trials done")
    return path


@pytest.fixture
def damaged(sound, tmp_path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copy(sound, tmp_path / "damaged.db"))


def call(path: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and what was said, without the path; whatever is not an error of evoengine's is raised."""
    done = CliRunner().invoke(evoengine, [*arguments, "--db", str(path)])
    if isinstance(done.exception, EvoengineError):
        assert "\n" not in str(done.exception)
        return done.exception.exit_code, str(done.exception)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output.replace(str(path), "LEDGER")


@pytest.fixture(scope="module")
def answers(sound) -> dict[tuple[str, ...], tuple[int, str]]:
    """What each command says of the sound ledger."""
    said = {command: call(sound, *command) for command in COMMANDS}
    assert {code for code, _ in said.values()} == {0}
    return said


def changed(value: object) -> object:
    """The least change: one bit of a text or a number; of nothing, something."""
    if value is None:
        return 1
    if isinstance(value, str):
        return value[:-1] + chr(ord(value[-1]) ^ 1) if value else "a"
    if isinstance(value, bytes):
        return bytes([value[0] ^ 1]) + value[1:]
    assert isinstance(value, (int, float))
    return value * 1.25 if isinstance(value, float) else value ^ 1


def damage(path: Path, table: str, row: int, column: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        (value,) = connection.execute(f"SELECT {column} FROM {table} WHERE id = ?", [row]).fetchone()
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", [changed(value), row])
        connection.commit()


def flipped_digit(text: str) -> str:
    """The last digit of a text, changed into another: what stays well-formed JSON, and says something else."""
    place = max(i for i, c in enumerate(text) if c.isdigit())
    return text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]


@pytest.mark.parametrize("row", each_nth(3, CHECKED), ids=lambda row: row.__tablename__)
def test_a_change_of_any_column_is_named_by_an_export_and_changes_no_other_answer(
    row, sound, damaged, answers, tmp_path
):
    table = row.__tablename__
    for place, column in enumerate(checked_columns(row)):
        damaged = Path(shutil.copy(sound, tmp_path / f"{column}.db"))
        damage(damaged, table, 1, column)
        code, said = call(damaged, "export", str(tmp_path / "run.json"), "--run", "1")
        assert code == 3, (column, said)
        assert f"row 1 of the table {table} is not what was written" in said
        command = COMMANDS[place % len(COMMANDS)]
        found = call(damaged, *command)
        assert found == answers[command] or (found[0] == 3 and "is damaged" in found[1]), (column, command, found)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("table", "column"),
    [("candidates", "config"), ("measurements", "samples_us"), ("measurements", "terms"), ("verdicts", "cases"),
     ("measurements", "policy"), ("runs", "started_at"), ("baselines", "policy")],
)  # fmt: skip
def test_a_flipped_digit_is_found(damaged, table, column, tmp_path):
    with closing(sqlite3.connect(damaged)) as connection:
        query = f"SELECT id, {column} FROM {table} WHERE {column} GLOB '*[0-9]*'"
        number, text = connection.execute(query).fetchone()
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", [flipped_digit(text), number])
        connection.commit()
    code, said = call(damaged, "export", str(tmp_path / "run.json"), "--run", "1")
    assert (code, f"row {number} of the table {table} is not what was written" in said) == (3, True)


@pytest.mark.parametrize(
    ("column", "value"),
    [("config", "{\"tile_m\": "), ("config", "[1]"), ("outcome", "measurdd"), ("created_at", "2026-13-01 00:00:00"),
     ("config", b"\xff\xfe"), ("occupancy", "x"), ("parents", "{}"), ("created_at", "1"), ("created_at", 2**62)],
)  # fmt: skip
def test_what_no_column_may_hold_is_damage_too(damaged, column, value):
    with closing(sqlite3.connect(damaged)) as connection:
        connection.execute(f"UPDATE candidates SET {column} = ? WHERE id = 3", [value])
        connection.commit()
    code, said = call(damaged, "history", "--json")
    assert (code, "row 3 of the table candidates is not what was written" in said) == (3, True), said


def test_a_loser_that_damage_made_the_winner_is_not_the_best(damaged):
    with closing(sqlite3.connect(damaged)) as connection:
        connection.execute("UPDATE measurements SET median_us = 1.0 WHERE candidate_id = 1")
        connection.commit()
    assert call(damaged, "best", "--json")[0] == 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE sources SET packed = (SELECT packed FROM machine_code)", "packed of row"),
        ("UPDATE machine_code SET packed = x'7f454c4600fe'", "of the table machine_code"),
    ],
)
def test_the_source_and_the_machine_code_are_held_against_their_sha256(damaged, change, named):
    with closing(sqlite3.connect(damaged)) as connection:
        connection.execute(change)
        connection.commit()
    code, said = call(damaged, "profile", "1")
    assert (code, named in said) == (3, True)


WHOLE = (("history", "--json"), ("history", "--csv", "-"), ("show", "1"), ("show", "1", "--json"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("UPDATE binaries SET id = -5 WHERE id = (SELECT binary_id FROM candidates WHERE id = 1)", "binaries"),
        ("UPDATE sources SET sha256 = 'x' WHERE sha256 = (SELECT source_sha256 FROM candidates WHERE id = 1)",
         "sources"),
    ],
)  # fmt: skip
def test_a_changed_primary_key_that_a_trial_names_is_not_taken_for_a_trial_without(damaged, change, named):
    with closing(sqlite3.connect(damaged)) as connection:
        connection.execute(change)
        connection.commit()
    for command in WHOLE:
        code, said = call(damaged, *command)
        assert (code, f"refers to a row of {named} that does not exist" in said) == (3, True), said


def test_flipped_bytes_anywhere_in_the_file_change_no_answer(sound, answers, tmp_path):
    data, draw = sound.read_bytes(), random.Random(16)
    used = [page for page in range(0, len(data), 4096) if any(data[page + 8 : page + 4096])]
    for turn in range(24):
        flipped = bytearray(data)
        place = used[turn * len(used) // 24] + draw.randrange(4096)
        flipped[place] ^= 1 << draw.randrange(8)
        damaged = tmp_path / f"flipped{turn}.db"
        damaged.write_bytes(flipped)
        command = COMMANDS[turn % len(COMMANDS)]
        found = call(damaged, *command)
        # the header's first bytes say whether it is a database at all
        assert found == answers[command] or found[0] == 3 or (found[0] == 2 and place < 100), (place, command, found)


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_file_that_was_cut_is_damaged(damaged, keep):
    os.truncate(damaged, int(damaged.stat().st_size * keep) // 4096 * 4096)
    for command in COMMANDS:
        assert call(damaged, *command)[0] == 3


# ── logs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def in_use(tmp_path):
    """A ledger whose log is not empty."""
    with open_ledger(str(tmp_path / "in_use.db"), create=True) as ledger:
        add_ranked(ledger, start_run(ledger), a_figure(1.0))
        yield Path(ledger.place)


def test_a_ledger_copied_without_the_log_that_holds_its_tables_says_so(tmp_path):
    with closing(sqlite3.connect(tmp_path / "whole.db")) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE runs (id)")
        connection.commit()
        copy = Path(shutil.copy(tmp_path / "whole.db", tmp_path / "copy.db"))
    code, said = call(copy, "history")
    assert (code, "its write-ahead log copy.db-wal has to be copied with it" in said) == (1, True)


def test_a_log_without_its_file_is_named(in_use, tmp_path):
    shutil.copy(f"{in_use}-wal", tmp_path / "lost.db-wal")
    code, said = call(tmp_path / "lost.db", "history")
    assert (code, "lost.db-wal beside it is the write-ahead log of a file that does not exist" in said) == (1, True)


def test_a_log_of_another_ledger_is_refused_and_not_taken_in(in_use, sound, tmp_path):
    theirs = Path(shutil.copy(sound, tmp_path / "theirs.db"))
    shutil.copy(f"{in_use}-wal", f"{theirs}-wal")
    before = theirs.read_bytes()
    for command in COMMANDS:
        code, said = call(theirs, *command)
        assert (code, "its write-ahead log theirs.db-wal do not fit together" in said) == (3, True), said
    assert theirs.read_bytes() == before


# ── in the middle of a search ───────────────────────────────────────────────────────────────────────────────────────


def delete(path: Path, sound: Path) -> None:
    path.unlink()


def replace(path: Path, sound: Path) -> None:
    other = shutil.copy(sound, path.with_name("other.db"))
    os.replace(other, path)


def cut(path: Path, sound: Path) -> None:
    os.truncate(path, 4096)


def overwrite(path: Path, sound: Path) -> None:
    """As cp does: the file stays the same to the system."""
    path.write_bytes(sound.read_bytes())


def overwrite_with_text(path: Path, sound: Path) -> None:
    path.write_text("no database\n" * 50000)


def empty(path: Path, sound: Path) -> None:
    os.truncate(path, 0)


def make_read_only(path: Path, sound: Path) -> None:
    path.chmod(0o444)


def remove_folder(path: Path, sound: Path) -> None:
    shutil.rmtree(path.parent)


LOST_TRIALS = "the trials that ended in this search (trials 1 to 3) are lost"
LOST = {
    delete: f"was deleted while it was in use: {LOST_TRIALS}",
    replace: f"was replaced by another file while it was in use: {LOST_TRIALS}",
    cut: f"bytes while it was in use: {LOST_TRIALS}",
    overwrite: f"was overwritten while it was in use: {LOST_TRIALS}",
    overwrite_with_text: f"was overwritten while it was in use: {LOST_TRIALS}",
    empty: f"was overwritten while it was in use: {LOST_TRIALS}",
    make_read_only: "was made read-only while it was in use: it has the trials that ended before (trials 1 to 3), but",
    remove_folder: f"is gone with its folder while it was in use: {LOST_TRIALS}",
}


@pytest.fixture
def searching(tmp_path):
    (tmp_path / "folder").mkdir()
    with open_ledger(str(tmp_path / "folder" / "ledger.db"), create=True) as ledger:
        yield ledger


@pytest.mark.parametrize("happens", LOST, ids=lambda happens: happens.__name__)
def test_a_ledger_that_is_lost_in_mid_search_is_noticed_by_the_next_write(searching, sound, happens):
    run = start_run(searching)
    for trial in range(3):
        add_ranked(searching, run, a_figure(1.0), name=f"kernel{trial}")
    empty_the_log(searching)
    happens(Path(searching.place), sound)
    with pytest.raises(MachineError) as caught:
        searching.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
    assert LOST[happens] in str(caught.value)


@pytest.mark.parametrize("happens", [delete, replace, overwrite], ids=lambda happens: happens.__name__)
def test_a_search_ends_with_exit_code_3_and_leaves_the_replacement_as_it_is(sound, tmp_path, monkeypatch, happens):
    """A whole search, over the times of another tuner's file: its fourth trial finds the ledger gone."""
    path, add_ended = tmp_path / "searched.db", Ledger.add_ended
    ended = []

    def add_and_lose(ledger: Ledger, candidate: Candidate) -> int:
        if len(ended) == 3:
            happens(path, sound)
        ended.append(add_ended(ledger, candidate))
        return ended[-1]

    monkeypatch.setattr(Ledger, "add_ended", add_and_lose)
    device = f"recorded:{cache(tmp_path / 'times.json')}"
    code, said = call(path, "search", "--device", device, "--trials", "9")
    assert (code, f"while it was in use: {LOST_TRIALS}" in said) == (
        3,
        True,
    ), said
    assert len(ended) == 3
    if happens is not delete:
        assert path.read_bytes() == sound.read_bytes()
        code, said = call(path, "history", "--json")
        assert code == 0, said
    else:
        assert not path.exists()


@pytest.mark.parametrize("happens", [replace, overwrite], ids=lambda happens: happens.__name__)
def test_what_replaced_a_ledger_is_not_touched(searching, sound, happens):
    run = start_run(searching)
    path = Path(searching.place)
    add_ranked(searching, run, a_figure(1.0))
    happens(path, sound)
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(MachineError, match="was replaced|was overwritten"):
            add_ranked(searching, run, a_figure(1.0))
    searching.close()
    assert path.read_bytes() == before
    assert [c.trial for c in open_ledger(str(path), create=False).candidates()] == [1, 2, 3, 4]


def test_an_older_copy_of_the_ledger_itself_is_known_too(searching, tmp_path):
    run, path, backup = start_run(searching), Path(searching.place), tmp_path / "backup.db"
    add_ranked(searching, run, a_figure(1.0), name="kernel")
    empty_the_log(searching)
    shutil.copy(path, backup)
    for trial in range(3):
        add_ranked(searching, run, a_figure(1.0), name=f"kernel{trial}")
    empty_the_log(searching)
    searching.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)  # so much is known to have been in the file
    overwrite(path, backup)
    with pytest.raises(MachineError, match="overwritten with an older copy of itself while it was in use: .*are lost"):
        searching.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
    searching.close()
    assert path.read_bytes() == backup.read_bytes()


def by_evoengine(path: Path, copy: Path) -> None:
    assert back_up(str(path), copy) == copy.stat().st_size


def by_sqlite(path: Path, copy: Path) -> None:
    with closing(sqlite3.connect(path)) as connection, closing(sqlite3.connect(copy)) as other:
        connection.backup(other)


@pytest.mark.parametrize("happens", [replace, overwrite], ids=lambda happens: happens.__name__)
@pytest.mark.parametrize("copied", [by_evoengine, by_sqlite], ids=lambda copied: copied.__name__)
def test_a_backup_put_in_the_place_of_its_ledger_is_known_though_it_holds_every_trial(
    searching, tmp_path, copied, happens
):
    run, path, backup = start_run(searching), Path(searching.place), tmp_path / "backup.db"
    add_ranked(searching, run, a_figure(1.0), name="kernel")
    copied(path, backup)
    before = backup.read_bytes()
    happens(path, backup)
    with pytest.raises(MachineError, match="(replaced|overwritten).* are lost, except those copied"):
        searching.add_candidate(run, PROBLEM, GPU, CONFIG, (), None)
    searching.close()
    assert path.read_bytes() == before


def test_a_backup_of_a_ledger_that_was_itself_a_backup_is_known_too(searching, tmp_path):
    path, backup = Path(searching.place), tmp_path / "backup.db"
    add_ranked(searching, start_run(searching), a_figure(1.0), name="kernel")
    by_evoengine(path, backup)
    by_evoengine(backup, tmp_path / "second.db")
    with open_ledger(str(backup), create=False) as restored:
        overwrite(backup, tmp_path / "second.db")
        with pytest.raises(MachineError, match="was overwritten while it was in use"):
            start_run(restored)


def test_a_ledger_that_was_moved_away_keeps_all_that_was_written(searching, sound):
    run = start_run(searching)
    path = Path(searching.place)
    add_ranked(searching, run, a_figure(1.0))
    os.rename(path, path.with_name("moved.db"))
    with pytest.raises(MachineError, match="was deleted"):
        add_ranked(searching, run, a_figure(1.0))
    searching.close()
    with open_ledger(str(path.with_name("moved.db")), create=False) as moved:
        assert [c.outcome for c in moved.candidates()] == [Outcome.ESTIMATED]


def test_a_ledger_that_somebody_vacuumed_is_written_on(searching):
    run = start_run(searching)
    for trial in range(3):
        add_ranked(searching, run, a_figure(1.0), name="k" * 20000 + str(trial))
    empty_the_log(searching)
    with closing(sqlite3.connect(searching.place)) as other:
        other.execute("CREATE TABLE large AS SELECT randomblob(500000) AS noise")
        other.commit()
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        add_ranked(searching, run, a_figure(1.0))
        other.execute("DROP TABLE large")
        other.execute("VACUUM")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    add_ranked(searching, run, a_figure(1.0))
    assert len(searching.candidates()) == 5


def empty_the_log(ledger: Ledger) -> None:
    with closing(sqlite3.connect(ledger.place)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def test_trials_are_named_by_their_spans():
    assert spans([7, 1, 2, 3, 4]) == "trials 1 to 4, 7"
    assert spans([5]) == "trial 5"
