"""Parse problems such as `WORKLOAD:m4096,n512,fp16`, whose parts are a name with a number, or a word."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from evoengine.errors import UsageError, did_you_mean

LARGEST = 2**31 - 1
"""sizes are passed to kernels as int32"""

_PART = re.compile(r"([a-z]+)(\d+)\Z", re.ASCII)
_RUN = re.compile(r"(?:(\d+)x)?(\d+)\Z", re.ASCII)


def read_parts(
    text: str,
    example: str,
    numbers: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    optional: Sequence[str] = (),
    lists: Sequence[str] = (),
    from_zero: Sequence[str] = (),
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the fields of a problem: the numeric ones, and the words.

    `numbers` maps the prefix of a part to its field; `words` maps a field to its possible words. All fields but the
    `optional` ones must be present; numbers are at least 1, those `from_zero` at least 0. `lists` are fields written as
    `field=512+37`; the text after `=` is returned among the words, for `read_runs`. `example` is a whole problem as a
    user would write it, with its workload's name.

    Raises UsageError naming the part that is wrong and what would be right.
    """
    workload, _, _ = example.partition(":")
    sizes: dict[str, int] = {}
    chosen: dict[str, str] = {}
    for part in text.removeprefix(f"{workload}:").split(","):
        name, value = _field(part.strip(), text, example, numbers, words, lists)
        if name in sizes or name in chosen:
            both = f"{sizes.get(name, chosen.get(name))} and {value}"
            raise UsageError(f"the problem {text!r} gives {name} twice, {both}; give it once, as in {example}")
        if isinstance(value, str):
            chosen[name] = value
            continue
        least = 0 if name in from_zero else 1
        if not least <= value <= LARGEST:
            raise UsageError(f"the problem {text!r} has {name} {value}; it must be from {least} to {LARGEST}")
        sizes[name] = value
    fields = {*sizes, *chosen}
    missing = [name for name in (*numbers.values(), *words, *lists) if name not in fields and name not in optional]
    if missing:
        raise UsageError(f"the problem {text!r} does not give {', '.join(missing)}; write it like {example}")
    return sizes, chosen


def both_lengths(sizes: dict[str, int], text: str, example: str) -> None:
    """Set `seq_q` and `seq_k` among the sizes if `seq` gives both. Raises UsageError if one is missing."""
    if "seq" in sizes:
        if "seq_q" in sizes or "seq_k" in sizes:
            raise UsageError(f"the problem {text!r} gives both s… and sq…/sk…; use s… alone or the other two")
        sizes["seq_q"] = sizes["seq_k"] = sizes.pop("seq")
    if missing := [name for name in ("seq_q", "seq_k") if name not in sizes]:
        raise UsageError(f"the problem {text!r} does not give {', '.join(missing)}; write it like {example}")


def require_groups(text: str, heads: int, kv_heads: int) -> None:
    """Raise UsageError unless the heads of keys and values divide the query heads."""
    if heads % kv_heads:
        raise UsageError(
            f"the problem {text!r} has {heads} heads over {kv_heads} kv heads; heads must be a multiple of kv heads"
        )


def read_runs(value: str, name: str, text: str, of: str, most: int) -> Iterator[int]:
    """Yield the lengths of `512+37+16x2048`, at most so many of the items that `of` names. Raises UsageError."""
    found = 0
    for part in value.split("+"):
        match = _RUN.match(part.strip())
        if not match:
            raise UsageError(
                f"the problem {text!r} has {name}={value}, of which {part!r} is not a length: write numbers from 0 on "
                f"with + between them, and 16x2048 for 16 {of} of 2048"
            )
        count = read_size(match[1] or "1")
        found += count
        if not count:
            raise UsageError(f"the problem {text!r} has {name}={value}, of which {part!r} has no {of}; leave it out")
        if found > most:
            raise UsageError(f"the problem {text!r} has {name} of {found} {of}; they must be from 1 to {most}")
        yield from [read_size(match[2])] * count


def written_runs(lengths: Sequence[int]) -> str:
    """Return lengths in the form that `read_runs` reads."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    return "+".join(str(length) if count == 1 else f"{count}x{length}" for length, count in runs)


def read_size(digits: str) -> int:
    """Return the number, truncated to 19 digits: longer ones are too large in any case."""
    significant = digits.lstrip("0")
    return int(significant[:19] or "0")


def _field(
    part: str,
    text: str,
    example: str,
    numbers: Mapping[str, str],
    words: Mapping[str, Sequence[str]],
    lists: Sequence[str],
) -> tuple[str, int | str]:
    for field, known in words.items():
        if part in known:
            return field, part
    name, equals, value = part.partition("=")
    if equals and name in lists:
        return name, value
    match = _PART.match(part)
    if match and match[1] in numbers:
        return numbers[match[1]], read_size(match[2])
    every = [word for known in words.values() for word in known]
    letters = part.rstrip("0123456789")
    near = "" if letters == part else did_you_mean(letters, (known for known in numbers if len(known) > 1))
    listed = " or ".join(every)
    either = "".join(f", {name}=…" for name in lists) + (f", or {listed}" if listed else "")
    raise UsageError(
        f"the problem {text!r} has a part {part!r} that is not {', '.join(numbers)} with a number{either}; "
        f"write it like {example}{near or did_you_mean(name, [*every, *lists])}"
    )
