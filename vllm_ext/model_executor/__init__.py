"""vLLM layers: the quantisation method and the linear-attention backend."""
