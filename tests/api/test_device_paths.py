"""The ways that arrays on GPUs take to actors, as `zc.explain` tells them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvloop

import zcactor as zc
from tests.actors_gpu import Gpus
from zcactor.api.device_paths import ProofService, device_path
from zcactor.process.context import current

LOOP_FACTORIES = {"uvloop": uvloop.new_event_loop}
"""One loop: nothing here depends on its kind, and each test starts a runtime."""
PATIENCE = 60.0
"""Seconds after which a test stops waiting: a watchdog, no statement about speed."""


@pytest.fixture(autouse=True)
def all_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take this machine's own choice of GPUs away."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@zc.actor
class Own:
    """An actor that explains the way to itself."""

    async def device(self) -> Any:
        return (await zc.explain(zc.current_actor().handle)).device


async def explained(options: str, **settings: Any) -> zc.gpu.DevicePath | None:
    """The way to an actor, with fake GPUs of these options and with settings of the actor."""
    config = zc.Config(gpu=f"fake:{options}", num_gpus=0)
    async with asyncio.timeout(PATIENCE), zc.init(config=config):
        return (await zc.explain(await Gpus.options(**settings).spawn())).device


@pytest.mark.slow
async def test_memory_is_mapped() -> None:
    path = await explained("devices=2")
    assert path == zc.gpu.DevicePath("mapped", "same host: the GPU memory is mapped in place", {}, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "visible", "against"),
    [
        ("devices=2,peer=none", "1", "does not see the GPU GPU-"),
        ("", "", r"does not see the GPU GPU-.* \(it sees: none\)"),
        ("export=none", None, "lets no memory of GPUs out"),
    ],
)
async def test_bytes_go_through_the_host(options: str, visible: str | None, against: str) -> None:
    env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    path = await explained(options, env=env)
    assert path is not None
    assert (path.path, path.proven, set(path.rejected)) == ("host", True, {"mapped"})
    with pytest.raises(AssertionError, match=against):
        raise AssertionError(path.rejected["mapped"])


@pytest.mark.slow
async def test_memory_of_a_hidden_gpu_is_copied_by_another() -> None:
    path = await explained("devices=2", env={"CUDA_VISIBLE_DEVICES": "1"})
    assert path is not None
    assert (path.path, path.proven, set(path.rejected)) == ("pulled", True, {"mapped"})
    assert "from one that the actor's process does not see" in path.reason


@pytest.mark.slow
async def test_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCACTOR_TRANSPORTS", "tcp")
    config = zc.Config(gpu="fake", transports="tcp")
    async with asyncio.timeout(PATIENCE), zc.init(config=config):
        path = (await zc.explain(await Gpus.spawn())).device
    assert path is not None
    assert (path.path, path.proven) == ("host", True)
    assert path.rejected == {
        "mapped": "memory of GPUs is mapped between processes of one host only",
        "gpudirect": "frames and arrays go by tcp, and network cards take part in RDMA only",
    }


@pytest.mark.slow
async def test_an_actor_in_the_same_process() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=zc.Config(gpu="fake")):
        own: Any = await Own.spawn()
        path = await own.device()
    assert (path.path, path.proven, path.rejected) == ("mapped", True, {})


@pytest.mark.slow
async def test_a_transfer_that_fails() -> None:
    path = await explained("fail=create")
    assert path is not None
    assert (path.path, path.proven, path.rejected) == ("", False, {})
    assert "the option fail made it fail" in path.reason


class Liar:
    """A process with GPUs of its own, whose peers answer with what a test says."""

    def __init__(self, answer: Any) -> None:
        self.config, self.store, self.requests = current().config, current().store, self
        self._answer = answer

    async def ask(self, session: Any, method: Any, x: Any, uuid: str, exports: bool) -> Any:
        assert (method, x.nbytes, uuid, exports) == (ProofService.proof, 65_536, x.uuid, True)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.mark.slow
async def test_answers_of_peers() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=zc.Config(gpu="fake")):
        session: Any = None

        def asked(answer: Any) -> Any:
            process: Any = Liar(answer)
            return device_path(process, session)

        wrong = await asked(("mapped", {}, bytes(65_536)))
        assert (wrong.path, wrong.proven) == ("mapped", False)
        assert "not those that were sent" in wrong.reason
        late = await asked(TimeoutError())
        assert (late.path, late.proven) == ("", False) and "within 30 s" in late.reason
        with pytest.raises(zc.ConnectionLost):
            await asked(zc.ConnectionLost("gone"))


@pytest.mark.slow
async def test_without_gpus() -> None:
    async with asyncio.timeout(PATIENCE), zc.init(config=zc.Config(gpu="off")):
        assert (await zc.explain(await Own.spawn())).device is None
