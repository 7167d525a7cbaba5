"""Build entry point; metadata lives in pyproject.toml.

The package list is computed here because `benchmarks/` stands beside the package in the tree and is installed as
`vllm_ext.benchmarks`, which static discovery cannot express.
"""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["vllm_ext", "vllm_ext.*"]), "vllm_ext.benchmarks"])
