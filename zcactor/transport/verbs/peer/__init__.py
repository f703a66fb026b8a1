"""One peer by RDMA: how two processes connect, and the frames and arrays of their connection."""
