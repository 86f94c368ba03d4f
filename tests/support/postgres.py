"""A real PostgreSQL server of one's own, in a folder that goes away with it; for tests, and to try one out:

    python tests/support/postgres.py evoengine search --trials 20

starts a server, runs the command with EVOENGINE_DB naming a new database in it, and stops the server. It takes
PostgreSQL's programs from /usr/lib/postgresql or the PATH (Debian: apt install postgresql). It trusts whoever connects
from this machine and syncs nothing to the disk: keep no ledger in it.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

PACKAGED = Path("/usr/lib/postgresql")


class Missing(Exception):
    """What there is not on this machine."""


def find_programs() -> Path:
    """The folder of initdb and pg_ctl. Raises Missing."""
    found = sorted(PACKAGED.glob("*/bin/initdb"))
    on_path = shutil.which("initdb")
    if not found and not on_path:
        raise Missing("there is no PostgreSQL server on this machine (initdb not found)")
    return found[-1].parent if found else Path(str(on_path)).parent


def unprivileged() -> dict[str, object]:
    """The server refuses to run as root; its package brings a user for it. Raises Missing."""
    if os.geteuid():
        return {}
    try:
        user = pwd.getpwnam("postgres")
    except KeyError:
        raise Missing("PostgreSQL does not run as root and there is no user postgres") from None
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


class Server:
    """One that may be stopped and started again; its URL stays."""

    def __init__(self, folder: Path) -> None:
        """Raises Missing."""
        self._programs, self._folder, self._account = find_programs(), folder, unprivileged()
        if self._account:
            os.chown(folder, self._account["user"], self._account["group"])
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self._port = free.getsockname()[1]
        self._call("initdb", "--username=evo", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C")

    def _call(self, program: str, *arguments: str) -> None:
        command = [self._programs / program, "-D", f"{self._folder}/data", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self._folder, **self._account)

    def start(self) -> None:
        options = f"-h 127.0.0.1 -p {self._port} -k {self._folder} -c fsync=off"
        self._call("pg_ctl", "--wait", "--log", f"{self._folder}/log", "-o", options, "start")

    def stop(self, mode: str = "immediate") -> None:
        """`fast` ends connections and shuts down in order, `immediate` does not even that."""
        self._call("pg_ctl", "--wait", f"--mode={mode}", "stop")

    @property
    def url(self) -> str:
        """Without the name of a database."""
        return f"postgresql://evo@127.0.0.1:{self._port}"

    def new_database(self, name: str) -> str:
        """URL of a new, empty database."""
        from sqlalchemy import create_engine, text

        engine = create_engine(f"{self.url.replace('://', '+psycopg://')}/postgres", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return f"{self.url}/{name}"


@contextmanager
def running_server() -> Iterator[Server]:
    """Raises Missing where PostgreSQL is not installed."""
    with tempfile.TemporaryDirectory(prefix="evoengine-postgres-") as folder:
        server = Server(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.stop()


def main(command: list[str]) -> int:
    if not command:
        sys.exit(__doc__)
    try:
        with running_server() as server:
            url = server.new_database("evoengine")
            print(f"EVOENGINE_DB={url}", file=sys.stderr)
            return subprocess.run(command, env=os.environ | {"EVOENGINE_DB": url}).returncode
    except Missing as missing:
        sys.exit(str(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
