"""Each algorithm on the quickstart's task, from the same start policy and SFT: curves, a table, a plot.

    python -m benchmarks.learning [--seed 0] [--algorithms grpo,gspo] [--iterations 10]

Writes benchmarks/learning.{json,md,png}. A second call goes on where the first one stopped. Exits with 1 when the
held-out accuracy of an algorithm is not above that of SFT by two standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import yaml
from pydantic import JsonValue

from forge_core.config import PostTrainConfig
from forge_core.plan import Plan
from forge_core.report import report

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "deployments" / "configs"
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "cispo", "gspo", "sapo", "rloo")
# What a recipe says about its tiny task, and not about the algorithm.
TASK = ("dataset", "num_iterations", "prompts_per_iteration", "group_size", "sampling", "minibatches", "optimizer")
# Without a clip on the loss nothing holds a step back: at the rate of the quickstart these forget what they knew.
SLOWER: dict[str, JsonValue] = {"optimizer": {"learning_rate": 1.0e-4, "warmup_steps": 16}}
OVERRIDES: dict[str, dict[str, JsonValue]] = {
    # Its clip is made for ratios averaged over thousands of tokens; answers here have three.
    "gspo": {"loss": {"fn": "gspo", "kwargs": {"clip_low": 0.1, "clip_high": 0.1}}},
    "sapo": SLOWER,
    "cispo": SLOWER,
    # The plain policy gradient is for one step on policy, so it takes a larger one.
    "rloo": {"minibatches": 1, "optimizer": {"learning_rate": 5.0e-4, "warmup_steps": 2}},
}


def settings(algorithm: str, seed: int, iterations: int, root: str) -> PostTrainConfig:
    """The quickstart with everything that makes the algorithm what it is."""
    base = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
    recipe = yaml.safe_load((CONFIGS / "algorithms" / f"{algorithm}.yaml").read_text())["grpo"]
    own = {name: value for name, value in recipe.items() if name not in TASK}
    grpo = base["grpo"] | own | OVERRIDES.get(algorithm, {}) | {"num_iterations": iterations}
    return PostTrainConfig.model_validate(base | {"grpo": grpo, "name": algorithm, "seed": seed, "root": root})


def run(config: PostTrainConfig, run_id: str) -> None:
    """Run a config, or find that it has run; its log and its config lie beside its artifacts."""
    path = Path(config.root) / f"{run_id}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    command = [sys.executable, "-m", "flows.post_train", str(path), "--run-id", run_id]
    with (path.parent / f"{run_id}.log").open("a") as log:
        subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT)


def figures(config: PostTrainConfig, run_id: str) -> dict:
    """What a finished run achieved."""
    found = report(Plan(config, run_id))
    count = config.evals[0].num_examples
    errors = {label: math.sqrt(value * (1 - value) / count) for label, value in found.accuracy.items()}
    return {
        "accuracy": found.accuracy,
        "standard_error": errors,
        "rewards": found.rewards,
    }


def has_learned(figures: dict) -> bool:
    """Whether accuracy has risen over SFT's by more than two standard errors of the difference."""
    error = math.hypot(figures["standard_error"]["sft"], figures["standard_error"]["grpo"])
    return figures["accuracy"]["grpo"] - figures["accuracy"]["sft"] > 2 * error


def table(found: dict[str, dict], command: str) -> str:
    """The figures as Markdown."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    lines = [
        "# Learning curves\n",
        "Each algorithm on the quickstart's task: two-digit sums, 384 prompts of 8 completions an iteration, from the "
        "same SFT policy. Accuracy is greedy on 500 held-out sums, ± its standard error.\n",
        f"`{command}` at {commit.stdout.strip()}, on a CPU.\n",
        "| algorithm | after SFT | after RL | gain | mean reward, first and last iteration |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, one in found.items():
        before, after = one["accuracy"]["sft"], one["accuracy"]["grpo"]
        lines.append(
            f"| {name} | {before:.1%} ± {one['standard_error']['sft']:.1%} | {after:.1%} ± "
            f"{one['standard_error']['grpo']:.1%} | {after - before:+.1%} | {one['rewards'][0]:.3f} → "
            f"{one['rewards'][-1]:.3f} |"
        )
    changed = "; ".join(f"{name}: `{json.dumps(value)}`" for name, value in OVERRIDES.items() if name in found)
    lines += ["", f"Recipes are those of deployments/configs/algorithms/, except {changed}.", "", "![](learning.png)"]
    return "\n".join(lines) + "\n"


def plot(found: dict[str, dict], path: Path) -> None:
    """Mean reward by iteration, a curve for each algorithm, named at its end."""
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=150)
    ends = sorted((one["rewards"][-1], name) for name, one in found.items())
    span = max(max(one["rewards"]) for one in found.values()) - min(min(one["rewards"]) for one in found.values())
    heights: dict[str, float] = {}
    lowest = -math.inf
    for reward, name in ends:  # labels apart from each other, lowest first
        lowest = max(reward, lowest + 0.035 * span)
        heights[name] = lowest
    for name, one in found.items():
        rewards = one["rewards"]
        (line,) = axes.plot(range(1, len(rewards) + 1), rewards, marker="o", markersize=3, linewidth=1.6)
        label = f"{name}  {one['accuracy']['sft']:.0%} → {one['accuracy']['grpo']:.0%}"
        axes.annotate(
            label,
            (len(rewards), rewards[-1]),
            xytext=(len(rewards) + 0.35, heights[name]),
            color=line.get_color(),
            va="center",
            fontsize=9,
        )
    axes.set_xlim(0.7, max(len(one["rewards"]) for one in found.values()) * 1.3)
    axes.set_xticks(range(1, max(len(one["rewards"]) for one in found.values()) + 1))
    axes.set_xlabel("iteration")
    axes.set_ylabel("mean reward of the rollouts (correct answers at temperature 1)")
    axes.set_title("Two-digit sums, one seed. At the right: held-out greedy accuracy after SFT → after RL", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description="Learning curves by algorithm.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--root", default=".forge/learning", help="where the runs go")
    arguments = parser.parse_args()
    found: dict[str, dict] = {}
    first: str | None = None
    for name in arguments.algorithms.split(","):
        run_id = f"{name}-seed{arguments.seed}-{arguments.iterations}"
        config = settings(name, arguments.seed, arguments.iterations, arguments.root)
        run(config.model_copy(update={"reuse_from": first}), run_id)  # start policy and SFT of the first algorithm
        first = first or f"{arguments.root}/{run_id}"
        found[name] = figures(config, run_id)
        print(f"{name}: {found[name]['accuracy']}", flush=True)
        (HERE / "learning.json").write_text(json.dumps(found, indent=1) + "\n")
        (HERE / "learning.md").write_text(table(found, f"python -m benchmarks.learning --seed {arguments.seed}"))
        plot(found, HERE / "learning.png")
    if failed := [name for name, one in found.items() if not has_learned(one)]:
        sys.exit(f"no clear gain over SFT: {', '.join(failed)}")


if __name__ == "__main__":
    main()
