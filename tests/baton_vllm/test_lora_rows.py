"""A step with adapters and without, by vLLM's own wrapper and by the corrected one."""

import pytest
import torch

from baton_vllm.settings import missing

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # of torch and vLLM, while they are imported
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

ADAPTERS = 2
RANK, FEATURES, ROWS = 4, 6, 5


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("asked", [(0, 1, 2, 0, 2), (0, 0, 0, 0, 0), (2, 2, 1, 1, 1)])
def test_a_row_without_an_adapter_stays_what_it_is(
    asked: tuple[int, ...], is_prefill: bool
) -> None:
    """0 is for none, another number an adapter's."""
    from vllm.lora.layers import LoRAMapping

    from baton_vllm.lora_rows import MaskedPunicaWrapper

    torch.manual_seed(0)
    down = torch.randn(ADAPTERS, 1, RANK, FEATURES)
    up = torch.randn(ADAPTERS, 1, FEATURES, RANK)
    x, plain = torch.randn(ROWS, FEATURES), torch.randn(ROWS, FEATURES)
    wrapper = MaskedPunicaWrapper(16, 8, device="cpu")
    mapping = LoRAMapping(index_mapping=asked, prompt_mapping=asked, is_prefill=is_prefill)
    wrapper.update_metadata(mapping, [1, 2], ADAPTERS, 100)

    y = plain.clone()
    wrapper.add_lora_linear(y, x, (down,), (up,), 0.5, (FEATURES,))
    logits = plain.clone()
    wrapper.add_lora_logits(logits, x, down, up, 0.5)

    for row, adapter in enumerate(asked):
        wanted = plain[row]
        if adapter:
            wanted = wanted + 0.5 * up[adapter - 1, 0] @ down[adapter - 1, 0] @ x[row]
        torch.testing.assert_close(y[row], wanted)
        torch.testing.assert_close(logits[row], wanted)
