"""A program for a guest: one RDMA READ with pyverbs between two queue pairs of this process."""

from __future__ import annotations

import sys
import time

import numpy as np
import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

NBYTES = 1 << 20
PORT, GID_INDEX = 1, 1


def main() -> int:
    """Open ``rxe0``, connect two queue pairs to each other, and read an array through them; return the exit status."""
    context = Context(name="rxe0")
    pd, cq = PD(context), CQ(context, 16)
    source = np.arange(NBYTES, dtype=np.uint8)
    target = np.zeros(NBYTES, np.uint8)
    source_mr = MR(pd, NBYTES, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ, address=source.ctypes.data)
    target_mr = MR(pd, NBYTES, e.IBV_ACCESS_LOCAL_WRITE, address=target.ctypes.data)
    cap = QPCap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1)
    reader, owner = (QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)) for _ in range(2))
    for qp, other in ((reader, owner), (owner, reader)):
        attr = QPAttr(port_num=PORT, path_mtu=context.query_port(PORT).active_mtu)
        attr.qp_access_flags, attr.dest_qp_num = e.IBV_ACCESS_REMOTE_READ, other.qp_num
        attr.rq_psn = attr.sq_psn = 1
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.rnr_retry, attr.timeout, attr.retry_cnt = 12, 6, 18, 6
        route = GlobalRoute(dgid=context.query_gid(PORT, GID_INDEX), sgid_index=GID_INDEX, hop_limit=64)
        attr.ah_attr = AHAttr(port_num=PORT, is_global=1, gr=route)
        qp.to_rts(attr)
    request = SendWR(
        opcode=e.IBV_WR_RDMA_READ,
        num_sge=1,
        sg=[SGE(target.ctypes.data, NBYTES, target_mr.lkey)],
        send_flags=e.IBV_SEND_SIGNALED,
    )
    request.set_wr_rdma(source_mr.rkey, source.ctypes.data)
    reader.post_send(request)
    deadline = time.monotonic() + 20
    found, completions = cq.poll(1)
    while not found:
        if time.monotonic() > deadline:
            print("the READ did not complete")
            return 1
        found, completions = cq.poll(1)
    if completions[0].status != e.IBV_WC_SUCCESS or not np.array_equal(source, target):
        print(f"the READ failed with status {completions[0].status}")
        return 1
    print(f"READ {NBYTES} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
