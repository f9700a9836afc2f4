"""From a run's config to the job of each stage: pure functions, evaluated in the flow process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_core import storage
from forge_core.artifacts import Ref, read_manifest, sha256_json
from forge_core.config import (
    DatasetConfig,
    DpoRunConfig,
    EvalConfig,
    GrpoConfig,
    GrpoRunConfig,
    RewardModelRunConfig,
    RunConfig,
    SftRunConfig,
)
from forge_core.fit_config import FitConfig, SftConfig
from forge_core.functions import check_function, is_over_batch, reward_sources, source_sha256
from forge_core.jobs import (
    DatasetJob,
    DpoJob,
    EvaluateJob,
    ReferenceJob,
    RolloutJob,
    ScoreJob,
    SftJob,
    StartJob,
    UpdateJob,
)
from forge_core.policy_uri import validate_policy_uri
from forge_core.update_config import UpdateConfig


@dataclass(frozen=True)
class Plan:
    """The jobs of one run. Policy versions are numbered v0000 (start), then one per SFT and per GRPO update."""

    config: RunConfig
    run_id: str

    @property
    def run_uri(self) -> str:
        """Prefix of everything this run writes."""
        return f"{storage.absolute_uri(self.config.root)}/{self.run_id}"

    @property
    def sft_config(self) -> SftConfig | None:
        """Settings of supervised fine-tuning, None when this run has none."""
        config = self.config
        return config.sft if isinstance(config, SftRunConfig) and config.sft.num_steps > 0 else None

    @property
    def grpo_config(self) -> GrpoConfig | None:
        """Settings of reinforcement learning, None when this run has none."""
        config = self.config
        return config.grpo if isinstance(config, GrpoRunConfig) and config.grpo.num_iterations > 0 else None

    @property
    def fits(self) -> list[FitConfig]:
        """Settings of every training on a fixed dataset."""
        config = self.config
        found: list[FitConfig] = [config.dpo] if isinstance(config, DpoRunConfig) else []
        found += [config.reward_model] if isinstance(config, RewardModelRunConfig) else []
        return found + ([self.sft_config] if self.sft_config is not None else [])

    def check(self) -> None:
        """Raise ValueError for whatever can be known to be wrong before a process starts."""
        config = self.config
        validate_policy_uri(config.policy.uri)
        for evaluation in config.evals:
            check_function(evaluation.dataset, "dataset")
            check_function(evaluation.reward, "reward")
        for fit in self.fits:
            check_function(fit.dataset, "dataset")
            if fit.validation is not None:
                check_function(fit.validation.dataset, "dataset")
        if isinstance(config, RewardModelRunConfig) and config.trainer.num_ranks > 1:
            raise ValueError(f"trainer.num_ranks is {config.trainer.num_ranks}; a reward model trains in one, set 1")
        if (grpo := self.grpo_config) is not None:
            check_function(grpo.dataset, "dataset")
            for reward in grpo.rewards:
                check_function(reward, "reward")
            check_function(grpo.advantage, "advantage")
            check_function(grpo.loss, "loss")
            if config.trainer.row_tokens < config.generator.max_model_len:
                raise ValueError(
                    f"trainer.row_tokens is {config.trainer.row_tokens}, less than generator.max_model_len "
                    f"({config.generator.max_model_len}): the trainer could not take the longest rollout; raise "
                    "row_tokens or lower max_model_len"
                )
            if grpo.dynamic_sampling is not None and is_over_batch(grpo.advantage, "advantage"):
                raise ValueError(
                    f"dynamic_sampling is set and advantage {grpo.advantage.fn} compares a whole batch, which would "
                    "then be several; use one that compares within a group, such as group_zscore"
                )
        self._check_gates()
        storage.require_exclusive_create(config.root, single_writer=config.single_writer)

    def _check_gates(self) -> None:
        gates, grpo = self.config.gates, self.grpo_config
        unmeasured = ["max_kl_to_reference"] if grpo is None or grpo.kl is None else []
        unmeasured += ["min_entropy", "max_logprob_gap"] if grpo is None else []
        for name in unmeasured:
            if (bound := getattr(gates, name)) is not None:
                raise ValueError(
                    f"gates.{name} is {bound:g}, which this run does not measure; leave it out"
                    + (
                        ", or set grpo.kl: {coefficient: 0}, which only measures"
                        if name == "max_kl_to_reference"
                        else ""
                    )
                )

    def dataset(self, dataset: DatasetConfig) -> DatasetJob:
        """Materialise one dataset; equal datasets of a run share the artifact."""
        source = source_sha256(dataset, "dataset")
        name = f"{dataset.fn.rpartition(':')[2]}-{sha256_json(dataset.model_dump(mode='json'))[:8]}"
        return DatasetJob(output=f"{self.run_uri}/datasets/{name}", dataset=dataset, source_sha256=source)

    def start(self) -> StartJob:
        """The starting policy, v0000; it depends on the run it comes from when that is one of ours."""
        uri = self.config.policy.uri
        is_directory = not uri.startswith(("fresh://", "hf://")) and not uri.endswith(".gguf")
        found = read_manifest(storage.absolute_uri(uri)) if is_directory else None
        return StartJob(
            output=self._policy_uri(0),
            policy=self.config.policy,
            source=found.ref if found else None,
            seed=self.config.seed,
        )

    def sft(self, policy: Ref, dataset: Ref, validation: Ref | None = None) -> SftJob:
        """Supervised fine-tuning, v0000 -> v0001."""
        sft = self.sft_config
        assert sft is not None
        return SftJob(
            output=self._policy_uri(1),
            policy=policy,
            dataset=dataset,
            validation=validation,
            sft=sft,
            chat=self.config.chat,
            trainer=self.config.trainer,
            seed=self.config.seed,
            snapshot_output=f"{self.run_uri}/train_states/v0001",
        )

    def dpo(self, policy: Ref, dataset: Ref, validation: Ref | None = None) -> DpoJob:
        """Training on preference pairs, v0000 -> v0001."""
        assert isinstance(self.config, DpoRunConfig)
        return DpoJob(
            output=self._policy_uri(1),
            policy=policy,
            dataset=dataset,
            validation=validation,
            dpo=self.config.dpo,
            chat=self.config.chat,
            trainer=self.config.trainer,
            seed=self.config.seed,
            snapshot_output=f"{self.run_uri}/train_states/v0001",
        )

    def rollout(
        self, policy: Ref, dataset: Ref, iteration: int, *, refill: int = 0, earlier_refills: int = 0
    ) -> RolloutJob:
        """Groups of completions for GRPO iteration `iteration` (0-based), from the prompts that follow in the stream.

        `refill` counts the further batches of dynamic sampling in this iteration, `earlier_refills` those before it.
        """
        grpo = self.grpo_config
        assert grpo is not None
        return RolloutJob(
            output=self._iteration_uri("rollouts", iteration, refill),
            policy=policy,
            dataset=dataset,
            first_prompt=(iteration + earlier_refills + refill) * grpo.prompts_per_iteration,
            num_prompts=grpo.prompts_per_iteration,
            order=grpo.order,
            group_size=grpo.group_size,
            sampling=grpo.sampling,
            chat=self.config.chat,
            generator=self.config.generator,
            rounded_to=grpo.quantized_rollouts,
            seed=self.config.seed,
        )

    def reference(self, policy: Ref, rollouts: Ref, iteration: int, *, refill: int = 0) -> ReferenceJob:
        """Log-probs of a rollout set under the frozen reference policy."""
        grpo, trainer = self.grpo_config, self.config.trainer
        assert grpo is not None
        return ReferenceJob(
            output=self._iteration_uri("reference_logprobs", iteration, refill),
            policy=policy,
            rollouts=rollouts,
            temperature=grpo.sampling.temperature,
            trainer=trainer.model_copy(update={"num_ranks": 1}) if grpo.reference_runs_on == "cpu" else trainer,
            seed=self.config.seed,
            runs_on=grpo.reference_runs_on,
        )

    def score(
        self, rollouts: Ref, iteration: int, *, reference_logprobs: Ref | None = None, refill: int = 0
    ) -> ScoreJob:
        """Rewards and advantages of a rollout set."""
        grpo = self.grpo_config
        assert grpo is not None
        return ScoreJob(
            output=self._iteration_uri("scored", iteration, refill),
            rollouts=rollouts,
            reference_logprobs=reference_logprobs,
            kl=grpo.kl if grpo.kl is not None and grpo.kl.place == "reward" else None,
            drop_uniform=grpo.drop_uniform,
            spread_of="rewards" if grpo.dynamic_sampling is not None else "total",
            rewards=grpo.rewards,
            advantage=grpo.advantage,
            overlong=grpo.overlong,
            drop_truncated=grpo.drop_truncated,
            max_tokens=grpo.sampling.max_tokens if grpo.overlong else 0,
            source_sha256=reward_sources(grpo.rewards)
            | {grpo.advantage.fn: source_sha256(grpo.advantage, "advantage")},
        )

    def update(self, policy: Ref, scored: Sequence[Ref], iteration: int) -> UpdateJob:
        """The policy after GRPO iteration `iteration`."""
        grpo, version = self.grpo_config, self.version(iteration) + 1
        assert grpo is not None
        is_snapshot = version % grpo.checkpoint_every == 0
        needs_horizon = grpo.optimizer.schedule != "constant"
        return UpdateJob(
            output=self._policy_uri(version),
            policy=policy,
            scored=tuple(scored),
            num_groups=grpo.prompts_per_iteration if grpo.dynamic_sampling is not None else 0,
            source_sha256=source_sha256(grpo.loss, "loss"),
            optimizer=grpo.optimizer,
            total_steps=grpo.num_iterations * grpo.minibatches * grpo.epochs if needs_horizon else 0,
            max_tokens=grpo.sampling.max_tokens if grpo.aggregation == "fixed_horizon" else 0,
            temperature=grpo.sampling.temperature,
            trainer=self.config.trainer,
            seed=self.config.seed,
            snapshot_output=f"{self.run_uri}/train_states/v{version:04d}" if is_snapshot else None,
            **{name: getattr(grpo, name) for name in UpdateConfig.model_fields},
        )

    def evaluate(self, policy: Ref, dataset: Ref, evaluation: EvalConfig, *, is_champion: bool = False) -> EvaluateJob:
        """Accuracy of a policy version under one named evaluation; a champion may be the version of another run."""
        version = f"champion-{policy.digest[:8]}" if is_champion else policy.uri.rpartition("/")[2]
        return EvaluateJob(
            output=f"{self.run_uri}/evals/{version}/{evaluation.name}",
            policy=policy,
            dataset=dataset,
            evaluation=evaluation,
            chat=self.config.chat,
            generator=self.config.generator,
            source_sha256=source_sha256(evaluation.reward, "reward"),
            seed=self.config.seed,
        )

    def version(self, iteration: int) -> int:
        """Version of the policy that GRPO iteration `iteration` starts from."""
        return iteration + int(self.sft_config is not None)

    def _iteration_uri(self, folder: str, iteration: int, refill: int) -> str:
        version = f"v{self.version(iteration):04d}"
        return f"{self.run_uri}/{folder}/{version}-{refill:02d}" if refill else f"{self.run_uri}/{folder}/{version}"

    def _policy_uri(self, version: int) -> str:
        return f"{self.run_uri}/policies/v{version:04d}"
