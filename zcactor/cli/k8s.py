"""``zcactor k8s render``: the Kubernetes manifests of a cluster for one program."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
from typing import Final, Literal, TextIO

import click

from zcactor.cli.nodes import fail
from zcactor.token import TOKEN_NBYTES

__all__ = ["k8s"]

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@click.group()
def k8s() -> None:
    """Run on Kubernetes."""


@k8s.command(context_settings={"allow_interspersed_args": False})
@click.option("--name", required=True, help="Name of all objects, and beginning of the pods' host names.")
@click.option("--image", required=True, help="Image with zcactor and the program.")
@click.option("--nodes", required=True, type=int, help="Number of pods, each of which is a node.")
@click.option(
    "--kind", type=click.Choice(["job", "lws"]), default="job", show_default=True,
    help="An Indexed Job, which ends with the program, or a LeaderWorkerSet, which starts it again.",
)  # fmt: skip
@click.option("--namespace", help="Namespace of all objects.  [that of kubectl]")
@click.option("--cpus", type=int, help="CPUs of each pod.")
@click.option("--memory", metavar="QUANTITY", help="Memory of each pod, 8Gi for instance; arrays are part of it.")
@click.option("--gpus", type=int, default=0, help="NVIDIA GPUs of each pod.")
@click.option("--rdma", metavar="RESOURCE=N", help="RDMA devices of each pod, by their device plugin's resource.")
@click.option("--secret", help="Secret that exists, with the token under the key 'token'.  [a new one]")
@click.option("--output", metavar="FILE", help="File to write, which only you can read.  [standard output]")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def render(
    name: str,
    image: str,
    nodes: int,
    kind: Literal["job", "lws"],
    namespace: str | None,
    cpus: int | None,
    memory: str | None,
    gpus: int,
    rdma: str | None,
    secret: str | None,
    output: str | None,
    program: tuple[str, ...],
) -> None:
    """Print the manifests of a cluster for one program, for kubectl apply -f -, or write them to a file with --output.

    They are JSON: a Secret with a new token, and a headless Service with an Indexed Job or a LeaderWorkerSet. Each pod
    runs zcactor run, and the program runs in the first one, where a plain zc.init() joins. Nothing is printed where
    Kubernetes would refuse a name or an amount: the exit status is 2.
    """
    from zcactor.cluster.kubernetes import Deployment, manifests

    if not program:
        raise fail("give a program: zcactor k8s render ... -- python program.py", 2)
    devices = None
    if rdma is not None:
        resource, sign, amount = rdma.rpartition("=")
        if not sign or not (amount.isascii() and amount.isdecimal() and len(amount) < 20):
            raise fail(f"--rdma is {rdma!r}: it must be RESOURCE=N, for instance rdma/hca_shared_devices_a=1", 2)
        devices = resource, int(amount)
    try:
        wanted = Deployment(
            name, image, nodes, program, kind, namespace, cpus, memory, gpus, devices, secret
        )  # fmt: skip
    except ValueError as error:
        raise fail(error, 2) from error
    items = manifests(wanted, secrets.token_bytes(TOKEN_NBYTES).hex())
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2) + "\n"
    if secret is None and output is None:
        _refuse_readable(sys.stdout)
        click.echo("The Secret holds a new token, which opens the whole cluster: let nobody else read this.", err=True)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        with open(os.open(output, _NEW, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise fail(f"--output: {output} exists; remove it, or give another file", 2) from None
    except OSError as error:
        raise fail(f"--output: {output} cannot be written: {error.strerror}", 2) from error


def _refuse_readable(stream: TextIO) -> None:
    """End where a stream goes to a file that others can read, as a shell's ``>`` makes it: a token must not lie
    there."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # no descriptor of the system is behind it
        return
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        raise fail(
            f"the output goes to a file of mode {stat.S_IMODE(status.st_mode):04o}, which others can read, and it has "
            "the cluster's token: use --output FILE in place of >FILE",
            2,
        )  # fmt: skip
