"""The verification record of an exported kernel, which suffices to judge it again elsewhere without a GPU.

A record holds the run as a T4 file with one candidate, its machine code, the definition of a kernel of a user's own,
and the seed of the judges. Signed, it is the predicate of an in-toto statement (v1) in a DSSE envelope (v1.0), whose
subject is the machine code.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from evoengine.errors import UsageError
from evoengine.ledger.transfer import CandidateHistory, RunHistory
from evoengine.publish.t4 import from_t4, to_t4
from evoengine.records import Candidate, CompiledCandidate, Judged, Run
from evoengine.sandbox.untrusted import LARGEST_TEXT, parse_json, read_limited_text

FORMAT = 1
FILE, SIGNED_FILE = "record.json", "record.dsse.json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:evoengine:verification-record:1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


@dataclass(frozen=True, slots=True)
class Record:
    run: Run
    """with the definition of a kernel of a user's own"""
    candidate: Candidate
    judged: Judged
    """the verdicts of the export"""
    seed: int
    """repeats the verdicts"""

    @property
    def contender(self) -> CompiledCandidate:
        """Return the kernel in the form that judges take."""
        return self.candidate.contender


def record_json(run: Run, candidate: Candidate, judged: Judged, seed: int) -> dict[str, Any]:
    """Return the record of a candidate, whose binary has its machine code."""
    assert candidate.binary is not None
    figures = [replace(candidate.measurement, taken_at=None)] if candidate.measurement else []
    code = replace(candidate.binary, cubin=b"")
    plain = replace(candidate, binary=code, parents=(), created_at=None, finished_at=None)
    verdicts = [replace(v, taken_at=None) for v in judged.verdicts]
    history = RunHistory(run, [], [CandidateHistory(plain, verdicts, figures)])
    return {
        "evoengine_record": FORMAT,
        "seed": seed,
        "definition": run.definition,
        "machine_code": {
            "sha256": hashlib.sha256(candidate.binary.cubin).hexdigest(),
            "base64": base64.b64encode(candidate.binary.cubin).decode(),
        },
        "run": to_t4(history),
    }


def read_record(path: Path, key: Path | None = None) -> Record:
    """Return an untrusted record.

    With `key`, the PEM file of a public key, the file must be an envelope that this key signed. Raises UsageError if it
    is not a record, or if the signature is missing or not the key's.
    """
    try:
        found = parse_json(read_limited_text(path, 4 * LARGEST_TEXT))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a record: {error}") from error
    if isinstance(found, dict) and "payloadType" in found:
        found = _opened(found, path, key)
    elif key is not None:
        raise UsageError(
            f"{path} is not signed; with --key it must be {SIGNED_FILE}, which best --export --sign writes"
        )
    return _record(found, str(path))


def _record(found: Any, where: str) -> Record:
    if not isinstance(found, dict) or found.get("evoengine_record") != FORMAT:
        raise UsageError(f"{where} is not a verification record of format {FORMAT}; best --export writes {FILE}")
    try:
        history = from_t4(found["run"])
        code, seed, definition = found["machine_code"], found["seed"], found.get("definition")
        cubin = base64.b64decode(code["base64"], validate=True)
        if history is None or type(seed) is not int or not 0 <= seed < 2**31:
            raise ValueError("it has no run, or no seed from 0 to 2^31 - 1")
        if definition is not None and not isinstance(definition, str):
            raise ValueError("its definition is not text")
        (judged,) = history.candidates
        candidate = judged.candidate
        if candidate.source is None or candidate.binary is None:
            raise ValueError("its candidate has no source or no binary")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError, binascii.Error) as error:
        raise UsageError(f"{where} is not a verification record: {type(error).__name__}: {error}") from error
    if hashlib.sha256(cubin).hexdigest() != code.get("sha256"):
        raise UsageError(f"{where} was changed: its machine code does not match its SHA-256")
    return Record(
        replace(history.run, definition=definition),
        replace(candidate, binary=replace(candidate.binary, cubin=cubin)),
        Judged(tuple(judged.verdicts)),
        seed,
    )


# ── signatures ──────────────────────────────────────────────────────────────────────────────────────────────────────


def require_key(key: Path) -> None:
    """Raise UsageError if no private key can be read from a PEM file, or securesystemslib is not installed."""
    _signer(key)


def _signer(key: Path) -> Any:
    signer_class, _, _ = _library()
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        return signer_class(load_pem_private_key(key.read_bytes(), password=None))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{key} is not a private key in PEM without a password: {error}") from error


def signed(record: Mapping[str, Any], key: Path) -> dict[str, Any]:
    """Return the envelope of a record, signed by the private key in a PEM file (RSA, ECDSA or Ed25519).

    Raises UsageError as `require_key`.
    """
    signer = _signer(key)
    _, envelope_class, _ = _library()
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": "kernel.cubin", "digest": {"sha256": record["machine_code"]["sha256"]}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": record,
    }
    envelope = envelope_class(json.dumps(statement, sort_keys=True).encode(), PAYLOAD_TYPE, {})
    envelope.sign(signer)
    found: dict[str, Any] = envelope.to_dict()
    return found


def _opened(found: dict[str, Any], path: Path, key: Path | None) -> Any:
    """Return the record in an envelope, whose signature is checked where a key is given."""
    try:
        if key is not None:
            _verify(found, path, key)
        if found["payloadType"] != PAYLOAD_TYPE:
            raise ValueError(f"its payload is of type {found['payloadType']!a:.60}")
        statement = parse_json(base64.b64decode(found["payload"], validate=True).decode())
        if (statement["_type"], statement["predicateType"]) != (STATEMENT_TYPE, PREDICATE_TYPE):
            raise ValueError("its payload is not a statement about a verification record")
        record = statement["predicate"]
        if statement["subject"][0]["digest"]["sha256"] != record["machine_code"]["sha256"]:
            raise ValueError("its subject is another kernel")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not an envelope of a verification record: {error}") from error
    return record


def require_public_key(key: Path) -> Any:
    """Return the public key in a PEM file. Raises UsageError if there is none, or no securesystemslib."""
    _, _, key_class = _library()
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        return key_class.from_crypto(load_pem_public_key(key.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{key} is not a public key in PEM: {error}") from error


def _verify(found: dict[str, Any], path: Path, key: Path) -> None:
    """Raise UsageError unless the public key in a PEM file signed the envelope."""
    public, (_, envelope_class, _) = require_public_key(key), _library()
    from securesystemslib.exceptions import VerificationError

    try:
        envelope_class.from_dict(deepcopy(found)).verify([public], 1)
    except VerificationError as error:
        raise UsageError(f"the key in {key} did not sign {path}, or it was changed since") from error


def _library() -> tuple[Any, Any, Any]:
    """Return the classes CryptoSigner, Envelope and SSlibKey of securesystemslib."""
    try:
        signer, dsse = import_module("securesystemslib.signer"), import_module("securesystemslib.dsse")
    except ImportError as error:
        raise UsageError("signatures need securesystemslib: pip install 'evoengine[sign]'") from error
    return signer.CryptoSigner, dsse.Envelope, signer.SSlibKey
