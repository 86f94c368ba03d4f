"""Remove passwords of database URLs from everything that is stored or shown."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence

HIDDEN = "***"
_URL = r"([A-Za-z][\w+.-]*://)({rest})"
_IN_TEXT, _WHOLE = (re.compile(_URL.format(rest=rest), re.DOTALL) for rest in (r"\S*", ".*"))
_PARAMETER = re.compile(r"(?i)(\b\w*(?:password|passwd|secret|token)=)[^&\s]*")
"""libpq takes password, sslpassword and oauth_client_secret as parameters of a URL, too"""


def hide_passwords(text: str) -> str:
    """Replace the password of every URL, and every parameter that is called a password, by HIDDEN."""
    return _hidden(text, _IN_TEXT)


def without_passwords(url: str) -> str:
    """Return a URL without passwords, which are then read from elsewhere (PGPASSWORD, ~/.pgpass)."""
    hidden = re.escape(HIDDEN)
    return re.sub(rf"\w+={hidden}&?", "", _hidden(url, _WHOLE)).replace(f":{HIDDEN}", "").rstrip("?&")


def command_line(arguments: Sequence[str] | None = None) -> str:
    r"""Return this process's command line, or that of `arguments`, without passwords.

    Bytes that are not UTF-8, as in a file's name, are written `\xff`, because a database stores text.
    """
    given = sys.argv if arguments is None else arguments
    return " ".join(_hidden(os.fsencode(each).decode("utf-8", "backslashreplace"), _WHOLE) for each in given)


def _hidden(text: str, url: re.Pattern[str]) -> str:
    return _PARAMETER.sub(rf"\1{HIDDEN}", url.sub(lambda found: found[1] + _without_password(found[2]), text))


def _without_password(rest: str) -> str:
    """Return what follows `://` without the password, which may contain an unescaped @ or slash."""
    login, at, place = rest.rpartition("@")
    if at:
        user, colon, _ = login.partition(":")
        return f"{user}:{HIDDEN}@{place}" if colon else rest
    host, colon, port = rest.partition("/")[0].partition(":")
    is_port = not port or port[0].isdigit() or host.startswith("[")
    return rest if is_port else f"{host}:{HIDDEN}"  # user:password, and the host was forgotten
