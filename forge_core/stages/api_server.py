"""The process that answers requests: vLLM's OpenAI-compatible server with the engine settings of the generator.

    python -m forge_core.stages.api_server POLICY_DIR --config JSON --served-as NAME...

It ends, with all that it has started, when its standard input closes: an owner that is killed takes it along.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.serve_config import ServeConfig

# What `vllm serve` runs; the command itself asks for a distribution named vllm, which the CPU build is not.
SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"


def end_with_owner() -> None:
    """Kill this session once standard input closes; the server is the leader of its own."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="owner", daemon=True).start()


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of an engine in vLLM's spelling."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        match value:
            case None:
                continue
            case bool():
                words.append(f"--{option}" if value else f"--no-{option}")
            case list() | tuple():
                words += [f"--{option}", *map(str, value)]
            case dict():
                words += [f"--{option}", json.dumps(value)]
            case _:
                words += [f"--{option}", str(value)]
    return words


def main() -> None:
    """Command line of a server process."""
    parser = argparse.ArgumentParser(prog="python -m forge_core.stages.api_server", description=__doc__)
    parser.add_argument("policy", type=Path, help="a directory in Hugging Face layout")
    parser.add_argument("--config", required=True, help="a ServeConfig as JSON")
    parser.add_argument("--served-as", nargs="+", required=True, help="names of the model; answers carry the first")
    given = parser.parse_args()
    end_with_owner()
    from forge_core.generator import engine_args  # loads torch and vLLM, which takes seconds: watched over already

    config = ServeConfig.model_validate_json(given.config)
    arguments = engine_args(given.policy, config.generator, seed=0)
    arguments |= {"host": config.host, "port": config.port, "served_model_name": given.served_as}
    arguments |= {"shutdown_timeout": config.drain_seconds, "uvicorn_log_level": "warning"}
    sys.argv = [SERVER_MODULE, *command_line(arguments)]
    runpy.run_module(SERVER_MODULE, run_name="__main__")


if __name__ == "__main__":
    main()
