"""Benchmarks, installed as `vllm_ext.benchmarks`: one registry; a benchmark refuses to time what fails its check."""
