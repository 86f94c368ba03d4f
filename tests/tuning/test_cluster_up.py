"""`evoengine cluster up` writes files that their own tools accept, and a script for Slurm that does what it says.

A controller of Slurm runs here, whose nodes are to be rented and never come; without it, sbatch reads the options. No
Kubernetes does: the objects are held against the API's schemas. The script runs with commands in place of srun and
scontrol that run on this machine.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from evoengine.cli.main import evoengine as command
from evoengine.errors import UsageError
from evoengine.tuning.ray_cluster import KUBERNETES, RAY, SLURM, Cluster, text_of, write_files
from tests.support.waiting import wait_for

IMAGE = "registry.example:5000/team/evoengine:0.1.0"
SIZES = [Cluster("h100", 2, 8, 64, IMAGE), Cluster("a100", 40, 1, 16, IMAGE), Cluster("l4", 1, 0, 2, IMAGE)]
SLURM_CONF = """\
ClusterName=none
SlurmctldHost=localhost
SlurmctldPort=1
MessageTimeout=2
GresTypes=gpu
NodeName=a
PartitionName=p Nodes=a Default=YES
"""

TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}


def fields(required: str, **properties: object) -> dict[str, object]:
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": False}


STRINGS = {"type": "object", "additionalProperties": TEXT}
META = {"type": "object"}
CLUSTER = fields(
    "headGroupSpec workerGroupSpecs authOptions enableInTreeAutoscaling",
    rayVersion=TEXT,
    authOptions=fields("mode", mode={"enum": ["token"]}),
    enableInTreeAutoscaling={"const": True},
    autoscalerOptions=fields(
        "version", version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    ),
    headGroupSpec=fields("template rayStartParams", rayStartParams=STRINGS, template=META),
    workerGroupSpecs={"type": "array", "minItems": 1, "items": fields(
        "groupName template minReplicas maxReplicas rayStartParams", groupName=TEXT, replicas=COUNT, minReplicas=COUNT,
        maxReplicas=COUNT, rayStartParams=STRINGS, template=META,
    )},
)  # fmt: skip
OBJECT = {"apiVersion": {"const": "ray.io/v1"}, "metadata": META}
SCHEMAS = {
    "RayCluster": fields("spec", **OBJECT, kind=TEXT, spec=CLUSTER),
    "RayJob": fields("spec", **OBJECT, kind=TEXT, spec=fields(
        "entrypoint rayClusterSpec", entrypoint=TEXT, shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT, backoffLimit=COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        submitterPodTemplate=META, rayClusterSpec=CLUSTER,
    )),
}  # fmt: skip
"""the fields of KubeRay 1.5.1 that the files have, by its API reference; a misspelt one is refused"""


def objects(cluster: Cluster) -> list[dict]:
    return [each for name in KUBERNETES for each in yaml.safe_load_all(text_of(name, cluster))]


def pods(ray: dict) -> list[dict]:
    spec = ray["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    found = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    return [*found, spec["submitterPodTemplate"]] if "submitterPodTemplate" in spec else found


def as_pod(template: dict) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", **template["metadata"]},
        **template_spec(template),
    }


def template_spec(template: dict) -> dict:
    return {"spec": template["spec"]}


# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("cluster", SIZES, ids=lambda cluster: f"{cluster.gpus}x{cluster.gpu}")
def test_kubernetes_knows_every_field(cluster):
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for each in objects(cluster):
        if each["kind"] in SCHEMAS:
            Draft202012Validator(SCHEMAS[each["kind"]]).validate(each)
            for template in pods(each):
                kubernetes.validate(as_pod(template), "1.30", strict=True)
        else:
            kubernetes.validate(each, "1.30", strict=True)


def test_a_field_that_kubernetes_does_not_have_is_noticed():
    kubernetes = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    template = pods(objects(SIZES[0])[-1])[0]
    template["spec"]["containers"][0]["imagePolicy"] = "Always"
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(as_pod(template), "1.30", strict=True)


def test_every_pod_is_one_that_the_policy_and_the_budgets_select():
    policy, head, workers, cluster, job = objects(SIZES[0])
    assert [each["kind"] for each in (policy, head, workers)] == ["NetworkPolicy", *["PodDisruptionBudget"] * 2]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    for ray in (cluster, job):
        for template in pods(ray):
            assert selected.items() <= template["metadata"]["labels"].items()
    for budget in (head, workers):
        assert selected.items() <= budget["spec"]["selector"]["matchLabels"].items()


def test_ray_is_told_of_the_gpus_as_its_command_line_takes_them():
    spec = objects(SIZES[0])[3]["spec"]
    (group,) = spec["workerGroupSpecs"]
    assert json.loads(json.loads(group["rayStartParams"]["resources"].strip("'"))) == {"gpu:h100": 8}
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert (group["minReplicas"], group["maxReplicas"], spec["headGroupSpec"]["rayStartParams"]["num-cpus"]) == (
        0,
        2,
        "0",
    )


def test_nodes_without_a_gpu_ask_for_none_and_one_is_always_there():
    (group,) = objects(SIZES[2])[3]["spec"]["workerGroupSpecs"]
    assert "gpu" not in json.dumps(group["rayStartParams"]) and "nvidia" not in json.dumps(group["template"])
    assert group["minReplicas"] == 1


def test_the_version_of_ray_is_that_of_the_container_file():
    constraints = Path(__file__).parents[2].joinpath("constraints.txt").read_text().split()
    assert f"ray=={RAY}" in constraints


# ── Slurm ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=SIZES, ids=lambda cluster: f"{cluster.gpus}x{cluster.gpu}")
def script(request, tmp_path) -> Path:
    (path,) = write_files(tmp_path, SLURM, request.param)
    return path


def test_the_script_is_a_shells_and_may_be_run(script):
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True).stderr == ""
    assert os.access(script, os.X_OK)


def test_shellcheck_has_nothing_to_say(script):
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("change", "said"), [(None, None), ("--time=soon", "Invalid --time"), ("--cpus", "--cpus")])
def test_sbatch_takes_the_options(tmp_path, change, said):
    """Beyond the options it needs a controller, and there is none: that it asks for one says that it took them."""
    if not shutil.which("sbatch"):
        pytest.skip("sbatch is not installed: apt-get install slurm-client")
    (tmp_path / "slurm.conf").write_text(SLURM_CONF)
    text = text_of("search.sh", SIZES[0])
    if change:
        text = text.replace("--time=24:00:00", change)
    (tmp_path / "search.sh").write_text(text)
    done = subprocess.run(
        ["sbatch", "--test-only", tmp_path / "search.sh"], capture_output=True, text=True,
        env={**os.environ, "SLURM_CONF": str(tmp_path / "slurm.conf")},
    )  # fmt: skip
    assert ("Unable to contact slurm controller" in done.stderr) == (change is None), done.stderr
    assert said is None or said in done.stderr


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def controller(request, tmp_path) -> Iterator[Path]:
    """A controller whose nodes are what the cluster asks for; its configuration, for SLURM_CONF."""
    cluster, conf = request.param, tmp_path / "slurm.conf"
    if not shutil.which("slurmctld") or not shutil.which("sbatch"):
        pytest.skip("slurmctld is not installed: apt-get install slurmctld slurm-client")
    (tmp_path / "state").mkdir()
    names = ",".join(f"node{n}" for n in range(cluster.nodes))
    gres = f"Gres=gpu:{cluster.gpus} " if cluster.gpus else ""
    conf.write_text(f"""\
ClusterName=none
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={free_port()}
AuthType=auth/none
CredType=cred/none
SlurmUser={getpass.getuser()}
StateSaveLocation={tmp_path}/state
SlurmctldPidFile={tmp_path}/pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
GresTypes=gpu
ResumeProgram=/bin/true
SuspendProgram=/bin/true
SuspendTime=600
NodeName={names} NodeAddr=127.0.0.1 CPUs={cluster.cpus} {gres}State=CLOUD
PartitionName=p Nodes={names} Default=YES
""")
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    process = subprocess.Popen(
        ["slurmctld", "-D", "-c", "-f", conf], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        sinfo = {"args": ["sinfo"], "env": environment, "capture_output": True}
        wait_for(lambda: process.poll() is not None or subprocess.run(**sinfo).returncode == 0)
        assert process.poll() is None, "the controller did not start"
        yield conf
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("controller", SIZES, indirect=True, ids=lambda cluster: f"{cluster.gpus}x{cluster.gpu}")
def test_a_controller_takes_the_job_where_the_nodes_are_what_it_asks_for(request, controller, tmp_path):
    cluster = request.node.callspec.params["controller"]

    def plan(asked: Cluster) -> subprocess.CompletedProcess[str]:
        (script,) = write_files(Path(tempfile.mkdtemp(dir=tmp_path)), SLURM, asked)
        environment = {**os.environ, "SLURM_CONF": str(controller)}
        return subprocess.run(["sbatch", "--test-only", script], capture_output=True, text=True, env=environment)

    done = plan(cluster)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr
    for more in ({"nodes": cluster.nodes + 1}, {"gpus": cluster.gpus + 1}, {"cpus": cluster.cpus + 1}):
        assert "not available" in plan(replace(cluster, **more)).stderr, more


class Job:
    """The script as a job of two nodes, with commands of one line in place of those that it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home, self.path = folder, folder / "home", folder / "bin"
        self.home.mkdir()
        self.path.mkdir()
        self.put("scontrol", "echo node1; echo node2")
        self.put("srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
        self.put("hostname", "echo 10.0.0.1 10.0.0.2")
        self.put("ray", f'echo "$@" >> {folder}/ray; [ "$1" = health-check ] || exec sleep 1000')
        self.put(
            "evoengine",
            f"""\
case "$1 $2" in
    "cluster resources") echo '{{}}';;
    "cluster status") [ "$(grep -c ^start {folder}/ray)" = 2 ] && echo '{{"nodes": [1, 2]}}';;
    *) echo "$@" > {folder}/search; stat -c %a "$RAY_AUTH_TOKEN_PATH" > {folder}/token;;
esac""",
        )
        write_files(folder, SLURM, Cluster("h100", 2, 8, 64))

    def put(self, name: str, text: str) -> None:
        path = self.path / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        path = f"{self.path}{os.pathsep}{os.environ['PATH']}"
        env = {
            "PATH": path, "HOME": str(self.home), "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_CPUS_PER_TASK": "2",
        }  # fmt: skip
        return subprocess.Popen(
            ["bash", self.folder / "search.sh", *arguments], env=env, text=True, stderr=subprocess.PIPE
        )

    @property
    def tokens(self) -> list[str]:
        return [path.name for path in (self.home / ".ray").iterdir()]


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


def test_the_script_searches_on_a_cluster_of_all_its_nodes_and_leaves_no_token(job, tmp_path):
    done = job.start("--problem", "gemm:m64,n64,k64,fp16", "--trials", "3")
    assert (done.communicate()[1], done.returncode) == ("", 0)
    asked = "search --cluster 10.0.0.1:20077 --gpu h100 --problem gemm:m64,n64,k64,fp16 --trials 3"
    assert (tmp_path / "search").read_text().strip() == asked
    started = [line for line in (tmp_path / "ray").read_text().splitlines() if line.startswith("start")]
    head, worker = sorted(started, key=lambda line: "--head" not in line)
    assert "--head" in head and "--port 20077" in head
    assert "--address 10.0.0.1:20077" in worker and "--head" not in worker
    assert (tmp_path / "token").read_text().strip() == "600" and job.tokens == []


def test_the_exit_code_is_the_searchs(job):
    job.put("evoengine", 'case "$2" in status) echo \'{"nodes": [1, 2]}\';; resources) echo "{}";; *) exit 3;; esac')
    assert job.start().wait() == 3 and job.tokens == []


def test_a_ray_node_that_ends_before_all_have_joined_ends_the_job_with_a_sentence(job):
    job.put("ray", '[ "$1" != start ] || { echo "no such address" >&2; exit 1; }; exit 1')
    done = job.start()
    said = done.communicate()[1]
    assert done.returncode == 1 and job.tokens == []
    assert "no such address" in said and "a Ray node ended before the head answered" in said


def test_it_waits_until_every_node_has_joined(job, tmp_path):
    asked = tmp_path / "asked"
    job.put("evoengine", f"""\
case "$1 $2" in
    "cluster resources") echo '{{}}';;
    "cluster status") echo x >> {asked}; [ "$(wc -l < {asked})" = 1 ] || more=', 2'; echo "{{\\"nodes\\": [1$more]}}";;
esac""")  # fmt: skip
    assert job.start().wait() == 0
    assert asked.read_text().split() == ["x", "x"]


def test_sigterm_ends_the_search_as_it_ends_one_on_a_terminal(job, tmp_path):
    """It comes before the time is up and where a job is preempted; the script waits for the search's own end."""
    job.put(
        "evoengine",
        f"""\
case "$1 $2" in
    "cluster resources") echo '{{}}';;
    "cluster status") echo '{{"nodes": [1, 2]}}';;
    *) trap 'echo ended > {tmp_path}/ended; exit 130' TERM; touch {tmp_path}/begun; while :; do sleep 0.1; done;;
esac""",
    )
    running = job.start()
    wait_for((tmp_path / "begun").exists)
    running.send_signal(signal.SIGTERM)
    assert running.wait() == 130
    assert (tmp_path / "ended").exists() and job.tokens == []


# ── what is asked ───────────────────────────────────────────────────────────────────────────────────────────────────


def up(folder: Path, *arguments: str):
    return CliRunner().invoke(command, ["cluster", "up", str(folder), *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "one of --slurm and --k8s"),
        (("--slurm", "--k8s"), "one of --slurm and --k8s"),
        (("--k8s",), "--k8s requires --image"),
        (("--slurm", "--image", IMAGE), "--slurm takes none"),
        (("--k8s", "--image", "UPPER/evoengine"), "is not a container image"),
        (("--k8s", "--image", "evil: {}\nkind: Pod"), "is not a container image"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence_and_nothing_is_written(tmp_path, arguments, said):
    done = up(tmp_path / "fleet", *arguments)
    assert isinstance(done.exception, UsageError) and said in str(done.exception)
    assert not (tmp_path / "fleet").exists()


def test_files_that_are_there_stay_as_they_are(tmp_path):
    (tmp_path / "job.yaml").write_text("mine\n")
    done = up(tmp_path, "--k8s", "--image", IMAGE)
    assert isinstance(done.exception, UsageError) and "job.yaml already exists" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]
    assert (tmp_path / "job.yaml").read_text() == "mine\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot write to .*file/fleet"):
        write_files(tmp_path / "file" / "fleet", SLURM, SIZES[0])
