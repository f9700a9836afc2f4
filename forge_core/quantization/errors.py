"""What quantization does to the numbers: of every layer, and of the policy's next-token distribution."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from forge_core.quantization.calibration import padded, signal_to_noise
from forge_core.quantization.layers import QuantizedLayer, QuantizedLinear, install, linear_layers

CHUNK_ELEMENTS = 2**22  # logits compared at once in float64, a dozen copies of which are alive


@dataclass
class LayerError:
    """Error of a layer's outputs, given the inputs that the unquantized policy gives it."""

    signal: float = 0.0
    noise: float = 0.0
    absolute: float = 0.0
    count: int = 0

    @property
    def sqnr(self) -> float:
        """Signal-to-quantization-noise ratio, dB."""
        return signal_to_noise(self.signal, self.noise)

    @property
    def mae(self) -> float:
        """Mean absolute error."""
        return self.absolute / self.count


@dataclass(frozen=True)
class OutputError:
    """Error of the policy as a whole, averaged over the positions of held-out sequences that predict a token."""

    mae: float  # of the probability of the token that follows: an average over a large vocabulary would hide everything
    kl: float  # KL(policy || quantized policy) of the next-token distribution, nats
    sqnr: float  # of the logits, mean over the vocabulary taken out, dB
    top1_agreement: float  # share of positions with the same most likely token


@torch.no_grad()
def measure_errors(
    model: nn.Module, layers: dict[str, QuantizedLayer], sequences: Sequence[Tensor], batch_size: int
) -> tuple[dict[str, LayerError], OutputError]:
    """Errors of every quantized layer, and of all of them together; `model` is left as it is."""
    quantized = copy.deepcopy(model)
    install(quantized, layers)
    errors = {name: LayerError() for name in layers}
    device = next(model.parameters()).device
    is_token: list[Tensor] = []
    hooks = [_watch(linear, QuantizedLinear(layers[name], linear), errors[name], is_token)
             for name, linear in linear_layers(model).items() if name in layers]  # fmt: skip
    total = torch.zeros(5, dtype=torch.float64)
    count = 0
    for start in range(0, len(sequences), batch_size):
        ids, mask = (tensor.to(device) for tensor in padded(sequences[start : start + batch_size]))
        is_token[:] = [mask]
        exact, rounded = model(ids).logits, quantized(ids).logits
        predicts = mask[:, 1:]
        aligned = (exact[:, :-1][predicts], rounded[:, :-1][predicts], ids[:, 1:][predicts])
        rows = max(1, CHUNK_ELEMENTS // exact.shape[-1])
        for chunk in zip(*(tensor.split(rows) for tensor in aligned), strict=True):
            total += _compare(*chunk).cpu()
        count += int(predicts.sum())
    for hook in hooks:
        hook.remove()
    mae, kl, agreement = (total[:3] / count).tolist()
    return errors, OutputError(mae, kl, signal_to_noise(total[3].item(), total[4].item()), agreement)


def _watch(linear: nn.Linear, rounded: QuantizedLinear, error: LayerError, is_token: list[Tensor]) -> RemovableHandle:
    def compare(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        exact = output[is_token[0]].double()
        difference = rounded(inputs[0])[is_token[0]].double() - exact
        error.signal += exact.square().sum().item()
        error.noise += difference.square().sum().item()
        error.absolute += difference.abs().sum().item()
        error.count += exact.numel()

    return linear.register_forward_hook(compare)


def _compare(exact: Tensor, rounded: Tensor, following: Tensor) -> Tensor:
    """Sums over positions [N]: probability error, KL, agreement, logit energy, logit error energy; float64 [5]."""
    exact_logprobs, rounded_logprobs = exact.double().log_softmax(-1), rounded.double().log_softmax(-1)
    probabilities = exact_logprobs.exp()
    chosen = [logprobs.gather(1, following[:, None]).exp() for logprobs in (exact_logprobs, rounded_logprobs)]
    centred = [logits.double() - logits.double().mean(-1, keepdim=True) for logits in (exact, rounded)]
    return torch.stack(
        [
            (chosen[0] - chosen[1]).abs().sum(),
            (probabilities * (exact_logprobs - rounded_logprobs)).sum(),
            (exact.argmax(-1) == rounded.argmax(-1)).sum().double(),
            centred[0].square().sum(),
            (centred[0] - centred[1]).square().sum(),
        ]
    )
