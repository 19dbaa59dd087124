"""The files of examples/launch are of their formats, and start what is there."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "launch"
SCRIPT = re.compile(r"examples/[a-z_]+\.py")


def parsed(name: str) -> Any:
    """The value of a YAML file."""
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_what_it_starts_exists_and_the_page_names_it(path: Path) -> None:
    scripts = SCRIPT.findall(path.read_text())
    assert scripts and all((ROOT / script).is_file() for script in scripts)
    assert f"../examples/launch/{path.name}" in (ROOT / "docs" / "launching.md").read_text()


def test_the_batch_script_starts_a_process_a_gpu() -> None:
    text = (FOLDER / "train.sbatch").read_text()
    subprocess.run(["bash", "-n", FOLDER / "train.sbatch"], check=True)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, flags=re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"] and "srun --kill-on-bad-exit=1 python" in text


def test_the_manifest_is_a_job_of_the_training_operator() -> None:
    job = parsed("kubernetes.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["command"][0] == "torchrun" and worker["replicas"] == job["spec"]["elasticPolicy"]["maxReplicas"]
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    volumes = {volume["name"] for volume in worker["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_task_of_skypilot_starts_torchrun_on_each_host() -> None:
    task = parsed("skypilot.yaml")
    assert task["num_nodes"] == 2 and set(task) <= {
        "name",
        "num_nodes",
        "resources",
        "workdir",
        "file_mounts",
        "setup",
        "run",
    }
    for word in ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr"):
        assert word in task["run"]
    subprocess.run(["bash", "-n", "-c", task["setup"] + task["run"]], check=True)


def test_the_image_copies_what_it_installs() -> None:
    lines = [line.split(maxsplit=1) for line in (FOLDER / "Dockerfile").read_text().splitlines() if line]
    steps = [step for step in lines if step[0] != "#"]
    assert {step[0] for step in steps} == {"FROM", "WORKDIR", "COPY", "RUN", "CMD"} and steps[0][0] == "FROM"
    copied = [name for step in steps if step[0] == "COPY" for name in step[1].split()[:-1]]
    assert all((ROOT / name).exists() for name in copied) and {"pyproject.toml", "constraints.txt", "fshard"} <= {
        *copied
    }
