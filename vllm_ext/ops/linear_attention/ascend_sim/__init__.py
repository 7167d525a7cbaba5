"""Ascend C kernels on the host simulator of `csrc_ascend/simulator`."""
