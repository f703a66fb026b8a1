"""Manifests: their contents, names and amounts that Kubernetes would refuse, and the one place of the token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from zcactor.cli.run import run
from zcactor.cluster.kubernetes import Deployment, manifests
from zcactor.cluster.sources import Spot, decide

TOKEN = "a1" * 32
GOOD: dict[str, Any] = {"name": "train", "image": "me/train:1", "nodes": 3, "program": ("python", "train.py")}


def rendered(**fields: Any) -> dict[str, dict[str, Any]]:
    """The objects of a deployment, by kind."""
    return {found["kind"]: found for found in manifests(Deployment(**{**GOOD, **fields}), TOKEN)}


def pod_of(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The template of the pods."""
    if "Job" in found:
        template: dict[str, Any] = found["Job"]["spec"]["template"]
        return template
    template = found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return template


def container_of(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = pod_of(found)["spec"]["containers"]
    made: dict[str, Any] = container
    return made


def variables_of(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container_of(found)["env"]}


def test_a_job() -> None:
    found = rendered()
    assert list(found) == ["Secret", "Service", "Job"]
    job, service = found["Job"]["spec"], found["Service"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 3, 3)
    assert job["backoffLimit"] == 0
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    pod = pod_of(found)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert (pod["spec"]["restartPolicy"], pod["spec"]["subdomain"]) == ("Never", service["metadata"]["name"])
    assert "resources" not in container_of(found)
    assert "securityContext" not in container_of(found)


@pytest.mark.parametrize("kind", ["job", "lws"])
def test_the_end_of_a_pod_is_waited_for(kind: str) -> None:
    (grace,) = (option.default for option in run.params if option.name == "grace")
    assert isinstance(grace, float)
    assert pod_of(rendered(kind=kind))["spec"]["terminationGracePeriodSeconds"] > grace + 5


def test_the_place_of_a_job_s_pods() -> None:
    found = variables_of(rendered())
    plain = {name: value for name, value in found.items() if isinstance(value, str)}
    assert plain["ZCACTOR_TOKEN_FILE"] == "/var/run/secrets/zcactor/token"
    decision = decide({**plain, "JOB_COMPLETION_INDEX": "2", "ZCACTOR_RUN": "a uid"})
    assert (decision.source, decision.spot) == ("Indexed Job", Spot(2, 3, "name", "train-0.train", None, "a uid"))
    facts = {name: value["fieldRef"]["fieldPath"] for name, value in found.items() if not isinstance(value, str)}
    assert facts == {
        "ZCACTOR_RUN": "metadata.labels['batch.kubernetes.io/controller-uid']", "ZCACTOR_HOST": "status.podIP",
    }  # fmt: skip


def test_a_worker_set() -> None:
    found = rendered(kind="lws", cpus=2)
    assert list(found) == ["Secret", "LeaderWorkerSet"]
    assert found["LeaderWorkerSet"]["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert found["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"] == 3
    assert "restartPolicy" not in pod_of(found)["spec"]  # a StatefulSet's pods have no other than Always
    variables = variables_of(found)
    assert variables["ZCACTOR_NUM_CPUS"] == "2"
    assert not {"ZCACTOR_SIZE", "ZCACTOR_HEAD", "ZCACTOR_RUN"} & set(variables)
    group = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "3", "LWS_LEADER_ADDRESS": "train-0.train.default"}
    plain = {name: value for name, value in variables.items() if isinstance(value, str)}
    assert decide({**plain, **group}).spot == Spot(1, 3, "name", "train-0.train.default", run="train-0.train.default")


@pytest.mark.parametrize("kind", ["job", "lws"])
def test_the_token_is_in_the_secret_alone(kind: str) -> None:
    found = rendered(kind=kind)
    secret = found.pop("Secret")
    assert secret["stringData"] == {"token": TOKEN}
    assert TOKEN not in json.dumps(found)
    (volume,) = pod_of(found)["spec"]["volumes"]
    assert volume["secret"]["secretName"] == secret["metadata"]["name"] == "train-token"
    assert volume["secret"]["defaultMode"] == 0o440
    (mount,) = container_of(found)["volumeMounts"]
    assert mount["readOnly"] and "subPath" not in mount


def test_a_secret_that_exists() -> None:
    found = rendered(secret="mine.token")
    assert list(found) == ["Service", "Job"]
    assert TOKEN not in json.dumps(found)
    assert pod_of(found)["spec"]["volumes"][0]["secret"]["secretName"] == "mine.token"


def test_amounts() -> None:
    found = container_of(rendered(cpus=8, memory="16Gi", gpus=2, rdma=("rdma/hca_a", 1)))
    wanted = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "2", "rdma/hca_a": "1"}
    assert found["resources"] == {"requests": wanted, "limits": wanted}
    assert found["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def test_a_namespace() -> None:
    assert all("namespace" not in each["metadata"] for each in rendered().values())
    assert {each["metadata"]["namespace"] for each in rendered(namespace="team-1").values()} == {"team-1"}


def test_arguments_arrive_as_given() -> None:
    program = ("sh", "-c", "echo $(HOME) $$ \\$1 'a b' *", "--", "é", "")
    command = container_of(rendered(program=program))["command"]
    assert command[:2] == ["zcactor", "run"]
    given = command[command.index("--") + 1 :]
    # Kubernetes takes a pair of dollars for one.
    assert [argument.replace("$$", "$") for argument in given] == list(program)
    assert all("$" not in argument.replace("$$", "") for argument in given)


LONGEST = {"job": "a" * 60, "lws": "a" * 50}


@pytest.mark.parametrize("kind", ["job", "lws"])
def test_the_longest_name(kind: str) -> None:
    assert rendered(kind=kind, name=LONGEST[kind], nodes=100)
    with pytest.raises(ValueError, match=f"take a name with at most {len(LONGEST[kind])}$"):
        rendered(kind=kind, name=LONGEST[kind] + "a", nodes=100)
    if kind == "job":
        with pytest.raises(
            ValueError, match=r"the host name of its last pod would be 'a{60}-100': that has 64 letters"
        ):
            rendered(kind=kind, name=LONGEST[kind], nodes=101)


@pytest.mark.parametrize(
    "image",
    [
        "train", "me/train", "train:1.2-gpu", "ghcr.io/me/train:1", "localhost:5000/a/b_c/d__e:latest", "[::1]:5000/a",
        "Registry.Example.com/a", f"me/train@sha256:{'0' * 64}", f"me/train:1@sha256:{'0' * 64}",
    ],
)  # fmt: skip
def test_images(image: str) -> None:
    assert container_of(rendered(image=image))["image"] == image


@pytest.mark.parametrize("memory", ["64Mi", "8Gi", "1.5Gi", "16G", "67108864", "7Ei"])
def test_memory(memory: str) -> None:
    assert container_of(rendered(memory=memory))["resources"]["limits"] == {"memory": memory}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": ""}, "--name is ''"),
        ({"name": "Train"}, "--name is 'Train': it must be of small letters, digits and '-'"),
        ({"name": "1train"}, "--name is '1train'"),
        ({"name": "train-"}, "--name is 'train-'"),
        ({"name": "a.b"}, "--name is 'a.b'"),
        ({"name": "a_b"}, "--name is 'a_b'"),
        ({"name": "train\n"}, r"--name is 'train\n'"),
        ({"name": "a" * 63}, "the host name of its last pod would be"),
        ({"name": "a" * 51, "kind": "lws"}, "the name of its StatefulSet would be"),
        ({"nodes": 0}, "--nodes is 0: it must be from 1 to 100000"),
        ({"nodes": 100_001}, "--nodes is 100001"),
        ({"image": ""}, "--image is ''"),
        ({"image": "Train"}, "--image is 'Train', which is no reference to an image"),
        ({"image": "me/train "}, "--image is 'me/train '"),
        ({"image": "me//train"}, "--image is 'me//train'"),
        ({"image": "train:"}, "--image is 'train:'"),
        ({"image": "train@sha256:12"}, "--image is 'train@sha256:12'"),
        ({"namespace": "a.b"}, "--namespace is 'a.b'"),
        ({"namespace": "a" * 64}, "--namespace is"),
        ({"namespace": ""}, "--namespace is ''"),
        ({"secret": "A"}, "--secret is 'A'"),
        ({"secret": "a..b"}, "--secret is 'a..b'"),
        ({"secret": "a" * 254}, "--secret is"),
        ({"cpus": 0}, "--cpus is 0: it must be from 1"),
        ({"gpus": -1}, "--gpus is -1"),
        ({"memory": "8GB"}, "--memory is '8GB': it must be a number and a unit"),
        ({"memory": "8gi"}, "--memory is '8gi'"),
        ({"memory": "512m"}, "--memory is '512m'"),
        ({"memory": "-1Gi"}, "--memory is '-1Gi'"),
        ({"memory": "8"}, "--memory is '8', 8 bytes: a node needs at least 64Mi"),
        ({"memory": "8Ei"}, "--memory is '8Ei'"),
        ({"memory": "٨Gi"}, "--memory is"),
        ({"rdma": ("hca", 1)}, "--rdma names the resource 'hca': it must be DOMAIN/NAME"),
        ({"rdma": ("rdma/", 1)}, "--rdma names the resource 'rdma/'"),
        ({"rdma": ("rdma/a/b", 1)}, "--rdma names the resource 'rdma/a/b'"),
        ({"rdma": ("x.kubernetes.io/a", 1)}, "x.kubernetes.io is Kubernetes's own"),
        ({"rdma": ("rdma/" + "a" * 64, 1)}, "--rdma names the resource"),
        ({"rdma": ("rdma/a", 0)}, "--rdma asks for 0 of rdma/a"),
        ({"program": ()}, "a program is missing"),
        ({"program": ("a", "\udcff")}, r"the program's argument '\udcff' is no UTF-8"),
        ({"program": ("a\0b",)}, "has a NUL"),
    ],
)
def test_what_kubernetes_would_refuse(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="^") as refused:
        rendered(**fields)
    assert words in str(refused.value)
