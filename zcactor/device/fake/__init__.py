"""A fake GPU, for programs and tests on machines without one. No timing of it says anything about a real one.

It is as strict as the strictest hardware. Device memory is memfds, and device pointers are addresses that nothing in
the process can read: code of the host that touches one crashes. The fake's engine has mappings of its own. Streams run
late and side by side, so work that is not ordered by events is seen in the wrong order.

- ``options``: the text that configures it
- ``system``: memory mappings, and what belongs to other processes
- ``memory``: extents and their mappings
- ``events``: events in shared memory
- ``engine``: streams, run by one thread a device
- ``gpu``: the driver, `FakeGpuDriver`
"""

from zcactor.device.fake.gpu import FakeGpuDriver, host_uuids

__all__ = ["FakeGpuDriver", "host_uuids"]
