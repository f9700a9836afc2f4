"""Functions named in a config: rewards, advantages, losses and datasets, built in or the user's own.

A name is a built-in short name or `package.module:function`. `check_function` reads the source without importing it, so
a wrong name or keyword fails while the config is loaded, before torch or any engine starts; `load_function` imports it
in the stage process that calls it.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from forge_core.artifacts import sha256_json
from forge_core.config import FunctionConfig
from forge_core.content import content_digest

PARSE_ATTEMPTS = 10

Role = Literal["reward", "advantage", "loss", "dataset"]

BUILT_INS: dict[Role, dict[str, str]] = {
    "reward": {
        "exact_number": "forge_core.rewards.numbers:exact_number",
        "gsm8k": "forge_core.rewards.numbers:gsm8k",
        "boxed": "forge_core.rewards.mathematics:boxed",
        "math": "forge_core.rewards.mathematics:math",
        "thinking": "forge_core.rewards.form:thinking",
        "format": "forge_core.rewards.form:format",
        "regex": "forge_core.rewards.form:regex",
        "length": "forge_core.rewards.form:length",
        "code": "forge_core.rewards.code:code",
        "judge": "forge_core.rewards.judge:judge",
        "reward_model": "forge_core.rewards.reward_model:reward_model",
        "reasoning_gym": "forge_core.rewards.gym:reasoning_gym",
    },
    "advantage": {
        name: f"forge_core.advantages:{name}"
        for name in (
            "group_zscore",
            "group_mean",
            "leave_one_out",
            "batch_std",
            "reinforce_pp",
            "reinforce_pp_baseline",
            "gdpo",
        )
    },
    "loss": {
        name: f"forge_core.losses:{name}"
        for name in ("reinforce", "grpo", "dapo", "cispo", "gspo", "sapo", "simple_grpo")
    },
    "dataset": {
        "arithmetic": "forge_core.datasets:arithmetic",
        "reasoning_gym": "forge_core.datasets:reasoning_gym",
        "file": "forge_core.datasets:file",
        "hub": "forge_core.datasets:hub",
        "gsm8k": "forge_core.datasets:gsm8k",
        "math": "forge_core.datasets:math",
        "countdown": "forge_core.datasets:countdown",
        "mixture": "forge_core.datasets:mixture",
    },
}
_POSITIONAL: dict[Role, int] = {"reward": 2, "advantage": 1, "loss": 1, "dataset": 0}
_EXPECTED: dict[Role, str] = {
    "reward": "(completion: str, example: Example, **settings) -> float | None or (completions: list[str], examples: "
    "list[Example], **settings) -> list[float | None]",
    "advantage": "(rewards: Tensor, **settings) -> Tensor or (inputs: AdvantageInputs, **settings) -> Tensor",
    "loss": "(inputs: LossInputs, **settings) -> LossOutput",
    "dataset": "(**settings) -> Iterator[Example]",
}


def import_string(name: str, role: Role) -> str:
    """`package.module:function` for a short or full name; raises ValueError naming the close matches."""
    if ":" in name:
        return name
    if name in BUILT_INS[role]:
        return BUILT_INS[role][name]
    close = difflib.get_close_matches(name, BUILT_INS[role], n=3) or sorted(BUILT_INS[role])
    raise ValueError(
        f"{role} is {name!r}, not a built-in ({', '.join(close)}) and not of the form package.module:function"
    )


def check_function(config: FunctionConfig, role: Role) -> None:
    """Raise ValueError when the function does not exist or cannot be called as `role` with these keyword arguments."""
    arguments = _definition(import_string(config.fn, role), role).args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    wanted = _POSITIONAL[role]
    settings = [argument.arg for argument in [*positional[wanted:], *arguments.kwonlyargs]]
    required = [argument.arg for argument in positional[wanted:num_required]]
    required += [a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None]
    expected = f"a {role} has the signature {_EXPECTED[role]}"
    if len(positional) < wanted:
        raise ValueError(f"{role} {config.fn} takes {len(positional)} positional arguments; {expected}")
    for name in config.kwargs:
        if name not in settings and arguments.kwarg is None:
            close = difflib.get_close_matches(name, settings, n=3) or settings
            raise ValueError(f"{role} {config.fn} has no setting {name!r}; it has {', '.join(close) or 'none'}")
    missing = [name for name in required if name not in config.kwargs]
    if missing:
        raise ValueError(f"{role} {config.fn} needs kwargs {', '.join(missing)}; {expected}")
    if isinstance(weights := config.kwargs.get("weights"), str):
        content_digest(weights)


def find_extractor(reward: FunctionConfig) -> str | None:
    """The function beside a reward that says what it takes for the answer: `{reward}_answer`, None when there is none.

    It is called like the reward, with its keyword arguments, and returns a text or None.
    """
    name = f"{import_string(reward.fn, 'reward')}_answer"
    path, function_name = _locate(name, "reward")
    if all(node.name != function_name for node in _functions(path)):
        return None
    check_function(reward.model_copy(update={"fn": name}), "reward")
    return name


def is_over_batch(config: FunctionConfig, role: Role) -> bool:
    """Whether a function takes a whole batch, by how its first argument is declared.

    An advantage does with AdvantageInputs, not one group; a reward with list[str], all completions at once.
    """
    arguments = _definition(import_string(config.fn, role), role).args
    first = [*arguments.posonlyargs, *arguments.args][0]
    if first.annotation is None:
        return False
    declared = ast.unparse(first.annotation).strip("'\"")
    return declared in ("list[str]", "Sequence[str]") if role == "reward" else declared.endswith("AdvantageInputs")


def labels(configs: Sequence[FunctionConfig]) -> list[str]:
    """Short names for metrics; of several functions of one name, the second is `{name}_1`."""
    names = [config.fn.rpartition(":")[2] for config in configs]
    earlier = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}_{count}" if count else name for name, count in zip(names, earlier, strict=True)]


def source_sha256(config: FunctionConfig, role: Role) -> str:
    """SHA-256 of the file that defines the function: an edited reward is another reward.

    With a setting called `weights`, of what lies there as well: so is one with other weights.
    """
    path, _ = _locate(import_string(config.fn, role), role)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    weights = config.kwargs.get("weights")
    return sha256_json([digest, content_digest(weights)]) if isinstance(weights, str) else digest


def reward_sources(rewards: Sequence[FunctionConfig]) -> dict[str, str]:
    """`source_sha256` of each reward by its fn; of several with one fn, the second is `{fn}_1`."""
    names = [reward.fn for reward in rewards]
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return {
        f"{reward.fn}_{count}" if count else reward.fn: source_sha256(reward, "reward")
        for reward, count in zip(rewards, counts, strict=True)
    }


def load_function(config: FunctionConfig, role: Role) -> Callable:
    """The function itself with its keyword arguments bound. Imports the module that defines it."""
    module_name, function_name = import_string(config.fn, role).split(":")
    return functools.partial(getattr(importlib.import_module(module_name), function_name), **config.kwargs)


def _locate(full_name: str, role: Role) -> tuple[Path, str]:
    module_name, _, function_name = full_name.partition(":")
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not function_name:
        raise ValueError(
            f"{role} is {full_name!r}, but no module {module_name!r} can be imported; install its package in this "
            "environment or put its directory on PYTHONPATH"
        )
    return Path(spec.origin), function_name


def _definition(full_name: str, role: Role) -> ast.FunctionDef:
    path, function_name = _locate(full_name, role)
    functions = {node.name: node for node in _functions(path)}
    if function_name not in functions:
        close = difflib.get_close_matches(function_name, functions, n=3) or sorted(functions)
        raise ValueError(f"{role} is {full_name!r}, but {path} defines no such function; it has {', '.join(close)}")
    return functions[function_name]


def _functions(path: Path) -> list[ast.FunctionDef]:
    return [node for node in _parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]


def _parse(source: str) -> ast.Module:
    for _ in range(PARSE_ATTEMPTS):
        try:
            return ast.parse(source)
        except SystemError:  # CPython 3.11 counts the depth of all threads that parse together (python/cpython#106905)
            time.sleep(0.01)
    return ast.parse(source)
