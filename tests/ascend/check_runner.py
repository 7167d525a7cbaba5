"""Run the checks of scripts one after another, and print what became of each; see `ascend_environment.run_checks`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback

import pytest
from ascend_environment import SKIPPED


def main() -> None:
    if os.environ["STUB_SOC_NAME"].startswith("Ascend310P"):
        # Triton has no target there: whatever imports it fails.
        sys.modules["triton"] = None  # type: ignore[assignment]
    results = {}
    for script in sys.argv[1:]:
        module = importlib.import_module(script.removesuffix(".py"))
        for name, check in list(vars(module).items()):
            if name.startswith("check_") and callable(check):
                try:
                    check()
                    results[name] = ""
                except pytest.skip.Exception as reason:
                    results[name] = f"{SKIPPED}{reason}"
                except BaseException:
                    results[name] = traceback.format_exc()
    print("CHECKS " + json.dumps(results), flush=True)
    os._exit(0)  # torch_npu's shutdown would wait for a device that is none


if __name__ == "__main__":
    main()
