"""Kubernetes manifests of a cluster for one program: the pods are the ranks of a ``zcactor run``. Pure.

Two kinds are made. An Indexed Job ends with its program. A LeaderWorkerSet starts its group again when that ends, and
needs a controller that the Kubernetes cluster has to have. Both hand the token to their pods as a file.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

__all__ = ["Deployment", "manifests"]

_JOIN_WITHIN: Final = 600
"""Seconds until all pods must have joined: the last ones may still be pulling a large image, or wait for a machine."""
_TERMINATION: Final = 30
"""Seconds from SIGTERM to a pod until Kubernetes kills it: 3 for the program (the default of ``zcactor run --grace``),
5 for the actors (`Config.shutdown_timeout`), and 20 in which a run ends its agents at the latest."""
_TOKEN_FOLDER: Final = "/var/run/secrets/zcactor"
_TOKEN_KEY: Final = "token"
_TOKEN_MODE: Final = 0o440
"""The mode of the token's file: for root, and for the pod's group where the program is not root."""
_GROUP: Final = 65532
"""The group of the pods' volumes. Any number does that no file of the image belongs to."""
_MOST_NODES: Final = 100_000
"""The most pods of an Indexed Job (Kubernetes, validation of batch/v1: parallelism)."""
_LABEL: Final = 63
"""The most letters of a DNS label (RFC 1123), which host names of pods, services and namespaces are."""
_REVISION: Final = 11
"""Letters that a StatefulSet's controller puts behind its name, in a label of its pods (controller-revision-hash)."""
_LEAST_MEMORY: Final = 64 << 20
"""Bytes that the idle processes of a node need more of. Less is a unit that was left out: ``8`` for ``8Gi``."""

_SERVICE: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DNS_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_IMAGE: Final = re.compile(
    r"((\[[0-9a-fA-F:]+\]|[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*)(:[0-9]+)?/)?"
    r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(@[A-Za-z][A-Za-z0-9]*([-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?"
)
"""A reference to an image, as the OCI distribution's grammar has it: ``[registry[:port]/]path[:tag][@digest]``."""
_MEMORY: Final = re.compile(r"([0-9]{1,19})(\.[0-9]{1,19})?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?")
_UNITS: Final = {
    unit: base**power
    for base, units in ((1024, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")), (1000, ("k", "M", "G", "T", "P", "E")))
    for power, unit in enumerate(units, 1)
}


class Deployment(msgspec.Struct, frozen=True):
    """A cluster for one program on Kubernetes. Its values are such as Kubernetes takes: others are refused at once.

    Raises:
        ValueError: Kubernetes would refuse a name, an amount or the image, or an argument of the program cannot be
            written into a manifest. The message names the option, the value and the limit.
    """

    name: str
    """The name of all objects, and the beginning of the pods' host names."""
    image: str
    """The image with zcactor and the program."""
    nodes: int
    """The number of pods."""
    program: tuple[str, ...]
    """The program and its arguments, which arrive as they are given."""
    kind: Literal["job", "lws"] = "job"
    namespace: str | None = None
    """The namespace; None leaves it to kubectl."""
    cpus: int | None = None
    """CPUs of each pod."""
    memory: str | None = None
    """Memory of each pod, as Kubernetes writes it; its arenas are part of it."""
    gpus: int = 0
    """NVIDIA GPUs of each pod."""
    rdma: tuple[str, int] | None = None
    """The resource of a device plugin that gives RDMA devices, and its amount for each pod."""
    secret: str | None = None
    """The name of a Secret that exists; None makes one."""

    def __post_init__(self) -> None:
        _check_name(self)
        if not 1 <= self.nodes <= _MOST_NODES:
            raise ValueError(f"--nodes is {self.nodes}: it must be from 1 to {_MOST_NODES}")
        if not _IMAGE.fullmatch(self.image):
            raise ValueError(
                f"--image is {self.image!r}, which is no reference to an image: registry/path:tag, the path in "
                "small letters"
            )
        if self.namespace is not None and not (_DNS_LABEL.fullmatch(self.namespace) and len(self.namespace) <= _LABEL):
            raise ValueError(
                f"--namespace is {self.namespace!r}: it must be at most {_LABEL} small letters, digits and '-', with a "
                "letter or digit at both ends"
            )
        if self.secret is not None and not (_DNS_NAME.fullmatch(self.secret) and len(self.secret) <= 253):
            raise ValueError(
                f"--secret is {self.secret!r}: it must be at most 253 small letters, digits, '-' and '.', with a "
                "letter or digit at both ends of each part"
            )
        for option, amount, least in (("--cpus", self.cpus, 1), ("--gpus", self.gpus, 0)):
            if amount is not None and not least <= amount < 1 << 31:
                raise ValueError(f"{option} is {amount}: it must be from {least} to {(1 << 31) - 1}")
        if self.memory is not None:
            _check_memory(self.memory)
        if self.rdma is not None:
            _check_resource(*self.rdma)
        if not self.program:
            raise ValueError("a program is missing")
        for argument in self.program:
            try:
                text = argument.encode()
            except UnicodeEncodeError:
                raise ValueError(f"the program's argument {argument!r} is no UTF-8, which manifests are") from None
            if b"\0" in text:
                raise ValueError(f"the program's argument {argument!r} has a NUL, which no argument can hold")

    @property
    def token_secret(self) -> str:
        """The name of the Secret with the token."""
        return self.secret or f"{self.name}-token"


def _check_name(wanted: Deployment) -> None:
    if not _SERVICE.fullmatch(wanted.name):
        raise ValueError(
            f"--name is {wanted.name!r}: it must be of small letters, digits and '-', begin with a letter, and end "
            "with a letter or digit, as it is also the name of a service"
        )
    longest = f"{wanted.name}-{wanted.nodes - 1}" if wanted.kind == "job" else f"{wanted.name}-0-{wanted.nodes - 1}"
    what, room = "the host name of its last pod", _LABEL - len(longest)
    if wanted.kind == "lws" and len(wanted.name) + len("-0") + _REVISION > len(longest):
        longest, what = f"{wanted.name}-0", "the name of its StatefulSet"
        room = _LABEL - _REVISION - len(longest)
    if room < 0:
        raise ValueError(
            f"--name is {wanted.name!r}, so {what} would be {longest!r}: that has {len(longest)} letters, and at most "
            f"{len(longest) + room} are possible; take a name with at most {len(wanted.name) + room}"
        )


def _check_memory(text: str) -> None:
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise ValueError(f"--memory is {text!r}: it must be a number and a unit, Mi, Gi and Ti, or M, G and T: 8Gi")
    whole, fraction, unit = found.groups()
    scale = _UNITS.get(unit or "", 1)
    nbytes = int(whole) * scale + (int(fraction[1:]) * scale // 10 ** (len(fraction) - 1) if fraction else 0)
    if not _LEAST_MEMORY <= nbytes < 1 << 63:
        raise ValueError(
            f"--memory is {text!r}, {nbytes} bytes: a node needs at least {_LEAST_MEMORY >> 20}Mi, and Kubernetes "
            "counts fewer than 8Ei"
        )


def _check_resource(resource: str, amount: int) -> None:
    domain, slash, name = resource.partition("/")
    good = (
        slash and _DNS_NAME.fullmatch(domain) and len(f"requests.{domain}") <= 253
        and _QUALIFIED.fullmatch(name) and len(name) <= _LABEL
    )  # fmt: skip
    if not good:
        raise ValueError(
            f"--rdma names the resource {resource!r}: it must be DOMAIN/NAME as a device plugin offers it, for "
            "instance rdma/hca_shared_devices_a"
        )
    if domain == "kubernetes.io" or domain.endswith(".kubernetes.io") or domain.startswith("requests."):
        raise ValueError(
            f"--rdma names the resource {resource!r}: {domain} is Kubernetes's own, and no device plugin's"
        )
    if not 1 <= amount < 1 << 31:
        raise ValueError(f"--rdma asks for {amount} of {resource}: it must be from 1 to {(1 << 31) - 1}")


def manifests(wanted: Deployment, token: str) -> list[dict[str, Any]]:
    """The objects of a deployment, in the order in which they are applied.

    Args:
        wanted: the deployment.
        token: a new token in its written form. It is in the Secret and nowhere else; without effect where
            `Deployment.secret` names one that exists.
    """
    found = []
    if wanted.secret is None:
        found.append(
            {
                "apiVersion": "v1", "kind": "Secret", "metadata": _metadata(wanted, wanted.token_secret),
                # A second token under the same name would keep new pods from joining older ones.
                "immutable": True, "type": "Opaque", "stringData": {_TOKEN_KEY: token},
            }
        )  # fmt: skip
    return [*found, *(_job(wanted) if wanted.kind == "job" else _worker_set(wanted))]


def _job(wanted: Deployment) -> list[dict[str, Any]]:
    template = _template(
        wanted,
        [
            {"name": "ZCACTOR_SIZE", "value": str(wanted.nodes)},
            {"name": "ZCACTOR_HEAD", "value": f"{wanted.name}-0.{wanted.name}"},
            # A Job that is deleted and made again is another run.
            _field("ZCACTOR_RUN", "metadata.labels['batch.kubernetes.io/controller-uid']"),
        ],
    )
    template["spec"].update(restartPolicy="Never", subdomain=wanted.name)
    return [
        {
            "apiVersion": "v1", "kind": "Service", "metadata": _metadata(wanted, wanted.name),
            # Pods look for the head before any of them is ready.
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(wanted)},
        },
        {
            "apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(wanted, wanted.name),
            "spec": {
                "completionMode": "Indexed", "completions": wanted.nodes, "parallelism": wanted.nodes,
                "backoffLimit": 0, "template": template,
            },
        },
    ]  # fmt: skip


def _worker_set(wanted: Deployment) -> list[dict[str, Any]]:
    # Rank, size, the leader's address and a headless Service come from the controller.
    return [
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
            "metadata": _metadata(wanted, wanted.name),
            "spec": {
                "replicas": 1,
                "leaderWorkerTemplate": {
                    "size": wanted.nodes, "restartPolicy": "RecreateGroupOnPodRestart",
                    "workerTemplate": _template(wanted, []),
                },
            },
        }
    ]  # fmt: skip


def _labels(wanted: Deployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "zcactor", "app.kubernetes.io/instance": wanted.name}


def _metadata(wanted: Deployment, name: str) -> dict[str, Any]:
    place = {} if wanted.namespace is None else {"namespace": wanted.namespace}
    return {"name": name, **place, "labels": _labels(wanted)}


def _field(name: str, path: str) -> dict[str, Any]:
    """A variable with a fact about the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _template(wanted: Deployment, place: list[dict[str, Any]]) -> dict[str, Any]:
    """The template of a pod. `place` are the variables that say its rank."""
    container: dict[str, Any] = {
        "name": "zcactor",
        "image": wanted.image,
        "command": ["zcactor", "run", "--timeout", str(_JOIN_WITHIN), "--", *map(_literal, wanted.program)],
        "env": [
            *place,
            # The own address is known before any name can be resolved.
            _field("ZCACTOR_HOST", "status.podIP"),
            {"name": "ZCACTOR_TOKEN_FILE", "value": f"{_TOKEN_FOLDER}/{_TOKEN_KEY}"},
            # Limits are times of processors, not processors: the process may run on all of the machine.
            *([] if wanted.cpus is None else [{"name": "ZCACTOR_NUM_CPUS", "value": str(wanted.cpus)}]),
        ],
        "volumeMounts": [{"name": "token", "mountPath": _TOKEN_FOLDER, "readOnly": True}],
    }
    if amounts := _amounts(wanted):
        # Requests are what limits are: the store is memory of the pod, and to take what was not asked for ends pods.
        container["resources"] = {"requests": dict(amounts), "limits": dict(amounts)}
    if wanted.rdma is not None:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # memory is pinned for the card
    return {
        "metadata": {"labels": _labels(wanted)},
        "spec": {
            # Variables of services called zcactor-something would be taken for settings.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": _TERMINATION,
            "securityContext": {"fsGroup": _GROUP},
            "containers": [container],
            "volumes": [
                {
                    "name": "token",
                    "secret": {
                        "secretName": wanted.token_secret, "defaultMode": _TOKEN_MODE,
                        "items": [{"key": _TOKEN_KEY, "path": _TOKEN_KEY}],
                    },
                }
            ],
        },
    }  # fmt: skip


def _amounts(wanted: Deployment) -> dict[str, str]:
    amounts = {}
    if wanted.cpus is not None:
        amounts["cpu"] = str(wanted.cpus)
    if wanted.memory is not None:
        amounts["memory"] = wanted.memory
    if wanted.gpus:
        amounts["nvidia.com/gpu"] = str(wanted.gpus)
    if wanted.rdma is not None:
        resource, amount = wanted.rdma
        amounts[resource] = str(amount)
    return amounts


def _literal(argument: str) -> str:
    """An argument in which Kubernetes expands nothing: it takes ``$(NAME)`` for a variable, and ``$$`` for a dollar."""
    return argument.replace("$", "$$")
