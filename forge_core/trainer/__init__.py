"""Training a policy with torchtitan; everything that knows torchtitan's names lives in this package."""

from forge_core.trainer import device as device  # before any module imports torchtitan
