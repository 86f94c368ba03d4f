"""An export's verification record judges the kernel again, from the file alone, and shows what was changed."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import evoengine
import evoengine.torch as tuned
from evoengine.errors import UsageError
from evoengine.publish.folder import CHECKSUMS, write_new
from evoengine.publish.packages import package_files
from evoengine.publish.record import FILE, SIGNED_FILE, read_record
from evoengine.torch import kernels, operators
from evoengine.tuning.verify import verify_record
from tests.support.exhaustive import more

PROBLEM = "rms_norm:rows9,hidden64,fp16"


def write_keys(folder: Path, name: str) -> Path:
    """Write NAME.pem and NAME.pub.pem; return the latter."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / f"{name}.pem").write_bytes(private)
    public = folder / f"{name}.pub.pem"
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return public


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with keys and an export that own.pem signed."""
    folder = tmp_path_factory.mktemp("attest")
    for name in ("own", "other"):
        write_keys(folder, name)
    evoengine.tune(PROBLEM, gpu="h100", trials=1, db=folder / "a.db", device="emulator")
    evoengine.export(folder / "out", db=folder / "a.db", sign=folder / "own.pem")
    return folder


@pytest.fixture
def changed(place, tmp_path):
    """Writes the record with a change and returns its path."""

    def written(change):
        record = json.loads((place / "out" / FILE).read_text())
        change(record)
        (tmp_path / "changed.json").write_text(json.dumps(record))
        return tmp_path / "changed.json"

    return written


def test_the_judges_repeat_the_record(place):
    found = verify_record(place / "out" / FILE)
    assert found.correct and found.differences == ()
    stated = json.loads((place / "out" / FILE).read_text())
    assert found.seed == stated["seed"]
    assert {v.device for v in found.on_cpu.verdicts} == {"emulator", "executor"}
    assert all(v.whole and len(v.cases) > 3 for v in found.on_cpu.verdicts)


def test_a_record_holds_what_the_export_holds(place):
    record = read_record(place / "out" / FILE)
    cubin = (place / "out" / "kernel.cubin").read_bytes()
    assert record.candidate.binary.cubin == cubin
    assert record.candidate.source.text.encode() == (place / "out" / "kernel.cu").read_bytes()


def test_the_key_that_signed_it_opens_the_signed_record(place):
    signed = place / "out" / SIGNED_FILE
    assert read_record(signed, place / "own.pub.pem") == read_record(place / "out" / FILE)
    envelope = json.loads(signed.read_text())
    statement = json.loads(base64.b64decode(envelope["payload"]))
    digest = hashlib.sha256((place / "out" / "kernel.cubin").read_bytes()).hexdigest()
    assert statement["subject"] == [{"name": "kernel.cubin", "digest": {"sha256": digest}}]
    assert envelope["payloadType"] == "application/vnd.in-toto+json" and envelope["signatures"][0]["keyid"]


def other_payload(place, tmp_path):
    envelope = json.loads((place / "out" / SIGNED_FILE).read_text())
    statement = json.loads(base64.b64decode(envelope["payload"]))
    statement["predicate"]["seed"] += 1
    envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (tmp_path / "other.json").write_text(json.dumps(envelope))
    return tmp_path / "other.json"


@pytest.mark.parametrize(
    ("file", "key", "message"),
    [
        (lambda place, tmp: place / "out" / SIGNED_FILE, "other.pub.pem", "did not sign .*, or it was changed since"),
        (other_payload, "own.pub.pem", "did not sign .*, or it was changed since"),
        (lambda place, tmp: place / "out" / FILE, "own.pub.pem", "is not signed; with --key it must be record.dsse"),
        (lambda place, tmp: place / "out" / SIGNED_FILE, "own.pem", "is not a public key in PEM"),
        (lambda place, tmp: place / "out" / SIGNED_FILE, "absent.pem", "is not a public key in PEM"),
    ],
)
def test_what_the_key_did_not_sign_is_refused(place, tmp_path, file, key, message):
    with pytest.raises(UsageError, match=message):
        read_record(file(place, tmp_path), place / key)


def test_another_machine_code_beside_its_own_sum_is_refused(changed):
    def change(record):
        record["machine_code"]["base64"] = base64.b64encode(b"\x7fELF other").decode()

    with pytest.raises(UsageError, match="was changed: its machine code does not match its SHA-256"):
        verify_record(changed(change))


def test_a_kernel_that_computes_something_else_is_refuted_whatever_the_record_states(changed):
    def change(record):
        source = record["run"]["results"][0]["evoengine"]["source"]
        assert "rsqrt" in source["text"]
        source["text"] = source["text"].replace("rsqrt", "sqrt")

    found = verify_record(changed(change))
    assert not found.correct
    assert any(text.startswith("emulator: ") and "passed" in text for text in found.differences)


@pytest.mark.parametrize("by", more(["seed"]))
def test_another_seed_does_not_repeat_the_record(changed, by):
    found = verify_record(changed(lambda record: record.update(seed=(record[by] + 1) % 2**31)))
    assert found.correct and len(found.differences) > 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(evoengine_record=2), "is not a verification record of format 1"),
        (lambda record: record.update(seed=-1), "no seed from 0 to 2\\^31"),
        (lambda record: record.update(seed="1"), "no seed from 0 to 2\\^31"),
        (lambda record: record.pop("machine_code"), "is not a verification record: KeyError"),
        (lambda record: record["machine_code"].update(base64="!"), "is not a verification record"),
        (lambda record: record["run"]["results"].clear(), "is not a verification record"),
        (lambda record: record["run"]["results"].extend(record["run"]["results"]), "is not a verification record"),
        (lambda record: record["run"]["metadata"]["evoengine"].update(problem=3), "is not a verification record"),
        (lambda record: record.update(definition=[]), "its definition is not text"),
    ],
)
def test_what_is_no_record_is_one_sentence(changed, change, message):
    with pytest.raises(UsageError, match=message):
        read_record(changed(change))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 99999, '{"payloadType": "x"}'])
def test_a_file_of_anything_is_one_sentence(tmp_path, text):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(UsageError, match="is not "):
        read_record(tmp_path / "record.json")


def test_a_key_that_cannot_sign_is_refused_before_anything_is_judged(place, tmp_path):
    (tmp_path / "bad.pem").write_text("no key")
    with pytest.raises(UsageError, match="is not a private key in PEM without a password"):
        evoengine.export(tmp_path / "out", db=place / "a.db", sign=tmp_path / "bad.pem")
    assert not (tmp_path / "out").exists()


# at load


def planted(place: Path) -> dict[str, bytes]:
    """The files of the export with another machine code, of which all but the record knows."""
    files = {
        path.name: path.read_bytes() for path in (place / "out").iterdir() if path.name != CHECKSUMS and path.is_file()
    }
    described = json.loads(files["kernel.json"])
    files["kernel.cubin"] += b"another"
    described["cubin_sha256"] = hashlib.sha256(files["kernel.cubin"]).hexdigest()
    return {**files, "kernel.json": json.dumps(described).encode()}


def imported(folder: Path, name: str) -> str:
    """What an import says in a process that has Python alone."""
    script = f"import sys; sys.path.insert(0, {str(folder)!r}); import {name}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True).stderr


@pytest.mark.parametrize("form", ["wheel", "hf-kernel"])
def test_a_planted_kernel_in_a_package_is_refused_by_its_record(place, tmp_path, form):
    files = planted(place)
    assert imported(place / "out", json.loads(files["kernel.json"])["module"]) == ""
    (first, *_) = write_new(tmp_path / "package", package_files(form, files, "mine"))
    if form == "wheel":
        zipfile.ZipFile(first).extractall(tmp_path)
        said = imported(tmp_path, "mine")
    else:
        (tmp_path / "package" / "build" / "torch-cuda").rename(tmp_path / "mine")
        said = imported(tmp_path, "mine")
    assert "kernel.cubin is not the machine code that record.json beside it says was verified" in said


@pytest.fixture
def chosen(monkeypatch):
    """The kernel that torch would call for tensors of the export's sizes, or why there is none."""
    monkeypatch.setattr(operators, "gpu_key", lambda device: "h100")
    x, weight = torch.zeros(9, 64, dtype=torch.float16), torch.zeros(64, dtype=torch.float16)

    def choose():
        request = operators._rms_norm_request(x, weight, x, operators.EPS)
        kernel = kernels.KERNELS.choose("call", request)
        return kernel, kernels.KERNELS.origins["call"]

    yield choose
    kernels.KERNELS.use(())


def test_with_a_key_only_what_it_signed_is_called(place, chosen):
    tuned.use(place / "out", key=place / "own.pub.pem")
    kernel, origin = chosen()
    assert kernel is not None and origin == str(place / "out")
    tuned.use(place / "out", key=place / "other.pub.pem")
    with pytest.warns(tuned.NoKernel, match="did not sign"):
        assert chosen()[0] is None
    tuned.use(place / "a.db", key=place / "own.pub.pem")
    with pytest.warns(tuned.NoKernel, match=r"the kernel of trial 1 of .*a\.db has no signed record"):
        assert chosen()[0] is None
    with pytest.raises(UsageError, match="is not a public key in PEM"):
        tuned.use(place / "out", key=place / "own.pem")


@pytest.mark.parametrize(("left_out", "said"), [(SIGNED_FILE, "has no signed record"), ("", "not that of its signed")])
def test_with_a_key_an_unsigned_and_a_planted_kernel_are_not_called(place, chosen, tmp_path, left_out, said):
    write_new(tmp_path / "out", {name: data for name, data in planted(place).items() if name != left_out})
    tuned.use(tmp_path / "out", key=place / "own.pub.pem")
    with pytest.warns(tuned.NoKernel, match=said):
        assert chosen()[0] is None
