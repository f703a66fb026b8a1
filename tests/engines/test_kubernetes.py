"""Manifests before Kubernetes's own schemas and its client, and played: pods as hosts of this machine.

No cluster can run here. `make test-engines` installs what is needed.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.engines.launching import PATIENCE, SUM
from tests.hosts.netns import Host, Network, missing
from tests.kubelet import mounting
from zcactor.cli.main import app

pytestmark = pytest.mark.slow

TOKEN_FOLDER = "/run/secrets/zcactor"
OPTIONS = {
    "least": (),
    "all": ("--namespace", "team", "--cpus", "4", "--memory", "8Gi", "--gpus", "1", "--rdma", "rdma/hca_a=1"),
    "a secret that exists": ("--secret", "mine"),
}


def rendered(kind: str, *options: str, program: tuple[str, ...] = ("python", "train.py", "é $(HOME)\n#")) -> str:
    """The output of ``zcactor k8s render``."""
    command = ["k8s", "render", "--name", "train", "--image", "me/train:1", "--nodes", "2", "--kind", kind]
    done = CliRunner().invoke(app, [*command, *options, "--", *program])
    assert done.exit_code == 0, done.output
    return done.stdout


def template_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The template of a LeaderWorkerSet's pods, as an object that Kubernetes has a schema for."""
    template = document["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return {"apiVersion": "v1", "kind": "PodTemplate", "metadata": document["metadata"], "template": template}


# ---- schemas


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["job", "lws"])
def test_schemas(kind: str, options: tuple[str, ...]) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="make test-engines installs it")
    documents = json.loads(rendered(kind, *options))["items"]
    judged = []
    for document in documents:
        found = template_of(document) if document["kind"] == "LeaderWorkerSet" else document
        for version in ("1.28", schemas.latest_version()):
            schemas.validate(found, version, strict=True)
        judged.append(found["kind"])
    secret = [] if "--secret" in options else ["Secret"]
    assert judged == [*secret, *(["Service", "Job"] if kind == "job" else ["PodTemplate"])]


def test_schemas_find_what_is_wrong() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="make test-engines installs it")
    job = json.loads(rendered("job"))["items"][-1]
    for place, key, value in (
        (job["spec"], "completion", 2),
        (job["spec"]["template"]["spec"]["containers"][0], "command", "run"),
    ):
        before = dict(place)
        place[key] = value
        for version in ("1.28", schemas.latest_version()):
            with pytest.raises(schemas.ValidationError):
                schemas.validate(job, version, strict=True)
        place.clear()
        place.update(before)


# ---- kubectl, to a server that keeps what it is given

RESOURCES = {
    "v1/secrets": "Secret",
    "v1/services": "Service",
    "batch/v1/jobs": "Job",
    "leaderworkerset.x-k8s.io/v1/leaderworkersets": "LeaderWorkerSet",
}


@pytest.mark.parametrize("kind", ["job", "lws"])
def test_kubectl_takes_it(kind: str, tmp_path: Path) -> None:
    kmock = pytest.importorskip("kmock", reason="make test-engines installs it")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed: make test-engines does that as root on Debian")
    text = rendered(kind)

    async def create() -> tuple[int | None, str, dict[str, Any]]:
        async with kmock.KubernetesEmulator() as server, kmock.Server(server):
            for name, each in RESOURCES.items():
                server.resources[name] = kmock.ResourceInfo(kind=each, namespaced=True, verbs={"create", "get"})
            core = {each: name.partition("/")[2] for name, each in RESOURCES.items() if name.startswith("v1/")}
            server["get /api/v1"] << {  # its own answer names the group "/v1", which kubectl does not take
                "apiVersion": "v1", "kind": "APIResourceList", "groupVersion": "v1",
                "resources": [
                    {"name": name, "singularName": "", "namespaced": True, "kind": each, "verbs": ["create"]}
                    for each, name in core.items()
                ],
            }  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                kubectl, "--server", str(server.url), "--cache-dir", str(tmp_path), "create", "--validate=false",
                "-o", "name", "-f", "-", env={"HOME": str(tmp_path)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                output, _ = await asyncio.wait_for(process.communicate(text.encode()), PATIENCE)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            kept = {key[0].plural: server.objects[key].last.raw for key in server.objects}
            return process.returncode, output.decode(), kept

    status, output, kept = asyncio.run(create())
    assert status == 0, output
    for document in json.loads(text)["items"]:
        (name,) = (name.rpartition("/")[2] for name, each in RESOURCES.items() if each == document["kind"])
        document["metadata"]["namespace"] = "default"
        assert kept.pop(name) == document
    assert not kept


# ---- pods


def pod(host: Host, documents: list[dict[str, Any]], index: int, head: Host) -> tuple[list[str], dict[str, str]]:
    """Give a host the name, the files and the token of a pod. Returns the container's command and its variables."""
    secret, *_, last = documents
    template = template_of(last)["template"] if last["kind"] == "LeaderWorkerSet" else last["spec"]["template"]
    (container,) = template["spec"]["containers"]
    facts = {"status.podIP": host.address, "metadata.labels['batch.kubernetes.io/controller-uid']": "6f1c-uid"}
    variables = {
        each["name"]: each["value"] if "value" in each else facts[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    name = last["metadata"]["name"]
    if last["kind"] == "Job":
        names = f"{name}-0.{template['spec']['subdomain']}"
        variables["JOB_COMPLETION_INDEX"] = str(index)
    else:
        names = f"{name}-0.{name}.default"
        variables |= {"LWS_WORKER_INDEX": str(index), "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": names}
    (host.directory / "hosts").write_text(f"127.0.0.1 localhost\n{head.address} {names}\n")
    (volume,), (mount,) = template["spec"]["volumes"], container["volumeMounts"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"]
    assert mount["mountPath"] == f"/var{TOKEN_FOLDER}"
    commands = mounting(TOKEN_FOLDER, secret["stringData"]["token"], mode=volume["secret"]["defaultMode"])
    with host.start(
        "sh", "-c", f"set -e; mount --bind {host.directory}/hosts /etc/hosts; mount -t tmpfs tmpfs /run; {commands}"
    ) as mounts:
        assert mounts.wait(PATIENCE) == 0
    program, *arguments = (argument.replace("$$", "$") for argument in container["command"])
    assert program == "zcactor"
    return [sys.executable, "-m", program, *arguments], variables


@pytest.mark.root
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("kind", ["job", "lws"])
def test_pods(kind: str, tmp_path: Path) -> None:
    (tmp_path / "sum.py").write_text(SUM)
    program = (sys.executable, str(tmp_path / "sum.py"), "a b", "$(HOME)", "$$", "*")
    documents = json.loads(rendered(kind, "--cpus", "1", program=program))["items"]
    ours = {"ZCACTOR_NUM_GPUS": "0", "ZCACTOR_STORE_CAPACITY": str(1 << 26), "STATUS": "5"}
    with Network(2) as hosts:
        pods = []
        for index, host in enumerate(hosts):
            command, variables = pod(host, documents, index, hosts[0])
            with (host.directory / "output").open("w") as output:
                pods.append(
                    host.start(
                        *command, env={**ours, **variables}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
                    )
                )
        statuses = [process.wait(PATIENCE) for process in pods]
        said = [(host.directory / "output").read_text() for host in hosts]
        assert statuses == [5, 5], said
        assert said == ["2 200000.0 ['a b', '$(HOME)', '$$', '*']\n", ""]
