"""Remote methods have numbers, which are on the wire: each names the same method for ever."""

from __future__ import annotations

import pytest

from zcactor.api.device_paths import ProofService
from zcactor.collectives.service import GroupService
from zcactor.execution.activity import ActivityService
from zcactor.graphs.service import GraphService
from zcactor.objects.adoption import Adoptions
from zcactor.objects.broadcast_directory import BroadcastService
from zcactor.objects.device_direct import DirectReads
from zcactor.objects.device_pieces import DevicePieces
from zcactor.objects.device_reach import DeviceReach
from zcactor.objects.promises import Promises
from zcactor.objects.succession import Succession
from zcactor.observe.stats import StatsService
from zcactor.peers.head_link import HeadLink
from zcactor.peers.idle_reaper import IdleReaper
from zcactor.peers.leases import Leases
from zcactor.peers.simultaneous_open import SimultaneousOpens
from zcactor.process.cluster import (
    HeadNews,
    HeadService,
    MembershipService,
    NodeService,
    WorkerService,
)
from zcactor.rpc.services import MAX_NUMBER, Services, method_number, remote, remote_methods
from zcactor.shuffling.sides import ShuffleService

SERVICES = (
    Services, Leases, Adoptions, Succession, Promises, BroadcastService, HeadLink, IdleReaper, SimultaneousOpens,
    DevicePieces, DirectReads, ProofService, DeviceReach, StatsService, ActivityService, ShuffleService, HeadNews,
    WorkerService, GroupService, GraphService, HeadService, MembershipService, NodeService,
)  # fmt: skip
NUMBERS = {
    0: "Services.ping",
    1: "Leases.lease",
    2: "Adoptions.hold",
    3: "Adoptions.lend",
    4: "Succession.take_over",
    5: "Promises.fetch",
    6: "BroadcastService.source",
    7: "BroadcastService.located",
    8: "HeadLink.connect_to",
    9: "IdleReaper.part",
    10: "SimultaneousOpens.retire",
    11: "DevicePieces.whole",
    12: "DevicePieces.stage",
    13: "DevicePieces.computed",
    14: "DirectReads.keys",
    15: "ProofService.proof",
    17: "StatsService.stats",
    18: "ShuffleService.partition",
    19: "ShuffleService.merge",
    20: "HeadNews.actor_changed",
    21: "HeadNews.head_ends",
    22: "HeadNews.heads_are",
    23: "HeadNews.log",
    24: "WorkerService.create",
    25: "WorkerService.stop",
    26: "WorkerService.vacate",
    27: "WorkerService.readmit",
    28: "WorkerService.moved",
    29: "WorkerService.discard",
    30: "WorkerService.discard_others",
    31: "WorkerService.leave",
    32: "ActivityService.activity",
    40: "GroupService.join",
    41: "GroupService.start",
    43: "GroupService.publish_with",
    45: "GroupService.offer",
    46: "GroupService.input",
    52: "GroupService.state",
    53: "GroupService.facts",
    60: "GraphService.join",
    61: "GraphService.start",
    70: "HeadService.reserve",
    71: "HeadService.constructed",
    72: "HeadService.waits",
    73: "HeadService.locate",
    74: "HeadService.process_of",
    75: "HeadService.get_actor",
    76: "HeadService.kill",
    77: "HeadService.stop",
    78: "HeadService.nodes",
    79: "HeadService.actors",
    80: "HeadService.resources",
    81: "HeadService.leader",
    82: "HeadService.stay",
    83: "HeadService.give_way",
    84: "HeadService.force",
    85: "HeadService.shutdown",
    100: "MembershipService.join_node",
    101: "MembershipService.return_node",
    102: "MembershipService.leave_node",
    103: "MembershipService.drain",
    104: "MembershipService.worker_started",
    105: "MembershipService.worker_ended",
    106: "MembershipService.worker_said",
    107: "MembershipService.join_driver",
    108: "MembershipService.return_driver",
    109: "MembershipService.leave_driver",
    110: "MembershipService.find",
    111: "MembershipService.call_back",
    112: "MembershipService.silence",
    114: "OwnNodeService.worker_ready",
    115: "OwnNodeService.worker_broken",
    116: "NodeService.relay",
    117: "NodeService.hold_actor",
    118: "NodeService.run_over",
    119: "NodeService.start_worker",
    120: "NodeService.kill_worker",
    121: "NodeService.serves",
    122: "NodeService.hold_recipe",
    123: "NodeService.recipe",
    124: "NodeService.drop_recipe",
    125: "NodeService.keep_recipes",
    126: "NodeService.end",
    128: "DeviceReach.gone",
    129: "GroupService.publish",
    130: "GroupService.piece",
    131: "GroupService.take_gpu",
    132: "GroupService.report",
    133: "GroupService.broken",
    134: "GroupService.superseded",
    135: "GroupService.forget",
    136: "GraphService.failed",
    137: "GraphService.cancel",
    138: "GraphService.noted",
    139: "GraphService.broken",
    140: "GraphService.forget",
}
"""The contract. A further method gets a number that was never here."""


def test_numbers_stay() -> None:
    declared = [function for service in SERVICES for _, function in remote_methods(service)]
    assert {method_number(function): function.__qualname__ for function in declared} == NUMBERS


def test_a_number_that_is_taken_or_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"has number 0, which Services\.ping has"):
        remote(0)(lambda _: None)
    for number in (-1, MAX_NUMBER + 1):
        with pytest.raises(ValueError, match=f"has number {number}, and numbers go from 0 to {MAX_NUMBER}"):
            remote(number)(lambda _: None)


def test_a_method_that_is_not_remote() -> None:
    with pytest.raises(KeyError):
        method_number(Services.add)
