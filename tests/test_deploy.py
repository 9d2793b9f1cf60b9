"""What `deploy/` holds is what its tools take, and starts what it says: image, Kubernetes, workflows."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from rgate_integrations.cli.serve import serve as serve_command
from tests.http_servers import Words, serving_gate

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent


def passes(*command, folder=ROOT):
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("checker", "options", "file"),
    [
        ("hadolint", ["--failure-threshold", "warning"], "Dockerfile"),
        ("kubernetes-validate", ["--strict"], "kubernetes.yaml"),  # it knows every field
    ],
)
def test_the_checker_of_each_file_finds_nothing(checker, options, file):
    passes(BIN / checker, *options, DEPLOY / file)


def test_what_is_copied_into_the_image_is_enough_to_build_the_package(tmp_path):
    copied = re.findall(r"^COPY --chown=rgate (.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for name in " ".join(copied).split():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    passes(sys.executable, "-m", "hatchling", "build", "-t", "wheel", folder=tmp_path)


def test_probes_and_ports_are_those_of_the_server():
    deployment, service, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    with serving_gate(Words(), token="secret") as url:  # noqa: S106  a probe has none
        for probe in ("livenessProbe", "readinessProbe"):
            assert httpx.get(url + container[probe]["httpGet"]["path"], timeout=600).status_code in (200, 503)
    port = inspect.signature(serve_command).parameters["port"].default
    assert container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"] == port


WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")
}


def test_workflows_run_what_contributors_run():
    assert ".ci/run" in [step.get("run") for step in WORKFLOWS["ci"]["jobs"]["run"]["steps"]]
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["publish"]["needs"] == ["test", "build"]
    allowed = [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert allowed == ["publish"]
    text = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    assert re.findall(r"uses: (?!\./)(\S+@(?![0-9a-f]{40}\b).*)", text) == []
