"""NVIDIA's GPUs, by the calls of ``cuda.bindings.driver``, which the extra ``gpu`` installs.

- ``calls``: the calls of CUDA, their errors, and the contexts that they need
- ``gpu``: the driver, `CudaGpuDriver`
"""

from zcactor.device.cuda.gpu import CudaGpuDriver

__all__ = ["CudaGpuDriver"]
